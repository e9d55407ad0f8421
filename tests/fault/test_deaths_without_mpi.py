"""Ranks that are killed under a launcher that only tells them who they are: the others go on while rank 0 lives.

Each case is a job of its own. python -m pytest tests/fault
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import SECONDS, Done, command, finished, ranks_alone, run, summary_of

from hetsync.train.checkpoint import load_newest

RANKS = 3
SAMPLES = 2560
CLUSTER = "name: three\nsource: none\ndevices: [{name: a, count: 2, speed: 2}, {name: b, count: 1, speed: 1}]\n"


def job(folder: Path, *words: str) -> list[str]:
    """Emulated devices make it last some seconds, whatever machine this is."""
    (folder / "three.yaml").write_text(CLUSTER)
    mine = ["--run.dir", "run", "--run.samples", str(SAMPLES), "--emulate", "three.yaml"]
    return command(*mine, "--emulation.samples_per_second", "1000", *words)


def killed(folder: Path, rank: int, *words: str) -> list[Done]:
    """Once rounds land; how each rank has ended."""
    told, deadline = folder / "run" / "telemetry" / "rank-0000.jsonl", time.monotonic() + SECONDS
    with ranks_alone(RANKS, job(folder, *words), folder) as processes:
        while not told.exists() or told.read_text().count('"round"') < 6:
            assert_alive(processes)
            assert time.monotonic() < deadline, "no round has landed in time"
            time.sleep(0.01)
        os.kill(processes[rank].pid, signal.SIGKILL)
        return [finished(process) for process in processes]


def assert_alive(processes: list[subprocess.Popen[str]]) -> None:
    ended = [finished(process).story for process in processes if process.poll() is not None]
    assert not ended, ended


@pytest.mark.parametrize("bound", ["0", "4"])
def test_the_others_go_on_with_every_sample(tmp_path: Path, bound: str) -> None:
    words = ["--sync.delay_bound", bound, "--optimizer.name", "sgd", "--optimizer.momentum", "0.9"]
    ends = killed(tmp_path, 1, *words, "--fault.tolerate", "true", "--run.evaluate_every", "1280")
    assert [done.status for done in ends] == [0, -signal.SIGKILL, 0], [done.story for done in ends]
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert (summary["status"], summary["ranks"], summary["ranks_at_start"]) == ("finished", 2, 3)
    assert summary["staleness"]["max"] <= int(bound)
    assert sum(summary["shares"]) == 64, "B stays"
    assert summary["shares"][1] == 0
    (failure,) = summary["failures"]
    assert (failure["rank"], failure["kind"], failure["action"]) == (1, "died", "went on")
    if bound == "0":
        alone = run("--run.dir", "alone", "--run.samples", SAMPLES, *words, folder=tmp_path)
        assert alone.status == 0, alone.story
        theirs, mine = (load_newest(tmp_path / name).model for name in ("run", "alone"))
        # Float32 sums of other slices differ by 1.2e-5.
        assert max(float((theirs[name] - value).abs().max()) for name, value in mine.items()) < 1e-4


def test_a_death_of_rank_0_ends_all_at_once(tmp_path: Path) -> None:
    ends = killed(tmp_path, 0, "--sync.delay_bound", "4")
    assert [done.status for done in ends] == [-signal.SIGKILL, 1, 1], [done.story for done in ends]
    assert summary_of(tmp_path / "run")["status"] == "failed", "nobody goes on elsewhere"
    for done in ends[1:]:
        assert any("rank 0 has gone" in sentence for sentence in done.sentences), done.story


@pytest.mark.thorough
def test_where_it_is_not_wanted_a_death_ends_all_at_once(tmp_path: Path) -> None:
    ends = killed(tmp_path, 1, "--sync.delay_bound", "0", "--fault.tolerate", "false")
    assert [done.status for done in ends] == [1, -signal.SIGKILL, 1], [done.story for done in ends]
    assert any("rank 1 has gone" in sentence for done in ends for sentence in done.sentences), [d.story for d in ends]
