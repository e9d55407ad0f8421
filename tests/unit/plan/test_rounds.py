"""What rounds add to a step: as jobs on a virtual clock show it, and in closed form."""

from __future__ import annotations

import pytest

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.plan.rounds import GradientCost, Replicas, Rounds, buckets_of_blocks, quorums, segments
from hetsync.simulate.scenario import Scenario, Traffic
from hetsync.simulate.simulation import Simulation

RATES = (6.0, 4.0, 2.0, 2.0)
BATCH, STEPS, VALUES = 70, 400, 1000
STEP_SECONDS = BATCH / sum(RATES)


def cluster(round_seconds):
    bandwidth = 2 * 3 / 4 * 4 * VALUES / round_seconds if round_seconds else None
    return Cluster("made up", "made up", (DeviceGroup("d", 4),), Link(0.0, bandwidth))


@pytest.mark.each_value
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("slices_a_round", [0.1, 0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize(
    ("delay_bound", "grace", "fragments"),
    [(0, 0, 1), (1, 0, 1), (2, 0, 1), (4, 0, 1), (4, 0, 3), (3, 1, 1), (4, 1, 1)],
)
def test_a_step_takes_what_it_takes_on_a_virtual_clock(delay_bound, grace, fragments, slices_a_round, accumulation):
    """Whole replicas of four speeds. At D = 1 rounds of about a slice hold ranks up: the closed form lacks that."""
    sync = SyncConfig(
        delay_bound=delay_bound, accumulation=accumulation, grace=grace, fragments=fragments, wire="float32"
    )
    devices = cluster(fragments * slices_a_round * STEP_SECONDS)
    profiles = [RankProfile("", "", StepTime(0.0, 1 / rate)) for rate in RATES]
    scenario = Scenario(devices, profiles, sync, BATCH, STEPS * BATCH, traffic=Traffic(VALUES, (VALUES,)))
    simulation = Simulation(scenario)
    simulation.advance()

    replicas = Replicas(scenario.shares, [n / rate for n, rate in zip(scenario.shares, RATES, strict=True)])
    rounds = Rounds({(0, 1, 2, 3): 4 * VALUES}, devices, sync, fragments=fragments)
    predicted = rounds.step_seconds(replicas, rounds.seconds(STEP_SECONDS))
    near = delay_bound == 1 and 0.5 <= slices_a_round / accumulation <= 1
    last = (fragments - 1) * slices_a_round / STEPS  # the last round sums all fragments
    assert simulation.now / STEPS == pytest.approx(predicted, rel=0.5 if near else 0.05 + last)
    carried = rounds.per_step(replicas, rounds.seconds(STEP_SECONDS), predicted)
    # Where the staleness of work under way holds rounds back, there are up to a third fewer.
    assert 0.65 * carried <= simulation.machine.version / STEPS <= 1.05 * carried


def test_replicas_that_are_cut_differently_sum_segments_with_those_who_hold_them():
    """Three blocks; one replica on rank 0, one on 1 and 2: the first block's sum must end before the others' begins."""
    held = segments([[(0,)] * 3, [(1,), (2,), (2,)]], [100, 300, 500])
    assert held == {(0, 1): 100, (0, 2): 800}
    devices = Cluster("made up", "made up", (DeviceGroup("d", 3),), Link(1.0, 100.0))
    rounds = Rounds(held, devices, SyncConfig())
    assert rounds.seconds(9.0) == (1 + 1) + (1 + 8)
    assert rounds.carried_bytes() == 2 * 900


def test_segments_without_a_rank_in_common_are_summed_side_by_side():
    held = segments([[(0,), (1,)], [(2,), (3,)]], [100, 800])
    devices = Cluster("made up", "made up", (DeviceGroup("d", 4),), Link(1.0, 100.0))
    assert Rounds(held, devices, SyncConfig()).seconds(9.0) == 1 + 8


def test_buckets_travel_while_backward_runs():
    """Four of a quarter each: the last is full when backward ends; one alone, or a pipeline, waits for all of it."""
    devices = Cluster("made up", "made up", (DeviceGroup("d", 2),), Link(0.0, 100.0))
    replicas = Replicas((1, 1), (12.0, 12.0))
    blocks = [GradientCost(1 / 6, 100, 100)] * 4
    for bucket_bytes, whole, seconds in ((100, True, 13), (400, True, 16), (100, False, 16)):
        sync = SyncConfig(delay_bound=0, bucket_bytes=bucket_bytes)
        buckets = buckets_of_blocks(1 / 3, blocks, bucket_bytes) if whole else ()
        rounds = Rounds({(0, 1): 400}, devices, sync, buckets)
        assert rounds.step_seconds(replicas, rounds.seconds(12.0)) == pytest.approx(seconds)


def test_what_the_first_block_holds_leaves_last():
    """An embedding of 300 bytes, whose gradient is there once backward has ended."""
    devices = Cluster("made up", "made up", (DeviceGroup("d", 2),), Link(0.0, 100.0))
    for sizes, seconds in (([300, 100], 12 + 3), ([100, 300], 12 + 1)):
        sync = SyncConfig(delay_bound=0, bucket_bytes=300)
        buckets = buckets_of_blocks(0.4, [GradientCost(0.3, size, size) for size in sizes], 300)
        rounds = Rounds({(0, 1): 400}, devices, sync, buckets)
        assert rounds.step_seconds(Replicas((1, 1), (12.0, 12.0)), rounds.seconds(12.0)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("shares", "quorum", "rounds"),
    [((30, 20, 10, 10), 0.25, 3), ((30, 20, 10, 10), 1.0, 1), ((35, 35), 0.25, 2), ((60, 5, 5), 0.25, 1)],
)
def test_rounds_start_when_a_quorum_is_there(shares, quorum, rounds):
    assert quorums(shares, quorum) == rounds


def test_a_quorum_of_all_waits_for_the_slowest():
    devices = Cluster("made up", "made up", (DeviceGroup("d", 2),), Link())
    replicas = Replicas((5, 5), (1.0, 9.0))
    assert Rounds({(0, 1): 4}, devices, SyncConfig(quorum=1.0)).step_seconds(replicas, 0.0) == 9.0
    assert Rounds({(0, 1): 4}, devices, SyncConfig()).step_seconds(replicas, 0.0) == pytest.approx(10 / (5 + 5 / 9))


def test_buckets_fill_by_what_is_summed_and_are_full_with_their_last_weights():
    """Half of each byte is carried; the block between has no weights, so nothing waits for it."""
    blocks = [GradientCost(0.2, 100, 50), GradientCost(0.2, 0, 0), GradientCost(0.2, 100, 50)]
    assert buckets_of_blocks(0.4, blocks, 100) == [(pytest.approx(0.6), 50), (pytest.approx(1.0), 50)]
    assert buckets_of_blocks(0.4, blocks, 200) == [(pytest.approx(1.0), 100)]
