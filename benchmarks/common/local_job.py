"""HetSync's jobs as a user starts them, by launch/local, and what they tell in their summary."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetsync.simulate.calibrate import binned, losses_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "models" / "recipes"
OVERRUNS = 0.02  # part of the slices from which on the machine was too slow for a figure to be trusted


def run_job(ranks: int, words: Sequence[object], limit_seconds: float) -> dict[str, Any]:
    """`launch/local RANKS WORDS` in a run folder of its own; its summary.json. A job that fails ends the benchmark."""
    with tempfile.TemporaryDirectory() as run:
        summary = summary_of(launched(ranks, [*words, "--run.dir", run]), Path(run), limit_seconds)
    check(words, summary)
    return summary


def launched(ranks: int, words: Sequence[object]) -> list[object]:
    """The command line of a job."""
    return [ROOT / "launch" / "local", ranks, *words]


def summary_of(command: Sequence[object], run: Path, limit_seconds: float) -> dict[str, Any]:
    """The summary.json that a command leaves in its run folder. A command that fails ends the benchmark."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit_seconds)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def with_curves(summary: dict[str, Any], run: Path) -> dict[str, Any]:
    """The summary with rank 0's `evaluations`, and `losses`: the training loss, mean over twentieths of the samples."""
    lines = (run / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "evaluation"]
    return {**summary, "evaluations": evaluations, "losses": binned(losses_of(run)).tolist()}


def check(words: Sequence[object], summary: dict[str, Any]) -> None:
    """A figure counts only if the run kept its promises and the machine kept up."""
    assert summary["samples_applied"] == summary["samples_expected"], words
    assert summary["staleness"]["max"] <= summary["delay_bound"], words
    warn_of_overruns(summary["overrun_fraction"], " ".join(map(str, words)))


def warn_of_overruns(part: float, job: str) -> None:
    if part > OVERRUNS:
        print(f"careful: {part:.1%} of slices overran in {job}", file=sys.stderr, flush=True)
