"""Data planes: how tensors and messages travel between ranks. The contract is in `base.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetsync.errors import UserError

if TYPE_CHECKING:
    from hetsync.plane.base import Plane

PLANES = ("auto", "mpi", "local")

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")


def launched_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of an MPI job, judged by its environment; loads no MPI.

    A SLURM step of several tasks counts also without PMI: taking each task for a job of its own would
    silently train the same model several times.
    """
    if any(name in environ for name in _LAUNCHER_VARIABLES):
        return True
    return _number(environ.get("SLURM_STEP_NUM_TASKS")) > 1


def open_plane(name: str, timeout_seconds: float = 600.0) -> Plane:
    """The plane called "mpi", "local", or, for "auto", the one that fits how this process was started.

    Collective for "mpi"; `timeout_seconds` bounds its blocking calls. Raises `UserError` for other names, where
    MPI cannot be used, and where the launcher started more ranks than MPI sees.
    """
    if name not in PLANES:
        raise UserError(f"plane: {name!r} is unknown; choose one of {', '.join(PLANES)}")
    if name == "local" or (name == "auto" and not launched_by_mpi()):
        from hetsync.plane.local import LocalPlane

        return LocalPlane()
    from hetsync.plane.mpi import MpiPlane

    plane = MpiPlane(timeout_seconds)
    _check_size(plane.size, os.environ)
    return plane


def _check_size(size: int, environ: Mapping[str, str]) -> None:
    started = next((_number(environ[name]) for name in _SIZE_VARIABLES if name in environ), 1)
    if size < started:
        raise UserError(
            f"the launcher started {started} ranks, but MPI sees {size}: use the mpirun of the MPI that"
            " mpi4py loads, or, with srun, --mpi=pmix"
        )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
