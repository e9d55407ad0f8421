"""Sums over ranks of several kinds, in particular: with Gloo in the place of NCCL.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import pytest
import torch
from planes import Finish, addend, assert_same_bits, gloo_sums, mixed_plane
from test_sums_contract import test_many_in_flight_polled_in_any_order as many_in_flight

from hetsync.plane.base import PlaneError
from hetsync.plane.hierarchical import HierarchicalSums

CPU = torch.device("cpu")

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]


def test_between_groups_first_ranks_alone_carry_float32(finish: Finish) -> None:
    plane = mixed_plane(gloo_sums)
    sums = plane.sums
    assert isinstance(sums, HierarchicalSums)
    assert (sums._between is not None) == (plane.rank < 2), "the first even rank and the first odd one"
    tensor = addend(plane.rank, 1000)
    finish(plane.allreduce(tensor), name="sum over two kinds")
    assert sums._flat.moves == 0
    assert sums._between is None or sums._between.moves == 1
    torch.testing.assert_close(tensor, torch.stack([addend(rank, 1000) for rank in range(4)]).sum(0))
    assert_same_bits(plane, tensor)
    rounded = torch.ones(10)
    finish(plane.allreduce(rounded, "bfloat16"), name="rounded sum")
    assert sums._flat.moves > 0, "in low precision all ranks sum at once"
    plane.close()


def test_buffers_lie_where_those_who_sum_between_groups_share_memory() -> None:
    plane = mixed_plane(gloo_sums)
    between = plane.sums._between  # type: ignore[attr-defined]
    lies_there = [sums.shared_memory.offset(plane.allocate(5, CPU)) is not None for sums in (between,) if sums]
    assert lies_there == [True] * (plane.rank < 2)
    assert plane.allocate(5, CPU).numel() == 5
    plane.close()


def test_without_mpi_between_them(finish: Finish) -> None:
    plane = mixed_plane(gloo_sums)
    many_in_flight(plane, finish)
    plane.close()


def test_zeros_keep_one_sign_everywhere(finish: Finish) -> None:
    plane = mixed_plane(gloo_sums)
    tensor = torch.full((5,), -0.0)
    finish(plane.allreduce(tensor), name="sum of negative zeros")
    assert_same_bits(plane, tensor)
    plane.close()


def test_a_failure_of_what_it_is_made_of_is_its_own(monkeypatch: pytest.MonkeyPatch, finish: Finish) -> None:
    plane = mixed_plane(gloo_sums)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    assert isinstance(plane.sums, HierarchicalSums)
    monkeypatch.setattr(plane.sums._flat, "allreduce", broken)
    with pytest.raises(PlaneError, match="broken"):
        plane.allreduce(torch.ones(3), "int8")
    assert plane.failed
