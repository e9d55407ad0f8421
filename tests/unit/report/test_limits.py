"""Each sentence of what limited a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hetsync.report.limits import Facts, RankTime, Slowdown, limits_of, slowed


def facts(*ranks: RankTime, **fields: Any) -> Facts:
    return Facts(ranks=ranks or (RankTime(0, 0.0, 0.0), RankTime(1, 0.0, 0.0)), **fields)


SENTENCES: list[tuple[Facts, str]] = [
    (
        facts(RankTime(4, 0.0, 0.01), RankTime(5, 0.0, 0.12)),
        "Rank 5 waits 12% of the time for data: more data.workers.",
    ),
    (
        facts(*(RankTime(n, 0.0, 0.06 + n / 100) for n in range(3)), RankTime(7, 0.0, 0.05)),
        "Ranks 0 to 2 and 7 wait up to 8% of the time for data: more data.workers.",
    ),
    (
        facts(RankTime(0, 0.3, 0.0), delay_bound=0),
        "Rank 0 waits 30% of the time for other ranks, in lockstep (D = 0): sync.delay_bound auto"
        " lets them go on meanwhile where that pays.",
    ),
    (
        facts(RankTime(0, 0.3, 0.0), delay_bound=2),
        "Rank 0 waits 30% of the time for other ranks, at the delay bound (D = 2): sync.delay_bound 4 if that goes on.",
    ),
    (
        facts(RankTime(0, 0.3, 0.0), delay_bound=None),
        "Rank 0 waits 30% of the time for other ranks: at rests and at the end, as there is no delay bound.",
    ),
    (
        facts(round_in_slices=0.3, accumulation=1),
        "Rounds take 30% of a slice: K = 2 (sync.accumulation 2) makes fewer, a faster link, sync.fragments or a"
        " smaller sync.wire shorter ones.",
    ),
    (
        facts(round_in_slices=3.25, delay_bound=0),
        "Rounds take 3.2 slices: sync.delay_bound auto hides them behind computing, a faster link"
        " or sync.wire bfloat16 shorter ones.",
    ),
    (
        facts(resting=(("evaluation", 0.12), ("checkpoint", 0.02))),
        "Rests for evaluation take 12% of the job's time: a larger run.evaluate_every.",
    ),
    (
        facts(resting=(("checkpoint", 0.2),)),
        "Rests for checkpoint take 20% of the job's time: a larger run.checkpoint_seconds or run.checkpoint_every.",
    ),
    (facts(resting=(("epoch", 0.2),)), "Rests for epoch take 20% of the job's time."),
    (
        facts(RankTime(0, 0.0, 0.0, runtime=0.08), accumulation=2),
        "HetSync itself takes 8% of a core on rank 0: K = 4 makes fewer rounds.",
    ),
    (
        facts(slowdowns=[Slowdown(3, "14:02", 0.6), Slowdown(1, "14:02", 0.5)]),
        "Two ranks (1 and 3) slowed at 14:02, to 50% of the speed before: look at what else runs there, and at heat.",
    ),
    (
        facts(round_in_slices=0.4, taken_back=frozenset({2})),
        "Rounds take 40% of a slice: a faster link, sync.fragments or a smaller sync.wire makes them shorter."
        " sync.accumulation auto has tried K = 2 for fewer, and taken it back.",
    ),
    (
        facts(RankTime(0, 0.0, 0.0, runtime=0.08), accumulation=2, taken_back=frozenset({4})),
        "HetSync itself takes 8% of a core on rank 0. sync.accumulation auto has tried K = 4 for fewer rounds, and"
        " taken it back.",
    ),
    (
        facts(slowdowns=[Slowdown(0, "14:02", 0.6), Slowdown(1, "14:02", 0.5), Slowdown(0, "14:02", 0.3)]),
        "Two ranks (0 and 1) slowed at 14:02, to 30% of the speed before: look at what else runs there, and at heat.",
    ),
    (
        facts(slowdowns=[Slowdown(3, "14:02", 0.6)]),
        "Rank 3 slowed at 14:02, to 60% of the speed before: look at what else runs there, and at heat.",
    ),
    (facts(failed="LostError: rank 1 is gone"), "The run ended by a failure: LostError: rank 1 is gone."),
    (
        facts(overruns=0.034),
        "3.4% of the emulated slices took longer than they should, so this machine was measured, not the program: lower"
        " emulation.samples_per_second.",
    ),
    (facts(efficiency=0.972), "Nothing: efficiency is 0.972."),
    (
        facts(efficiency=0.8),
        "Efficiency is 0.800, and nothing that takes 5 % of a rank's time was found: waits, loading and the runtime"
        " took less each.",
    ),
    (facts(), "Nothing that takes 5 % of a rank's time was found."),
]


@pytest.mark.parametrize(
    ("told", "sentence"), SENTENCES, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_a_sentence(told: Facts, sentence: str) -> None:
    assert limits_of(told) == [sentence]


def test_waits_for_slow_rounds_want_fewer_rounds() -> None:
    told, _ = limits_of(facts(RankTime(0, 0.3, 0.0), round_in_slices=1.5))
    assert told == "Rank 0 waits 30% of the time for other ranks, as rounds take longer than slices: K = 2 makes fewer."


def test_waits_where_fewer_rounds_were_tried_want_shorter_ones() -> None:
    told, _ = limits_of(facts(RankTime(0, 0.3, 0.0), round_in_slices=1.5, taken_back=frozenset({2})))
    assert told == (
        "Rank 0 waits 30% of the time for other ranks, as rounds take longer than slices: a faster link,"
        " sync.fragments or a smaller sync.wire makes them shorter."
    )


def test_a_rank_that_slowed_twice_in_a_minute_weighs_once() -> None:
    twice = [Slowdown(0, "14:02", 0.6), Slowdown(0, "14:02", 0.5)]
    first, _ = limits_of(facts(RankTime(0, 0.0, 0.3), RankTime(1, 0.0, 0.0), slowdowns=twice))
    assert first.startswith("Rank 0 waits 30% of the time for data")


def test_the_greatest_loss_comes_first() -> None:
    told = limits_of(facts(RankTime(0, 0.1, 0.2), RankTime(1, 0.3, 0.0), delay_bound=3, failed="UserError: no"))
    assert [sentence.split(":")[0] for sentence in told] == [
        "The run ended by a failure",
        "Ranks 0 and 1 wait up to 30% of the time for other ranks, at the delay bound (D = 3)",
        "Rank 0 waits 20% of the time for data",
    ]


def test_many_slowdowns_are_counted() -> None:
    told = limits_of(facts(slowdowns=[Slowdown(number, f"14:0{number}", 0.5) for number in range(6)]))
    assert len(told) == 4
    assert told[-1] == "There were 3 more such slowdowns: the speeds below show them."


def test_a_lasting_slowdown_is_found_once() -> None:
    assert slowed([10.0] * 8 + [4.0] * 12) == [(8, 0.4)]


def test_gaps_are_passed_over() -> None:
    assert slowed([math.nan, *[10.0] * 6, math.nan, *[5.0] * 6]) == [(8, 0.5)]


def test_two_steps_down_are_two() -> None:
    assert [place for place, _ in slowed([10.0] * 8 + [6.0] * 8 + [2.0] * 8)] == [8, 16]


@pytest.mark.parametrize("dip", [1, 4])
def test_a_dip_is_none(dip: int) -> None:
    assert slowed([10.0] * 8 + [2.0] * dip + [10.0] * 8) == []


def test_jitter_is_none() -> None:
    generator = np.random.default_rng(0)
    assert slowed(list(generator.lognormal(0.0, 0.3, 200))) == []
