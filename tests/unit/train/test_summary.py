"""A summary from values."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.sync.messages import NO_BOUND, Settings
from hetsync.sync.recovery import Death
from hetsync.train.summary import JobFigures, Join, LostRank, RankFigures, RunFigures, first_summary, summarise

JOB = JobFigures(
    status="finished",
    ranks=2,
    ranks_at_start=2,
    plane="sums by MPI, messages by MPI (given)",
    emulated=False,
    emulate=None,
    samples_applied=3000,
    samples_expected=3000,
    shares=[6, 2],
    seed=0,
)


def figures(rank: int, train_seconds: float) -> RankFigures:
    return RankFigures(
        rank=rank,
        profile=RankProfile("device", "host", StepTime(0.0, 0.01)),
        share=JOB.shares[rank],
        samples=1000,
        solo_samples_per_second=100.0,
        train_seconds=train_seconds,
        compute_seconds=8.0,
        wait_seconds=1.0,
        slices=100,
        overruns=10,
    )


RUN = RunFigures(
    job=JOB,
    per_rank=[figures(0, 10.0), figures(1, 20.0)],
    rounds=5,
    staleness={2: 1, 0: 3},
    settings=Settings(),
    metrics={"accuracy": 0.5},
    anchor_sha256="f00",
    wall_seconds=30.0,
)


def test_the_rate_is_that_of_this_job_over_its_slowest_ranks_seconds() -> None:
    assert summarise(RUN)["samples_per_second"] == 150.0
    resumed = summarise(replace(RUN, samples_before=1000))
    assert resumed["samples_per_second"] == 100.0
    assert resumed["solo_fraction"] == 0.5
    assert resumed["samples_applied"] == 3000


def test_what_a_job_leaves_that_dies_is_part_of_what_it_leaves_otherwise() -> None:
    assert first_summary(JOB).items() <= summarise(RUN).items()


def test_some_keys_are_there_for_some_runs_only() -> None:
    some = {"control": {"name": "ppo"}, "landscape": {"loss": 0.0}, "simulated": True}
    assert not some.keys() & summarise(RUN).keys()
    assert some.items() <= summarise(replace(RUN, **some)).items()


def test_staleness_is_counted_in_tasks() -> None:
    summary = summarise(RUN)
    assert summary["staleness"] == {"mean": 0.5, "max": 2, "histogram": {"0": 3, "2": 1}}
    assert list(summary["staleness"]["histogram"]) == ["0", "2"]
    assert summary["overrun_fraction"] == 0.1


@pytest.mark.parametrize(("bound", "told"), [(0, 0), (4, 4), (NO_BOUND, None)])
def test_no_bound_is_null(bound: int, told: int | None) -> None:
    assert summarise(replace(RUN, settings=Settings(bound)))["delay_bound"] == told


def test_a_rank_that_has_died_counts_for_the_time_it_was_there() -> None:
    death = Death(
        rank=2,
        round=3,
        activity="computing",
        noticed_seconds=0.1,
        recovered_seconds=0.02,
        samples_returned=8,
    )
    lost = LostRank(
        death=death,
        profile=RankProfile("device", "lost", StepTime(0.0, 0.01)),
        samples=400,
        solo_samples_per_second=100.0,
        train_seconds=5.0,
        compute_seconds=4.0,
    )
    summary = summarise(replace(RUN, job=replace(JOB, ranks_at_start=3), lost=[lost]))
    assert (summary["ranks"], summary["ranks_at_start"]) == (2, 3)
    assert summary["solo_samples_per_second_sum"] == 225.0, "a quarter of the job's 20 s"
    assert summary["solo_fraction"] == 150.0 / 225.0
    told = asdict(death)
    cause = told.pop("cause")
    assert cause == "died"
    assert summary["failures"] == [{**told, "host": "lost", "kind": cause, "action": "went on"}]
    assert [row["rank"] for row in summary["per_rank"]] == [0, 1, 2]
    gone = summary["per_rank"][2]
    assert (gone["left_at_round"], gone["samples"], gone["share"]) == (3, 400, 0)
    assert gone["solo_samples_per_second"] == 100.0
    assert "wait_fraction" not in gone, "nobody has measured it"


def test_a_rank_that_has_died_and_been_replaced_has_two_rows() -> None:
    """Each counts for the part of the job in which it was there."""
    death = Death(1, 3, "computing", 0.1, 0.2, 8)
    lost = LostRank(
        death=death,
        profile=RUN.per_rank[1].profile,
        samples=500,
        solo_samples_per_second=100.0,
        train_seconds=5.0,
        compute_seconds=5.0,
    )
    join = Join(rank=1, host="host", round=4, seconds=2.5, samples=500)
    newcomer = replace(figures(1, 10.0), joined_at_round=4)
    summary = summarise(replace(RUN, per_rank=[figures(0, 20.0), newcomer], lost=[lost], joins=[join]))
    assert summary["joins"] == [{"rank": 1, "host": "host", "round": 4, "seconds": 2.5}]
    rows = [(row["rank"], row.get("left_at_round"), row.get("joined_at_round")) for row in summary["per_rank"]]
    assert sorted(rows, key=str) == [(0, None, None), (1, 3, None), (1, None, 4)]
    assert summary["solo_samples_per_second_sum"] == 100.0 + 25.0 + 50.0
