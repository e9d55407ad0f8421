"""What facts come to: every verdict and sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetsync.doctor.checks import CHECKS, GIB, Finding, Verdict, findings
from hetsync.doctor.facts import Facts, Horovod, Limits, Mpi, Storage, Torch
from hetsync.doctor.nodes import compare, compare_clocks, compare_folders

SOUND = Facts(
    host="n1",
    python="3.11.7",
    hetsync="0.1.0",
    packages={"torch": "2.13.0+cu130", "mpi4py": "4.1.2", "numpy": "2.4.6"},
    required={"torch": "2.4", "mpi4py": "4.0", "numpy": "1.26"},
    mpi=Mpi(library="Open MPI v5.0.11", thread_multiple=True, cuda_aware=False, ulfm=True),
    mpirun="mpirun (Open MPI) 5.0.11",
    torch=Torch(cuda="13.0", gpus=("A100", "A100"), nccl="2.28.9", gloo=True),
    nvidia_gpus=("A100", "A100"),
    run_folder=Storage("runs", 50 * GIB),
    shared_memory=Storage("/dev/shm", 8 * GIB),
    limits=Limits(20_000, None, infiniband=True),
    clock_call_seconds=5e-8,
)
NONE = Mpi(failure="cannot load MPI library")
CPU = Torch(gloo=True)


def test_a_sound_machine_is_ok() -> None:
    assert [finding for finding in findings(SOUND) if finding.verdict != Verdict.OK] == []


def test_every_check_has_a_subject_of_its_own() -> None:
    assert len({check(SOUND).subject for check in CHECKS}) == len(CHECKS)


def test_what_is_told_of_a_sound_machine() -> None:
    told = {finding.subject: finding.found for finding in findings(SOUND)}
    assert told == {
        "HetSync": "0.1.0",
        "packages": "Python 3.11.7, torch 2.13.0+cu130, mpi4py 4.1.2, numpy 2.4.6",
        "launcher": "none",
        "MPI": "Open MPI v5.0.11",
        "MPI threads": "MPI_THREAD_MULTIPLE",
        "mpirun": "mpirun (Open MPI) 5.0.11",
        "ULFM": "there, and not in force: the loss of a rank ends the job, which goes on by --resume",
        "torch": "for CUDA 13.0",
        "GPUs": "A100, A100",
        "CUDA-aware MPI": "no; sums over MPI travel through host memory",
        "NCCL": "2.28.9",
        "Horovod": "not installed",
        "torchrun": "there",
        "run folder": "runs: 50.0 GiB free",
        "shared memory": "/dev/shm: 8.00 GiB free",
        "locked memory": "unlimited",
        "open files": "20,000",
        "clock": "50 ns a reading",
    }


OTHERWISE_OK = {
    "under mpirun": ("launcher", {"launcher": "MPI", "ranks": 4}, "MPI, 4 ranks"),
    "no MPI, so no threads": ("MPI threads", {"mpi": NONE}, "not looked at without MPI"),
    "MPI without ULFM": ("ULFM", {"mpi": Mpi(library="MPICH")}, "not there: the loss of a rank ends the job"),
    "torch for CPUs": ("torch", {"torch": CPU}, "for CPUs"),
    "no GPU": ("GPUs", {"torch": CPU, "nvidia_gpus": ()}, "none: ranks train on CPUs"),
    "CPUs need no CUDA-aware MPI": ("CUDA-aware MPI", {"torch": CPU}, "not needed without GPUs"),
    "CUDA-aware MPI": ("CUDA-aware MPI", {"mpi": replace(SOUND.mpi, cuda_aware=True)}, "yes; sums"),
    "MPI that does not say": ("CUDA-aware MPI", {"mpi": replace(SOUND.mpi, cuda_aware=None)}, "it does not say; sums"),
    "CPUs need no NCCL": ("NCCL", {"torch": CPU}, "not needed without GPUs"),
    "Horovod": ("Horovod", {"horovod": Horovod(True, None, ("MPI", "NCCL"))}, "with MPI, NCCL"),
    "empty Horovod": ("Horovod", {"horovod": Horovod(True)}, "with neither MPI nor Gloo nor NCCL"),
    "few bytes to lock on Ethernet": ("locked memory", {"limits": Limits(20_000, 2**23)}, "8 MiB"),
    "any number of files": ("open files", {"limits": Limits(None, None)}, "unlimited"),
}


@pytest.mark.parametrize("case", OTHERWISE_OK)
def test_what_is_ok_too(case: str) -> None:
    subject, changes, found = OTHERWISE_OK[case]
    finding = finding_of(subject, replace(SOUND, **changes))
    assert finding.verdict == Verdict.OK
    assert finding.found.startswith(found)


NOTE, PROBLEM = Verdict.NOTE, Verdict.PROBLEM
WRONG = {
    "GPUs that torch was not built for": (
        "GPUs",
        {"torch": replace(SOUND.torch, without_kernels=("Tesla V100",))},
        PROBLEM,
        "this torch, for CUDA 13.0, has no kernels for Tesla V100",
        "install a build of torch that has",
    ),
    "old torch": (
        "packages", {"packages": {**SOUND.packages, "torch": "2.3.1"}}, PROBLEM, "torch 2.3.1", "install torch>=2.4: "
    ),
    "no mpi4py": (
        "packages", {"packages": {**SOUND.packages, "mpi4py": None}}, PROBLEM, "mpi4py missing", "install mpi4py>=4.0: "
    ),
    "half a launcher": (
        "launcher", {"launcher_left_out": "WORLD_SIZE"}, PROBLEM, "it sets no WORLD_SIZE, so", "start with torchrun"
    ),
    "no MPI": ("MPI", {"mpi": NONE}, PROBLEM, "mpi4py loads none: cannot load MPI library", "install openmpi, or"),
    "no MPI under torchrun": (
        "MPI", {"mpi": NONE, "launcher": "torchrun"}, NOTE, "none that loads: cannot load", "nothing for torchrun; for"
    ),
    "MPI of one thread": (
        "MPI threads", {"mpi": Mpi(library="MPICH")}, PROBLEM, "no MPI_THREAD_MULTIPLE", "take an MPI with"
    ),
    "no mpirun": ("mpirun", {"mpirun": None}, NOTE, "none in the PATH", "srun --mpi=pmix, or use torchrun"),
    "MPICH's mpirun": (
        "mpirun", {"mpirun": "HYDRA build details:"}, PROBLEM, "of MPICH, but mpi4py loads Open MPI",
        "put the mpirun of Open MPI first in the PATH, or rebuild mpi4py against MPICH",
    ),
    "Intel's library": (
        "mpirun", {"mpi": replace(SOUND.mpi, library="Intel(R) MPI Library 2021.15")}, PROBLEM,
        "of Open MPI, but mpi4py loads Intel MPI", "rebuild mpi4py against Open MPI",
    ),
    "ULFM": ("ULFM", {"ulfm_in_force": True}, NOTE, "in force: the others go on", "leave out --with-ft ulfm where a"),
    "torch does not load": (
        "torch", {"torch": Torch(failure="undefined symbol")}, PROBLEM, "does not load: undefined symbol", "torch"
    ),
    "GPU, and torch for CPUs": (
        "GPUs", {"torch": CPU}, NOTE, "torch sees none of A100, A100, so ranks train on CPUs", "build of torch for"
    ),
    "old driver": ("GPUs", {"torch": Torch(cuda="13.0")}, NOTE, "torch sees none", "driver to one for CUDA 13.0"),
    "no NCCL": ("NCCL", {"torch": replace(SOUND.torch, nccl=None)}, NOTE, "this torch has none", "a build of torch"),
    "Horovod of another torch": (
        "Horovod", {"horovod": Horovod(True, "undefined symbol")}, NOTE, "does not load: undefined", "build it anew"
    ),
    "no torchrun": ("torchrun", {"torchrun": False}, NOTE, "not there", "python -m torch.distributed.run"),
    "no Gloo": ("torchrun", {"torch": Torch()}, NOTE, "there, but this torch has no Gloo", "start with mpirun"),
    "full disk": (
        "run folder", {"run_folder": Storage("runs", 0, "No space left on device")}, PROBLEM,
        "runs: No space left on device", "free space, or choose another folder by --run.dir",
    ),
    "nearly full disk": (
        "run folder", {"run_folder": Storage("runs", GIB // 2)}, NOTE, "runs: 0.5 GiB free", "free space"
    ),
    "little shared memory": (
        "shared memory", {"shared_memory": Storage("/dev/shm", 2**26)}, NOTE, "/dev/shm: 0.06 GiB free", "--ipc=host"
    ),
    "full shared memory, several ranks": (
        "shared memory", {"shared_memory": Storage("/dev/shm", 0, "No space"), "ranks": 2}, PROBLEM, "No space", "--shm"
    ),
    "full shared memory, one rank": (
        "shared memory", {"shared_memory": Storage("/dev/shm", 0, "No space")}, NOTE, "/dev/shm: No space", "--shm-size"
    ),
    "locked memory": (
        "locked memory", {"limits": Limits(20_000, 2**23, True)}, NOTE, "8 MiB, and InfiniBand wants", "ulimit -l"
    ),
    "open files": ("open files", {"limits": Limits(256, None)}, NOTE, "256", "ulimit -n 4096"),
    "slow clock": ("clock", {"clock_call_seconds": 1e-5}, NOTE, "10,000 ns a reading", "clocksource=tsc"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_has_a_remedy(case: str) -> None:
    subject, changes, verdict, found, remedy = WRONG[case]
    finding = finding_of(subject, replace(SOUND, **changes))
    assert finding.verdict == verdict
    assert found in finding.found
    assert remedy in finding.remedy


def test_threads_are_no_matter_to_torchrun() -> None:
    facts = replace(SOUND, mpi=Mpi(library="MPICH"), launcher="torchrun")
    assert finding_of("MPI threads", facts).verdict == Verdict.NOTE


def test_a_long_failure_is_cut() -> None:
    assert len(finding_of("MPI", replace(SOUND, mpi=Mpi(failure="x" * 1000))).found) < 200


def finding_of(subject: str, facts: Facts) -> Finding:
    (finding,) = [finding for finding in findings(facts) if finding.subject == subject]
    return finding


# Several nodes.


def compared(*changes: dict[str, object]) -> dict[str, tuple[Verdict, str, dict[str, str]]]:
    nodes = [replace(SOUND, host=f"n{number}", **change) for number, change in enumerate(changes, 1)]  # type: ignore[arg-type]
    return {
        each.finding.subject: (each.finding.verdict, each.finding.found, dict(each.differs)) for each in compare(nodes)
    }


def test_like_nodes_differ_in_nothing() -> None:
    found = compared({}, {"run_folder": Storage("runs", 40 * GIB)}, {"clock_call_seconds": 6e-8})
    assert all(verdict == Verdict.OK and not differs for verdict, _, differs in found.values())


def test_the_odd_node_is_named_with_what_it_has() -> None:
    found = compared({"limits": Limits(256, None)}, {}, {})
    assert found["open files"] == (NOTE, "20,000", {"n1": "256"})


def test_a_full_disk_on_one_node_is_a_problem() -> None:
    found = compared({}, {}, {"run_folder": Storage("runs", 0, "No space left on device")})
    assert found["run folder"] == (PROBLEM, "runs: 50.0 GiB free", {"n3": "runs: No space left on device"})


@pytest.mark.parametrize(
    ("change", "subject", "verdict"),
    [
        ({"hetsync": "0.0.9"}, "HetSync", PROBLEM),
        ({"mpi": Mpi(library="Open MPI v4.1.2", thread_multiple=True)}, "MPI", PROBLEM),
        ({"python": "3.12.1"}, "packages", NOTE),
    ],
)
def test_versions_that_differ(change: dict[str, object], subject: str, verdict: Verdict) -> None:
    nodes = [SOUND, replace(SOUND, host="n2"), replace(SOUND, host="n3", **change)]  # type: ignore[arg-type]
    (each,) = [each for each in compare(nodes) if each.finding.subject == subject]
    assert each.finding.verdict == verdict
    assert each.finding.remedy == "install the same version on every node"
    assert set(each.differs) == {"n3"}


def test_gpus_that_differ_are_what_hetsync_is_for() -> None:
    verdict, found, differs = compared({}, {}, {"torch": replace(SOUND.torch, gpus=("T4",))})["GPUs"]
    assert (verdict, found, differs) == (Verdict.OK, "A100, A100", {"n3": "T4"})


def test_nodes_with_run_folders_of_their_own_are_named() -> None:
    shared = compare_folders("runs", {"n1": True, "n2": True})
    assert (shared.finding.verdict, shared.finding.found) == (Verdict.OK, "all nodes see rank 0's runs")
    own = compare_folders("runs", {"n1": True, "n2": False})
    assert (own.finding.verdict, own.differs) == (NOTE, {"n2": "has another"})
    assert "--run.dir: --resume reads it on every rank" in own.finding.remedy


def test_clocks_apart_are_named() -> None:
    close = compare_clocks({"n1": 100.0, "n2": 100.5, "n3": 100.2})
    assert (close.finding.verdict, close.finding.found, close.differs) == (Verdict.OK, "0.500 s apart", {})
    apart = compare_clocks({"n1": 100.0, "n2": 100.5, "n3": 160.5})
    assert (apart.finding.verdict, apart.differs) == (NOTE, {"n3": "+60.0 s"})
    assert "NTP" in apart.finding.remedy
