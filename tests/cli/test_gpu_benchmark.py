"""The visit to a GPU in its small form: the same code, so that it does not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import environment

from benchmarks.gpu.__main__ import Visit
from benchmarks.gpu.speed import DELAYED, OFTEN, in_turn, length, merged, overlap

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # this machine may be busy with other tests


def test_copies_beside_kernels_are_measured_in_unions() -> None:
    assert merged([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length([(0, 2.5), (3, 4)]) == 3.5
    assert overlap([(0, 2), (1, 3)], [(2.5, 10), (-1, 0.5)]) == pytest.approx(1.0)
    assert overlap([(0, 1)], []) == 0


FIRST = [part.name for part in Visit(True, Path()).parts(False)]
SECOND = [part.name for part in Visit(True, Path()).parts(True)]
LONG = ("speed", "races", "waits", "memory", "death")
VISITS = [pytest.param(name, [], id=name, marks=[pytest.mark.thorough] * (name in LONG)) for name in FIRST]
VISITS += [pytest.param(name, ["--second"], id=f"second-{name}", marks=pytest.mark.thorough) for name in SECOND]


@pytest.mark.parametrize(("part", "second"), VISITS)
def test_the_small_form_of_a_part_passes(part: str, second: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--small", "--output", str(tmp_path), *second, "--parts", part]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    said = "\n".join(log.read_text()[-3000:] for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + said
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["verdict"] for row in kept["parts"]] == ["passed"]
    if part in ("speed", "four"):
        check_speeds(tmp_path, part, [15, 8, 4, 3] if part == "four" else [20, 10])
    elif part == "rests":
        rests = json.loads((tmp_path / "rests.json").read_text())
        assert all(rest["seconds"]["agree"] > 0 and rest["bytes"]["hashed"] > 0 for rest in rests["rests"])


def check_speeds(folder: Path, part: str, shares: list[int]) -> None:
    tasks = json.loads((folder / f"{part}.json").read_text())["tasks"]
    assert tasks
    for task in tasks:
        ways = {run["way"]: run for run in task["runs"]}
        assert set(ways) == {"DDP, equal shares", "DDP, shares by speed", "HetSync, D = 0", OFTEN, DELAYED}
        assert task["shares_by_speed"] == shares
        assert ways[OFTEN]["summary"]["samples_applied"] == task["samples"]
        assert all(len(stretches) == 3 for stretches in ways[OFTEN]["round_milliseconds"])
        # The same steps on the same samples, whatever was trained off the clock before. Fifty layers with batch norm of
        # ten samples make much of the order of sums, and of three samples ten times as much at each step.
        same = {"gpt": 1e-4, "cifar10_resnet18-like": 1e-4, "resnet50": 5e-3 if part == "speed" else 0.1}[task["task"]]
        assert ways["HetSync, D = 0"]["loss"] == pytest.approx(ways["DDP, shares by speed"]["loss"], rel=same)
        assert task["bytes"]["delayed_mode"] >= 3 * task["bytes"]["weights"]
        assert (folder / f"trace-{task['task']}.json.gz").exists()
    table = (folder / "gpu.md").read_text()
    assert f"| {tasks[0]['task']} | {OFTEN} |" in table
    assert "DDP sums by gloo, HetSync by MPI" in table


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
