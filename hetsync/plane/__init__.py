"""Data planes: how tensors and messages travel between ranks. The contract is in `base.py`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from hetsync.errors import INTERNAL_ERROR, OwnMistakeError, UserError, one_sentence
from hetsync.launchers import ASKS, half_told, launched_by_mpi, launched_by_torch, leaves_survivors, ranks_started
from hetsync.shortage import can_start_threads, no_processes

if TYPE_CHECKING:
    from hetsync.plane.base import Messages, Plane, Sums

JOINED = "joined"
PLANES = ("auto", "mpi", "torch", "horovod", "local")
THREADS_OF_GLOO = 16  # what a rank takes beside its own, with those of torch's store


def open_plane(name: str, timeout_seconds: float = 600.0, tolerate: bool = True) -> Plane:
    """The plane called by that name, or, for "auto", the one that fits how this process was started.

    Collective, but for "local"; `timeout_seconds` bounds its blocking calls. With `tolerate` a rank's death is
    `MembersLost` where that can be. Raises `UserError` for other names, where
    a plane cannot be used, and where it would not reach all ranks that a launcher started.
    """
    if name not in PLANES:
        raise UserError(f"plane: {name!r} is unknown; choose one of {', '.join(PLANES)}")
    if ASKS in os.environ:
        plane = _newcomer(timeout_seconds)
        os.environ[ASKS] = JOINED
        return plane
    by_torch, by_mpi = launched_by_torch(), launched_by_mpi()
    if name == "torch" or (name == "auto" and by_torch > 1):
        return _torch(name, by_torch, by_mpi, timeout_seconds, tolerate)
    if name in ("mpi", "horovod") or (name == "auto" and by_mpi):
        return _mpi(name, by_torch, timeout_seconds, tolerate)
    return _local(name, max(by_torch, ranks_started()))


def _mpi(name: str, by_torch: int, timeout_seconds: float, tolerate: bool) -> Plane:
    if by_torch > 1:
        raise UserError(
            f"run.plane is {name}, but torchrun, or a launcher like it, started these {by_torch} ranks, of which MPI"
            f" does not know: use run.plane torch or auto, or start them with mpirun -np {by_torch}"
        )
    from hetsync.plane.choice import ChosenPlane
    from hetsync.plane.mpi import MpiMessages, MpiSums

    messages = MpiMessages(timeout_seconds, tolerate)
    _check_size(messages.size, ranks_started())
    sums = _horovod_sums(messages) if name == "horovod" else MpiSums(messages.mpi, timeout_seconds)
    why = f"run.plane is {name}" if name != "auto" else "run.plane is auto, and an MPI launcher started the ranks"
    return ChosenPlane(messages, sums, name, why, timeout_seconds)


def _horovod_sums(messages: Messages) -> Sums:
    from hetsync.plane.base import made_by_all

    # Of all ranks before any of them begins to wait for the others within Horovod.
    made_by_all(messages, lambda: import_module("hetsync.plane.horovod"))
    from hetsync.plane.horovod import HorovodSums

    return made_by_all(messages, lambda: HorovodSums(messages))


def _torch(name: str, by_torch: int, by_mpi: bool, timeout_seconds: float, tolerate: bool) -> Plane:
    if not by_torch and not by_mpi:
        raise UserError(
            "run.plane is torch, but no launcher started this process: start it with torchrun --nproc-per-node N or"
            " mpirun -np N, or use run.plane auto"
        )
    why = "run.plane is torch" if name == "torch" else f"run.plane is auto, and torchrun started {by_torch} ranks"
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise UserError(
            f"{why}, which takes Gloo, but this torch has none: install another build of it, or use mpirun and"
            " run.plane mpi"
        )
    if not can_start_threads(THREADS_OF_GLOO):
        raise OwnMistakeError(no_processes())
    from hetsync.plane.choice import ChosenPlane, torch_sums
    from hetsync.plane.rendezvous import rendezvous_by_messages

    if by_torch:
        return ChosenPlane(*_without_mpi(timeout_seconds, tolerate and leaves_survivors()), name, why, timeout_seconds)
    from hetsync.plane.mpi import MpiMessages

    messages = MpiMessages(timeout_seconds)
    _check_size(messages.size, ranks_started())
    sums = torch_sums(messages, rendezvous_by_messages(messages, timeout_seconds))
    return ChosenPlane(messages, sums, name, why, timeout_seconds)


def _without_mpi(timeout_seconds: float, tolerant: bool) -> tuple[Messages, Sums]:
    from hetsync.plane.base import LostError, made_by_all
    from hetsync.plane.ending import leave
    from hetsync.plane.rendezvous import rendezvous_by_environment
    from hetsync.plane.store import StoreMessages, StoreSums

    rendezvous = rendezvous_by_environment(timeout_seconds)
    try:
        messages = StoreMessages(rendezvous, tolerant)
        return messages, made_by_all(messages, lambda: StoreSums(messages))
    except LostError as lost:
        # At once: threads that wait in the store of a rank that has gone spoil an orderly end.
        leave(INTERNAL_ERROR, f"rank {rendezvous.rank}: {one_sentence(str(lost))}, before all ranks had met")


def _newcomer(timeout_seconds: float) -> Plane:
    if os.environ[ASKS] == JOINED:
        raise UserError(
            "hetsync join has let this process into one job, and its script begins another, which needs all of its"
            " ranks from the start: start that anew, with resume='auto' for the first"
        )
    from hetsync.plane.choice import ChosenPlane
    from hetsync.plane.rendezvous import first_connection, rendezvous_with_job
    from hetsync.plane.store import StoreMessages, StoreSums
    from hetsync.plane.store_places import StoreNewcomer

    newcomer = StoreNewcomer(first_connection())
    rendezvous = rendezvous_with_job(timeout_seconds, newcomer.rank, newcomer.ranks_at_start)
    messages = StoreMessages(rendezvous, tolerant=True, newcomer=newcomer)
    return ChosenPlane(messages, StoreSums(messages), "torch", "hetsync join has started this process", timeout_seconds)


def _local(name: str, started: int) -> Plane:
    if name == "auto" and (missing := half_told()) is not None:
        other = "WORLD_SIZE" if missing == "RANK" else "RANK"
        raise UserError(
            f"{other} is set, but {missing} is not, or is no number, so this process might be one of several that train"
            f" alone: start the ranks with torchrun, set both, or unset {other}"
        )
    if started > 1:
        raise UserError(
            f"run.plane is local, but {started} ranks were started, and each would train alone: use run.plane auto"
        )
    from hetsync.plane.local import LocalPlane

    plane = LocalPlane()
    plane.why = "run.plane is local" if name == "local" else "run.plane is auto, and one rank was started"
    return plane


def _check_size(size: int, started: int) -> None:
    if size < started:
        raise UserError(
            f"the launcher started {started} ranks, but MPI sees {size}: use the mpirun of the MPI that"
            " mpi4py loads, or, with srun, --mpi=pmix"
        )
