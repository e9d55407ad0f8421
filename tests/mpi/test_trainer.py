"""The trainer's evaluations: exact in parts, once at each position, kept when the job is stopped.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_trainer.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from hetsync.config.schema import Config, DataConfig, EmulationConfig, RunConfig, SyncConfig
from hetsync.data.evaluation import evaluate_range
from hetsync.errors import STOPPED
from hetsync.plane.base import Plane
from hetsync.sync.optimizer_state import average_optimizer_state
from hetsync.train.evaluation import EvaluationLoader
from hetsync.train.job import Job, StoppedByRequest
from hetsync.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

SAMPLES = 960
EVERY = 320


@dataclass
class Trained:
    """A recipe's job at its end."""

    trainer: Trainer
    status: int

    @property
    def job(self) -> Job:
        return self.trainer.job


def train(
    plane: Plane,
    folder: Path,
    bound: int,
    checkpoint_every: int | None = None,
    emulate: str | None = None,
    before: Callable[[Trainer], None] = lambda trainer: None,
) -> Trained:
    run = RunConfig(dir=str(folder), samples=SAMPLES, evaluate_every=EVERY, checkpoint_every=checkpoint_every)
    run = replace(run, profile_seconds=0.3)
    config = Config(run=run, data=DataConfig("digits", batch_size=32), sync=SyncConfig(bound, rebalance=False))
    config = replace(config, emulation=EmulationConfig(emulate, 4000.0 if emulate else None))
    try:
        with Job(config, plane) as job:
            trainer = Trainer(config, job)
            before(trainer)
            trainer.train()
    except StoppedByRequest as stopped:
        return Trained(trainer, stopped.status)
    return Trained(trainer, 0)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "evaluation"]


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("checkpoint_every", [None, EVERY, 2 * EVERY])
def test_parts_make_the_whole_and_no_position_comes_twice(
    plane: Plane, folder: Path, bound: int, checkpoint_every: int | None
) -> None:
    done = train(plane, folder, bound, checkpoint_every)
    data, samples = done.trainer.data, len(done.trainer.data.test)
    whole = data.report({**evaluate_range(done.trainer.model, data, 0, samples), "samples": samples})
    assert done.job.metrics == pytest.approx(whole, rel=1e-5)
    if plane.rank == 0:
        found = evaluations(folder)
        applied = [event["samples_applied"] for event in found]
        assert len(applied) == 3
        assert applied == sorted(set(applied))
        assert applied[-1] == SAMPLES
        assert found[-1]["accuracy"] == pytest.approx(whole["accuracy"])
        seconds = [event["train_seconds"] for event in found]
        assert seconds == sorted(seconds)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_stopped_job_keeps_its_last_metrics(plane: Plane, folder: Path, bound: int) -> None:
    def stop_then(trainer: Trainer) -> None:
        trainer.job.ready()
        assert trainer.job._running is not None
        evaluations = trainer.job._running.evaluations
        report = evaluations.report

        def report_and_stop(evaluation: Any, train_seconds: float) -> None:
            report(evaluation, train_seconds)
            trainer.job.session.request_stop()

        evaluations.report = report_and_stop  # type: ignore[method-assign]

    assert train(plane, folder, bound, before=stop_then).status == STOPPED
    if plane.rank == 0:
        summary = json.loads((folder / "summary.json").read_text())
        assert 0 < summary["metrics"]["accuracy"] == evaluations(folder)[-1]["accuracy"]


@pytest.mark.ranks(2)
def test_the_average_of_optimizer_states_at_rest_is_off_the_clock(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*arguments: Any) -> None:
        sleep(1.0)
        average_optimizer_state(*arguments)

    monkeypatch.setattr("hetsync.train.rest.average_optimizer_state", slowly)
    began = 0.0

    def look_at_the_clock(trainer: Trainer) -> None:
        nonlocal began
        began = monotonic()

    train(plane, folder, 4, checkpoint_every=EVERY, emulate="quickstart", before=look_at_the_clock)
    if plane.rank == 0:
        summary = json.loads((folder / "summary.json").read_text())
        assert 0 < summary["train_seconds"] < monotonic() - began - 3 * 1.0


def test_a_summary_holds_the_efficiency_and_the_part_of_solo_rates(plane: Plane, folder: Path) -> None:
    train(plane, folder, 4)
    if plane.rank == 0:
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["train_seconds"] == max(rank["train_seconds"] for rank in summary["per_rank"])
        trained = sum(rank["device_samples_per_second"] for rank in summary["per_rank"])
        assert summary["device_samples_per_second_sum"] == pytest.approx(trained)
        assert summary["efficiency"] == pytest.approx(summary["samples_per_second"] / trained)
        assert 0 < summary["efficiency"] <= 1
        interval = summary["solo_fraction_interval"]
        assert interval is None or interval[0] <= summary["solo_fraction"] <= interval[1]
        assert all(rank["load_seconds_per_sample"] > 0 for rank in summary["per_rank"])


@pytest.mark.parametrize("emulate", [None, "quickstart"])
def test_emulated_devices_evaluate_equal_parts(
    plane: Plane, folder: Path, emulate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do it at the machine's speed; real ones by their shares."""
    parts: list[int] = []
    batches = EvaluationLoader.__iter__

    def watched(self: EvaluationLoader) -> Iterator[Any]:
        parts.append(len(self.part))
        return batches(self)

    monkeypatch.setattr(EvaluationLoader, "__iter__", watched)
    done = train(plane, folder, 4, emulate=emulate)
    shares = [1] * plane.size if emulate else list(done.job.session.shares)
    count = len(done.trainer.data.test)
    assert len(parts) == 3
    assert all(abs(part - count * shares[plane.rank] / sum(shares)) < 1 for part in parts)
