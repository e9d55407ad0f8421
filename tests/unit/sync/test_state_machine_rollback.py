"""The state machine where all ranks go back to a checkpoint."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from state_machine_jobs import any_settings, everyday, relaxed
from virtual import VirtualCluster, make_machine

from hetsync.sync.messages import DrainRequested, Event, Settings, WentBack
from hetsync.sync.milestones import ROLLBACK, STOP

TOTAL, CHECKPOINTS = 240, 60


class GoingBack:
    """At a step at which somebody computes all are to go back; at the rest for that they do."""

    def __init__(self, step: int, also: tuple[Event, ...]) -> None:
        self.from_to: tuple[int, int] | None = None
        self._step, self._also = step, also
        self.next_evaluation: int | None = None  # once they have
        self._asked = False

    def __call__(self, cluster: VirtualCluster, step: int) -> list[Event]:
        computing = any(stub.computing for stub in cluster.stubs.values())
        if not self._asked and step >= self._step and computing:
            self._asked = True
            return [DrainRequested(ROLLBACK), *self._also, DrainRequested(ROLLBACK)]
        last = cluster.starts[-1] if cluster.starts else None
        if self.from_to is not None and self.next_evaluation is None:
            self.next_evaluation = cluster.machine.snapshots.next
        at_rest = last is not None and last.drain == ROLLBACK and cluster.machine.version > last.number
        if at_rest and self.from_to is None:
            applied = cluster.machine.ledger.applied
            to = applied // CHECKPOINTS * CHECKPOINTS
            self.from_to = applied, to
            cluster.applied[to:] = bytes(TOTAL - to)
            return [WentBack(to)]
        return []


@relaxed
@given(any_settings, st.integers(0, 120), st.booleans())
def test_what_comes_after_the_checkpoint_goes_out_again(settings: Settings, step: int, stops: bool) -> None:
    """Nothing goes out before, and no rest is left out, nor one that was asked for meanwhile."""
    machine = make_machine([4, 2, 2], settings, TOTAL, CHECKPOINTS)
    back = GoingBack(step, (DrainRequested(STOP),) if stops else ())
    cluster = VirtualCluster(machine, **everyday.arguments(3), before=back)
    cluster.run()
    reasons = [reason for _, reason in cluster.drains]
    assert reasons.count(ROLLBACK) == (back.from_to is not None)
    if back.from_to is None:
        return
    applied, to = back.from_to
    at = reasons.index(ROLLBACK)
    assert cluster.drains[at][0] == applied
    assert (STOP in reasons) == stops
    if stops:
        assert cluster.drains[at + 1] == (to, STOP)
    marks = [position for position, reason in cluster.drains[at + 1 :] if reason != STOP]
    assert marks == (list(range(to + CHECKPOINTS, TOTAL + 1, CHECKPOINTS)) or [TOTAL])  # the end has a rest anyway


@relaxed
@given(st.integers(0, 4), st.integers(60, 240))
def test_evaluations_behind_the_checkpoint_come_again(bound: int, step: int) -> None:
    machine = make_machine([4, 2, 2], Settings(bound, 1.0, 1), TOTAL, CHECKPOINTS, evaluate=40)
    back = GoingBack(step, ())
    cluster = VirtualCluster(machine, **everyday.arguments(3), before=back)
    cluster.run()
    assume(back.from_to is not None and back.next_evaluation is not None)
    assert back.from_to is not None
    _, to = back.from_to
    assert back.next_evaluation == (to // 40 + 1) * 40
