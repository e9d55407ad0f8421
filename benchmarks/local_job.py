"""Jobs under mpirun, as a user starts them, and what they tell in their summary."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_job(ranks: int, words: Sequence[object], limit_seconds: float) -> dict[str, Any]:
    """`launch/local RANKS WORDS` in a run folder of its own; its summary.json. A job that fails ends the benchmark."""
    with tempfile.TemporaryDirectory() as run:
        command = [ROOT / "launch" / "local", ranks, *words, "--run.dir", run]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=limit_seconds)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        summary: dict[str, Any] = json.loads((Path(run) / "summary.json").read_text())
    check(words, summary)
    return summary


def check(words: Sequence[object], summary: dict[str, Any]) -> None:
    """A figure counts only if the run kept its promises and the machine kept up."""
    assert summary["samples_applied"] == summary["samples_expected"], words
    assert summary["staleness"]["max"] <= summary["delay_bound"], words
    if summary["overrun_fraction"] > 0.02:
        print(f"careful: {summary['overrun_fraction']:.1%} of slices overran in {words}", file=sys.stderr)
