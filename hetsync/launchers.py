"""What launchers tell a process, before MPI is there: is it one of a job's ranks, and which?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
# Of launchers that start ranks as no plane knows them: horovodrun without MPI, jsrun, PALS, Flux, MPICH's on a host.
_OTHER_SIZES = ("HOROVOD_SIZE", "JSM_NAMESPACE_SIZE", "PALS_SIZE", "FLUX_JOB_SIZE", "MPI_LOCALNRANKS")
_PLACE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

STATUS_FILE = "HETSYNC_STATUS_FILE"  # that launch/local reads
RUN_FILE = "HETSYNC_RUN_FILE"  # that it reads, too
ASKS = "HETSYNC_ASKS"  # where the job's store is, of a process that `hetsync join` has started

# How the variables begin by which a process knows that it is a rank; without them it is none.
LAUNCHER_PREFIXES = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_", "MV2_COMM_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_")

HOW_TO_TOLERATE = (
    "start the ranks with mpirun --with-ft ulfm of Open MPI 5, with run.plane mpi, or on CPUs without MPI, by one"
    " torchrun a node without restarts, or a launcher that leaves the others alone"
)


def launched_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of an MPI job, judged by its environment; loads no MPI.

    A SLURM step of several tasks counts also without PMI: taking each task for a job of its own would
    silently train the same model several times; unless each was told its RANK, as by torchrun. That one starts ranks of
    its own in such a step, or under mpirun.
    """
    if _TORCHRUN in environ:
        return False
    if any(name in environ for name in _LAUNCHER_VARIABLES):
        return True
    return _number(environ.get("SLURM_STEP_NUM_TASKS")) > 1 and not _told_all(environ)


def _told_all(environ: Mapping[str, str]) -> bool:
    """Whether somebody has told this process all that torchrun tells, of several ranks."""
    return all(environ.get(name) for name in _BY_HAND) and _number(environ["WORLD_SIZE"]) > 1


def launched_by_torch(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks that torchrun, or a launcher that sets RANK and WORLD_SIZE as it does, has started; 0 where none has."""
    if launched_by_mpi(environ) or "RANK" not in environ:
        return 0
    return _number(environ.get("WORLD_SIZE"))


def half_told(environ: Mapping[str, str] = os.environ) -> str | None:
    """The one of RANK and WORLD_SIZE that a launcher without MPI has left out, where it has set the other."""
    if launched_by_mpi(environ):
        return None
    if "RANK" not in environ and _number(environ.get("WORLD_SIZE")) > 1:
        return "RANK"
    return "WORLD_SIZE" if "RANK" in environ and not _number(environ.get("WORLD_SIZE")) else None


def told_otherwise(environ: Mapping[str, str] = os.environ) -> str | None:
    """The variable by which a launcher says that there are several ranks, where none says it as a plane needs it."""
    if launched_by_mpi(environ) or launched_by_torch(environ):
        return None
    return next((name for name in _OTHER_SIZES if _number(environ.get(name)) > 1), None)


def ranks_started(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of the job, as its MPI launcher has it; 1 where it says nothing."""
    if _TORCHRUN in environ:
        return 1
    return next((_number(environ[name]) for name in _SIZE_VARIABLES if name in environ), 1)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def gpus_granted(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs of this node that SLURM has given to the job; 0 where it was asked for none, or is not there."""
    return _number(environ.get("SLURM_GPUS_ON_NODE"))


def told_of_deaths(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MPI tells survivors of a rank's death (ULFM, by `mpirun --with-ft ulfm`), instead of ending the job. Its
    functions for that exist in any case."""
    return environ.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")


def leaves_survivors(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher without MPI leaves the others alone when a rank dies: torchrun ends all on that rank's node,
    and starts all of them anew where it was told to restart. Others are taken at their word, which is none."""
    if _TORCHRUN not in environ:
        return True
    nodes, restarts = (_number(environ.get(name)) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    return nodes > 1 and not restarts


def reaches_later_processes(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks can be joined by processes that MPI starts later: Open MPI's shared memory does not reach these."""
    transports = environ.get("OMPI_MCA_btl", "^").split(",")
    if transports[0].startswith("^"):  # all but these
        return "tcp" not in (transports[0][1:], *transports[1:])
    return "tcp" in transports


def write_status(status: int, environ: Mapping[str, str] = os.environ) -> None:
    """Of the job, which is at its end: for launch/local, as mpirun's own is another where a process has died that was
    started in the place of a rank."""
    _tell(STATUS_FILE, str(status), environ)


def write_run(folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """That the job works in: for launch/local, which outlives it, to say how it is resumed."""
    _tell(RUN_FILE, str(folder), environ)


def _tell(name: str, what: str, environ: Mapping[str, str]) -> None:
    if name in environ:
        with contextlib.suppress(OSError):
            Path(environ[name]).write_text(what)


def told_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank as launchers tell it (before MPI is there); None where it is alone, or none tells."""
    if launched_by_torch(environ) > 1:
        return _number(environ["RANK"])
    told = next((environ[name] for name in _RANK_VARIABLES if name in environ), None)
    return _number(told) if launched_by_mpi(environ) and told is not None else None


def first_rank() -> bool:
    """Is this rank 0, judged by what launchers tell?"""
    return not told_rank()


def first_on_host() -> bool:
    """Is this the first of its host's ranks, judged by what launchers tell? True where none tells."""
    if launched_by_torch() > 1:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    told = next((os.environ[name] for name in _PLACE_VARIABLES if name in os.environ), "0")
    return not launched_by_mpi() or told == "0"
