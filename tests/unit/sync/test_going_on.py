"""What one rank's communication thread makes of a decision after a death, and whom it excludes."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hetsync.plane.base import DamagedError, LostError, MembersLost
from hetsync.sync.communicator import Communicator
from hetsync.sync.deltas import Deltas
from hetsync.sync.engine import Engine
from hetsync.sync.gradients import Gradients
from hetsync.sync.mending import Mending
from hetsync.sync.messages import (
    CapFound,
    Evaluated,
    Event,
    Settings,
    Standing,
    StartRound,
    Task,
    TaskFinished,
    TaskStarted,
)
from hetsync.sync.milestones import no_marks, rests_for
from hetsync.sync.overhead import MainThreadTimer
from hetsync.sync.recovery import Action, Books, Death, Decision, LandedRound, Report, decide, rebuilt
from hetsync.sync.shared_state import EngineOptions, Phase, SharedState
from hetsync.sync.slowness import SlowRanks
from hetsync.sync.worker import Holding, Worker

TOTAL = 100
REPORTED = "_books", "_coordinator", "_newest", "_damaged"  # where there is such a thing
FINAL = StartRound(5, frozenset(), TOTAL, True, "end", True)


def communicator(**fields: Any) -> Communicator:
    """As far as it is asked for here."""
    made = Communicator.__new__(Communicator)
    vars(made).update({"_shared": SharedState(Worker(0, 5), None, EngineOptions(1)), **fields})
    return made


def again(version: int) -> Decision:
    return Decision(Action.GO_ON, version, (0, 1, 2), 0, rest_again=True)


def at_rest(made: Communicator, drained: StartRound | None = None) -> SharedState:
    shared = made._shared
    shared.phase, shared.drained, shared.at_rest = Phase.RESTING, drained, True
    return shared


def test_a_rest_that_two_deaths_break_off_is_come_to_once_more() -> None:
    """The main thread writes a checkpoint meanwhile, and hears of neither."""
    made = communicator()
    shared = at_rest(made)
    made._go_on_at_rest(again(5))
    assert shared.rest_again
    at_rest(made, FINAL)  # the drain has come once more, and the main thread has not taken it
    made._go_on_at_rest(again(6))
    assert shared.rest_again
    assert shared.drained is None


def test_a_rest_that_is_to_be_repeated_is_reported_at_another_death() -> None:
    """Or a job at its final rest would count as ended, and nobody would ever drain."""
    made, milestones = communicator(), rests_for({}, TOTAL)
    shared = at_rest(made)
    made._go_on_at_rest(again(6))
    standing = Standing(6, Settings(0, 1.0, 1), milestones(TOTAL - 1))
    books = Books([standing], [(0, TOTAL)], 6, samples_by_rank={0: TOTAL})
    reports = {
        rank: Report(
            rank,
            6,
            Holding(),
            LandedRound(FINAL, {}),
            at_rest=shared.at_rest,
            books=books if rank == 0 else None,
        )
        for rank in range(3)
    }
    decision = decide(reports, 4)
    machine = rebuilt(decision, reports, dict.fromkeys(range(3), 1), TOTAL, milestones, no_marks)
    assert decision.rest_again
    assert machine.first_instructions()


def test_a_death_that_another_breaks_in_on_is_told() -> None:
    death = Death(3, 7, "computing", 0.1, 0.0, 4)
    told: list[Death] = []

    def go_on(recovered: object) -> None:
        raise MembersLost("rank 2 has gone")

    decision = Decision(Action.GO_ON, 7, (0, 1), 0, books=Books([]), deaths=(death,))
    made = communicator(_deaths={}, _on_death=told.append, _go_on=go_on)
    with pytest.raises(MembersLost):
        made._carry_out(cast(Any, SimpleNamespace(decision=decision)), 0.0)
    assert [each.rank for each in told] == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deaths_are_outlived_with_weights_of_any_precision(dtype: torch.dtype) -> None:
    made = communicator(_keeps_going=True, _options=EngineOptions(8))
    made._shared.deltas = Deltas([torch.zeros(2, dtype=dtype)])
    assert made._outlives_deaths()


def test_a_damaged_message_ends_the_job_where_a_death_would() -> None:
    made = communicator(_keeps_going=False)
    with pytest.raises(DamagedError, match="of rank 1"):
        made._recover(DamagedError("a message of rank 1 has arrived damaged", 1))


def test_a_plane_that_fails_again_and_again_though_nobody_goes_is_given_up() -> None:
    """And not mended for ever."""
    members = (0, 1)
    plane = SimpleNamespace(rank=0, members=members, mend=lambda: None, send=lambda message, to: None)

    def receive() -> list[tuple[int, object]]:
        raise DamagedError("a message of rank 1 has been lost", 1)

    plane.receive = receive
    report = Report(0, 5, Holding())
    mending = Mending(cast(Any, plane), lambda: report, lambda reports: decide(reports, 2), lambda: None, 10.0)
    with pytest.raises(LostError, match="though nobody has gone: a message of rank 1 has been lost"):
        mending.run()


@pytest.mark.parametrize("sent", [False, True])
def test_the_cap_that_a_rank_has_found_is_in_its_report(sent: bool) -> None:
    """The coordinator that it was told to may be gone."""
    made = communicator(_plane=SimpleNamespace(rank=0), _requested=[], **dict.fromkeys(REPORTED))
    engine = Engine.__new__(Engine)
    engine._shared = made._shared
    engine.report(CapFound(0, 22))
    if sent:
        assert made._pop_outbox() == [CapFound(0, 22)]
    assert [made._report().cap for _ in range(2)] == [22, 22]
    assert made._pop_outbox() == []


# What the main thread tells while others recover.


def main_thread_of(made: Communicator, **fields: Any) -> Engine:
    engine = Engine.__new__(Engine)
    options = EngineOptions(1, skips=True)
    vars(engine).update({"_shared": made._shared, "_plane": made._plane, "_options": options, **fields})
    return engine


def spoiled_gradients() -> Gradients:
    """Of a synchronous task that is computed."""
    model = torch.nn.Linear(1, 1)
    gradients = Gradients(model, 64, lambda fraction: None, lambda: None, skips=True)
    gradients.open_task()
    gradients.open_slice(1, last=True)
    (model(torch.ones(1)) * torch.nan).sum().backward()
    gradients.close_slice()
    return gradients


def test_nothing_is_told_of_a_spoiled_task_that_a_recovery_drops() -> None:
    """The machine that goes on knows of no such task."""
    sent: list[Event] = []
    gradients = spoiled_gradients()
    made = communicator(
        _plane=SimpleNamespace(rank=0, leads=False),
        _rounds=SimpleNamespace(gradients=gradients),
        _router=SimpleNamespace(begin_anew=lambda early: None, send_events=sent.extend),
        watchdog=SimpleNamespace(processes={}, excluded={}),
        _make_watchdog=SimpleNamespace,
        _requested=[],
        _on_dropped=lambda task: None,
        **dict.fromkeys([*REPORTED, "_tally", "_slow"]),
    )
    task = Task(0, (((0, 1),),), 0, 0, 0, synchronous_round=5, round_samples=2, share=1)
    made._shared.worker.assign(task)
    made._shared.worker.start_task()
    recovered = SimpleNamespace(decision=again(5)._replace(rest_again=False), adopted=None, early=[])

    def wait(_: object) -> None:
        made._go_on(cast(Any, recovered))

    made._report()
    engine = main_thread_of(made, _gradients=gradients, timer=MainThreadTimer(), _wait=wait)
    assert not engine.reduce(task)
    assert engine.is_void
    made.flush()
    assert sent == []


def test_an_evaluation_is_told_or_owed_whenever_a_recovery_asks() -> None:
    """A part that is neither in the report nor owed would be of no evaluation that the next machine knows."""
    made = communicator(_plane=SimpleNamespace(rank=0), _requested=[], **dict.fromkeys(REPORTED))
    shared, reports = made._shared, list[Report]()
    thread = threading.Thread(target=lambda: reports.append(made._report()))

    class Outbox(deque[Event]):
        """Another thread reports just before something is put in."""

        def append(self, event: Event) -> None:
            thread.start()
            thread.join(0.2)
            super().append(event)

    shared.outbox, shared.evaluating = Outbox(), 4
    main_thread_of(made).report(Evaluated(0, 4, {}))
    thread.join(10)
    assert (reports[0].evaluating, list(shared.outbox)) == (None, [])


# Who crawls.


class Watched:
    """A watchdog's exclusions."""

    def __init__(self) -> None:
        self.excluded: dict[int, str] = {}

    def exclude(self, rank: int, why: str) -> None:
        self.excluded[rank] = why


