"""--resume: refused without a trace, or gone on with; a finished run is left alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from in_process import train
from jobs import CACHE, summary_of

MINE = """
import dataclasses, json
from pathlib import Path
from hetsync.data import build
from hetsync.data.metrics import cross_entropy

def watched(at_work):
    def loss(model, batch):
        summary = Path("run/summary.json")
        if summary.exists() and json.loads(summary.read_text())["status"] == "running":
            at_work(summary)
        return cross_entropy(model, batch)
    return dataclasses.replace(build("digits", {}), loss=loss)

def broken():
    return dataclasses.replace(build("digits", {}), loss=lambda model, batch: 1 / 0)

def spied():
    return watched(lambda summary: Path("seen").write_text(summary.read_text()))

def interrupted():
    def strike(summary):
        raise ZeroDivisionError("struck")
    return watched(strike)
"""
SAMPLES = 640


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        words = ["--run.samples", SAMPLES, "--run.checkpoint_every", SAMPLES // 2, "--run.dir", folder]
        assert train(*words) == 0
    return folder


@pytest.fixture
def run(here: Path, finished: Path) -> Path:
    shutil.copytree(finished, here / "run")
    return here / "run"


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


REFUSED = {
    "fewer samples": (["--run.samples", "300"], "to train on 300 samples, but .*640"),
    "fewer epochs": (
        ["--run.samples", "null", "--run.epochs", "0.1"],
        "train on 144 samples, but .*640 already: raise",
    ),
    "another model": (["--model.options.batch_norm", "true"], "does not fit the model .*in the checkpoint"),
    "another optimizer": (["--optimizer.name", "adamw"], "does not fit the optimizer .*SGD, not AdamW"),
    "no data": (["--data.name", "mnist"], "data.name is mnist"),
    "no device": (["--run.device", "tpu"], "run.device is tpu"),
    "a policy that is not there": (["--control.name", "ppo", "--control.policy", "gone"], "control.policy gone"),
}


def test_a_resume_that_fails_before_it_saves_gives_the_recipe_its_place_back(run: Path) -> None:
    before = (run / "recipe.yaml").read_text()
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES, "--data.name", "mine:broken") == 1
    assert (run / "recipe.yaml").read_text() == before
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES) == 0
    assert summary_of(run)["samples_applied"] == 2 * SAMPLES


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_resume_leaves_the_run_as_it_was(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = REFUSED[name]
    before = content(run)
    more = [] if "--run.samples" in words else ["--run.samples", 2 * SAMPLES]
    assert train("--resume", "run", *more, *words) == 2
    said = capsys.readouterr().err
    assert said.count("hetsync:") == 1
    assert "Traceback" not in said
    assert re.search(sentence, said), said
    assert content(run) == before
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES) == 0
    assert summary_of(run)["samples_applied"] == 2 * SAMPLES


def test_a_finished_run_is_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run)
    assert train("--resume", "run") == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "is finished after 640 samples: raise its epochs or samples" in said.err
    assert content(run) == before


def test_a_finished_run_goes_on_where_more_is_asked_for_and_keeps_its_first_recipe(run: Path) -> None:
    first = (run / "recipe.yaml").read_text()
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES) == 0
    assert summary_of(run)["samples_applied"] == 2 * SAMPLES
    assert (run / "recipe-1.yaml").read_text() == first
    assert "samples: 1280" in (run / "recipe.yaml").read_text()


def newest_state(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda folder: folder.name) / "state.json"


def evaluations(run: Path) -> list[float]:
    """The seconds of training that each followed."""
    records = [json.loads(line) for line in (run / "telemetry/rank-0000.jsonl").read_text().splitlines()]
    return [record["train_seconds"] for record in records if record["kind"] == "evaluation"]


def test_seconds_of_training_go_on_from_those_of_the_jobs_before(run: Path) -> None:
    state = {**json.loads(newest_state(run).read_text()), "format": 1}
    state["progress"]["train_seconds"] = 1000.0
    del state["sha256"], state["digests"]  # of the first format, which may be written by hand
    newest_state(run).write_text(json.dumps(state))
    before = len(evaluations(run))
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES, "--run.evaluate_every", SAMPLES // 2) == 0
    later = evaluations(run)[before:]
    assert len(later) >= 2
    assert later == sorted(later)
    assert all(1000 < seconds < 1060 for seconds in later)
    assert 1000 < json.loads(newest_state(run).read_text())["progress"]["train_seconds"] < 1060


def test_a_run_of_an_older_version_is_resumed(run: Path) -> None:
    """Whose recipe has `emulate` at the top, and least and greatest for min and max."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["emulate"] = recipe["emulation"].pop("profile")
    for key, value in [pair for pair in recipe["control"].items() if pair[0].startswith(("min_", "max_"))]:
        del recipe["control"][key]
        recipe["control"][key.replace("min_", "least_").replace("max_", "greatest_")] = value
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES) == 0
    assert summary_of(run)["samples_applied"] == 2 * SAMPLES
    assert "emulate" not in yaml.safe_load((run / "recipe.yaml").read_text())
    assert "emulate" in yaml.safe_load((run / "recipe-1.yaml").read_text())


def test_a_run_that_lost_its_summary_is_not_finished(run: Path) -> None:
    metrics = summary_of(run)["metrics"]
    (run / "summary.json").unlink()
    assert train("--resume", "run") == 0
    assert summary_of(run)["status"] == "finished"
    assert summary_of(run)["metrics"] == metrics


def test_another_batch_size_is_shared_out_anew(run: Path) -> None:
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES, "--data.batch_size", 32) == 0
    assert summary_of(run)["shares"] == [32]


def test_while_it_trains_a_run_says_so(run: Path) -> None:
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES, "--data.name", "mine:spied") == 0
    seen = json.loads(Path("seen").read_text())
    assert (seen["status"], seen["samples_applied"], seen["samples_expected"]) == ("running", SAMPLES, 2 * SAMPLES)
    assert summary_of(run)["status"] == "finished"


def test_a_run_that_failed_says_so(run: Path) -> None:
    assert train("--resume", "run", "--run.samples", 2 * SAMPLES, "--data.name", "mine:interrupted") == 1
    assert summary_of(run)["status"] == "failed"


def test_a_run_that_saved_nothing_may_be_begun_again(here: Path) -> None:
    words = ["--run.dir", "run", "--run.samples", SAMPLES]
    assert train(*words, "--data.name", "mine:interrupted") == 1
    assert summary_of(here / "run")["status"] == "failed"
    assert train(*words) == 0
    assert train(*words) == 2
