"""The peers benchmark: its figures, timelines and tables. Imports no MPI."""

import pytest
from peers_fixtures import RANK_FIGURES, job

from benchmarks.peers import report, timeline

# Figures.


def test_evaluations_are_told_at_their_samples_and_seconds_of_training():
    lines = [
        {"kind": "piece", "at": 2.0, "compute_seconds": 1.0, "data_seconds": 0.25, "wait_seconds": 0.25},
        {"kind": "evaluation", "at": 4.5, "samples_applied": 10, "train_seconds": 2.0, "accuracy": 0.5},
        {"kind": "round", "at": 7.5, "round": 2},
        {"kind": "evaluation", "at": 9.0, "samples_applied": 20, "train_seconds": 5.0, "accuracy": 0.75},
    ]
    assert report.evaluations(lines) == [
        {"samples": 10, "seconds": 2.0, "accuracy": 0.5},
        {"samples": 20, "seconds": 5.0, "accuracy": 0.75},
    ]


def test_a_run_of_hetsync_tells_of_each_rank_what_the_peers_tell():
    own = {key: RANK_FIGURES[key] for key in (*report.SHARED, "device_samples_per_second")}
    summary = {"samples_applied": 300, "train_seconds": 10.0, "metrics": {}, "staleness": {}}
    summary["per_rank"] = [own | {"runtime_cpu_fraction": 0.01}]
    sums = [("sum", 1.0, 1.25), ("compute", 1.0, 2.0), ("sum", 3.0, 3.75)]
    assert report.from_hetsync(summary, [], [sums], [10**8])["per_rank"] == [RANK_FIGURES]


# Timelines.


def told(at, **seconds):
    return {"kind": "piece", "at": at, **{f"{name}_seconds": spent for name, spent in seconds.items()}}


def test_delayed_ranks_wait_before_they_compute_and_sums_fly_meanwhile():
    lines = [
        told(2.0, compute=1.0, data=0.25, wait=0.25),  # training began at 0.5
        {"kind": "round", "at": 3.0, "round": 0, "seconds": 0.75},
        told(3.5, compute=1.0, data=0.0, wait=0.5),
        {"kind": "score", "at": 5.0, "seconds": 1.5},
        {"kind": "evaluation", "at": 5.25, "samples_applied": 10},
    ]
    assert timeline.from_telemetry(lines, synchronous=False) == [
        ("compute", 0.5, 1.5),
        ("wait", 0.0, 0.25),
        ("sum", 1.75, 2.5),
        ("compute", 2.0, 3.0),
        ("wait", 1.5, 2.0),
        ("rest", 3.0, 4.5),
    ]


def test_synchronous_ranks_wait_for_the_sum_of_what_they_have_computed():
    lines = [told(2.0, compute=1.0, data=0.0, wait=0.5), {"kind": "round", "at": 2.0, "round": 0, "seconds": 1.5}]
    assert timeline.from_telemetry(lines, synchronous=True) == [
        ("compute", 0.0, 1.0),
        ("wait", 1.0, 1.5),
        ("sum", 1.0, 1.5),
    ]


def test_timelines_leave_out_what_nobody_could_see():
    assert timeline.shifted([("wait", 5.0, 5.00001), ("compute", 5.0, 6.00004)], 4.0) == [("compute", 1.0, 2.0)]


@pytest.mark.parametrize(("rests", "middle"), [(1, 0.0), (2, 0.0), (8, 3.0)])
def test_the_plot_shows_what_happens_at_the_evaluation_half_way(rests, middle):
    assert timeline.half_way([("rest", float(i), i + 0.5) for i in range(rests)]) == middle


# Figures of a job.


def test_figures_of_a_job():
    record = job("ddp-equal")
    assert report.rate(record) == 30
    assert report.efficiency(record) == 0.75
    assert report.time_to_target(record) == pytest.approx(10 * 2.5 / 3)  # half-way between the last two evaluations
    assert report.time_to_target(record, "samples") == pytest.approx(250)
    assert report.kilobytes_per_sample(record) == 2
    assert report.idle(record) == 0.25
    assert report.communicating(record) == 0.1


@pytest.mark.parametrize(
    ("accuracies", "expected"), [((0.96, 0.1, 0.2), 10 / 3), ((0.1, 0.2, 0.3), None), ((0.5, 0.95, 0.5), 20 / 3)]
)
def test_the_target_counts_when_it_is_first_reached(accuracies, expected):
    assert report.time_to_target(job("alone", accuracies=accuracies)) == (expected and pytest.approx(expected))


def test_a_falling_metric_reaches_its_target_from_above():
    record = job("alone", accuracies=(1.0, 0.5, 0.2), falling=True, target=["accuracy", 0.75])
    assert report.time_to_target(record) == pytest.approx(5)


def test_spread_tells_how_many_have_the_figure():
    assert report.spread([1.0, 3.0, 2.0], ".0f") == "2 [1, 3]"
    assert report.spread([1.0, None], ".0f") == "1 (1 of 2)"
    assert report.spread([None], ".0f") == "–"


def test_a_lost_comparison_and_a_missing_peer_stay_in_the_tables():
    skipped = {k: v for k, v in job("horovod").items() if k not in ("result", "ideal", "equal")}
    records = [job("hetsync-delayed", 12.0), job("ddp-equal", 10.0), skipped | {"missing": "skipped: not here"}]
    lines = report.markdown(records).splitlines()
    assert any(line.startswith("| horovod | skipped: not here |") for line in lines)
    assert "| digits | c | ddp-equal | 0.83 | – | 0.83 | 1.00 |" in lines
    assert "equal shares reach 0.500 at most" in lines[0]


def test_ratios_compare_within_a_repetition():
    records = [job("hetsync-delayed", s, seed=i) for i, s in enumerate((10.0, 20.0, 40.0))]
    records += [job("alone", 2 * s, seed=i) for i, s in enumerate((10.0, 20.0, 40.0))]
    assert "| digits | c | alone | 2.00 [2.00, 2.00] | – | 2.00 [2.00, 2.00] |" in report.markdown(records)


def test_what_the_machine_gives_on_equal_devices_is_taken_off():
    records = []
    for cluster, seconds in (("homogeneous", 11.0), ("heavy-jitter", 22.0), ("throttled", 22.0)):
        records += [job("hetsync-delayed", 10.0, cluster=cluster), job("ddp-by-speed", seconds, cluster=cluster)]
    records.append(job("horovod", 15.0, cluster="heavy-jitter"))
    lines = report.markdown(records).splitlines()
    assert "| digits | homogeneous | ddp-by-speed | 1.10 | 1.00 | 1.10 | 1.00 |" in lines
    assert "| digits | heavy-jitter | ddp-by-speed | 2.20 | 2.00 | 2.20 | 1.00 |" in lines
    assert "| digits | heavy-jitter | horovod | 1.50 | – | 1.50 | 1.00 |" in lines, "which was not on equal devices"
    assert "| digits | throttled | ddp-by-speed | 2.20 | – | 2.20 | 1.00 |" in lines, "whose devices are real"


def test_who_sends_more_is_told():
    ours = job("hetsync-delayed")
    ours["result"]["per_rank"] = [RANK_FIGURES | {"bytes_sent": 2.8 * RANK_FIGURES["bytes_sent"]}]
    assert "| digits | c | ddp-by-speed | 1.00 | – | 1.00 | 2.80 |" in report.markdown([ours, job("ddp-by-speed")])
