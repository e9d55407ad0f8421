"""Jobs by a plan: what they refuse, and a job of one rank, which trains as one without a plan does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.utils.data import Subset

from hetsync import data, models
from hetsync.balance.profile import StepTime
from hetsync.cli.train import train
from hetsync.config.parser import recipe_of
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.errors import USER_ERROR, UserError
from hetsync.models.digits_cnn import DigitsCNN
from hetsync.plane.local import LocalPlane
from hetsync.replica.passes import EmulatedPasses
from hetsync.stop_signal import StopSignal
from hetsync.train import checkpoint, data_facts, planned_ranks
from hetsync.train.job import Job
from hetsync.train.trainer import Trainer

BATCH, SAMPLES = 50, 260
ALONE = [{"micro_batches": 3, "stages": [{"ranks": [0], "blocks": ["*"]}]}]
WHOLE = [{"stages": [{"ranks": [0], "blocks": ["*"]}]}]


class Unasked(StopSignal):
    """No signal comes; a test's process keeps its own handlers."""

    def __init__(self) -> None:
        self.caught = None

    def listen(self, listener: object) -> None: ...

    def over(self) -> None: ...


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(tmp_path: Path, name: str = "planned", **sections: Any) -> Config:
    run = {"dir": str(tmp_path / name), "samples": SAMPLES, "profile_seconds": 0.05, "checkpoint_every": 150}
    given = {"data": {"batch_size": BATCH}, "sync": {"delay_bound": 0}, **sections}
    return recipe_of({**given, "run": {**run, **sections.get("run", {})}})


def run(tmp_path: Path, config: Config, replicas: list[dict[str, Any]], resume: Path | None = None, **more: Any) -> int:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"format": 1, "batch_size": BATCH, "replicas": replicas, **more}))
    config = replace(config, plan=replace(config.plan, file=str(path)))
    return train(LocalPlane(), config, resume, Unasked(), "nothing")


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [
        ("hetsync.train.planned.measured", "times the whole model, which this one does not hold"),
        ("hetsync.train.planned_in_step.ReplicasInStep._step", "or give this rank's stage fewer blocks"),
    ],
)
def test_too_little_memory_is_mended_in_the_plan(
    failing: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(failing, short)
    with pytest.raises(UserError, match=f"out of GPU memory: .*{sentence}"):
        run(tmp_path, recipe(tmp_path), ALONE)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("sync", "accumulation", 2),
        ("sync", "wire", "int8"),
        ("sync", "fragments", 2),
        ("sync", "outer", {"name": "nesterov"}),
        ("control", "name", "random"),
        ("ema", "decay", 0.9),
        ("run", "precision", "bfloat16"),
        ("run", "compile", True),
        ("fault", "tolerate", True),
        ("fault", "least_ranks", 1),
        ("fault", "silent_seconds", 30.0),
        ("fault", "slow", "exclude"),
        ("fault", "not_finite", "skip"),
        ("fault", "replace", True),
        ("fault", "inject", [{"kind": "die", "rank": 0, "round": 1}]),
    ],
)
def test_what_jobs_by_a_plan_cannot_do_is_refused(section: str, key: str, value: Any, tmp_path: Path) -> None:
    sections = {section: {key: value}}
    if section == "control":
        sections["sync"] = {"delay_bound": 4}
    with pytest.raises(
        UserError, match=rf"^{section}\.{key}.* which jobs by a plan that cuts the model do not know: \w+"
    ):
        run(tmp_path, recipe(tmp_path, **sections), ALONE)
    assert not (tmp_path / "planned").exists()


