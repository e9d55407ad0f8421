"""`hetsync.join` on one rank: its arguments, and loops that only a rank alone can show."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

import hetsync
from hetsync.config.schema import RunConfig
from hetsync.plane.local import LocalPlane
from hetsync.sync.digests import weights_sha256
from hetsync.train.job import Job
from hetsync.train.session import Session

SAMPLES, BATCH, FEATURES, CLASSES = 192, 16, 4, 3
BOUNDS = pytest.mark.parametrize("bound", [0, 4])
Body = Callable[[Job, int, torch.Tensor], Any]


def samples(count: int = SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, FEATURES, generator=draw), torch.randint(CLASSES, (count,), generator=draw))


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def by_job(job: Job, number: int, loss: torch.Tensor) -> None:
    job.backward(loss)
    job.step()


def train(
    model: nn.Module, optimizer: Optimizer, body: Body = by_job, count: int = SAMPLES, **settings: Any
) -> Session:
    """`body` is given each batch's number and loss, and returns "leave" to end the loop."""
    with hetsync.join(plane=LocalPlane(), progress=False, **settings) as job:
        job.prepare(model, optimizer)
        for number, (inputs, labels) in enumerate(job.loader(samples(count), BATCH, epochs=1)):
            if body(job, number, cross_entropy(model(inputs), labels)) == "leave":
                break
    return job.session


def refused(capsys: pytest.CaptureFixture[str], act: Callable[[], Any]) -> str:
    """The one sentence with which the job ends."""
    with pytest.raises(SystemExit) as ended:
        act()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hetsync: ")
    assert captured.err.count("\n") == 1
    return captured.err


QUICKSTART = {"emulate": "quickstart"}
MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "no such setting": ({"delay_bond": 3}, "hetsync.join has no argument delay_bond (did you mean delay_bound?)"),
    "no such argument": ({"collate": len}, "hetsync.join has no argument collate"),
    "text for a number": ({"accumulation": "two"}, "hetsync: accumulation is two: it must be a whole number or auto"),
    "null": (
        {"accumulation": None},
        "hetsync: accumulation is null: it must be a whole number or auto; leave it out",
    ),
    "out of range": ({"quorum": 2.0}, "hetsync: quorum is 2.0"),
    "speed": (QUICKSTART, "needs samples_per_second"),
    "profile": ({"emulate": "nope", "samples_per_second": 3.0}, "there is no cluster profile nope"),
    "no profile's name": ({"emulate": 5, "samples_per_second": 3.0}, "hetsync: emulate is 5: it must be text or null"),
    "speed of nothing": (
        {"samples_per_second": 3.0},
        "hetsync: samples_per_second is 3.0, but no cluster is emulated",
    ),
    "text for a speed": (
        {**QUICKSTART, "samples_per_second": "fast"},
        "hetsync: samples_per_second is fast: it must be a number",
    ),
    "no speed": ({**QUICKSTART, "samples_per_second": 0}, "hetsync: samples_per_second is 0"),
    "backwards": ({**QUICKSTART, "samples_per_second": -1}, "hetsync: samples_per_second is -1"),
    "no number": ({**QUICKSTART, "samples_per_second": float("nan")}, "hetsync: samples_per_second is nan"),
    "nobody is excluded where deaths end the job": (
        {"fault": {"slow": "exclude"}},
        "fault.slow is exclude, but a rank's death ends jobs with",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_of_join_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings, sentence = MISUSES[name]
    model = network()
    assert sentence in refused(capsys, lambda: train(model, SGD(model.parameters(), 0.1), **settings))


def test_models_and_data_are_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    sentence = refused(capsys, lambda: hetsync.join(model, SGD(model.parameters(), 0.1), samples()))
    assert "hetsync.join takes no model and no data: give models, optimizers and DataLoaders to job.prepare" in sentence


def test_an_unknown_plane_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, lambda: hetsync.join(plane="gloo"))
    assert "plane: 'gloo' is unknown; choose one of auto, mpi, torch, horovod, local" in sentence


