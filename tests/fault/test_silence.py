"""A first rank that gives no sign of life is ended as any other: the second one watches it.

Each case is a job of its own, under mpirun. python -m pytest tests/fault/test_silence.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import command, finished, mpirun, started, summary_of

SAMPLES = 1500
SILENT = ["--fault.silent_seconds", "2", "--sync.shares", "equal"]


@pytest.mark.each_value(1)
@pytest.mark.parametrize(("ranks", "bound"), [(2, 0), (3, 4)])
def test_the_others_go_on_without_a_first_rank_that_is_stopped(tmp_path: Path, ranks: int, bound: int) -> None:
    words = [
        "--run.dir",
        "run",
        "--run.samples",
        SAMPLES,
        *SILENT,
        "--fault.inject",
        "[{kind: stop, rank: 0, round: 5}]",
    ]
    words += ["--sync.delay_bound", bound, "--fault.least_ranks", 1]
    with started([*mpirun(ranks), "--with-ft", "ulfm", *command(*words)], tmp_path) as process:
        done = finished(process)
    assert done.status == 0, done.story
    (said,) = [line for line in done.sentences if "it is excluded" in line]
    assert said.startswith("hetsync: rank 0 (process ")
    assert said.endswith(") is silent for 3 s: it is excluded")
    assert "rank 0 is stopped" in done.err, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert [(failure["rank"], failure["kind"]) for failure in summary["failures"]] == [(0, "silent")]


HANGS = """
import ctypes, os
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        if any(Path("run/checkpoints").glob("samples-*")) and os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            hang()
        return self.layers(x)

def hang():
    ctypes.PyDLL(None).sleep(1000)  # in C, with Python's lock kept
"""


def test_elsewhere_the_job_ends_and_says_who_was_silent(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGS)
    words = ["--model.name", "mine:Net", "--run.dir", "run", "--run.samples", SAMPLES, "--run.checkpoint_every", 128]
    with started([*mpirun(3), *command(*words, *SILENT, "--fault.tolerate", "false")], tmp_path) as process:
        done = finished(process, 60.0)
    assert done.status not in (0, 85, 86), done.story
    assert any("rank 0 (process " in line and ") is silent for 3 s: " in line for line in done.sentences), done.story
    assert "rank 0 runs, at" in done.err, done.story
    assert "in hang" in done.err, done.story
