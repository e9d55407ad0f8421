"""Schedules of one's own, torch.compile, best weights and early stop: what is wrong is said before training."""

from __future__ import annotations

import json
from pathlib import Path

import in_process
import pytest
import torch
from jobs import summary_of

from hetsync.config.schedule import ScheduleConfig
from hetsync.errors import UserError

MINE = """
import math
import torch

def halved(samples, total):
    return 0.5 if 2 * samples >= total else 1.0

def of_one(samples):
    return 1.0

def endless(samples, total):
    return math.inf

rates = []

class Watched(torch.optim.SGD):
    def step(self, closure=None):
        rates.append(self.param_groups[0]["lr"])
        super().step(closure)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, images):
        return self.layer(images.flatten(1)).relu()
"""


@pytest.fixture(autouse=True)
def in_a_run_folder(here: Path) -> None:
    """Every test here writes files."""


def train(*words: str | float) -> int:
    return in_process.train("--run.dir", "run", *words)


REFUSED = {
    "no such schedule": (
        ["--schedule.name", "cosin"],
        "schedule.name is cosin (did you mean cosine?): use constant, linear or cosine, or package.module:function",
    ),
    "no module": (["--schedule.name", "nobody:wrote"], "schedule.name is nobody:wrote, which cannot be imported"),
    "one argument": (["--schedule.name", "mine:of_one"], "does not take two numbers, samples and total"),
    "no number": (["--schedule.name", "mine:endless"], "which gave inf after 0 of 640 samples: return a number"),
    "two schedules": (
        ["--schedule.name", "mine:halved", "--schedule.warmup_samples", 10],
        "schedule.warmup_samples is 10, but schedule.name is mine:halved, which gives the whole factor: leave it out",
    ),
    "no such best": (
        ["--run.keep_best.metric", "acuracy"],
        "run.keep_best.metric is acuracy, which evaluations do not give (did you mean accuracy?): use one of accuracy",
    ),
    "no such stop": (
        ["--run.early_stop.metric", "f1", "--run.evaluate_every", 320],
        "run.early_stop.metric is f1, which evaluations do not give: use one of accuracy",
    ),
    "one evaluation": (
        ["--run.early_stop.metric", "loss"],
        "run.early_stop.metric is loss, but run.evaluate_every is null, so there is one evaluation",
    ),
    "no patience": (["--run.early_stop.patience", 0], "run.early_stop.patience is 0: it must be at least 1"),
    "mode": (["--run.keep_best.mode", "most"], "run.keep_best.mode is most: it must be max or min"),
    "no such tracker": (["--run.track", "[tensorbord]"], "run.track has tensorbord (did you mean tensorboard?): use"),
    "no list": (["--run.track", "tensorboard"], "run.track is tensorboard: it must be a list"),
    "decay": (["--ema.decay", 1], "ema.decay is 1.0: it must be below 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_sentence_before_training(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = REFUSED[name]
    assert train("--run.samples", 640, *words) == 2
    said = capsys.readouterr().err
    assert said.count("hetsync: ") == 1
    assert sentence in said
    assert not Path("run").exists()


@pytest.mark.parametrize("bound", [0, 4])
def test_a_schedule_of_ones_own(bound: int) -> None:
    words = ["--schedule.name", "mine:halved", "--optimizer.name", "mine:Watched", "--optimizer.learning_rate", 0.01]
    assert train("--run.samples", 640, "--sync.delay_bound", bound, *words) == 0
    from mine import rates  # type: ignore[import-not-found]

    assert rates[-10:] == [0.01] * 5 + [0.005] * 5


def test_built_in_schedules_are_as_they_were() -> None:
    assert [ScheduleConfig("linear", final_factor=0.2).factor(at, 100) for at in (0, 50)] == [1.0, 0.6]
    assert ScheduleConfig("cosine", warmup_samples=10).factor(4, 100) == 0.5
    with pytest.raises(UserError, match="use constant, linear or cosine"):
        ScheduleConfig("step")


def test_a_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model))
    for module in ("train.trainer", "profiling.measure"):
        monkeypatch.setattr(f"hetsync.{module}.check_compiler", lambda device: None)
    assert train("--run.samples", 640, "--model.name", "mine:Net", "--run.compile", "true") == 0
    measured, trained = compiled
    assert measured is not trained


def test_without_a_compiler_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(function: object) -> object:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", broken)
    assert train("--run.samples", 640, "--run.compile", "true") == 2
    said = capsys.readouterr().err
    assert said.startswith("hetsync: run.compile is true, but torch.compile does not work here (No working C++ comp")
    assert said.count("hetsync: ") == 1
    assert not Path("run").exists()


def test_a_recipe_is_tracked() -> None:
    pytest.importorskip("tensorboard")
    assert train("--run.samples", 640, "--run.evaluate_every", 320, "--run.track", "[tensorboard]") == 0
    names = {line.split(",")[2] for line in Path("run/metrics.csv").read_text().splitlines()[1:]}
    assert {"train/loss", "evaluation/accuracy", "speed/efficiency", "share/rank_0"} <= names
    assert len(list(Path("run/tensorboard").glob("events.*"))) == 1


def test_a_run_that_stopped_early_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run.evaluate_every", 64, "--run.early_stop.metric", "accuracy", "--run.early_stop.mode", "min"]
    assert train("--run.samples", 64000, *words, "--run.early_stop.patience", 1, "--optimizer.name", "adamw") == 0
    summary = summary_of(Path("run"))
    assert summary["status"] == "finished"
    assert summary["samples_applied"] < 64000
    before = Path("run/summary.json").read_text()
    capsys.readouterr()
    assert train("--resume", "run") == 0
    assert "this run has ended early after" in capsys.readouterr().err
    assert Path("run/summary.json").read_text() == before
    assert json.loads(before)["samples_applied"] % 64 == 0
