"""What recipes can do beside training, on any number of ranks: precision, best weights, early stop, averages.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_recipes.py
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetsync.config.schema import (
    Config,
    DataConfig,
    EarlyStopConfig,
    EmaConfig,
    EmulationConfig,
    KeepBestConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SyncConfig,
    WireFormat,
)
from hetsync.data.evaluation import evaluate_range
from hetsync.errors import UserError
from hetsync.models.digits_cnn import DigitsCNN
from hetsync.models.steps import GoesBySteps
from hetsync.plane.base import Plane
from hetsync.train.checkpoint import load_newest
from hetsync.train.job import Job
from hetsync.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

BATCH = 32
EVERY = 320
SAMPLES = 960


def recipe(folder: Path, bound: int, **run: Any) -> Config:
    run = {"samples": SAMPLES, "profile_seconds": 0.2, "dir": str(folder), **run}
    optimizer = OptimizerConfig("adamw", 0.005)
    return Config(
        run=RunConfig(**run), data=DataConfig("digits", BATCH), optimizer=optimizer, sync=SyncConfig(bound, quorum=0.5)
    )


def train(plane: Plane, config: Config, resume: bool = False) -> Trainer:
    with Job(config, plane, resume=resume, show="nothing") as job:
        trainer = Trainer(config, job)
        trainer.train()
    return trainer


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "evaluation"]


def metrics_now(trainer: Trainer, model: torch.nn.Module) -> dict[str, float]:
    data, samples = trainer.data, len(trainer.data.test)
    return data.report({**evaluate_range(model, data, 0, samples), "samples": samples})


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_each_precision_learns(plane: Plane, folder: Path, precision: str, bound: int) -> None:
    trainer = train(plane, recipe(folder, bound, precision=precision, samples=3200))
    assert trainer.job.metrics["accuracy"] > 0.5
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("wire", "expected"), [("float32", 1.0), ("int8", 0.25)])
def test_the_summary_tells_what_sums_were_of_ddps(
    plane: Plane, folder: Path, wire: WireFormat, expected: float
) -> None:
    config = recipe(folder, 0)
    train(plane, replace(config, sync=replace(config.sync, wire=wire)))
    if plane.rank == 0:
        told = json.loads((folder / "summary.json").read_text())["bytes_of_ddp"]
        assert told == (pytest.approx(expected, rel=0.05) if plane.size > 1 else None)
    plane.barrier()


@pytest.mark.parametrize("slices", [0.5, 12.0])
def test_behind_a_link_that_is_seen_to_be_very_slow_a_job_begins_with_delay(
    plane: Plane, folder: Path, slices: float
) -> None:
    """On all ranks, with weights to go back to, and goes on so where it is gone on with."""
    if plane.rank == 0:
        devices, link = f"[{{name: d, count: {plane.size}}}]", f"{{compute_fraction: {slices}}}"
        told = {"name": "p", "source": "made up", "devices": devices, "link": link}
        (folder / "p.yaml").write_text("".join(f"{key}: {value}\n" for key, value in told.items()))
    plane.barrier()
    emulation = EmulationConfig(str(folder / "p.yaml"), 2000.0)
    first = replace(recipe(folder / "run", 0), sync=SyncConfig(), emulation=emulation)
    begins = plane.size > 1 and slices > 1
    for samples, resume in ((SAMPLES, False), (2 * SAMPLES, True)):
        config = replace(first, run=replace(first.run, samples=samples))
        running = train(plane, config, resume).job._running
        session, kept = running.session, running._kept.positions
        told = [(change.round, change.delay_bound, change.wire) for change in session.rounds_changes]
        at_first = [each for each in told if each[0] == session.terms.version]
        assert at_first == [(session.terms.version, 4, "top64")] * begins
        assert plane.gather_objects(session.terms.settings.delay_bound) == [4 if begins else 0] * plane.size
        assert (0 in kept) == (begins and not resume), kept
        assert plane.gather_objects(session.applied) == [samples] * plane.size


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_precision_is_that_of_the_passes(plane: Plane, folder: Path, precision: str) -> None:
    seen = set()
    config = recipe(folder, 0, precision=precision, samples=BATCH)
    with Job(config, plane, show="nothing") as job:
        trainer = Trainer(config, job)
        trainer.model.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
        trainer.train()
    # A rank that the machine kept busy while it was measured may have no sample of the one batch.
    assert set().union(*plane.gather_objects(seen)) == {getattr(torch, precision)}


@pytest.mark.parametrize("bound", [0, 4])
def test_the_best_weights_are_those_of_the_best_evaluation(plane: Plane, folder: Path, bound: int) -> None:
    config = recipe(folder, bound, evaluate_every=EVERY, keep_best=KeepBestConfig("loss", "min"))
    trainer = train(plane, config)
    if plane.rank == 0:
        found = evaluations(folder)
        assert [event["samples_applied"] for event in found] == [EVERY, 2 * EVERY, SAMPLES]
        books = json.loads((folder / "best" / "best.json").read_text())
        best = min(found, key=lambda event: event["loss"])
        assert (books["samples_applied"], books["value"]) == (best["samples_applied"], pytest.approx(best["loss"]))
        trainer.model.load_state_dict(load_file(folder / "best" / "model.safetensors"))
        assert metrics_now(trainer, trainer.model)["loss"] == pytest.approx(best["loss"], rel=1e-4)
    plane.barrier()


@pytest.mark.parametrize("bound", [0, 4])
def test_training_that_gains_nothing_ends(plane: Plane, folder: Path, bound: int) -> None:
    """A model that learns does not get less accurate for long."""
    stop = EarlyStopConfig("accuracy", "min", patience=2)
    config = recipe(folder, bound, samples=6400, evaluate_every=EVERY, early_stop=stop)
    train(plane, replace(config, optimizer=OptimizerConfig("adamw", 0.02)))
    if plane.rank == 0:
        summary = json.loads((folder / "summary.json").read_text())
        found = [event["accuracy"] for event in evaluations(folder)]
        assert summary["status"] == "finished"
        assert summary["samples_applied"] == len(found) * EVERY < 6400
        assert min(found) == min(found[:-2])


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_evaluations_and_best_weights_are_of_the_average(
    plane: Plane, folder: Path, bound: int, accumulation: int
) -> None:
    config = recipe(folder, bound, evaluate_every=EVERY, keep_best=KeepBestConfig("loss", "min"))
    config = replace(config, ema=EmaConfig(0.8), sync=replace(config.sync, accumulation=accumulation))
    trainer = train(plane, config)
    average = trainer.average
    assert average is not None
    told, averaged = trainer.job.metrics["loss"], metrics_now(trainer, average.module)["loss"]
    assert told == pytest.approx(averaged, rel=1e-4)
    assert abs(told - averaged) < abs(told - metrics_now(trainer, trainer.model)["loss"])
    if bound == 0:
        assert int(average.n_averaged) == SAMPLES // BATCH // accumulation
    if plane.rank == 0 and evaluations(folder)[-1]["loss"] == min(event["loss"] for event in evaluations(folder)):
        kept = load_file(folder / "best" / "model.safetensors")
        assert all(torch.equal(kept[name], tensor) for name, tensor in average.module.state_dict().items())
    plane.barrier()


class Masked(DigitsCNN):
    """With what attention keeps beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("own_mask", self.mask.clone(), persistent=False)
        self.register_buffer("places", torch.arange(4096))


