"""The benchmark that needs a GPU, in its small form: the same code, so that it does not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import environment

from benchmarks.gpu_rank import in_turn, length, merged, overlap

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # this machine may be busy with other tests


def test_copies_beside_kernels_are_measured_in_unions() -> None:
    assert merged([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length([(0, 2.5), (3, 4)]) == 3.5
    assert overlap([(0, 2), (1, 3)], [(2.5, 10), (-1, 0.5)]) == pytest.approx(1.0)
    assert overlap([(0, 1)], []) == 0


@pytest.mark.parametrize(
    "tasks", [["gpt"], pytest.param(["resnet50", "cifar10_resnet18-like"], marks=pytest.mark.thorough)], ids=" ".join
)
def test_the_small_form_trains_every_task_in_every_way(tasks: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--small", "--seconds", "0.1", "--output", str(tmp_path)]
    words += ["--tasks", *tasks]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["failure"] is None
    assert [task["task"] for task in kept["tasks"]] == tasks
    for task in kept["tasks"]:
        ways = {run["way"]: run for run in task["runs"]}
        assert set(ways) == {"DDP, equal shares", "DDP, shares by speed", "HetSync, D = 0", "HetSync, delayed"}
        assert task["shares_by_speed"] == [16, 8, 4, 4]
        assert ways["HetSync, delayed"]["summary"]["samples_applied"] == task["samples"]
        # The same steps on the same samples, whatever was trained off the clock before.
        assert ways["HetSync, D = 0"]["loss"] == pytest.approx(ways["DDP, shares by speed"]["loss"], rel=1e-4)
        assert task["bytes"]["delayed_mode"] >= 3 * task["bytes"]["weights"]
        assert (tmp_path / f"trace-{task['task']}.json").exists()
    table = (tmp_path / "gpu.md").read_text()
    assert f"| {tasks[0]} | HetSync, delayed |" in table
    assert "DDP sums by gloo, HetSync by MPI" in table
    assert "once, in the order of the rows" in table


def test_every_way_begins_in_turn() -> None:
    assert list(in_turn(["a", "b", "c", "d"], 1)) == [["a", "b", "c", "d"]]
    assert list(in_turn(["a", "b", "c", "d"], 2)) == [["a", "b", "c", "d"], ["c", "d", "a", "b"]]
    assert [order[0] for order in in_turn(["a", "b", "c", "d"], 4)] == ["a", "b", "c", "d"]


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path)]
    told = environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(words, cwd=ROOT, env=told, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("no CUDA device: start it on a machine with a GPU, or give --small")
    assert not list(tmp_path.iterdir())
