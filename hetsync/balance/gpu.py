"""A rank's GPU, or its part of one: ranks that share a GPU are devices of their own.

Where NVIDIA's Multi-Process Service runs (launch/mps), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE leaves a process a part of
the GPU's multiprocessors; without it, processes take turns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hetsync.errors import UserError

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"


def gpu_name(device: torch.device) -> str:
    """Devices that are called the same are equally fast, and compute the same bits."""
    percentage = os.environ.get(PERCENTAGE)
    name = torch.cuda.get_device_name(device)
    return name if percentage is None else f"{name}, {percentage} % of it"


def gpu_identity(device: torch.device) -> str:
    """The same on all ranks of a host that share this GPU, whatever index each knows it by."""
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", device.index))


def check_percentage(environment: Mapping[str, str] = os.environ) -> None:
    """UserError for a part of the GPU that CUDA would not heed: it runs on without MPS, and says nothing."""
    percentage = environment.get(PERCENTAGE)
    if percentage is None:
        return
    try:
        fits = 0 < float(percentage) <= 100
    except ValueError:
        fits = False
    if not fits:
        raise UserError(f"{PERCENTAGE} is {percentage}: give more than 0, up to 100")
    pipes = environment.get(PIPES, DEFAULT_PIPES)
    if not (Path(pipes) / "control").exists():
        raise UserError(
            f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {percentage}, but no MPS daemon listens in {pipes}: start the job by"
            " launch/mps, or unset it"
        )
