"""The trainer's evaluations: exact in parts, once at each position, kept when the job is stopped.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_trainer.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetsync.config import Config, DataConfig, EmulationConfig, RunConfig, SyncConfig
from hetsync.plane.base import Plane
from hetsync.stop import StopSignal
from hetsync.trainer import STOPPED, Trainer, evaluate_range

pytestmark = pytest.mark.mpi

SAMPLES = 960
EVERY = 320


def trainer(
    plane: Plane, folder: Path, bound: int, checkpoint_every: int | None = None, emulate: str | None = None
) -> Trainer:
    run = RunConfig(dir=str(folder), samples=SAMPLES, evaluate_every=EVERY, checkpoint_every=checkpoint_every)
    config = Config(run=run, data=DataConfig("digits", batch_size=32), sync=SyncConfig(bound, rebalance=False))
    config = replace(config, emulate=emulate, emulation=EmulationConfig(samples_per_second=4000.0 if emulate else None))
    return Trainer(config, plane, folder, None)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "evaluation"]


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("checkpoint_every", [None, EVERY, 2 * EVERY])
def test_parts_make_the_whole_and_no_position_comes_twice(
    plane: Plane, folder: Path, bound: int, checkpoint_every: int | None
) -> None:
    job = trainer(plane, folder, bound, checkpoint_every)
    assert job.train(StopSignal()) == 0
    whole = job.data.report(
        {**evaluate_range(job.model, job.data, 0, len(job.data.test)), "samples": len(job.data.test)}
    )
    assert job.metrics == pytest.approx(whole, rel=1e-5)
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
    job = trainer(plane, folder, bound)
    report = job.report

    def report_and_stop(evaluation: Any, train_seconds: float) -> None:
        report(evaluation, train_seconds)
        job.session.request_stop()

    job.report = report_and_stop  # type: ignore[method-assign]
    assert job.train(StopSignal()) == STOPPED
    if plane.rank == 0:
        summary = json.loads((folder / "summary.json").read_text())
        assert 0 < summary["metrics"]["accuracy"] == evaluations(folder)[-1]["accuracy"]


@pytest.mark.parametrize("emulate", [None, "quickstart"])
def test_emulated_devices_evaluate_equal_parts(
    plane: Plane, folder: Path, emulate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do it at the machine's speed; real ones by their shares."""
    job = trainer(plane, folder, 4, emulate=emulate)
    parts: list[int] = []

    def evaluate(model: Any, data: Any, first: int, stop: int) -> dict[str, float]:
        parts.append(stop - first)
        return evaluate_range(model, data, first, stop)

    monkeypatch.setattr("hetsync.trainer.evaluate_range", evaluate)
    assert job.train(StopSignal()) == 0
    shares = [1] * plane.size if emulate else list(job.session.shares)
    count = len(job.data.test)
    assert len(parts) == 3
    assert all(abs(part - count * shares[plane.rank] / sum(shares)) < 1 for part in parts)
