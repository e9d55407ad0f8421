"""The report card: against the rates at the start and as they were, with its interval and its reasons. No MPI."""

from __future__ import annotations

from typing import Any

import pytest

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.balance.shares import solo_rates
from hetsync.cli.simulation_report import simulated_summary
from hetsync.config.schema import Config, EmulationConfig, SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, LognormalJitter, Slowdown
from hetsync.simulate import Scenario, Simulation
from hetsync.train.efficiency import report_card, sentences


def rank(solo: float, trained: float, uncertainty: float | None = 0.0) -> dict[str, Any]:
    return {
        "solo_samples_per_second": solo,
        "device_samples_per_second": trained,
        "solo_uncertainty": uncertainty,
    }


def said(rate: float, *ranks: dict[str, Any], emulated: bool = False) -> list[str]:
    return sentences({"samples_per_second": rate, "emulated": emulated, **report_card(rate, ranks)})


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
    summary = simulated(Slowdown(1, 4.0, 2000))
    assert summary["efficiency"] < 0.92, "of the rates at the start"
    assert summary["efficiency_while_training"] > 0.97, "of the rates as they were"
    done = sum(rank["samples"] for rank in summary["per_rank"])
    capable = summary["device_samples_per_second_sum"] * summary["train_seconds"]
    assert done <= capable * 1.0001


def test_ranks_that_wait_for_the_slow_one_are_not_excused() -> None:
    summary = simulated(Slowdown(1, 4.0, 2000), delay_bound=0, rebalance=False)
    assert summary["efficiency_while_training"] < 0.8


@pytest.mark.parametrize("seed_luck", [0.8, 1.25])
def test_luck_of_the_draw_is_in_one_figure_and_not_in_the_other(seed_luck: float) -> None:
    events = [Slowdown(rank, seed_luck, 0) for rank in range(4)]
    summary = simulated(*events)
    assert summary["efficiency"] == pytest.approx(summary["efficiency_while_training"] / seed_luck, rel=1e-3)
    assert 0.97 < summary["efficiency_while_training"] <= 1


@pytest.mark.parametrize("bound", [0, 4])
def test_no_luck_lifts_a_job_above_what_its_devices_could_do(bound: int) -> None:
    summary = simulated(sigma=0.6, delay_bound=bound)
    assert 0 < summary["efficiency_while_training"] <= 1


def test_the_interval_is_that_of_the_rates_alone_added_up() -> None:
    card = report_card(90.0, [rank(80, 80, 0.01), rank(20, 20, 0.06)])
    assert card["efficiency"] == pytest.approx(0.9)
    assert card["efficiency_interval"] == pytest.approx([0.9 / 1.02, 0.9 * 1.02])
    assert (
        "efficiency 0.900 (0.882 to 0.918 by the scatter of the profiled steps)"
        in said(90.0, rank(80, 80, 0.01), rank(20, 20, 0.06))[0]
    )


def test_an_interval_that_nobody_knows_is_not_made_up() -> None:
    ranks = rank(80, 80, 0.01), rank(20, 20, None)
    assert report_card(90.0, ranks)["efficiency_interval"] is None
    assert "too few times to say how certain" in said(90.0, *ranks)[0]


def test_exact_rates_have_no_interval() -> None:
    first, second = said(99.0, rank(60, 60), rank(40, 40), emulated=True)
    assert first == "99.0 samples/s of emulated devices, of 100.0 that the ranks reach alone: efficiency 0.990"
    assert second == "of the 100.0 that the devices were capable of while training, at the speeds drawn: 0.990"


@pytest.mark.parametrize(("emulated", "then"), [(True, "as the profile has them"), (False, "as measured at the start")])
def test_above_one_says_why(emulated: bool, then: str) -> None:
    *_, reason = said(108.0, rank(50, 60), rank(50, 50), emulated=emulated)
    assert reason.startswith("above 1: within their slices the devices were 10.0% faster than ")
    assert reason.endswith(then)
    assert not any("above 1" in line for line in said(100.0, rank(50, 60), rank(50, 50), emulated=emulated))


def test_a_rank_without_samples_counts_with_its_rate_alone() -> None:
    card = report_card(50.0, [rank(50, 50), rank(50, 0)])
    assert card["device_samples_per_second_sum"] == 100
    assert card["efficiency_while_training"] == 0.5


def test_rates_alone_are_at_shares_by_speed_whatever_a_job_does() -> None:
    """A rank's small slices cost it more a sample: the shares that a job ends with must not decide its efficiency."""
    fast, slow = StepTime(0.01, 1e-3), StepTime(0.01, 3e-3)
    ranks = [RankProfile("fast", "", fast), RankProfile("slow", "", slow)]
    assert solo_rates(60, ranks) == pytest.approx([fast.rate(45), slow.rate(15)])
    assert solo_rates(60, [RankProfile("fast", "", fast, cap=40), ranks[1]]) == pytest.approx(
        [fast.rate(40), slow.rate(20)]
    )
