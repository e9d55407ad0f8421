"""A controller in its own process changes the settings of real jobs, or dies in the attempt.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_control.py
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest
import torch
from training import (
    OPTIMIZERS,
    SAMPLES,
    Blobs,
    Net,
    Outcome,
    assert_invariants,
    cross_entropy,
    of_unequal_speed,
    train,
    unequal_shares,
)

from hetsync.config.schema import ControlConfig, ScheduleConfig, SyncConfig
from hetsync.control.controller import Decision
from hetsync.control.process import ControlProcess, Make
from hetsync.control.window_meter import WindowMeter
from hetsync.plane.base import Plane
from hetsync.sync.messages import Event, NormMeasured, Settings
from hetsync.sync.observation import Observation
from hetsync.train.session import Session

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

D4 = Settings(4, 0.25, 1)
COURSE = [Settings(0, 0.25, 1), Settings(2, 0.25, 2), Settings(0, 0.25, 2), Settings(1, 0.25, 3), D4]
CHANGES = 8
ROUNDS = 250
SECONDS = 40.0
# So slow that the controller keeps up, wherever it runs.
SLICE_SECONDS = 0.01


class Restless:
    """Goes through `COURSE` over and over, a step a window; never where MPI is."""

    def __init__(self, config: ControlConfig, seed: int, batch_size: int) -> None:
        assert "mpi4py" not in sys.modules
        self._course = cycle(COURSE)

    def decide(self, seen: Observation) -> Decision:
        return Decision(next(self._course), "restless")


class Failing:
    def __init__(self, config: ControlConfig, seed: int, batch_size: int) -> None:
        pass

    def decide(self, seen: Observation) -> Decision:
        raise RuntimeError("this controller fails")


def controlled(
    plane: Plane,
    make: Make,
    samples: int,
    on_slice: Callable[[Session, int], None],
    min_delay_bound: int = 0,
    sync: SyncConfig | None = None,
    optimizer: str = "momentum",
    model: torch.nn.Module | None = None,
    schedule: ScheduleConfig | None = None,
) -> Outcome:
    """A job of which rank 0 does `on_slice` after each of its slices."""
    config = ControlConfig("random", interval_seconds=0.02, min_delay_bound=min_delay_bound)

    def after_slice(session: Session, number: int) -> None:
        time.sleep(SLICE_SECONDS)
        if plane.rank == 0:
            on_slice(session, number)

    return train(
        plane,
        sync or SyncConfig(4, 0.25, rebalance=False, pins=unequal_shares(plane.size)),
        model=model,
        optimizer=optimizer,
        samples=samples,
        on_slice=after_slice,
        device=of_unequal_speed(plane.rank),
        schedule=schedule,
        controller=lambda: ControlProcess(config, 0, 24, None, make),
    )


def test_settings_change_online_between_and_within_the_modes(plane: Plane) -> None:
    deadline = time.monotonic() + SECONDS

    def until_changed(session: Session, number: int) -> None:
        assert session.control is not None
        if session.control.summary()["changes"] >= CHANGES or time.monotonic() > deadline:
            session.request_stop()

    outcome = controlled(plane, Restless, 10_000 * SAMPLES, until_changed)
    assert outcome.session.stopping
    assert_invariants(plane, [outcome], outcome.session.applied, 4)
    settings = plane.gather_objects(outcome.session.settings)
    assert settings == settings[:1] * plane.size
    if plane.rank == 0:
        assert outcome.session.control is not None
        summary = outcome.session.control.summary()
        assert summary["changes"] >= CHANGES
        assert summary["died"] is None
        assert summary["accumulation"] == [1, 3]
        assert summary["delay_bound"] == [0, 4]
        assert summary["cpu_seconds"] >= summary["start_cpu_seconds"] > 0


class Content:
    """Leaves everything as it is."""

    def __init__(self, config: ControlConfig, seed: int, batch_size: int) -> None:
        pass

    def decide(self, seen: Observation) -> Decision:
        return Decision(seen.settings, "content")


def test_the_controller_sees_how_far_the_job_and_its_learning_rate_are(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[tuple[int, Observation]] = []
    observe = WindowMeter.observe

    def watched(meter: WindowMeter, settings: Settings, now: float) -> Observation:
        observed.append((meter._machine.ledger.applied, observe(meter, settings, now)))
        return observed[-1][1]

    monkeypatch.setattr(WindowMeter, "observe", watched)
    schedule, samples = ScheduleConfig("cosine", final_factor=0.1), 1000 * SAMPLES
    deadline = time.monotonic() + SECONDS

    def until_observed(session: Session, number: int) -> None:
        if len(observed) > 3 or time.monotonic() > deadline:
            session.request_stop()

    controlled(plane, Content, samples, until_observed, schedule=schedule)
    if plane.rank == 0:
        assert len(observed) > 3
        for applied, seen in observed:
            assert seen.progress == applied / samples
            assert seen.learning_rate == schedule.factor(applied, samples)
        assert observed[-1][1].learning_rate < 1


def noise_scale_of(model: torch.nn.Module, data: Blobs) -> float:
    """From each sample's own gradient at these weights: the variance over the squared norm of the mean."""
    gradients = []
    for points, labels in zip(data.points, data.labels, strict=True):
        model.zero_grad()
        cross_entropy(model, points[None], labels[None]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    each = torch.stack(gradients)
    mean = each.mean(0)
    return float((each - mean).square().sum() / len(each) / mean.square().sum())


@pytest.mark.each_value(1)
@pytest.mark.parametrize(("bound", "momentum"), [(0, 0.9), (4, 0.0)])
def test_the_noise_scale_is_measured_while_training(
    plane: Plane, bound: int, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are so short that the weights, and with them the noise scale, hardly change; buffers have no part in it."""
    optimizer = partial(torch.optim.SGD, lr=1e-3 * (1 - momentum), momentum=momentum)
    monkeypatch.setitem(OPTIMIZERS, "slow", lambda model: optimizer(model.parameters()))
    model = Net()
    model.register_buffer("constant", torch.full((50,), 100.0))
    told_of: list[NormMeasured] = []
    add_event = WindowMeter.add_event

    def listen(meter: WindowMeter, event: Event, now: float) -> None:
        if isinstance(event, NormMeasured):
            told_of.append(event)
        add_event(meter, event, now)

    monkeypatch.setattr(WindowMeter, "add_event", listen)
    deadline = time.monotonic() + SECONDS

    def until_known(session: Session, number: int) -> None:
        assert session.control is not None
        assert session.coordinator is not None
        told = session.control.summary()["decisions"] > 1 and session.coordinator.machine.version > ROUNDS
        if told or time.monotonic() > deadline:
            session.request_stop()

    sync = SyncConfig(bound, 1.0, rebalance=False, pins=unequal_shares(plane.size))
    outcome = controlled(plane, Content, 10_000 * SAMPLES, until_known, sync=sync, optimizer="slow", model=model)
    if plane.rank == 0:
        assert sum(event.samples for event in told_of) == outcome.session.applied  # each sample once
        assert {event.steps == 0 for event in told_of} == {bound == 0}
        assert outcome.session.control is not None
        found = outcome.session.control.summary()["noise_scale"]
        if plane.size == 1:
            assert found is None
        else:  # of some fifty rounds, in which the signal is far above the noise: a rough figure
            assert found is not None
            assert 0.2 < found / noise_scale_of(outcome.model, Blobs()) < 5


@pytest.mark.parametrize("bound", [0, 4])
def test_without_a_controller_no_norm_is_computed(plane: Plane, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[torch.Tensor] = []
    monkeypatch.setattr("hetsync.sync.collectives.squared_norm", weighed.append)
    train(plane, SyncConfig(bound, rebalance=False))
    assert not weighed


@pytest.mark.each_value(1)
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_training_goes_on_without_its_controller(plane: Plane, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    struck, died = [], []
    deadline = time.monotonic() + SECONDS

    def strike(session: Session, number: int) -> None:
        control = session.control
        assert control is not None
        if how == "killed" and control.summary()["decisions"] and not struck:
            os.kill(control._process.pid, signal.SIGKILL)
            struck.append(number)
        if control.died is not None:
            died.append(number)
        if len(died) == 20 or time.monotonic() > deadline:
            session.request_stop()

    make = Restless if how == "killed" else Failing
    outcome = controlled(plane, make, 10_000 * SAMPLES, strike, min_delay_bound=1)
    assert_invariants(plane, [outcome], outcome.session.applied, 4)
    if plane.rank == 0:
        assert len(died) >= 20, "nobody noticed"
        assert bool(struck) == (how == "killed")
        control = outcome.session.control
        assert control is not None
        expected = "was ended by SIGKILL" if how == "killed" else "failed (RuntimeError: this controller fails;"
        assert control.died is not None
        assert control.died.startswith(expected)
        said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hetsync:")]
        assert said == [
            f"hetsync: the controller {control.died}: training goes on without it, with accumulation"
            f" {outcome.session.settings.accumulation} and delay bound {outcome.session.settings.delay_bound}"
        ]
        assert outcome.rests[-1].loss < 0.6 * outcome.first_loss
