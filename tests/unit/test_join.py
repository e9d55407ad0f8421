"""A training loop of the user's own, on one rank: what works there, and what is refused in one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hetsync
from hetsync.api import JoinedSession
from hetsync.config.schema import RunConfig
from hetsync.errors import UserError
from hetsync.plane.local import LocalPlane
from hetsync.sync.digests import weights_sha256

SAMPLES, BATCH, FEATURES, CLASSES = 192, 16, 4, 3
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


def samples(count: int = SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, FEATURES, generator=draw), torch.randint(CLASSES, (count,), generator=draw))


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def join(model: nn.Module, optimizer: Optimizer, bound: int, **settings: Any) -> JoinedSession:
    return hetsync.join(
        model, optimizer, samples(), batch_size=BATCH, plane=LocalPlane(), delay_bound=bound, **settings
    )


def train(
    session: JoinedSession,
    model: nn.Module,
    *,
    after_backward: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """To the end; the learning rates that the steps had."""
    rates = []
    with session:
        for inputs, labels in session.slices():
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            after_backward()
            rates.append(float(session.optimizer.param_groups[0]["lr"]))
            session.step(loss)
            after_step()
    return rates


def refused(capsys: pytest.CaptureFixture[str], session: JoinedSession, model: nn.Module, **hooks: Any) -> str:
    """The one sentence with which the job ends."""
    with pytest.raises(SystemExit) as ended:
        train(session, model, **hooks)
    return said(capsys, ended.value)


def said(capsys: pytest.CaptureFixture[str], ended: SystemExit) -> str:
    assert ended.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hetsync: ")
    assert captured.err.count("\n") == 1
    return captured.err


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, SAMPLES // BATCH),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.7),
    "steps": lambda optimizer: StepLR(optimizer, 3, 0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@BOUNDS
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_makes_one_step_for_each_batch(kind: str, bound: int) -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    session = join(model, optimizer, bound, scheduler=SCHEDULERS[kind](optimizer))
    plain = SGD(network().parameters(), 0.1)
    scheduler = SCHEDULERS[kind](plain)
    expected = []
    for _ in range(SAMPLES // BATCH):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert train(session, model) == pytest.approx(expected)


def test_a_synchronous_job_with_scheduler_and_clipping_is_the_plain_loop() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), 0.01)
    scheduler = CosineAnnealingLR(optimizer, SAMPLES // BATCH)
    session = join(model, optimizer, 0, scheduler=scheduler, max_grad_norm=0.2)
    order: list[torch.Tensor] = []
    with session:
        for inputs, labels in session.slices():
            order.append(inputs)
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            session.step(loss)
    labels_of = {tuple(row.tolist()): label for row, label in zip(*samples().tensors, strict=True)}
    plain = network()
    optimizer = AdamW(plain.parameters(), 0.01)
    scheduler = CosineAnnealingLR(optimizer, SAMPLES // BATCH)
    for inputs in order:
        labels = torch.stack([labels_of[tuple(row.tolist())] for row in inputs])
        optimizer.zero_grad()
        cross_entropy(plain(inputs), labels).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        optimizer.step()
        scheduler.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@BOUNDS
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_that_the_loop_steps_is_refused(capsys: pytest.CaptureFixture[str], kind: str, bound: int) -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    sentence = refused(capsys, join(model, optimizer, bound), model, after_step=scheduler.step)
    assert "learning rate" in sentence
    assert "hetsync.join(scheduler=" in sentence


def test_a_scheduler_that_wants_a_metric_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    with pytest.raises(SystemExit) as ended:
        join(model, optimizer, 4, scheduler=ReduceLROnPlateau(optimizer))
    assert "ReduceLROnPlateau" in said(capsys, ended.value)


def test_a_scheduler_of_another_optimizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    with pytest.raises(SystemExit) as ended:
        join(model, SGD(model.parameters(), 0.1), 4, scheduler=ExponentialLR(SGD(model.parameters(), 0.1), 0.5))
    assert "another optimizer" in said(capsys, ended.value)


@BOUNDS
def test_an_optimizer_that_the_loop_steps_is_refused(capsys: pytest.CaptureFixture[str], bound: int) -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    sentence = refused(capsys, join(model, optimizer, bound), model, after_backward=lambda: optimizer.step())
    assert "session.step takes the place of optimizer.step" in sentence


def test_after_the_job_the_optimizer_is_the_users_again() -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    train(join(model, optimizer, 4), model)
    optimizer.step()


MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "no such setting": ({"delay_bond": 3}, "hetsync.join has no argument delay_bond (did you mean delay_bound?)"),
    "text for a number": ({"accumulation": "two"}, "hetsync: accumulation is two: it must be a whole number or auto"),
    "out of range": ({"quorum": 2.0}, "hetsync: quorum is 2.0"),
    "no batch": ({"batch_size": 0}, "hetsync: batch_size is 0: it must be at least 1"),
    "no epochs": ({"epochs": 0}, "hetsync: epochs is 0.0: it must be greater than 0"),
    "endless": ({"epochs": float("inf")}, "hetsync: epochs is inf"),
    "not a number": ({"epochs": "many"}, "hetsync: epochs is many: it must be a number"),
    "a loader": ({"dataset": DataLoader(samples())}, "give its data set (loader.dataset) and batch_size"),
    "no optimizer": ({"optimizer": 3}, "optimizer is a int: give a torch.optim.Optimizer"),
    "no model": ({"model": 3}, "model is a int: give a torch.nn.Module"),
    "no weights": ({"model": nn.Tanh()}, "model has no weights to train"),
    "empty": ({"dataset": samples(0)}, "the data set is empty"),
    "speed": ({"emulate": "quickstart"}, "needs samples_per_second"),
    "profile": ({"emulate": "nope", "samples_per_second": 3.0}, "there is no cluster profile nope"),
    "no profile's name": ({"emulate": 5, "samples_per_second": 3.0}, "hetsync: emulate is 5: it must be text or null"),
    "speed of nothing": (
        {"samples_per_second": 3.0},
        "hetsync: samples_per_second is 3.0, but no cluster is emulated",
    ),
    "text for a speed": (
        {"emulate": "quickstart", "samples_per_second": "fast"},
        "hetsync: samples_per_second is fast: it must be a number",
    ),
    "no speed": ({"emulate": "quickstart", "samples_per_second": 0}, "hetsync: samples_per_second is 0"),
    "backwards": ({"emulate": "quickstart", "samples_per_second": -1}, "hetsync: samples_per_second is -1"),
    "no number": ({"emulate": "quickstart", "samples_per_second": float("nan")}, "hetsync: samples_per_second is nan"),
    "clip": ({"max_grad_norm": 0.0}, "hetsync: max_grad_norm is 0.0: it must be greater than 0"),
    "evaluate": ({"evaluate_every": 0}, "hetsync: evaluate_every is 0: it must be at least 1"),
}


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


MISUSES["a batch beyond the data"] = ({"batch_size": 500}, "batch_size is 500, but the data set has 192 samples")
MISUSES["null"] = (
    {"accumulation": None},
    "hetsync: accumulation is null: it must be a whole number or auto; leave it out",
)
MISUSES["no such argument"] = ({"collate": len}, "hetsync.join has no argument collate")
MISUSES["iterable"] = ({"dataset": Endless()}, "give a map-style data set, which has a length")


@BOUNDS
def test_weights_that_become_nan_near_the_end_end_no_job_well(capsys: pytest.CaptureFixture[str], bound: int) -> None:
    """A rank alone looks now and then, and at the end. The loop tells no loss."""
    model = network()
    session = hetsync.join(
        model, SGD(model.parameters(), 0.1), samples(480), batch_size=BATCH, plane=LocalPlane(), delay_bound=bound
    )

    def loop() -> None:
        with session:
            for number, (inputs, labels) in enumerate(session.slices()):
                (cross_entropy(model(inputs), labels) * (float("nan") if number == 20 else 1.0)).backward()
                session.step()

    with pytest.raises(SystemExit) as ended:
        loop()
    assert "is not finite any more after 480 samples" in said(capsys, ended.value)


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


def test_nobody_is_excluded_where_deaths_end_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        hetsync.join(progress=False, fault={"slow": "exclude"})
    assert "fault.slow is exclude, but a rank's death ends jobs with" in said(capsys, ended.value)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_of_join_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, sentence = MISUSES[name]
    model = network()
    arguments = {"model": model, "optimizer": SGD(model.parameters(), 0.1), "dataset": samples(), **changes}
    with pytest.raises(SystemExit) as ended:
        hetsync.join(**arguments, plane=LocalPlane())
    assert sentence in said(capsys, ended.value)
    assert isinstance(ended.value.__cause__, UserError)


def test_an_unknown_plane_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    with pytest.raises(SystemExit) as ended:
        hetsync.join(model, SGD(model.parameters(), 0.1), samples(), plane="gloo")
    assert "plane: 'gloo' is unknown; choose one of auto, mpi, torch, horovod, local" in said(capsys, ended.value)


@BOUNDS
def test_an_optimizer_of_weights_that_the_model_has_not_is_refused(
    capsys: pytest.CaptureFixture[str], bound: int
) -> None:
    model, other = network(), nn.Linear(2, 2)
    with pytest.raises(SystemExit) as ended:
        join(model, Adam([*model.parameters(), *other.parameters()]), bound)
    assert "2 weights that the model has not" in said(capsys, ended.value)


@BOUNDS
@pytest.mark.parametrize(
    ("backwards", "steps", "sentence"),
    [(1, 0, "once after each slice's backward"), (1, 2, "called twice"), (0, 1, "loss.backward()")],
)
def test_a_slice_is_one_backward_and_one_step(
    capsys: pytest.CaptureFixture[str], bound: int, backwards: int, steps: int, sentence: str
) -> None:
    model = network()

    def loop() -> None:
        with join(model, SGD(model.parameters(), 0.1), bound) as session:
            for inputs, labels in session.slices():
                loss = cross_entropy(model(inputs), labels)
                for _ in range(backwards):
                    loss.backward()
                for _ in range(steps):
                    session.step(loss)

    with pytest.raises(SystemExit) as ended:
        loop()
    assert sentence in said(capsys, ended.value)


def test_other_errors_are_the_users_own() -> None:
    model = network()

    def loop() -> None:
        with join(model, SGD(model.parameters(), 0.1), 4) as session:
            for _ in session.slices():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()


# What the review of the first version found.


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
        session = join(model, kind(model.parameters(), 0.1), bound)
        train(session, model)
        found.append(weights_sha256(session.engine.anchor))
    assert found[0] == found[1]


@BOUNDS
def test_a_loop_whose_slices_are_held_may_be_left(bound: int) -> None:
    model = network()
    with join(model, SGD(model.parameters(), 0.1), bound) as session:
        slices = session.slices()
        for number, (inputs, labels) in enumerate(slices):
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            session.step(loss)
            if number == 3:
                break
    assert session.applied == 4 * BATCH
    assert slices is not None


def test_a_slice_left_before_its_step_does_not_count() -> None:
    """On a rank alone, where nothing of it has left for others."""
    found = []
    for steps in (3, 4):
        model = network()
        with join(model, SGD(model.parameters(), 0.1), 0) as session:
            for number, (inputs, labels) in enumerate(session.slices()):
                if number == 3:
                    cross_entropy(model(inputs), labels).backward()
                    if steps == 3:
                        break
                    session.step()
                    break
                cross_entropy(model(inputs), labels).backward()
                session.step()
        found.append(session.applied)
    assert found == [3 * BATCH, 4 * BATCH]


def test_after_a_failure_the_model_may_be_trained_again() -> None:
    model = network()

    def interrupted() -> None:
        with join(model, SGD(model.parameters(), 0.1), 0) as session:
            for number, (inputs, labels) in enumerate(session.slices()):
                loss = cross_entropy(model(inputs), labels)
                loss.backward()
                if number == 2:
                    raise KeyboardInterrupt
                session.step(loss)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {type(weight.grad) for weight in model.parameters()} == {torch.Tensor}
    train(join(model, SGD(model.parameters(), 0.1), 0), model)


@BOUNDS
def test_a_loss_may_be_a_number(bound: int) -> None:
    model = network()
    with join(model, SGD(model.parameters(), 0.1), bound) as session:
        for inputs, labels in session.slices():
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            session.step(loss.item())


def test_a_loss_of_each_sample_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()

    def loop() -> None:
        with join(model, SGD(model.parameters(), 0.1), 4) as session:
            for inputs, labels in session.slices():
                loss = cross_entropy(model(inputs), labels, reduction="none")
                loss.mean().backward()
                session.step(loss)

    with pytest.raises(SystemExit) as ended:
        loop()
    assert "a loss of shape (16,)" in said(capsys, ended.value)


@BOUNDS
def test_a_scheduler_ends_where_a_plain_loop_leaves_it(bound: int) -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = ExponentialLR(optimizer, 0.9)
    train(join(model, optimizer, bound, scheduler=scheduler), model)
    assert scheduler.last_epoch == SAMPLES // BATCH
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (SAMPLES // BATCH))


@BOUNDS
def test_a_decay_that_the_loop_changes_is_refused(capsys: pytest.CaptureFixture[str], bound: int) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), 0.01)

    def change() -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.5

    sentence = refused(capsys, join(model, optimizer, bound), model, after_step=change)
    assert "weight decay was changed in the loop" in sentence


class Slow(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.01)
        super().step()


@BOUNDS
def test_the_optimizers_step_is_device_time(bound: int) -> None:
    """In both modes: else what devices are capable of could not be compared between them."""
    model = network()
    session = join(model, Slow(model.parameters(), 0.1), bound)
    train(session, model)
    assert session.totals.compute_seconds >= 0.01 * SAMPLES / BATCH
