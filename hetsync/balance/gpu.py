"""A rank's GPU, or its part of one: ranks that share a GPU are devices of their own.

Where NVIDIA's Multi-Process Service runs (launch/mps), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE leaves a process a part of
the GPU's multiprocessors; without it, processes take turns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
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


def has_kernels(capability: tuple[int, int], built_for: Iterable[str]) -> bool:
    """Has a torch that was built for these (`torch.cuda.get_arch_list()`) kernels for a GPU of this compute capability?
    Binary code (sm_80) runs within its major version from its own minor one on, PTX (compute_80) on all that are
    newer; code of one architecture with a letter (sm_90a) on that one. CUDA 13 has none for Volta and Pascal. True
    where it does not say so (ROCm)."""
    told = re.findall(r"\b(sm|compute)_(\d+)(\d)([a-z]?)\b", " ".join(built_for))
    for kind, major, minor, only in told:
        built = int(major), int(minor)
        newer = not only and capability > built and (kind == "compute" or capability[0] == built[0])
        if capability == built or newer:
            return True
    return not told


def check_kernels(device: torch.device) -> None:
    """UserError where this torch has no code for the device, which its first kernel would tell with a traceback."""
    capability, built_for = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if not has_kernels(capability, built_for):
        raise UserError(
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} (compute capability"
            f" {capability[0]}.{capability[1]}; it was built for {', '.join(built_for)}): install a build of torch that"
            " has (for Volta and Pascal one for CUDA 12), or leave that device out by CUDA_VISIBLE_DEVICES"
        )


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
