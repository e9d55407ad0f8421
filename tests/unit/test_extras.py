"""What is not installed is named, with the command that installs it."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import environment

from hetsync import extras
from hetsync.data import build
from hetsync.errors import UserError
from hetsync.extras import EXTRAS, require

ROOT = Path(__file__).parents[2]
LARGE = {"mlflow", "wandb"}  # extras that tests do without


def requirements(text: str) -> set[str]:
    return {re.split(r"[\s<>=\[]", line)[0] for line in text.split("\n") if line}


def test_extras_are_those_of_the_package() -> None:
    package = configparser.ConfigParser()
    package.read(ROOT / "setup.cfg")
    known = package["options.extras_require"]
    for extra, modules in EXTRAS.items():
        assert requirements(known[extra]) == set(modules.values())
        assert extra in LARGE or requirements(known["test"]) >= set(modules.values())
    assert not requirements(package["options"]["install_requires"]) & {p for m in EXTRAS.values() for p in m.values()}


def test_what_is_there_is_not_asked_for() -> None:
    for extra in EXTRAS.keys() - LARGE:
        require(extra, "this test")


WITHOUT = """
import importlib.machinery
hidden = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in {names!r} else hidden(name, *rest)
)
from hetsync.cli.main import main
from hetsync.cli.train import main as train_main
{call}
"""
STARTS = {
    "digits": (["sklearn"], "train_main(['--run.dir', {run!r}])", "data.name digits needs scikit-learn"),
    "images": (["PIL"], "main(['data', 'check', 'image_folder', {run!r}])", "reading images needs pillow"),
    "text": (
        ["sacrebleu"],
        "train_main(['--data.name', 'multi30k', '--data.options.path', {run!r}, '--run.dir', {run!r}])",
        "data.name multi30k needs sacrebleu",
    ),
    "control": (
        ["gymnasium", "stable_baselines3"],
        "main(['control', 'train', '--output', {run!r}])",
        "learning a policy needs gymnasium and stable-baselines3",
    ),
    "report": (["bokeh"], "main(['report', {run!r}])", "hetsync report needs bokeh"),
    "control, half": (["gymnasium"], "main(['control', 'train', '--output', {run!r}])", "a policy needs gymnasium:"),
    "tensorboard": (
        ["tensorboard"],
        "train_main(['--run.track', '[tensorboard]', '--run.dir', {run!r}])",
        "tracker tensorboard needs tensorboard",
    ),
    "mlflow": (["mlflow"], "train_main(['--run.track', '[mlflow]', '--run.dir', {run!r}])", "needs mlflow-skinny"),
    "wandb": (["wandb"], "train_main(['--run.track', '[wandb]', '--run.dir', {run!r}])", "tracker wandb needs wandb"),
    "fine-tuning": (
        ["gymnasium"],
        "train_main(['--control.name', 'ppo', '--control.fine_tune', 'true', '--run.dir', {run!r}])",
        "learning a policy needs gymnasium",
    ),
}


ALIKE = "control", "mlflow", "wandb", "fine-tuning"  # of others


@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=[pytest.mark.thorough] * (start in ALIKE)) for start in STARTS]
)
def test_each_start_without_them_is_one_sentence(start: str, tmp_path: Path) -> None:
    names, call, sentence = STARTS[start]
    (tmp_path / "x").mkdir()
    program = WITHOUT.format(names=names, call=call.format(run=str(tmp_path / "x")))
    words = [sys.executable, "-c", program]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert sentence in line
    assert f"{sys.executable} -m pip install " in line


def test_digits_without_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"data\.name digits needs scikit-learn: .* -m pip install scikit-learn"):
        build("digits", {})
