"""A rank's GPU, or its part of one: ranks that share a GPU are devices of their own.

Where NVIDIA's Multi-Process Service runs (launch/mps), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE leaves a process a part of
the GPU's multiprocessors; without it, processes take turns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hetsync.errors import UserError

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpu_name(device: torch.device) -> str:
    """Devices that are called the same are equally fast, and compute the same bits."""
    percentage = os.environ.get(PERCENTAGE)
    name = torch.cuda.get_device_name(device)
    return name if percentage is None else f"{name}, {percentage} % of it"


def mps_name() -> str:
    """Of a host's Apple GPU."""
    return f"{torch.backends.mps.get_name()} GPU, {torch.backends.mps.get_core_count()} cores"


def gpu_identity(device: torch.device) -> str:
    """The same on all ranks of a host that share this GPU's memory, whatever index each knows it by (each may see
    devices of its own). A part of a GPU that MIG has cut out has memory of its own; builds of torch differ in whether
    its uuid is the part's, so its name counts, too."""
    properties = torch.cuda.get_device_properties(device)
    unit = getattr(properties, "uuid", None) or _place(properties) or _visible_name(device)
    name = _visible_name(device)
    return f"{unit} {name}" if name.startswith("MIG-") else str(unit)


def _place(properties: Any) -> str | None:
    """On the host's buses; None where this torch does not tell it."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return None if None in numbers else ":".join(f"{number:02x}" for number in numbers)


def _visible_name(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """As whoever started this process calls it: a number, or a uuid."""
    index, name = device.index or 0, ""
    for variable in VISIBLE:  # each is of what the ones after it leave
        shown = [each.strip() for each in environment.get(variable, "").split(",") if each.strip()]
        if index < len(shown):
            name = shown[index]
            index = int(name) if name.isdigit() else 0
    return name or str(index)


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