TWO_RANKS = [{"stages": [{"ranks": [0], "blocks": ["features"]}, {"ranks": [1], "blocks": ["classifier"]}]}]


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        (TWO_RANKS, "plan .*plan.yaml: it places rank 1, but the job has 1: start 2 ranks"),
        ([{"stages": [{"ranks": [0], "blocks": ["features"]}]}], r"replicas\[0\] lacks block classifier.1 and 1 more"),
        ([{"stages": [{"ranks": [0], "blocks": ["feature"]}]}], r"feature, which is no block .*did you mean features"),
        ([{**ALONE[0], "micro_batches": 51}], "batch_size is 50, .* need 51 for their micro-batches"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    replicas: list[Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of whole models, as those without a plan, ends its process with the sentence."""
    with pytest.raises((UserError, SystemExit)) as refused:
        run(tmp_path, recipe(tmp_path), replicas)
    told = str(refused.value) if isinstance(refused.value, UserError) else capsys.readouterr().err
    assert re.search(sentence, told)
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "planned").exists()


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"model": {"name": "resnet18"}}, "plan .*plan.yaml: model.name is digits_cnn, but the job's is resnet18"),
        (
            {"emulation": {"profile": "small.yaml", "samples_per_second": 500.0}},
            r"plan .*plan.yaml: rank 0 needs [\d,]+ bytes for its stage, and [\d,]+ of its small may be used",
        ),
    ],
    ids=["model", "memory"],
)
def test_a_data_parallel_plan_that_does_not_fit_is_refused(
    sections: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    devices = [{"name": "small", "memory_gib": 0.001}]  # for weights, and some of the batch
    Path("small.yaml").write_text(yaml.safe_dump({"name": "small", "source": "made up", "devices": devices}))
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, recipe(tmp_path, **sections), WHOLE, model={"name": "digits_cnn"})
    told = capsys.readouterr().err
    assert ended.value.code == USER_ERROR
    assert re.search(sentence, told)
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "planned").exists()


def saved(folder: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.complete(folder / "checkpoints")[-1]
    return {**load_file(newest / checkpoint.MODEL), **load_file(newest / checkpoint.OPTIMIZER)}


def test_a_rank_alone_trains_as_without_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = recipe(tmp_path, "alone")
    with Job(wanted, LocalPlane(), show="nothing") as job:
        Trainer(wanted, job).train()
    config = recipe(tmp_path)
    assert run(tmp_path, config, ALONE) == 0
    found, expected = saved(tmp_path / "planned"), saved(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)

    summary = json.loads((tmp_path / "planned" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["delay_bound"]) == ("finished", 6, 0)
    assert summary["plan"]["replicas"] == [[[0]]]
    assert summary["per_rank"][0]["step_fraction"] == pytest.approx(1.0)
    assert run(tmp_path, config, ALONE, resume=tmp_path / "planned") == 0
    assert "finished after 260 samples" in capsys.readouterr().err


class Scaled(DigitsCNN):
    """Of brighter images, as the data say."""

    def __init__(self, classes: int, brightness: float) -> None:
        super().__init__(classes=classes)
        self.brightness = brightness

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images * self.brightness)


def bright(brightness: float = 1.5) -> Data:
    found = data.build("digits", {})
    few = Subset(found.test, range(20))
    return replace(found, validation=few, model_options={"classes": 10, "brightness": brightness})


def test_evaluations_are_of_the_validation_part_and_constants_those_of_the_beginning(tmp_path: Path) -> None:
    own = {"model": {"name": f"{__name__}:Scaled"}, "data": {"name": f"{__name__}:bright", "batch_size": BATCH}}
    assert run(tmp_path, recipe(tmp_path, **own), ALONE) == 0
    of_twenty = 20 * json.loads((tmp_path / "planned" / "summary.json").read_text())["metrics"]["accuracy"]
    assert of_twenty == pytest.approx(round(of_twenty), abs=1e-6)
    kept = data_facts.kept(tmp_path / "planned")
    assert kept == {"classes": 10, "brightness": 1.5}
    data_facts.keep(tmp_path / "planned", {**kept, "brightness": 2.5})  # as if the data had told so then
    built: list[torch.nn.Module] = []
    with pytest.MonkeyPatch.context() as patch:
        once = models.build_for
        patch.setattr(models, "build_for", lambda *given: built.append(once(*given)) or built[-1])
        longer = recipe(tmp_path, **own, run={"samples": SAMPLES + BATCH})
        assert run(tmp_path, longer, ALONE, resume=tmp_path / "planned") == 0
    assert built[0].brightness == 2.5


def test_batch_norm_trains_on_short_slices(tmp_path: Path) -> None:
    """The last one, of 10 samples, has fewer micro-batches."""
    config = recipe(tmp_path, model={"name": "normed_net:NormedDigits"})
    assert run(tmp_path, config, [{**ALONE[0], "micro_batches": 25}]) == 0
    assert json.loads((tmp_path / "planned" / "summary.json").read_text())["samples_applied"] == SAMPLES


def test_each_update_takes_its_emulated_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    taken: list[float] = []

    class Watched(EmulatedPasses):
        def __init__(self, time: StepTime, parts: Any, update_seconds: float, *words: Any) -> None:
            given.append(update_seconds)
            super().__init__(time, parts, update_seconds, *words)

        @contextmanager
        def updating(self) -> Iterator[None]:
            before = self.seconds
            with super().updating():
                yield
            taken.append(self.seconds - before)

    monkeypatch.setattr(planned_ranks, "EmulatedPasses", Watched)
    config = recipe(tmp_path, emulation={"profile": "homogeneous", "samples_per_second": 2000})
    assert run(tmp_path, config, ALONE) == 0
    (update_seconds,) = given
    assert update_seconds > 0
    assert taken == pytest.approx([update_seconds] * 6), "50, 50, 50, a rest, 50, 50 and 10 samples"


def test_a_loss_that_is_not_finite_ends_the_job(tmp_path: Path) -> None:
    config = recipe(tmp_path, optimizer={"learning_rate": 1e15})
    with pytest.raises(UserError, match=r"the loss became (nan|inf) on rank 0 after .*: lower optimizer.learning_rate"):
        run(tmp_path, config, ALONE)
    lines = (tmp_path / "planned" / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "failure"


def test_training_stops_early_and_resumes_as_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = {"metric": "loss", "mode": "max", "patience": 1}
    run_section = {"evaluate_every": 100, "checkpoint_every": None, "early_stop": stop}
    config = recipe(tmp_path, run=run_section, optimizer={"learning_rate": 0.001})  # the loss falls
    assert run(tmp_path, config, ALONE) == 0
    summary = json.loads((tmp_path / "planned" / "summary.json").read_text())
    assert (summary["status"], summary["samples_applied"]) == ("finished", 200)
    assert run(tmp_path, config, ALONE, resume=tmp_path / "planned") == 0
    assert "ended early after 200 samples" in capsys.readouterr().err


@pytest.mark.parametrize("judged", [None, "accuracy"])
def test_a_run_that_has_saved_its_end_but_no_summary_is_finished(judged: str | None, tmp_path: Path) -> None:
    """It was killed in its last evaluation."""
    config = recipe(tmp_path, run={"keep_best": {"metric": judged}})
    assert run(tmp_path, config, ALONE) == 0
    folder = tmp_path / "planned"
    whole = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**whole, "status": "running", "metrics": {}}))
    shutil.rmtree(folder / "best", ignore_errors=True)

    assert run(tmp_path, config, ALONE, resume=folder) == 0
    found = json.loads((folder / "summary.json").read_text())
    assert (found["status"], found["samples_applied"]) == ("finished", SAMPLES)
    for name in ("metrics", "anchor_sha256", "rounds"):
        assert found[name] == whole[name]
    assert (folder / "best" / "best.json").exists() == (judged is not None)
