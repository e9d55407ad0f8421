"""The Trace Event Format of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import round_of, start, task, write_lines

from hetsync.report.run import read_run
from hetsync.report.trace import trace_of


def events(folder: Path, *, delay_bound: int) -> list[dict[str, Any]]:
    others = [
        round_of(1.2, 0.1, None),
        {"kind": "score", "at": 2.0, "round": 1, "seconds": 0.5},
        {
            "kind": "rounds_change",
            "at": 2.2,
            "round": 8,
            "accumulation": 2,
            "work": 0.4,
            "waits": 0.0,
            "reason": "K = 2",
        },
        {"kind": "failure", "at": 2.5, "error": "LostError: gone"},
        {"kind": "evaluation", "at": 2.0, "samples_applied": 10, "train_seconds": 1.0, "loss": float("inf")},
    ]
    work = task(1.0, compute=0.4, wait=0.3, data=0.1)
    write_lines(folder, 0, [*start(delay_bound=delay_bound), work, *others])
    found: list[dict[str, Any]] = json.loads(trace_of(read_run(folder)), parse_constant=pytest.fail)["traceEvents"]
    return found


@pytest.mark.parametrize(
    ("delay_bound", "order"),
    [
        (4, [("waiting", 0.2, 0.3), ("loading", 0.5, 0.1), ("computing", 0.6, 0.4)]),
        (0, [("loading", 0.2, 0.1), ("computing", 0.3, 0.4), ("waiting", 0.7, 0.3)]),
    ],
)
def test_parts_of_a_task_follow_each_other(
    tmp_path: Path, delay_bound: int, order: list[tuple[str, float, float]]
) -> None:
    told = events(tmp_path, delay_bound=delay_bound)
    slices = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in told if e["ph"] == "X" and e["tid"] == 0]
    assert [name for name, *_ in slices] == [*(name for name, *_ in order), "evaluation"]
    for (_, *times), (_, *expected) in zip(slices, [*order, ("", 1.5, 0.5)], strict=True):
        assert times == pytest.approx(expected)


def test_rounds_failures_and_names_are_there(tmp_path: Path) -> None:
    told = events(tmp_path, delay_bound=4)
    (sums,) = [event for event in told if event["name"] == "round"]
    assert (sums["tid"], sums["ts"], sums["dur"]) == (1, pytest.approx(1.1e6), pytest.approx(1e5))
    assert sums["args"] == {"rounds": 1.0}
    names = {event["args"]["name"] for event in told if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"rank 0 (node, cpu)", "main", "communication"}
    assert [event["args"] for event in told if event["name"] == "failure"] == [{"error": "LostError: gone"}]
    (raised,) = [event for event in told if event["name"] == "rounds_change"]
    assert (raised["ts"], raised["args"]["accumulation"]) == (pytest.approx(2.2e6), 2)
    (evaluation,) = [event for event in told if event["name"] == "evaluation" and event["ph"] == "i"]
    assert evaluation["args"]["loss"] == "inf"
