"""Data planes: how tensors and messages travel between ranks. The contract is in `base.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetsync.errors import UserError
from hetsync.launchers import launched_by_mpi, launched_without_mpi, ranks_started

if TYPE_CHECKING:
    from hetsync.plane.base import Plane

PLANES = ("auto", "mpi", "local")


def open_plane(name: str, timeout_seconds: float = 600.0) -> Plane:
    """The plane called "mpi", "local", or, for "auto", the one that fits how this process was started.

    Collective for "mpi"; `timeout_seconds` bounds its blocking calls. Raises `UserError` for other names, where
    MPI cannot be used, and where a launcher started more ranks than MPI sees.
    """
    if name not in PLANES:
        raise UserError(f"plane: {name!r} is unknown; choose one of {', '.join(PLANES)}")
    if name == "auto":
        _check_launcher(launched_without_mpi())
    if name == "local" or (name == "auto" and not launched_by_mpi()):
        from hetsync.plane.local import LocalPlane

        return LocalPlane()
    from hetsync.plane.mpi import MpiPlane

    plane = MpiPlane(timeout_seconds)
    _check_size(plane.size, ranks_started())
    return plane


def _check_launcher(started: int) -> None:
    if started > 1:
        raise UserError(
            f"{started} processes were started without MPI, by torchrun or a launcher like it, and each would train"
            f" alone: start them with mpirun -np {started} python SCRIPT"
        )


def _check_size(size: int, started: int) -> None:
    if size < started:
        raise UserError(
            f"the launcher started {started} ranks, but MPI sees {size}: use the mpirun of the MPI that"
            " mpi4py loads, or, with srun, --mpi=pmix"
        )
