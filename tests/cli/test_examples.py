"""The example of a user's own loop: plain, and with each framework."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from jobs import ROOT, finished, mpirun, program, started

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
LEAST_ACCURACY = 0.9
SECONDS = 120.0
# Torch 2.13 abandons Gloo's threads under DistributedDataParallel; one that asks for Python's lock at the end aborts.
ABORTED_AT_THE_END = "terminate called without an active exception"


def run(words: list[str], script: str, folder: Path, excused: str | None = None) -> str:
    """What it says."""
    with started([*words, str(EXAMPLES / script), "--folder", str(folder)], folder.parent) as process:
        done = finished(process, SECONDS)
    assert done.status == 0 or (excused is not None and excused in done.err), done.story
    return done.out + done.err


def accuracy(words: list[str], script: str, folder: Path, excused: str | None = None) -> float:
    """The last one that the script shows."""
    return float(re.findall(r"accuracy ([\d.]+)", run(words, script, folder, excused))[-1])


def test_plain(tmp_path: Path) -> None:
    assert accuracy([sys.executable], "before.py", tmp_path / "run") > LEAST_ACCURACY
    assert (tmp_path / "run" / "best.pt").exists()


@pytest.mark.thorough
def test_with_hetsync(tmp_path: Path) -> None:
    assert accuracy([*mpirun(2), sys.executable], "after.py", tmp_path / "run") > LEAST_ACCURACY
    best = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert best["value"] > LEAST_ACCURACY
    assert summary["samples_applied"] == summary["samples_expected"] == 8 * 1437


@pytest.mark.thorough
def test_with_ddp(tmp_path: Path) -> None:
    words = [program("torchrun"), "--standalone", "--nproc-per-node", "2"]
    assert accuracy(words, "ddp.py", tmp_path / "run", ABORTED_AT_THE_END) > LEAST_ACCURACY
    assert (tmp_path / "run" / "best.pt").exists()


@pytest.mark.thorough
def test_with_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    words = [program("accelerate"), "launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    assert accuracy(words, "with_accelerate.py", tmp_path / "run", ABORTED_AT_THE_END) > LEAST_ACCURACY
    assert (tmp_path / "run" / "best.pt").exists()


@pytest.mark.thorough
def test_with_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    folder = tmp_path / "run"
    run([sys.executable], "with_lightning.py", folder)
    (monitor,) = torch.load(folder / "best.ckpt", weights_only=False)["callbacks"].values()
    assert monitor["best_model_score"] > LEAST_ACCURACY


@pytest.mark.each_value(1)
@pytest.mark.parametrize(
    ("module", "script", "ranks"),
    [
        ("accelerate", "accelerate_digits.py", None),
        ("lightning", "lightning_digits.py", 2),
    ],
)
def test_neighbours(module: str, script: str, ranks: int | None, tmp_path: Path) -> None:
    pytest.importorskip(module)
    words = [*(mpirun(ranks) if ranks is not None else []), sys.executable, str(EXAMPLES / script)]
    with started(words, tmp_path) as process:
        done = finished(process, SECONDS)
    assert done.status == 0, done.story
    assert float(re.findall(r"accuracy ([\d.]+)", done.out)[-1]) > LEAST_ACCURACY


def test_a_script_of_accelerates_with_another_import(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script, line = (EXAMPLES / "accelerate_digits.py").read_text(), "from accelerate import Accelerator\n"
    assert line in script
    changed = script.replace(line, "from hetsync.neighbours.accelerate import Accelerator\n")
    (tmp_path / "script.py").write_text(changed)
    with started([*mpirun(2), sys.executable, "script.py"], tmp_path, {"PYTHONPATH": str(ROOT)}) as process:
        done = finished(process, SECONDS)
    assert done.status == 0, done.story
    assert float(re.findall(r"accuracy ([\d.]+)", done.out)[-1]) > LEAST_ACCURACY


@pytest.mark.thorough
def test_the_trainer_with_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    words = [*mpirun(2), sys.executable, str(EXAMPLES / "trainer_lora.py")]
    with started(words, tmp_path) as process:
        done = finished(process, SECONDS)
    assert done.status == 0, done.story
    assert float(re.findall(r"^loss ([\d.]+)", done.out, re.MULTILINE)[-1]) < 0.5
    assert (tmp_path / "runs" / "lora").exists()


@pytest.mark.parametrize(
    ("script", "bound", "figure", "most"),
    [
        # Nats a character; by how often each occurs, 3.3.
        pytest.param("text.py", 0, "loss", 2.7, marks=pytest.mark.thorough),
        ("trips.py", 4, "mape", 25.0),  # percent; by the mean speed, 27
    ],
)
def test_other_data(script: str, bound: int, figure: str, most: float, tmp_path: Path) -> None:
    words = [*mpirun(2), sys.executable, str(EXAMPLES / script), "--delay-bound", str(bound), "--epochs", "4"]
    with started(words, tmp_path) as process:
        done = finished(process, SECONDS)
    assert done.status == 0, done.story
    (found,) = re.findall(rf"^finished:.* {figure} ([\d.]+)", done.out + done.err, re.MULTILINE)
    assert float(found) < most
