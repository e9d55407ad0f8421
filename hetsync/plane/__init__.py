"""Data planes: how tensors and messages travel between ranks. The contract is in `base.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetsync.errors import INTERNAL_ERROR, CommonMistakeError, OwnMistakeError, UserError, one_sentence
from hetsync.launchers import (
    ASKS,
    half_told,
    launched_by_mpi,
    launched_by_torch,
    leaves_survivors,
    ranks_started,
    told_otherwise,
    told_rank,
)
from hetsync.shortage import can_start_threads, no_processes

if TYPE_CHECKING:
    from hetsync.plane.base import Messages, Plane, Sums
    from hetsync.plane.rendezvous import Rendezvous

JOINED = "joined"
SECONDS_TO_CONFESS = 2.0  # to the others, what is wrong with this rank
Told = tuple[Mapping[str, Any] | None, str | None]  # the settings to be compared, and what is wrong with this rank's
PLANES = ("auto", "mpi", "torch", "horovod", "local")
THREADS_OF_GLOO = 16  # what a rank takes beside its own, with those of torch's store


def open_plane(name: str, timeout_seconds: float = 600.0, tolerate: bool = True, compares: bool = True) -> Plane:
    """The plane called by that name, or, for "auto", the one that fits how this process was started.

    Collective, but for "local"; `timeout_seconds` bounds its blocking calls, and for how long ranks wait for each other
    here. With `tolerate` a rank's death is `MembersLost` where that can be. Ranks of other versions or settings are
    refused, unless it is not to `compare` them. Raises `UserError` for other names, where a plane cannot be used,
    and where it would not reach all ranks that a launcher started: `CommonMistakeError` on all ranks, `OwnMistakeError`
    on one. What waits for ever ends this process.
    """
    if ASKS in os.environ:
        plane = _newcomer(timeout_seconds)
        os.environ[ASKS] = JOINED
        return plane
    by_torch, by_mpi = launched_by_torch(), launched_by_mpi()
    mistake = _mistake(name, by_torch, by_mpi)
    if name == "local" and mistake is None:
        return _local(name)
    settings = {"run.plane": name, "run.timeout_seconds": timeout_seconds, "fault.tolerate": tolerate}
    by_gloo = name == "torch" or (name == "auto" and by_torch > 1)
    if by_gloo and mistake is None and not can_start_threads(THREADS_OF_GLOO):
        raise OwnMistakeError(no_processes())
    told = (settings if compares else None), mistake
    if by_torch > 1 or (by_torch and name == "torch" and mistake is None):
        return _without_mpi(name, by_torch, timeout_seconds, tolerate, told)
    if by_mpi or (name in ("mpi", "horovod") and mistake is None):
        return _with_mpi(name, timeout_seconds, tolerate, told)
    if mistake is not None:
        raise UserError(mistake)
    return _local(name)


def _mistake(name: str, by_torch: int, by_mpi: bool) -> str | None:
    """What is wrong with a plane of this name in a process that was started like this one."""
    if name not in PLANES:
        return f"plane: {name!r} is unknown; choose one of {', '.join(PLANES)}"
    if name in ("mpi", "horovod") and by_torch > 1:
        return (
            f"run.plane is {name}, but torchrun, or a launcher like it, started these {by_torch} ranks, of which MPI"
            f" does not know: use run.plane torch or auto, or start them with mpirun -np {by_torch}"
        )
    if name == "torch" and not by_torch and not by_mpi:
        return (
            "run.plane is torch, but no launcher started this process: start it with torchrun --nproc-per-node N or"
            " mpirun -np N, or use run.plane auto"
        )
    if name == "torch" or (name == "auto" and by_torch > 1):
        import torch.distributed

        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            return (
                f"{_why(name, by_torch)}, which takes Gloo, but this torch has none: install another build of it, or"
                " use mpirun and run.plane mpi"
            )
    if name == "auto" and not by_torch and (missing := half_told()) is not None:
        other = "WORLD_SIZE" if missing == "RANK" else "RANK"
        return (
            f"{other} is set, but {missing} is not, or is no number, so this process might be one of several that train"
            f" alone: start the ranks with torchrun, set both, or unset {other}"
        )
    if name == "auto" and (variable := told_otherwise()) is not None:
        return (
            f"{variable} is {os.environ[variable]}, so this process is one of several, and each would train alone:"
            f" start the ranks with torchrun or mpirun, or, where it is alone, give run.plane local"
        )
    started = max(by_torch, ranks_started())
    if name == "local" and started > 1:
        return f"run.plane is local, but {started} ranks were started, and each would train alone: use run.plane auto"
    return None


def _why(name: str, by_torch: int) -> str:
    if name != "auto":
        return f"run.plane is {name}"
    by = f"torchrun started {by_torch} ranks" if by_torch else "an MPI launcher started the ranks"
    return f"run.plane is auto, and {by}"


def _with_mpi(name: str, timeout_seconds: float, tolerate: bool, told: Told) -> Plane:
    from hetsync.plane.greeting import CONNECTING_SECONDS, greet, own_hello
    from hetsync.plane.mpi_start import INTERFACE, MpiPost, connect_all, ends_after, ends_at_failures, start_mpi

    started_here = start_mpi(timeout_seconds)
    connecting = min(CONNECTING_SECONDS, timeout_seconds)
    with ends_at_failures():
        post = MpiPost()
        # A script that has started MPI itself may have been at work since then.
        greet(post, own_hello(*told), connecting if started_here else timeout_seconds, INTERFACE)
        _check_size(post.size, ranks_started())
        with ends_after(connecting, f"rank {post.rank} waited {{}} s for MPI to connect all ranks: {INTERFACE}"):
            connect_all(connecting)
            return _by_mpi(name, timeout_seconds, tolerate)


def _by_mpi(name: str, timeout_seconds: float, tolerate: bool) -> Plane:
    """Once all ranks have greeted each other."""
    from hetsync.plane.choice import ChosenPlane, torch_sums
    from hetsync.plane.mpi import MpiMessages, MpiSums
    from hetsync.plane.rendezvous import rendezvous_by_messages

    messages = MpiMessages(timeout_seconds, tolerate)
    sums: Sums
    if name == "torch":
        sums = torch_sums(messages, rendezvous_by_messages(messages, timeout_seconds))
    elif name == "horovod":
        sums = _horovod_sums(messages)
    else:
        sums = MpiSums(messages.mpi, timeout_seconds)
    return ChosenPlane(messages, sums, name, _why(name, 0), timeout_seconds)


def _horovod_sums(messages: Messages) -> Sums:
    from hetsync.plane.base import made_by_all

    # Of all ranks before any of them begins to wait for the others within Horovod.
    made_by_all(messages, lambda: import_module("hetsync.plane.horovod"))
    from hetsync.plane.horovod import HorovodSums

    return made_by_all(messages, lambda: HorovodSums(messages))


def _without_mpi(name: str, by_torch: int, timeout_seconds: float, tolerate: bool, told: Told) -> Plane:
    from hetsync.plane.base import LostError, made_by_all
    from hetsync.plane.choice import ChosenPlane
    from hetsync.plane.ending import leave, within
    from hetsync.plane.rendezvous import ABSENT, SECONDS_TO_HEAR
    from hetsync.plane.store import StoreMessages, StoreSums

    at = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
    late = f"rank {told_rank() or 0} has waited too long for the store of torch at {at}: {ABSENT}"
    # Longer than the waits within, which say more: torch waits for ever where something else answers there.
    longest = 2 * timeout_seconds + SECONDS_TO_HEAR.total_seconds()
    with within(longest, lambda: leave(INTERNAL_ERROR, late)):
        rendezvous = _met(timeout_seconds, told)
        try:
            messages = StoreMessages(rendezvous, tolerate and leaves_survivors())
            sums = made_by_all(messages, lambda: StoreSums(messages))
        except LostError as lost:
            # At once: threads that wait in the store of a rank that has gone spoil an orderly end.
            leave(INTERNAL_ERROR, f"rank {rendezvous.rank}: {one_sentence(str(lost))}, before all ranks had met")
    return ChosenPlane(messages, sums, name, _why(name, by_torch), timeout_seconds)


def _met(timeout_seconds: float, told: Told) -> Rendezvous:
    """Collective: where ranks without MPI meet."""
    from hetsync.plane.rendezvous import met, rendezvous_by_environment

    mistake = told[1]
    if mistake is None:
        return met(rendezvous_by_environment(timeout_seconds), *told)
    try:
        return met(rendezvous_by_environment(min(SECONDS_TO_CONFESS, timeout_seconds)), *told)
    except CommonMistakeError:
        raise
    except UserError as unmet:
        raise UserError(mistake) from unmet


def _newcomer(timeout_seconds: float) -> Plane:
    if os.environ[ASKS] == JOINED:
        raise UserError(
            "hetsync join has let this process into one job, and its script begins another, which needs all of its"
            " ranks from the start: start that anew, with resume='auto' for the first"
        )
    from hetsync.plane.choice import ChosenPlane
    from hetsync.plane.greeting import require_versions_of_job
    from hetsync.plane.rendezvous import first_connection, hello_key, placed_in_job, rendezvous_with_job
    from hetsync.plane.store import StoreMessages, StoreSums
    from hetsync.plane.store_places import StoreNewcomer

    store = first_connection()
    require_versions_of_job(store.get(hello_key(0)).decode())
    newcomer = StoreNewcomer(store)
    rendezvous = placed_in_job(rendezvous_with_job(timeout_seconds, newcomer.rank, newcomer.ranks_at_start), store)
    messages = StoreMessages(rendezvous, tolerant=True, newcomer=newcomer)
    return ChosenPlane(messages, StoreSums(messages), "torch", "hetsync join has started this process", timeout_seconds)


def _local(name: str) -> Plane:
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
