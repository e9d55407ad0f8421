"""Who is killed, and what telemetry tells of it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.recoveries import LATEST, landed_at, lines_of, trials, verdict


def test_every_third_is_rank_0_and_all_ways_come() -> None:
    some = list(trials(30, 4, seed=3))
    assert [trial.rank == 0 for trial in some] == [number % 3 == 0 for number in range(30)]
    assert {trial.rank for trial in some} == set(range(4))
    assert {(trial.way, trial.bound) for trial in some} == {("recipe", 0), ("recipe", 4), ("script", 0), ("script", 4)}
    assert all(0 <= trial.after <= LATEST for trial in some)
    assert some == list(trials(30, 4, seed=3))


def test_a_round_lands_by_the_clock_of_all_ranks(tmp_path: Path) -> None:
    lines = [
        {"kind": "start", "at": 0.0, "wall_clock": "1970-01-01T00:01:40+00:00"},
        {"kind": "round", "at": 2.0, "round": 6},
        {"kind": "death", "at": 2.5, "recovered_seconds": 0.2},
        {"kind": "round", "at": 2.75, "round": 7},
    ]
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "rank-0001.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert landed_at(lines_of(tmp_path, 1), first=7) == [102.75]


def test_a_promise_that_is_not_kept_is_told() -> None:
    def told(*seconds: float) -> str:
        return verdict([{"rank": rank, "seconds": each} for rank, each in enumerate(seconds)])

    assert told(0.2, 0.4).endswith(": kept")
    assert told(0.2, 5.5, 0.3).endswith("NOT KEPT")
    assert told(1.2, 1.3).endswith("NOT KEPT")