def crawling(ranks: int, task: Task, factor: float = 10.0) -> Communicator:
    """Whose ranks compute this task."""
    members = {rank: SimpleNamespace(current=SimpleNamespace(task=task)) for rank in range(ranks)}
    return communicator(
        _coordinator=SimpleNamespace(machine=SimpleNamespace(members=members)),
        _slow=SlowRanks(factor),
        _outlives_deaths=lambda: True,
        _plane=SimpleNamespace(members=tuple(range(ranks))),
        _options=EngineOptions(8),
        watchdog=Watched(),
    )


def task_of(slices: int) -> Task:
    return Task(0, tuple(((at, at + 1),) for at in range(slices)), 4, 0, 0)


def slow_down(made: Communicator, rank: int, task: Task) -> None:
    finished = TaskFinished(rank, task.number, task.samples, seconds=0.001 * len(task.slices))
    for _ in range(20):
        made._exclude_slow([finished])
    for _ in range(3):
        made._exclude_slow([finished._replace(seconds=100 * finished.seconds)])


def test_who_crawls_is_excluded_where_enough_are_left() -> None:
    task = task_of(2)
    many, two = crawling(5, task), crawling(2, task)
    slow_down(many, 1, task)
    slow_down(many, 2, task)
    assert set(many.watchdog.excluded) == {1, 2}
    slow_down(many, 3, task)
    slow_down(two, 1, task)
    assert set(many.watchdog.excluded) == {1, 2}, "two of five would end the job"
    assert not two.watchdog.excluded