def test_the_planes_wait_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def opened(name: str, timeout_seconds: float, tolerate: bool) -> LocalPlane:
        waits.append(timeout_seconds)
        return LocalPlane()

    monkeypatch.setattr(hetsync.api, "open_plane", opened)
    with hetsync.join(timeout_seconds=7, progress=False), hetsync.join(progress=False):
        pass
    assert waits == [7.0, RunConfig().timeout_seconds]


def test_the_plane_hears_of_tolerate_in_either_place(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def opened(name: str, timeout_seconds: float, tolerate: bool) -> LocalPlane:
        told.append(tolerate)
        return LocalPlane()

    monkeypatch.setattr(hetsync.api, "open_plane", opened)
    for arguments in ({}, {"tolerate": False}, {"fault": {"tolerate": False}}, {"fault": {"not_finite": "skip"}}):
        with hetsync.join(progress=False, **arguments):  # type: ignore[arg-type]
            pass
    assert told == [True, False, False, True]


@BOUNDS
def test_weights_that_become_nan_near_the_end_end_no_job_well(capsys: pytest.CaptureFixture[str], bound: int) -> None:
    """A rank alone looks now and then, and at the end. The loop tells no loss."""
    model = network()
    optimizer = SGD(model.parameters(), 0.1)

    def body(job: Job, number: int, loss: torch.Tensor) -> None:
        (loss * (float("nan") if number == 20 else 1.0)).backward()
        job.step()

    sentence = refused(capsys, lambda: train(model, optimizer, body, 480, delay_bound=bound))
    assert "is not finite any more after 480 samples" in sentence


@BOUNDS
def test_a_decay_that_the_loop_changes_is_refused(capsys: pytest.CaptureFixture[str], bound: int) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), 0.01)

    def body(job: Job, number: int, loss: torch.Tensor) -> None:
        by_job(job, number, loss)
        optimizer.param_groups[0]["weight_decay"] = 0.5

    sentence = refused(capsys, lambda: train(model, optimizer, body, delay_bound=bound))
    assert "weight decay was changed in the loop" in sentence


def test_other_errors_are_the_users_own() -> None:
    model = network()
    with pytest.raises(ZeroDivisionError):
        train(model, SGD(model.parameters(), 0.1), lambda job, number, loss: number / 0)


def test_after_the_job_the_optimizer_is_the_users_again() -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    train(model, optimizer, delay_bound=4)
    optimizer.step()


def test_after_a_failure_the_model_may_be_trained_again() -> None:
    model = network()

    def interrupted(job: Job, number: int, loss: torch.Tensor) -> None:
        job.backward(loss)
        if number == 2:
            raise KeyboardInterrupt
        job.step()

    with pytest.raises(KeyboardInterrupt):
        train(model, SGD(model.parameters(), 0.1), interrupted, delay_bound=0)
    assert {type(weight.grad) for weight in model.parameters()} == {torch.Tensor}
    train(model, SGD(model.parameters(), 0.1), delay_bound=0)


def test_a_batch_left_before_its_step_does_not_count() -> None:
    """On a rank alone, where nothing of it has left for others."""
    found = []
    for steps in (3, 4):

        def body(job: Job, number: int, loss: torch.Tensor, steps: int = steps) -> str | None:
            job.backward(loss)
            if number < steps:
                job.step()
            return "leave" if number == 3 else None

        model = network()
        found.append(train(model, SGD(model.parameters(), 0.1), body, delay_bound=0).applied)
    assert found == [3 * BATCH, 4 * BATCH]


class Writing(SGD):
    """Puts other memory behind its weights, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.data = torch.add(weight.data, weight.grad, alpha=-group["lr"])


@BOUNDS
def test_an_optimizer_may_write_its_weights_anew(bound: int) -> None:
    found = []
    for kind in (SGD, Writing):
        model = network()
        session = train(model, kind(model.parameters(), 0.1), delay_bound=bound)
        found.append(weights_sha256(session.engine.anchor))
    assert found[0] == found[1]


class Slow(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.01)
        super().step()


@BOUNDS
def test_the_optimizers_step_is_device_time(bound: int) -> None:
    """In both modes: else what devices are capable of could not be compared between them."""
    model = network()
    session = train(model, Slow(model.parameters(), 0.1), delay_bound=bound)
    assert session.totals.compute_seconds >= 0.01 * SAMPLES / BATCH
