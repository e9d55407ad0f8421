"""What a job saves and when: before it evaluates, by time, never what is not finite, and in spite of a full disk."""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import in_process
import pytest
import torch
from jobs import summary_of

from hetsync.train import checkpoint
from hetsync.train.checkpoint import complete, load_newest

MINE = """
import dataclasses, time
import torch
from pathlib import Path
from hetsync.data import build
from hetsync.data.metrics import classification, cross_entropy

def of_tensors():
    metrics = lambda model, batch: {k: torch.tensor(v) for k, v in classification(model, batch).items()}
    return dataclasses.replace(build("digits", {}), metrics=metrics)

def of_lists():
    return dataclasses.replace(build("digits", {}), metrics=lambda model, batch: {"accuracy": [1, 2]})

def broken_at_the_end():
    def metrics(model, batch):
        if Path("run/checkpoints").exists():
            raise ZeroDivisionError("at the end")
        return classification(model, batch)
    return dataclasses.replace(build("digits", {}), metrics=metrics)

def slow():
    def loss(model, batch):
        time.sleep(0.02)
        return cross_entropy(model, batch)
    return dataclasses.replace(build("digits", {}), loss=loss)

class Spoilt(torch.optim.SGD):
    '''The twentieth step is the last of 1280 samples: no loss will tell.'''

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.count = 0

    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        if self.count == 20 and Path("run/checkpoints").exists():
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("nan"))
"""


@pytest.fixture(autouse=True)
def in_a_run_folder(here: Path) -> None:
    """Every test here writes files."""


def train(*words: str | float) -> int:
    return in_process.train("--run.dir", "run", *words)


def saved() -> list[int]:
    return [int(path.name.partition("-")[2]) for path in complete(Path("run/checkpoints"))]


def rests() -> list[str]:
    lines = Path("run/telemetry/rank-0000.jsonl").read_text().splitlines()
    return [record["reason"] for record in map(json.loads, lines) if record["kind"] == "rest"]


def test_metrics_may_be_tensors() -> None:
    assert train("--run.samples", 640, "--data.name", "mine:of_tensors") == 0
    assert 0 <= summary_of(Path("run"))["metrics"]["accuracy"] <= 1


def test_metrics_that_are_no_numbers_are_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run.samples", 640, "--data.name", "mine:of_lists") == 2
    said = capsys.readouterr().err
    (sentence,) = (line for line in said.splitlines() if line.startswith("hetsync: "))
    assert sentence == "hetsync: data.metrics gave accuracy as list: give a number, or a tensor of one number"
    assert not Path("run").exists()


def test_an_evaluation_that_fails_comes_after_the_save() -> None:
    assert train("--run.samples", 640, "--data.name", "mine:broken_at_the_end") == 1
    assert saved() == [640]
    Path("mine.py").write_text(MINE.replace('raise ZeroDivisionError("at the end")', "pass"))
    sys.modules.pop("mine", None)
    assert train("--resume", "run") == 0
    assert summary_of(Path("run"))["status"] == "finished"


@pytest.mark.thorough
@pytest.mark.parametrize("bound", [0, 4])
def test_checkpoints_by_time(bound: int) -> None:
    words = ["--run.samples", 3200, "--data.name", "mine:slow", "--run.keep_checkpoints", 99]
    assert train(*words, "--run.checkpoint_seconds", 0.2, "--sync.delay_bound", bound) == 0
    assert rests()[-1] == "end"
    assert rests().count("checkpoint") >= 2
    assert len(saved()) >= 3
    assert saved()[-1] == 3200


def test_no_checkpoints_by_time() -> None:
    words = ["--run.samples", 1600, "--data.name", "mine:slow", "--run.checkpoint_seconds", "null"]
    assert train(*words) == 0
    assert saved() == [1600]


@pytest.mark.parametrize("bound", [0, 4])
def test_weights_that_are_not_finite_are_never_saved(bound: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run.samples", 1280, "--run.checkpoint_every", 640, "--optimizer.name", "mine:Spoilt"]
    options = ["--optimizer.weight_decay", 0, "--sync.delay_bound", bound]
    assert train(*words, *options) == 2
    (said,) = re.findall("hetsync: .*", capsys.readouterr().err)
    sentence = "is not finite any more after 1280 samples.* the last good checkpoint is .*samples-0+640: lower"
    assert re.search(sentence, said)
    assert saved() == [640]
    assert torch.isfinite(torch.cat([t.flatten() for t in load_newest(Path("run")).model.values()])).all()
    assert summary_of(Path("run"))["status"] == "failed"


# Disks.


@pytest.fixture
def full_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """There is no space for checkpoints whose names match."""

    def fill(names: str) -> None:
        real = checkpoint.flush_to_disk

        def flush(file: Path) -> None:
            if re.search(names, str(file.parent)):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(file)

        monkeypatch.setattr(checkpoint, "flush_to_disk", flush)

    return fill


def test_training_goes_on_without_a_checkpoint_that_cannot_be_written(
    full_for: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    full_for("(128|256|384|512)$")
    assert train("--run.samples", 640, "--run.checkpoint_every", 128) == 0
    (said,) = re.findall("hetsync: .*", capsys.readouterr().err)  # of four that failed
    assert "cannot write the checkpoint" in said
    assert said.endswith("No space left on device; free space or choose another run folder; training goes on")
    assert saved() == [640]


def test_a_last_checkpoint_that_cannot_be_written_fails_the_job(
    full_for: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    full_for("640$")
    assert train("--run.samples", 640, "--run.checkpoint_every", 320) == 2
    (said,) = re.findall("hetsync: .*", capsys.readouterr().err)
    assert re.search("cannot write the checkpoint .*640: .*No space left on device; free space", said)
    assert saved() == [320]
    assert summary_of(Path("run"))["status"] == "failed"


def test_training_goes_on_without_telemetry(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run" / "telemetry").mkdir(parents=True)
    (here / "run" / "telemetry" / "rank-0000.jsonl").symlink_to("/dev/full")
    assert train("--run.samples", 2000) == 0
    (said,) = re.findall("hetsync: .*", capsys.readouterr().err)
    assert re.search("cannot write .*run/telemetry/rank-0000.jsonl: No space left on device", said)
    assert saved() == [2000]
