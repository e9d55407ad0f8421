"""Settings that change while a job runs, and jobs that are stopped, on real MPI ranks.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_changes.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from training import SAMPLES, Outcome, assert_invariants, delayed, of_unequal_speed, train

from hetsync.plane.base import Plane
from hetsync.session import Session
from hetsync.sync.messages import NO_BOUND, Event, Instruction, Settings

pytestmark = pytest.mark.mpi

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
        decide = coordinator.policy.on

        def on(event: Event) -> list[Instruction]:
            nonlocal asked
            decided = decide(event)
            if not asked and coordinator.policy.ledger.frontier == 100:
                asked = True
                session.request_stop()
            return decided

        coordinator.policy.on = on  # type: ignore[method-assign]

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
