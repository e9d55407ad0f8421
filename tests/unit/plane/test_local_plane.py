from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hetsync.config.schema import WireFormat
from hetsync.errors import UserError
from hetsync.launchers import launched_by_mpi, ranks_started
from hetsync.plane import _check_size, open_plane
from hetsync.plane.base import PlaneError
from hetsync.plane.local import LocalPlane
from hetsync.plane.wire import WIRE_FORMATS, round_trip


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_sum_of_one_rank_is_its_rounded_addend(wire: WireFormat) -> None:
    x = torch.randn(1500)
    tensor = x.clone()
    assert LocalPlane().allreduce(tensor, wire).done()
    torch.testing.assert_close(tensor, round_trip(x, wire))


def test_messages_to_itself_are_copies_in_order() -> None:
    plane = LocalPlane()
    message = [1]
    plane.send(message, to=0)
    message.append(2)
    plane.send("second", to=0)
    assert plane.receive() == [(0, [1]), (0, "second")]
    assert plane.receive() == []


def test_there_is_no_rank_1() -> None:
    with pytest.raises(PlaneError, match="no rank 1"):
        LocalPlane().send("lost", to=1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, True),
        ({"PMI_SIZE": "4"}, True),
        ({"PMIX_RANK": "0"}, True),
        ({"SLURM_NTASKS": "4"}, False),  # a batch script, before srun or mpirun
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"SLURM_STEP_NUM_TASKS": ""}, False),
    ],
)
def test_launcher_is_recognised(environ: dict[str, str], expected: bool) -> None:
    assert launched_by_mpi(environ) is expected


def test_ranks_that_do_not_see_each_other_are_refused() -> None:
    _check_size(4, ranks_started({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}))
    with pytest.raises(UserError, match="started 4 ranks, but MPI sees 1"):
        _check_size(1, ranks_started({"SLURM_STEP_NUM_TASKS": "4"}))


def test_unknown_plane_is_refused() -> None:
    with pytest.raises(UserError, match="'gloo' is unknown"):
        open_plane("gloo")


def run(code: str) -> tuple[int, str]:
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return answer.returncode, answer.stdout.strip()


def test_local_plane_loads_no_mpi() -> None:
    code = "import sys, hetsync.plane as p; p.open_plane('local'); print('mpi4py' in sys.modules)"
    assert run(code) == (0, "False")


def test_abort_ends_the_process_with_its_code() -> None:
    code = "from hetsync.plane.local import LocalPlane; print('last words'); LocalPlane().abort(7)"
    assert run(code) == (7, "last words")


def test_a_rank_alone_has_nobody_to_exchange_tensors_with() -> None:
    with pytest.raises(PlaneError, match="no other to exchange tensors with"):
        LocalPlane().open_channels()