def test_a_rank_whose_share_has_grown_does_not_crawl_until_it_is_slow() -> None:
    """Where speeds were not measured, shares move from equal ones to those by speed."""
    made = crawling(5, task_of(1), factor=3.0)
    assert made._coordinator is not None
    member = cast(Any, made._coordinator).machine.members[1]

    def compute(share: int, seconds_per_sample: float) -> None:
        member.current.task = Task(0, (((0, share),),), 4, 0, 0, share=share)
        made._exclude_slow([TaskFinished(1, 0, share, seconds=seconds_per_sample * share)])

    for share in [32] * 10 + [117] * 20:
        compute(share, 0.001)
    assert not made.watchdog.excluded
    for share in (117, 118, 119):
        compute(share, 0.004)
    assert set(made.watchdog.excluded) == {1}


def test_tasks_of_many_slices_whose_beginning_comes_with_their_end_are_not_slow() -> None:
    task = task_of(16)
    made = crawling(5, task)
    finished = TaskFinished(1, 0, 16, seconds=0.016)
    for _ in range(20):
        made._exclude_slow([finished])
    assert made._coordinator is not None
    cast(Any, made._coordinator).machine.members[1].current = None
    for _ in range(3):
        made._exclude_slow([TaskStarted(1, 0, 0), finished])
    assert not made.watchdog.excluded


# What the coordinator hears.


def test_the_coordinator_hears_at_once_what_several_ranks_have_told() -> None:
    """Or each message would be answered by itself, to each rank."""
    heard: list[list[TaskStarted]] = []
    made = communicator(
        _coordinator=SimpleNamespace(handle=heard.append),
        _slow=None,
        _heard={},
        _requested=[],
        watchdog=SimpleNamespace(heard=lambda ranks: None),
    )
    own, others = TaskStarted(0, 0, 0), [TaskStarted(rank, rank, 0) for rank in (1, 2)]
    made._shared.outbox.append(own)
    assert made._tell_coordinator([[event] for event in others]) == 3
    assert heard == [[*others, own]]
    assert set(made._heard) == {1, 2}
    assert not made._tell_coordinator([])
    assert len(heard) == 1


@pytest.mark.parametrize("delayed", [False, True])
def test_where_somebody_joins_the_other_mode_begins_with_the_buffers_that_travel_now(delayed: bool) -> None:
    """The newcomer has no list of that mode, and sums of other buffers would not fit together."""
    weights, buffers = [torch.zeros(2)], [torch.zeros(3), torch.zeros(1)]
    other = Deltas(weights, buffers=buffers)
    made = communicator(_rounds=SimpleNamespace(gradients=SimpleNamespace(tail=other.tail)))
    shared = made._shared
    shared.weights, shared.buffers = weights, buffers
    other.tail.travel = [0] if delayed else [1]
    if delayed:
        shared.delayed_mode().tail.travel = [1]  # type: ignore[union-attr]
    made._share_travel()
    assert other.tail.travel == [1]
    shared.deltas = None  # the other mode, and this one once more
    assert shared.delayed_mode().tail.travel == [1]  # type: ignore[union-attr]
