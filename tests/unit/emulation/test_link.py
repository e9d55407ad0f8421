from __future__ import annotations

import pytest
import torch

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig, WireFormat
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, PairLink
from hetsync.emulation.link import EmulatedLink, EmulatedSums, LinkTimes, Way, behind_link
from hetsync.plane.base import Handle, Residual
from hetsync.plane.faulty import Corrupt, Delay, Drop, FaultyPlane, Stall
from hetsync.plane.local import LocalPlane
from hetsync.plane.wire import encoded_bytes
from hetsync.simulate.scenario import Scenario, Traffic


class _Ready(Handle):
    def __init__(self) -> None:
        self.ready = False

    def done(self) -> bool:
        return self.ready


class _FourRanks(LocalPlane):
    """One of four ranks, whose collectives end when the test says so."""

    ranks_at_start = 4  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.members = tuple(range(4))
        self.handles: list[_Ready] = []

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        self.handles.append(_Ready())
        return self.handles[-1]


def test_tensors_are_allocated_where_the_sums_are() -> None:
    class Sums(LocalPlane):
        def allocate(self, count: int, device: torch.device) -> torch.Tensor:
            return torch.full((count,), 7.0)

    for sums in (EmulatedLink(Sums(), 1.0, 1.0), EmulatedSums(Sums(), lambda size: 1.0, Way())):
        assert sums.allocate(2, torch.device("cpu")).tolist() == [7, 7]


class _Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def link(latency_seconds: float = 1.0, bytes_per_second: float = 6.0) -> tuple[EmulatedLink, _FourRanks, _Clock]:
    inner, clock = _FourRanks(), _Clock()
    return EmulatedLink(inner, latency_seconds, bytes_per_second, clock), inner, clock


# Over four ranks 1024 values are 6144 bytes a link in float32: 2 · 3/4 · 4096.
@pytest.mark.parametrize(("wire", "n_bytes"), [("float32", 6144), ("bfloat16", 3072), ("int8", 1542)])
def test_transfer_takes_latency_once_and_the_bytes_of_a_ring(wire: WireFormat, n_bytes: int) -> None:
    assert link(0.5, 6.0)[0].transfer_seconds(encoded_bytes(1024, wire)) == pytest.approx(0.5 + n_bytes / 6)


def test_a_wrapped_plane_tells_how_its_collectives_move() -> None:
    class Moving(_FourRanks):
        moves = 7

    assert EmulatedLink(Moving(), 1.0, 6.0).moves == 7
    assert FaultyPlane(Moving(), []).moves == 7


def test_transfer_starts_when_all_ranks_have_joined() -> None:
    plane, inner, clock = link()
    handle = plane.allreduce(torch.zeros(4))  # 24 bytes a link: 1 s + 4 s
    clock.seconds += 50
    assert not handle.done()
    inner.handles[0].ready = True
    assert not handle.done()
    clock.seconds += 4.9
    assert not handle.done()
    clock.seconds += 0.1
    assert handle.done()


def test_collectives_share_the_link_one_after_another() -> None:
    plane, inner, clock = link()
    first, second = plane.allreduce(torch.zeros(4)), plane.allreduce(torch.zeros(4))
    for handle in inner.handles:
        handle.ready = True
    assert not second.done()  # polling the second puts the first on the link
    clock.seconds += 5
    assert first.done()
    assert not second.done()
    clock.seconds += 5
    assert second.done()


def test_link_that_was_idle_saves_nothing_up() -> None:
    plane, inner, clock = link()
    for _ in range(2):
        handle = plane.allreduce(torch.zeros(4))
        inner.handles[-1].ready = True
        assert not handle.done()
        clock.seconds += 5
        assert handle.done()
        clock.seconds += 100


def test_one_rank_needs_no_link() -> None:
    plane = EmulatedLink(LocalPlane(), latency_seconds=10, bytes_per_second=1)
    assert plane.allreduce(torch.zeros(4)).done()


@pytest.mark.parametrize("figures", [(-1, 1), (0, 0), (float("nan"), 1)])
def test_impossible_links_are_refused(figures: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="a link needs"):
        EmulatedLink(LocalPlane(), *figures)


def test_faults_strike_at_their_rank_and_count_only() -> None:
    clock = _Clock()
    here = [Corrupt(0, 1), Stall(0, 2), Delay(0, 3, seconds=5), Drop(0, 1)]
    plane = FaultyPlane(LocalPlane(), [*here, Corrupt(1, 0)], clock)
    tensors = [torch.ones(3) for _ in range(4)]
    handles = [plane.allreduce(tensor) for tensor in tensors]
    assert [bool(tensor.isnan().any()) for tensor in tensors] == [False, True, False, False]
    assert [handle.done() for handle in handles] == [True, True, False, False]
    clock.seconds += 5
    assert [handle.done() for handle in handles] == [True, True, False, True]
    for message in range(3):
        plane.send(message, to=0)
    assert plane.receive() == [(0, 0), (0, 2)]
    assert plane.fired == here


@pytest.mark.parametrize("values", [1, 1000])
def test_a_simulated_collective_takes_what_an_emulated_one_does(values: int) -> None:
    """Of a round in one bucket, and of a small bucket of it: each has the whole latency."""
    link, plane = Link(latency_seconds=0.5, bytes_per_second=1e4), _FourRanks()
    times = LinkTimes.of(link, plane.size, round_bytes=4000, slice_seconds=0.1)
    emulated = EmulatedLink(plane, times.latency_seconds, times.bytes_per_second)
    assert times.seconds(values, "float32") == pytest.approx(emulated.transfer_seconds(4 * values))
    assert times.seconds(values, "float32") == pytest.approx(0.5 + 2 * 3 / 4 * 4 * values / 1e4)


def test_emulated_and_simulated_jobs_heed_links_by_pair() -> None:
    devices = (DeviceGroup("a", 2), DeviceGroup("b", 2))
    cluster = Cluster("x", "s", devices, links=(PairLink(("a", "b"), 0.5, 1e4),))
    emulated = behind_link(_FourRanks(), cluster, round_bytes=4000, slice_seconds=0.1)
    assert isinstance(emulated, EmulatedLink)
    assert emulated.transfer_seconds(4000) == pytest.approx(0.5 + 2 * 3 / 4 * 4000 / 1e4)
    ranks = [RankProfile("", "", StepTime(0, 1))] * 4
    scenario = Scenario(cluster, ranks, SyncConfig(), 8, 80, traffic=Traffic(1000))
    assert scenario.link_seconds(1000) == pytest.approx(emulated.transfer_seconds(4000))


def test_a_cluster_without_links_slows_nothing() -> None:
    plane = _FourRanks()
    assert behind_link(plane, Cluster("x", "s", (DeviceGroup("a", 4),)), 4000, 0.1) is plane


def test_a_rank_sums_with_some_ranks_after_it_has_with_others() -> None:
    inner, clock, way = _FourRanks(), _Clock(), Way()
    sums = [EmulatedSums(inner, lambda size: size / 4, way, clock) for _ in range(2)]
    handles = [each.allreduce(torch.ones(values)) for each, values in zip(sums, (3, 5), strict=True)]
    inner.handles[1].ready = True
    assert not any(handle.done() for handle in handles)  # the second is on its way for 5 s
    clock.seconds += 2
    inner.handles[0].ready = True
    assert not handles[0].done()  # it follows the other, and takes 3 s
    clock.seconds += 3
    assert (handles[0].done(), handles[1].done()) == (False, True)
    clock.seconds += 3
    assert handles[0].done()
