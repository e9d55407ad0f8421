"""The report card: efficiency against the rates as they were, and the part of those at the start. No MPI."""

from __future__ import annotations

from typing import Any

import pytest

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.balance.shares import solo_rates
from hetsync.cli.simulation_report import simulated_summary
from hetsync.config.schema import Config, EmulationConfig, SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, LognormalJitter, Slowdown
from hetsync.simulate import Scenario, Simulation
from hetsync.train.efficiency import report_card, sentence


def rank(solo: float, trained: float, uncertainty: float | None = 0.0) -> dict[str, Any]:
    return {
        "solo_samples_per_second": solo,
        "device_samples_per_second": trained,
        "solo_uncertainty": uncertainty,
    }


def said(rate: float, *ranks: dict[str, Any], emulated: bool = False) -> str:
    return sentence({"samples_per_second": rate, "emulated": emulated, **report_card(rate, ranks)})


def simulated(*events: Slowdown, sigma: float = 0.0, **sync: Any) -> dict[str, Any]:
    """Four equal ranks of 40 samples/s."""
    jitter = LognormalJitter(sigma) if sigma else None
    cluster = Cluster("test", "made up", (DeviceGroup("device", 4),), None, jitter, events)
    ranks = [RankProfile("device", "", StepTime(0.0, 1 / 40), True)] * 4
    simulation = Simulation(Scenario(cluster, ranks, SyncConfig(**sync), 80, 16_000))
    simulation.advance()
    return simulated_summary(simulation, Config(emulation=EmulationConfig("test")), {}, 0.0)


def test_a_rank_that_slows_down_costs_the_cluster_not_the_efficiency() -> None:
    """One of four becomes four times slower half-way, and nobody waits for it."""
    summary = simulated(Slowdown(1, 4.0, 2000), delay_bound=4)
    assert summary["solo_fraction"] < 0.92, "of the rates at the start"
    assert summary["efficiency"] > 0.97, "of the rates as they were"
    done = sum(rank["samples"] for rank in summary["per_rank"])
    capable = summary["device_samples_per_second_sum"] * summary["train_seconds"]
    assert done <= capable * 1.0001


def test_ranks_that_wait_for_the_slow_one_are_not_excused() -> None:
    summary = simulated(Slowdown(1, 4.0, 2000), delay_bound=0, rebalance=False)
    assert summary["efficiency"] < 0.8


@pytest.mark.parametrize("seed_luck", [0.8, 1.25])
def test_luck_of_the_draw_is_in_one_figure_and_not_in_the_other(seed_luck: float) -> None:
    events = [Slowdown(rank, seed_luck, 0) for rank in range(4)]
    summary = simulated(*events)
    assert summary["solo_fraction"] == pytest.approx(summary["efficiency"] / seed_luck, rel=1e-3)
    assert 0.97 < summary["efficiency"] <= 1


@pytest.mark.parametrize("bound", [0, 4])
def test_no_luck_lifts_a_job_above_what_its_devices_could_do(bound: int) -> None:
    summary = simulated(sigma=0.6, delay_bound=bound)
    assert 0 < summary["efficiency"] <= 1


def test_the_interval_is_that_of_the_rates_alone_added_up() -> None:
    card = report_card(90.0, [rank(80, 80, 0.01), rank(20, 20, 0.06)])
    assert card["solo_fraction"] == pytest.approx(0.9)
    assert card["solo_fraction_interval"] == pytest.approx([0.9 / 1.02, 0.9 * 1.02])


def test_an_interval_that_nobody_knows_is_not_made_up() -> None:
    ranks = rank(80, 80, 0.01), rank(20, 20, None)
    assert report_card(90.0, ranks)["solo_fraction_interval"] is None


def test_there_is_one_efficiency_in_words() -> None:
    told = said(99.0, rank(50, 60), rank(40, 50), emulated=True)
    assert told == (
        "99.0 samples/s, of 110.0 that the emulated devices were capable of while training: efficiency 0.900"
    )
    unknown = {**rank(0, 120), "solo_samples_per_second": None}
    assert said(90.0, unknown) == (
        "90.0 samples/s, of 120.0 that the devices were capable of while training: efficiency 0.750"
    )


def test_devices_that_have_become_faster_lift_one_figure_above_one() -> None:
    card = report_card(108.0, [rank(50, 60), rank(50, 50)])
    assert (card["solo_fraction"], card["efficiency"]) == (1.08, pytest.approx(108 / 110))


def test_a_rank_without_samples_counts_with_its_rate_alone() -> None:
    card = report_card(50.0, [rank(50, 50), rank(50, 0)])
    assert card["device_samples_per_second_sum"] == 100
    assert card["efficiency"] == 0.5


def test_rates_alone_are_at_shares_by_speed_whatever_a_job_does() -> None:
    """A rank's small slices cost it more a sample: the shares that a job ends with must not decide its efficiency."""
    fast, slow = StepTime(0.01, 1e-3), StepTime(0.01, 3e-3)
    ranks = [RankProfile("fast", "", fast), RankProfile("slow", "", slow)]
    assert solo_rates(60, ranks) == pytest.approx([fast.rate(45), slow.rate(15)])
    assert solo_rates(60, [RankProfile("fast", "", fast, cap=40), ranks[1]]) == pytest.approx(
        [fast.rate(40), slow.rate(20)]
    )
