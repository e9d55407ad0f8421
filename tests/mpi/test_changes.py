"""Settings that change while a job runs, and jobs that are stopped, on real MPI ranks.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_changes.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from training import (
    BATCH,
    OPTIMIZERS,
    SAMPLES,
    SEED,
    Blobs,
    Net,
    Outcome,
    assert_invariants,
    cross_entropy,
    delayed,
    of_unequal_speed,
    synchronous,
    train,
    unequal_shares,
)

from hetsync.config import schema
from hetsync.config.schema import WireFormat
from hetsync.data.loader import EpochOrder
from hetsync.plane.base import Plane
from hetsync.sync import rounds_rule
from hetsync.sync.messages import NO_BOUND, Event, Instruction, Settings, SharesChanged
from hetsync.train.session import Session

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]

D0, D1, D4 = Settings(0, 0.25, 1), Settings(1, 1.0, 1), Settings(4, 0.1, 1)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (D4, [D0, D4, D0]),
        (D0, [D4, D0]),
        (D4, [D1, replace(D4, accumulation=3), replace(D1, quorum=0.5), D4]),
        (D0, [replace(D0, accumulation=2), replace(D4, accumulation=2), Settings(NO_BOUND, 0.5, 1)]),
        (D4, [D0, D4, D0, D4, D0]),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_settings_change_while_running(plane: Plane, first: Settings, then: list[Settings], every: int) -> None:
    """`every` 1 changes them again before the last change came through."""
    left = list(then)

    def tune(session: Session, number: int) -> None:
        if plane.rank == 0 and left and number % every == 0:
            session.tune(left.pop(0))

    sync = delayed(plane, delay_bound=first.delay_bound, quorum=first.quorum, accumulation=first.accumulation)
    samples = 4 * SAMPLES
    outcome = train(
        plane, sync, samples=samples, rests=[90, 300, 310], on_slice=tune, device=of_unequal_speed(plane.rank)
    )
    largest = max(settings.delay_bound for settings in [first, *then])
    assert_invariants(plane, [outcome], samples, largest)
    assert plane.gather_objects(outcome.session.settings) == [then[-1]] * plane.size
    assert outcome.rests[-1].loss < 0.6 * outcome.first_loss


ANY_REASON = {  # for a change by rule
    "DELAY_COSTS": 0.0,
    "QUORUM_COSTS": 0.0,
    "GRACE_COSTS": 0.0,
    "DOUBLING_COSTS": 0.0,
    "SETTLING_TASKS": 0,
    "OVERWHELMING": float("inf"),
    "KEPT": -1e9,
    "WINDOW_ROUNDS": 2,
    "WINDOW_TASKS": 2,
    "WINDOW_SECONDS": 0.0,
}


def test_q_and_k_rise_by_rule(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where any work of a round is too much; a rank alone has no rounds to save."""
    for name, value in ANY_REASON.items():
        monkeypatch.setattr(rounds_rule, name, value)
    samples = 16 * SAMPLES  # for ten tasks of a rank that seldom gets a core
    sync = delayed(plane, quorum="auto", grace="auto", accumulation="auto")
    outcome = train(plane, sync, samples=samples, rests=[90])
    assert_invariants(plane, [outcome], samples, 4)
    expected = [(1, 0.5, 0), (1, 0.5, 1), (2, 0.5, 1), (4, 0.5, 1)] if plane.size > 1 else []
    if plane.rank == 0:
        changes = outcome.session.rounds_changes
        assert [(change.accumulation, change.quorum, change.grace) for change in changes] == expected
        assert all(change.work > 0 and change.waits >= 0 for change in changes)
    settings = outcome.session.settings
    last = expected[-1] if expected else (1, 0.25, 0)
    assert plane.gather_objects((settings.accumulation, settings.quorum, settings.grace)) == [last] * plane.size


