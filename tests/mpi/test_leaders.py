"""Whole jobs whose messages go through leaders, as those of more than 64 ranks do: two ranks a leader here."""

from __future__ import annotations

import pytest
from training import SAMPLES, Net, Outcome, assert_invariants, delayed, of_unequal_speed, train

from hetsync.config.schema import SyncConfig
from hetsync.plane.base import Plane
from hetsync.sync import router
from hetsync.sync.messages import Settings
from hetsync.sync.milestones import Evaluation
from hetsync.train.session import Session
from hetsync.train.terms import NoEvaluation

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]


@pytest.fixture(autouse=True)
def _two_ranks_a_leader(monkeypatch: pytest.MonkeyPatch, plane: Plane) -> None:
    if plane.size < 3:
        pytest.skip("one leader only")
    monkeypatch.setattr(router, "GROUP", 2)


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("quorum", [0.1, 1.0])
def test_training_keeps_the_invariants(plane: Plane, bound: int, quorum: float) -> None:
    class Counting(NoEvaluation):
        complete = 0

        def report(self, evaluation: Evaluation, train_seconds: float) -> None:
            assert len(evaluation.parts) == plane.size
            self.complete += 1

    scorer = Counting()
    outcome = train(
        plane,
        delayed(plane, delay_bound=bound, quorum=quorum),
        model=Net(batch_norm=True),
        samples=4 * SAMPLES,
        rests=[100, 2 * SAMPLES],
        device=of_unequal_speed(plane.rank),
        evaluate_every=SAMPLES,
        scorer=scorer,
    )
    assert_invariants(plane, [outcome], 4 * SAMPLES, bound)
    assert plane.rank != 0 or scorer.complete >= 2
    assert outcome.rests[-1].loss < 0.6 * outcome.first_loss


def test_settings_and_stops_come_from_those_who_are_led(plane: Plane) -> None:
    def ask(session: Session, number: int) -> None:
        if plane.rank == plane.size - 1 and number == 2:
            session.tune(Settings(0, 0.25, 2))
        if plane.rank == plane.size - 1 and number == 5:
            session.request_stop()

    outcome: Outcome = train(plane, SyncConfig(4, 0.25), samples=20 * SAMPLES, on_slice=ask)
    assert outcome.session.stopping
    assert outcome.session.settings == Settings(0, 0.25, 2)
    assert_invariants(plane, [outcome], outcome.session.applied, 4)
