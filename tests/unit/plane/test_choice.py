"""Which plane a process takes by its launcher, its recipe and its device, and what it says where none fits."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from hetsync.errors import UserError
from hetsync.launchers import (
    first_on_host,
    first_rank,
    launched_by_mpi,
    launched_by_torch,
    leaves_survivors,
    ranks_started,
    reaches_later_processes,
    told_rank,
)
from hetsync.plane import open_plane
from hetsync.plane.base import LostError, Messages, made_by_all
from hetsync.plane.choice import ChosenPlane, DeviceOf, groups_of, reason_against_nccl
from hetsync.plane.local import LocalMessages, LocalSums
from hetsync.plane.rendezvous import rendezvous_by_environment

OF_LAUNCHERS = (
    *("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
BY_TORCH = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
BY_TORCHRUN = {**BY_TORCH, "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_who_started_the_ranks() -> None:
    assert launched_by_torch(BY_TORCH) == 4
    assert launched_by_torch({}) == 0
    by_both = {**BY_TORCH, "OMPI_COMM_WORLD_SIZE": "4"}  # some sites' mpirun sets RANK as well
    assert (launched_by_mpi(by_both), launched_by_torch(by_both)) == (True, 0)
    within_a_step = {**BY_TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "1"}  # srun torchrun
    assert (launched_by_mpi(within_a_step), launched_by_torch(within_a_step)) == (False, 4)
    assert ranks_started(within_a_step) == 1


def test_only_rank_0_of_torchrun_speaks(environ: pytest.MonkeyPatch) -> None:
    for name, value in BY_TORCHRUN.items():
        environ.setenv(name, value)
    assert not first_rank()
    environ.setenv("RANK", "0")
    assert first_rank()


def test_a_slurm_step_without_pmi_can_be_told_who_its_ranks_are() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "4"}
    told = {**step, **BY_TORCH, "MASTER_ADDR": "one", "MASTER_PORT": "29500"}
    assert (launched_by_torch(told), launched_by_mpi(told), told_rank(told)) == (4, False, 1)
    for left_out in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        some = {name: value for name, value in told.items() if name != left_out}
        assert launched_by_mpi(some), "or each task might train alone"
    assert launched_by_mpi({**told, "WORLD_SIZE": "1"})
    assert launched_by_mpi({**told, "PMIX_RANK": "1"})


def test_who_is_the_first_of_its_host(environ: pytest.MonkeyPatch) -> None:
    assert first_on_host(), "alone"
    for name, value in {**BY_TORCHRUN, "RANK": "4", "LOCAL_RANK": "0"}.items():
        environ.setenv(name, value)
    assert first_on_host()
    environ.setenv("LOCAL_RANK", "1")
    assert not first_on_host()
    environ.delenv("TORCHELASTIC_RUN_ID")
    for launcher, place in (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"), ("PMI_SIZE", "MPI_LOCALRANKID")):
        environ.setenv(launcher, "4")
        assert first_on_host()
        environ.setenv(place, "2")
        assert not first_on_host()
        environ.delenv(launcher)
        environ.delenv(place)


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "RANK is set, but WORLD_SIZE is not, or is no number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "HOROVOD_SIZE is 2, so this process is one of several"),
        ({"JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_SIZE is 4"),
        ({"PALS_SIZE": "2"}, "PALS_SIZE is 2"),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE is 2"),
    ],
)
def test_half_of_what_a_launcher_tells_is_refused(
    environ: pytest.MonkeyPatch, told: dict[str, str], sentence: str
) -> None:
    """Each of several ranks would train alone."""
    for name, value in told.items():
        environ.setenv(name, value)
    with pytest.raises(UserError, match=sentence):
        open_plane("auto")
    assert open_plane("local").size == 1


@pytest.mark.parametrize("told", [{"HOROVOD_SIZE": "1"}, {**BY_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}])
def test_other_launchers_may_start_one_rank(environ: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    for name, value in {"FLUX_JOB_SIZE": "1", **told}.items():
        environ.setenv(name, value)
    assert open_plane("auto").size == 1


def test_a_lone_rank_of_torchrun_needs_nothing(environ: pytest.MonkeyPatch) -> None:
    for name, value in {**BY_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}.items():
        environ.setenv(name, value)
    plane = open_plane("auto")
    assert plane.size == 1
    assert plane.described == (
        "sums by this process alone, messages by this process alone (run.plane is auto, and one rank was started)"
    )


@pytest.mark.parametrize(
    ("name", "started", "sentence"),
    [
        ("mpi", BY_TORCHRUN, r"run.plane is mpi, but torchrun.* started these 4 ranks.*mpirun -np 4"),
        ("horovod", BY_TORCHRUN, r"run.plane is horovod, but torchrun.* started these 4 ranks.*mpirun -np 4"),
        ("local", BY_TORCHRUN, r"run.plane is local, but 4 ranks were started.*auto"),
        ("local", {"OMPI_COMM_WORLD_SIZE": "2"}, r"run.plane is local, but 2 ranks were started.*auto"),
        ("torch", {}, r"run.plane is torch, but no launcher started this process.*torchrun"),
        ("auto", BY_TORCH, r"MASTER_PORT is not set.*torchrun"),
        ("auto", {**BY_TORCH, "MASTER_PORT": "1"}, r"MASTER_ADDR is not set.*torchrun"),
        ("torch", {**BY_TORCH, "MASTER_PORT": "x"}, r"MASTER_PORT is x.*torchrun"),
        ("auto", {**BY_TORCH, "RANK": "7", "MASTER_PORT": "1"}, r"RANK is 7, but WORLD_SIZE is 4"),
    ],
)
def test_what_cannot_be_opened(environ: pytest.MonkeyPatch, name: str, started: dict[str, str], sentence: str) -> None:
    for variable, value in started.items():
        environ.setenv(variable, value)
    with pytest.raises(UserError, match=sentence):
        open_plane(name)


@pytest.mark.parametrize(
    ("trouble", "told"),
    [(None, "No module named 'horovod'"), (OSError("libmpi.so.12: cannot open shared object file"), "libmpi.so.12")],
)
def test_a_horovod_that_cannot_be_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, trouble: OSError | None, told: str
) -> None:
    class Importer:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "horovod":
                raise trouble or ModuleNotFoundError(f"No module named '{name}'")

    for name in [name for name in sys.modules if name.split(".")[0] == "horovod" or name == "hetsync.plane.horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Importer(), *sys.meta_path])
    with pytest.raises(UserError, match=rf"run.plane is horovod, but .*\({told}.*\): build it by launch/horovod"):
        importlib.import_module("hetsync.plane.horovod")


def test_a_torch_without_gloo_is_named(environ: pytest.MonkeyPatch) -> None:
    for variable, value in BY_TORCHRUN.items():
        environ.setenv(variable, value)
    environ.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(
        UserError, match=r"run.plane is auto, and torchrun started 4 ranks, which takes Gloo, but this torch has none"
    ):
        open_plane("auto")


@pytest.mark.parametrize(
    ("told", "leaves"),
    [
        (BY_TORCH, True),  # it says nothing of itself
        ({**BY_TORCHRUN, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({**BY_TORCHRUN, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "0"}, True),
        ({**BY_TORCHRUN, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
    ],
)
def test_whether_a_launcher_leaves_the_others_alone(told: dict[str, str], leaves: bool) -> None:
    assert leaves_survivors(told) == leaves


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(UserError, match=f"MASTER_PORT is {port}, but rank 0 cannot open it.*free port"):
            rendezvous_by_environment(5.0, told)


def test_a_store_that_nobody_opened_is_named() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with pytest.raises(UserError, match=r"rank 1 does not reach the store of torch at 127\.0\.0\.1, port 9"):
        rendezvous_by_environment(1.0, told).connect()


CPU, GPU, OTHER_GPU, AMD = (
    DeviceOf("a", "cpu", None),
    DeviceOf("a", "cuda:0", "a GPU-1"),
    DeviceOf("a", "cuda:1", "a GPU-2"),
    DeviceOf("b", "cuda:0", "b GPU-1", "AMD"),
)


def test_nccl_needs_a_device_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert reason_against_nccl([GPU, OTHER_GPU]) is None
    assert reason_against_nccl([GPU, CPU, OTHER_GPU]) == "rank 1 has no CUDA device"
    assert reason_against_nccl([OTHER_GPU, GPU, GPU]) == "rank 1, 2 share cuda:0 of a"
    assert reason_against_nccl([GPU, DeviceOf("b", "cuda:0", "b GPU-9")]) is None
    assert reason_against_nccl([GPU, AMD]) == "rank 0 has a device of NVIDIA and rank 1 has a device of AMD"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert reason_against_nccl([GPU, OTHER_GPU]) == "this torch is built without NCCL"


def test_groups_of_ranks_that_nccl_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    other_amd = DeviceOf("b", "cuda:1", "b GPU-2", "AMD")
    assert groups_of([GPU, CPU, OTHER_GPU, CPU]) == [[0, 2], [1], [3]]
    assert groups_of([AMD, GPU, other_amd, OTHER_GPU]) == [[0, 2], [1, 3]]
    assert groups_of([GPU, GPU, CPU]) == [[0], [1], [2]]
    assert groups_of([GPU, GPU, AMD, other_amd]) == [[0], [1], [2, 3]]


class Among(LocalMessages):
    """Ranks of which the others have these devices."""

    def __init__(self, *others: DeviceOf) -> None:
        super().__init__()
        self.others = others
        self.members = tuple(range(1 + len(others)))

    def gather_objects(self, value: object) -> list[object]:
        return [value, *self.others]


class Switching(ChosenPlane):
    """Tells what it would take, which no CPU can."""

    nccl = False
    groups: Sequence[Sequence[int]] | None = None

    def _use_nccl(self, device: torch.device) -> None:
        self.nccl = True

    def _use_groups(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        self.groups = groups


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr(DeviceOf, "here", lambda device: GPU)
    return torch.device("cuda", 0)


NAMES = pytest.mark.parametrize(
    "name", ["auto", "mpi", "torch", "horovod"], ids="run.plane {}".format
)  # pytest-mpi skips a mere "mpi"


@NAMES
@pytest.mark.parametrize("other", [CPU, GPU, OTHER_GPU, AMD])
def test_what_ranks_with_cuda_devices_take(on_a_gpu: torch.device, name: str, other: DeviceOf) -> None:
    plane = Switching(Among(other), LocalSums(), name, "why", 1.0)
    if name == "torch" and other is not OTHER_GPU:
        with pytest.raises(UserError, match=r"run.plane is torch, which sums CUDA tensors by NCCL, but .*auto or mpi"):
            plane.settle(on_a_gpu)
    else:
        plane.settle(on_a_gpu)
    assert plane.nccl == (other is OTHER_GPU and name in ("auto", "torch"))
    assert plane.groups is None, "no two ranks to join"
    assert ("no NCCL, as rank" in plane.why) == (name == "auto" and other is not OTHER_GPU)


@NAMES
def test_what_ranks_of_several_kinds_take(on_a_gpu: torch.device, name: str) -> None:
    plane = Switching(Among(OTHER_GPU, CPU), LocalSums(), name, "why", 1.0)
    if name == "torch":
        with pytest.raises(UserError, match=r"run.plane is torch.* but rank 2 has no CUDA device: .*auto or mpi"):
            plane.settle(on_a_gpu)
    else:
        plane.settle(on_a_gpu)
    assert not plane.nccl
    assert plane.groups == ([[0, 1], [2]] if name == "auto" else None)
    assert plane.why == ("why; NCCL not over all, as rank 2 has no CUDA device" if name == "auto" else "why")


def test_groups_that_do_not_meet_leave_the_sums_as_they_are(
    on_a_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreached(*_: object) -> None:
        raise UserError("rank 1 does not reach the store")

    monkeypatch.setattr(Switching, "_use_groups", unreached)
    plane = Switching(Among(OTHER_GPU, CPU), LocalSums(), "auto", "why", 1.0)
    plane.settle(on_a_gpu)
    assert plane.why == "why; no NCCL, as rank 1 does not reach the store"


@NAMES
def test_ranks_on_cpus_keep_their_sums(name: str) -> None:
    plane = Switching(Among(CPU), LocalSums(), name, "why", 1.0)
    plane.settle(torch.device("cpu"))
    assert not plane.nccl
    assert plane.why == "why"


def test_a_mistake_on_one_rank_is_raised_on_all() -> None:
    class Two(LocalMessages):
        def gather_objects(self, value: object) -> list[object]:
            return [value, UserError("rank 1 does not reach it")]

    with pytest.raises(UserError, match="rank 1 does not reach it"):
        made_by_all(Two(), lambda: "made")
    alone: Messages = LocalMessages()
    assert made_by_all(alone, lambda: "made") == "made"


def test_the_torch_plane_loads_no_mpi() -> None:
    code = "import sys, hetsync.plane.choice, hetsync.plane.store; print('mpi4py' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "False"


def test_a_lost_rank_is_no_traceback() -> None:
    from hetsync.plane.ending import _verdict

    assert _verdict(LostError("lost another rank")) == (1, "lost another rank")


@pytest.mark.parametrize(
    ("told", "reached"), [({}, True), ("self,sm", False), ("self,sm,tcp", True), ("^vader", True), ("^tcp", False)]
)
def test_whether_a_process_that_starts_later_is_reached(told: dict[str, str] | str, reached: bool) -> None:
    assert reaches_later_processes({"OMPI_MCA_btl": told} if isinstance(told, str) else told) is reached