@pytest.mark.parametrize("bound", [0, 4])
def test_masks_and_indices_are_copied_into_the_average(plane: Plane, folder: Path, bound: int) -> None:
    """Between infinities there is no mean, and that of equal integers may be rounded down."""
    config = recipe(folder, bound, evaluate_every=EVERY, checkpoint_every=EVERY)
    config = replace(config, model=ModelConfig(f"{__name__}:Masked"), ema=EmaConfig(0.9))
    trainer = train(plane, config)
    average = trainer.average
    assert average is not None
    assert math.isfinite(trainer.job.metrics["loss"])
    for name, buffer in trainer.model.named_buffers():
        assert torch.equal(average.module.get_buffer(name), buffer)
    if plane.rank == 0:
        assert load_newest(folder).progress.samples_applied == SAMPLES
    plane.barrier()


@pytest.mark.parametrize("bound", [0, 4])
def test_average_best_and_patience_go_on_in_a_resumed_run(plane: Plane, folder: Path, bound: int) -> None:
    stop = EarlyStopConfig("loss", "min", patience=9)
    named = {"evaluate_every": EVERY, "early_stop": stop, "keep_best": KeepBestConfig("accuracy")}
    config = replace(recipe(folder, bound, **named), ema=EmaConfig(0.8))
    first = train(plane, config)
    again = train(plane, replace(config, run=replace(config.run, samples=2 * SAMPLES)), resume=True)
    assert first.average is not None
    assert again.average is not None
    if bound == 0:
        assert int(again.average.n_averaged) == 2 * SAMPLES // BATCH
    if plane.rank == 0:
        found = evaluations(folder)
        applied = sorted({event["samples_applied"] for event in found})
        assert applied == [EVERY * number for number in range(1, 7)]
        assert again.patience.state_dict()["best"] == pytest.approx(min(event["loss"] for event in found))
        books = json.loads((folder / "best" / "best.json").read_text())
        assert books["value"] == pytest.approx(max(event["accuracy"] for event in found))


@pytest.mark.parametrize("bound", [0, 4])
def test_a_resumed_run_may_rest_elsewhere(plane: Plane, folder: Path, bound: int) -> None:
    """It evaluates where it stands, and then at the new marks up to its end."""
    first = recipe(folder, bound, samples=480)
    train(plane, first)
    run = replace(first.run, samples=1120, evaluate_every=EVERY, keep_best=KeepBestConfig("accuracy"))
    train(plane, replace(first, run=run), resume=True)
    again = replace(run, samples=1280, evaluate_every=2 * EVERY)
    train(plane, replace(first, run=again), resume=True)
    if plane.rank == 0:
        applied = [event["samples_applied"] for event in evaluations(folder)]
        assert applied == [480, 640, 960, 1120, 1120, 1280]


@pytest.mark.parametrize("samples", [0, 1.5])
def test_an_interval_is_a_number_of_samples(plane: Plane, samples: Any) -> None:
    job = Job(Config(), plane, keep=False)
    with pytest.raises(UserError, match=f"job.intervals got {samples} samples: give a whole number, 1 or more"):
        job.intervals(samples)
    job.close()


class Counting(GoesBySteps, DigitsCNN):
    """Goes by the job's steps, and keeps those that it was told."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes=classes)
        self.told: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.told.append(self.step_count)
        return super().forward(images)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_model_that_goes_by_steps_is_told_those_of_the_job(plane: Plane, folder: Path, bound: int) -> None:
    counting = ModelConfig(f"{__name__}:Counting")
    trainer = train(plane, replace(recipe(folder, bound), model=counting, sync=SyncConfig(bound, shares="equal")))
    told = trainer.model.told[trainer.model.told.index(1) - 1 :]  # not those of profiling
    steps = SAMPLES // BATCH
    if bound == 0 or plane.size == 1:
        assert told == list(range(steps))
    else:
        assert told == sorted(told)
        assert steps // 2 < told[-1] <= steps