@pytest.mark.parametrize("wire", ["int8", "top64"])
def test_the_wire_comes_and_goes_by_rule(plane: Plane, monkeypatch: pytest.MonkeyPatch, wire: WireFormat) -> None:
    """With delay, where any wait is too much: ranks are alike at rests, whatever wires rounds have had."""
    for name, value in {**ANY_REASON, "CALM_WINDOWS": 1, "WIRE_COSTS": {wire: -1.0}}.items():
        monkeypatch.setattr(rounds_rule, name, value)
    monkeypatch.setattr(schema, "SMALL_VALUES", 0)
    sync, device = delayed(plane, delay_bound="auto", quorum=0.25, grace=0, wire="auto"), of_unequal_speed(plane.rank)
    outcome = train(plane, sync, samples=16 * SAMPLES, rests=[90], device=device)
    assert_invariants(plane, [outcome], 16 * SAMPLES, 4)
    if plane.rank == 0:
        changes = outcome.session.rounds_changes
        assert ({change.wire for change in changes if change.delay_bound} == {"float32", wire}) == (plane.size > 1)
        assert all(change.wire == "float32" for change in changes if change.delay_bound == 0)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_delay_comes_and_goes_by_rule(plane: Plane, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """Where any wait is too much, and each window looks back. The books are whole, and weights alike, throughout."""
    for name, value in {**ANY_REASON, "CALM_WINDOWS": 0}.items():
        monkeypatch.setattr(rounds_rule, name, value)
    sync = delayed(plane, delay_bound="auto", quorum=0.25, grace=0)
    device = of_unequal_speed(plane.rank)
    outcome = train(plane, sync, samples=8 * SAMPLES, rests=[90], optimizer=optimizer, device=device)
    assert_invariants(plane, [outcome], 8 * SAMPLES, 4)
    if plane.rank == 0:
        bounds = [change.delay_bound for change in outcome.session.rounds_changes]
        assert bounds == [4, 0] * (len(bounds) // 2) + [4] * (len(bounds) % 2)
        assert len(bounds) >= 3 or plane.size == 1
    assert outcome.rests[-1].loss < 0.6 * outcome.first_loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("optimizer", "goes"), [("momentum", True), ("adamw", False)])
def test_optimizers_that_lose_by_delay_wait_for_longer(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, optimizer: str, goes: bool
) -> None:
    for name, value in {**ANY_REASON, "ADAPTIVE_DELAY_COSTS": 1e9}.items():
        monkeypatch.setattr(rounds_rule, name, value)
    sync = delayed(plane, delay_bound="auto", quorum=0.25, grace=0)
    outcome = train(plane, sync, samples=4 * SAMPLES, optimizer=optimizer, device=of_unequal_speed(plane.rank))
    assert (outcome.session.settings.delay_bound > 0) == goes


def test_tuned_at_rest(plane: Plane) -> None:
    def tune(outcome: Outcome) -> None:
        if plane.rank == 0:
            outcome.session.tune(D0 if outcome.session.settings.delay_bound else D4)

    outcome = train(plane, delayed(plane), samples=2 * SAMPLES, rests=[60, 200, 300], at_rest=tune)
    assert_invariants(plane, [outcome], 2 * SAMPLES, 4)
    assert {60, 200, 300, 2 * SAMPLES} <= {rest.applied for rest in outcome.rests}


def test_any_rank_may_tune(plane: Plane) -> None:
    def tune(session: Session, number: int) -> None:
        if plane.rank == plane.size - 1 and number == 2:
            session.tune(replace(D4, accumulation=2))

    outcome = train(plane, delayed(plane), samples=2 * SAMPLES, on_slice=tune)
    assert outcome.session.settings == replace(D4, accumulation=2)


# Stops.


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("by", ["rank 0", "last rank", "all ranks"])
def test_stop_and_go_on(plane: Plane, bound: int, by: str) -> None:
    asks = {"rank 0": plane.rank == 0, "last rank": plane.rank == plane.size - 1}.get(by, True)

    def ask(session: Session, number: int) -> None:
        if asks and number == 3:
            session.request_stop()

    samples = 4 * SAMPLES
    device = of_unequal_speed(plane.rank)
    stopped = train(plane, delayed(plane, delay_bound=bound), samples=samples, on_slice=ask, device=device)
    assert stopped.session.stopping
    assert 0 < stopped.session.applied < samples
    assert plane.gather_objects(stopped.session.applied) == [stopped.session.applied] * plane.size
    assert_invariants(plane, [stopped], stopped.session.applied, bound)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_stop_asked_for_shortly_before_a_rest_is_not_forgotten(plane: Plane, bound: int) -> None:
    """All samples up to the rest are handed out: the job comes to rest there anyhow."""
    asked = False

    def listen(session: Session, number: int) -> None:
        coordinator = session.coordinator
        if coordinator is None or number > 0:
            return
        decide = coordinator.machine.handle

        def on(event: Event) -> list[Instruction]:
            nonlocal asked
            decided = decide(event)
            if not asked and coordinator.machine.ledger.frontier == 100:
                asked = True
                session.request_stop()
            return decided

        coordinator.machine.handle = on  # type: ignore[method-assign]

    sync = delayed(plane, delay_bound=bound)
    outcome = train(plane, sync, rests=[100], on_slice=listen, device=of_unequal_speed(plane.rank))
    assert plane.broadcast_object(asked)
    assert outcome.session.stopping
    assert outcome.session.applied < SAMPLES
    assert_invariants(plane, [outcome], outcome.session.applied, bound)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_stop_asked_for_at_rest(plane: Plane, bound: int) -> None:
    def ask(outcome: Outcome) -> None:
        if plane.rank == 0 and outcome.session.applied == 70:
            outcome.session.request_stop()

    outcome = train(plane, delayed(plane, delay_bound=bound), samples=3 * SAMPLES, rests=[70], at_rest=ask)
    assert outcome.session.stopping
    assert outcome.session.applied < 3 * SAMPLES
    assert_invariants(plane, [outcome], outcome.session.applied, bound)


# Batches that are not for all.


def test_a_step_is_nobodys_to_miss(plane: Plane) -> None:
    """At D = 0 the last batch before a rest has one sample, of one rank and then of another: all end with its step."""
    shares = unequal_shares(plane.size)
    spans = [
        (start, end)
        for rest in range(0, 100, BATCH + 1)
        for start, end in ((rest, rest + BATCH), (rest + BATCH, rest + BATCH + 1))
    ]
    data, model = Blobs(), Net()
    step = OPTIMIZERS["momentum"](model)
    for span in spans:
        indices = EpochOrder(len(data), SEED).indices([span])
        step.zero_grad()
        cross_entropy(model, data.points[indices], data.labels[indices]).backward()
        step.step()

    def turn(outcome: Outcome) -> None:
        if plane.rank == 0:
            turned = reversed(shares.values()) if outcome.session.applied % 50 else shares.values()
            outcome.session.engine.report(SharesChanged(dict(enumerate(turned))))

    outcome = train(plane, synchronous(plane), samples=100, rests=[25, 50, 75], at_rest=turn)
    assert_invariants(plane, [outcome], 100, 0)
    off = [float((mine - theirs).abs().max()) for mine, theirs in zip(outcome.weights, model.parameters(), strict=True)]
    assert max(plane.gather_objects(max(off))) < 1e-5
