"""The coordinator: speeds, rebalancing, bad losses, and one message a rank in the order of the decisions."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from virtual import make_machine

from hetsync.balance.profile import StepTime
from hetsync.balance.speed_tracker import LEAST_OBSERVATIONS, SHIFT_TASKS, Speeds
from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError
from hetsync.sync.coordinator import (
    ANSWER_SECONDS,
    MOST_TASKS_HELD,
    Coordinator,
    as_messages,
    tasks_held,
)
from hetsync.sync.delay_guard import DelayGuard
from hetsync.sync.messages import (
    AssignTask,
    CapFound,
    Contributed,
    Evaluated,
    Holding,
    LoopCounts,
    RankLeft,
    RankWithdrew,
    RoundCompleted,
    Settings,
    SettingsChanged,
    StartRound,
    TaskFinished,
    TaskLeftOut,
    TaskSpoiled,
    TaskStarted,
    settings_of,
)
from hetsync.sync.recovery import Action, Books, Decision, Report, decide
from hetsync.sync.rounds_rule import GREATER_QUORUM, SETTLING_TASKS, WINDOW_TASKS, rule_for
from hetsync.sync.state_machine import LEAST_TASKS_HELD, RoundStateMachine
from hetsync.telemetry import Telemetry
from hetsync.train.telling import Telling


def speeds(*seconds_per_sample, fixed=0.0):
    return Speeds({rank: StepTime(fixed, seconds) for rank, seconds in enumerate(seconds_per_sample)})


# A coordinator whose messages go nowhere.


class Office:
    """A coordinator of two ranks, and what it has sent."""

    def __init__(self, shares=(8, 8), settings=None, rebalance=True, total=100_000, evaluate=None, **options):
        self.messages = []
        self.machine: RoundStateMachine = make_machine(
            list(shares), settings or Settings(8, 0.1), total, evaluate=evaluate
        )
        self.coordinator = Coordinator(
            self.machine,
            speeds(*[1.0] * len(shares)),
            as_messages(self.machine, lambda messages: self.messages.extend(messages.items())),
            rebalance=rebalance,
            **options,
        )
        self.coordinator.start()
        self.version = dict.fromkeys(range(len(shares)), 0)

    def work(self, rank, seconds_per_sample=1.0, loss_sum=0.0, rounds_part=0.0):
        """The rank does its next task; whatever rounds result are complete at once."""
        number, samples = self._next(rank)
        self.coordinator.handle([TaskStarted(rank, number, self.machine.version)])
        sent = len(self.messages)
        seconds = samples * seconds_per_sample
        self.coordinator.handle([TaskFinished(rank, number, samples, seconds, loss_sum, rounds_part * seconds)])
        for started in [i for to, message in self.messages[sent:] if to == min(self.machine.members) for i in message]:
            if isinstance(started, StartRound):
                self._complete(started)

    def _next(self, rank):
        task = self.machine.members[rank].queued[0].task
        return task.number, task.samples

    def next_samples(self, rank):
        return self._next(rank)[1]

    def _complete(self, started):
        for rank in started.contributors:
            self.coordinator.handle(
                [Contributed(rank, started.number, self.machine.members[rank].ready[-1].task.number)]
            )
        self.coordinator.handle([RoundCompleted(started.number)])

    @property
    def shares(self):
        return [member.share for member in self.machine.members.values()]


@pytest.mark.parametrize(("seconds", "tasks"), [(0.0, 16), (0.005, 16), (0.006, 13), (0.03, 2), (5.0, 2)])
def test_a_rank_alone_holds_as_many_tasks_as_take_a_moment(seconds, tasks):
    assert tasks_held(seconds, Settings(0), 1) == tasks_held(seconds, Settings(4, 1.0), 1) == tasks


@pytest.mark.parametrize(
    ("seconds", "bound", "tasks"),
    [
        (0.0, 99, 16),
        (0.0005, 99, 16),
        (0.001, 99, 9),
        (0.0021, 4, 5),
        (0.001, 4, 6),
        (0.0, 1, 3),
        (0.008, 4, 2),
        (9, 4, 2),
    ],
)
def test_what_a_rank_holds_in_delayed_mode_lasts_until_it_is_given_more(seconds, bound, tasks):
    """But what it cannot begin before a round lands would only be in the way of a rest."""
    assert tasks_held(seconds, Settings(bound, 0.25), 2) == tasks
    assert tasks in (16, bound + 2) or (tasks - 1) * seconds >= ANSWER_SECONDS


@pytest.mark.parametrize("settings", [Settings(0), Settings(4, 1.0)], ids=["in step", "in pace"])
def test_ranks_that_run_no_further_ahead_than_others_hold_the_next_task(settings):
    assert tasks_held(0.001, settings, 2) == LEAST_TASKS_HELD


def test_the_small_task_before_a_rest_is_no_measure_of_what_is_held():
    office = Office((8, 8), Settings(4, 0.25))
    for seconds, samples, held in [(0.002, 8, 5), (0.1, 8, 2), (0.0004, 2, 2)]:
        task = office.machine.members[0].queued[0].task
        started = TaskStarted(0, task.number, office.machine.version)
        office.coordinator.handle([started, TaskFinished(0, task.number, samples, seconds)])
        assert office.machine.tasks_held == held


@pytest.mark.parametrize(
    ("shares", "settings", "seconds", "held"),
    [
        ((8,), Settings(0), 0.001, MOST_TASKS_HELD),
        ((8,), Settings(4, 0.25), 0.001, MOST_TASKS_HELD),
        ((8, 8), Settings(0), 0.001, LEAST_TASKS_HELD),
        ((8, 8), Settings(4, 0.25), 0.1, LEAST_TASKS_HELD),
        ((8, 8), Settings(4, 0.25), 0.002, 5),
    ],
)
def test_ranks_hold_more_than_the_next_task_where_tasks_are_short(shares, settings, seconds, held):
    office = Office(shares, settings)
    machine = office.machine
    for rank, member in machine.members.items():
        task = member.queued[0].task
        office.coordinator.handle([TaskStarted(rank, task.number, 0), TaskFinished(rank, task.number, 8, seconds)])
    assert machine.tasks_held == held
    if settings.synchronous:
        office.coordinator.handle([RoundCompleted(0)])
    assert all(len(member.queued) == held for member in machine.members.values())


@pytest.mark.parametrize(("ratio", "moves"), [(1.0, False), (1.05, False), (1.3, True), (3.0, True)])
def test_shares_follow_speeds_only_where_it_pays(ratio, moves):
    """Two ranks of 8: at 5 % difference the best shares gain less than 5 %; at 30 % and more they gain more."""
    office = Office((40, 40))
    for _ in range(3 * LEAST_OBSERVATIONS):
        office.work(0)
        office.work(1, ratio)
    assert sum(office.shares) == 80
    assert (office.shares != [40, 40]) == moves
    if moves:
        assert office.shares[0] / office.shares[1] == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize(("cap", "shares"), [(None, [60, 20]), (50, [50, 30])])
def test_no_share_grows_beyond_a_cap_that_the_first_slices_have_shown(cap, shares):
    office = Office((40, 40))
    if cap is not None:
        office.coordinator.handle([CapFound(0, cap)])
    for _ in range(3 * LEAST_OBSERVATIONS):
        office.work(0)
        office.work(1, 3.0)
    assert office.shares == pytest.approx(shares, abs=1)
    assert cap is None or office.shares[0] <= cap


def test_a_gain_of_just_under_five_percent_is_let_be():
    for percent, moves in ((9, False), (12, True)):  # equal shares lose about half of the difference
        office = Office((400, 400))
        for _ in range(3 * LEAST_OBSERVATIONS):
            office.work(0)
            office.work(1, 1 + percent / 100)
        assert (office.shares != [400, 400]) == moves, percent


def test_a_jump_in_speed_moves_shares_after_three_tasks():
    office = Office((40, 40))
    for _ in range(3 * LEAST_OBSERVATIONS + 1):
        office.work(0)
        office.work(1)
    assert office.shares == [40, 40]
    for _ in range(SHIFT_TASKS):
        assert office.shares == [40, 40]
        office.work(0)
        office.work(1, 3.0)
    assert office.shares == [60, 20]


def test_shares_that_move_often_do_not_keep_the_rule_from_making_rounds_fewer():
    changes = []
    office = Office(
        settings=Settings(8, 0.25), rule=rule_for(SyncConfig(delay_bound=4, grace=0)), on_rounds_change=changes.append
    )
    tasks = SETTLING_TASKS + WINDOW_TASKS - 2  # of each rank, from one speed to the next
    moves, shares = 0, (8, 8)
    for turn in range(4):
        for _ in range(tasks):
            for rank in (0, 1):
                office.work(rank, 1.0 + (rank == turn % 2), rounds_part=0.2)
            before, shares = shares, tuple(member.share for member in office.machine.members.values())
            moves += shares != before
    assert moves >= 4
    assert [(change.quorum, change.work) for change in changes] == [(GREATER_QUORUM, pytest.approx(0.2))]


def test_a_rules_fragments_are_told_by_rounds():
    sync = SyncConfig(delay_bound=4, quorum=0.25, grace=0)
    office = Office(settings=settings_of(sync), rule=rule_for(sync))
    for _ in range(SETTLING_TASKS + WINDOW_TASKS + 2):
        for rank in (0, 1):
            office.work(rank, 1.0, rounds_part=0.5)
    assert office.machine.settings.fragments == office.coordinator.settings.fragments == 4
    starts = [told for to, message in office.messages if to == 0 for told in message if isinstance(told, StartRound)]
    assert [starts[0].fragments, starts[-1].fragments] == [2, 4]


def test_small_tasks_before_a_rest_tell_nothing_of_a_ranks_speed():
    office = Office((40, 40), total=4 * 80 + 60)
    small = 0
    while not office.machine.ended:
        rank = next(rank for rank in (0, 1) if office.machine.members[rank].queued)
        full = office.next_samples(rank) == 40
        small += not full
        office.work(rank, 1.0 if full else 9.0)
        if not any(member.queued for member in office.machine.members.values()):
            break
    assert small >= 2
    assert [time.seconds_per_sample for time in office.coordinator.speeds.times([0, 1])] == [1.0, 1.0]


def test_shares_stay_where_rebalancing_is_off():
    office = Office((40, 40), rebalance=False)
    for _ in range(3 * LEAST_OBSERVATIONS):
        office.work(0)
        office.work(1, 5.0)
    assert office.shares == [40, 40]


def test_no_share_moves_before_speeds_are_known():
    office = Office((40, 40))
    for _ in range(LEAST_OBSERVATIONS - 1):
        office.work(0)
        office.work(1, 5.0)
    assert office.shares == [40, 40]


def test_new_shares_reach_the_work_that_is_handed_out_next():
    office = Office((40, 40))
    for _ in range(3 * LEAST_OBSERVATIONS):
        office.work(0)
        office.work(1, 4.0)
    sizes = {to: i.task.samples for to, message in office.messages for i in message if isinstance(i, AssignTask)}
    assert sizes == dict(enumerate(office.shares)) == {0: 64, 1: 16}


# Losses.


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_names_the_rank_and_the_remedy(loss):
    office = Office()
    office.work(0, loss_sum=4.0)
    with pytest.raises(UserError, match=r"on rank 1 after \d+ samples: lower optimizer.learning_rate"):
        office.work(1, loss_sum=loss)


def test_the_loss_is_the_mean_over_samples_since_the_last_look():
    office = Office((12, 4))
    assert office.coordinator.take_loss() is None
    office.work(0, loss_sum=12.0)
    office.work(1, loss_sum=20.0)
    assert office.coordinator.take_loss() == pytest.approx(2.0)
    assert office.coordinator.take_loss() is None
    office.work(1, loss_sum=8.0)
    assert office.coordinator.take_loss() == pytest.approx(2.0)


def test_device_seconds_add_up_by_rank():
    office = Office((12, 4))
    for _ in range(3):
        office.work(0, 2.0)
        office.work(1, 0.5)
    assert dict(office.coordinator.device_seconds) == {0: 72.0, 1: 6.0}
    assert office.coordinator.device_rate() == 36 / 72.0 + 12 / 6.0


# Messages.


def test_every_rank_gets_one_letter_with_all_that_was_decided_in_order():
    office = Office((4, 4, 4), Settings(0, 1.0), total=16)
    assert [to for to, _ in office.messages] == [0, 1, 2]
    for rank, message in office.messages:
        assert [type(i) for i in message] == [AssignTask, StartRound, AssignTask, StartRound]
        assert all(i.rank == rank for i in message if isinstance(i, AssignTask))
        numbers = [i.task.synchronous_round if isinstance(i, AssignTask) else i.number for i in message]
        assert numbers == [0, 0, 1, 1]


def test_all_events_of_a_letter_are_answered_in_one():
    office = Office((4, 4))
    office.messages.clear()
    number, samples = office._next(0)
    after = office.machine.members[0].queued[1].task.number
    office.coordinator.handle(
        [TaskStarted(0, number, 0), TaskFinished(0, number, samples, 1.0), TaskStarted(0, after, 0)]
    )
    assert len({to for to, _ in office.messages}) == len(office.messages)
    to_first = dict(office.messages)[0]
    assert [type(i) for i in to_first] == [AssignTask, StartRound]


def test_what_is_left_out_is_in_the_books_of_whoever_leads_next():
    """Or samples that spoil gradients again would go out once more under each new first rank."""
    office = Office()
    sent: list[tuple[int, list[object]]] = []
    office.coordinator._deliver = as_messages(office.machine, lambda messages: sent.extend(messages.items()), (0, 1))
    task = office.machine.members[1].queued[0].task
    spans = task.slices[0]
    office.coordinator.handle([TaskStarted(1, task.number, 0), TaskSpoiled(1, task.number, spans)])
    left = TaskLeftOut(1, 0, task.samples, spans)
    assert office.coordinator.left_out == [left]
    told = {rank: [notice for notice in notices if isinstance(notice, TaskLeftOut)] for rank, notices in sent}
    assert told == {0: [left], 1: [left]}
    behind, books = (Books([office.machine.standing]) for _ in range(2))
    for rank, notices in sent:
        if rank == 1:
            books.follow(notices)
    reports = {rank: Report(rank, 0, Holding(), books=copy) for rank, copy in [(1, behind), (2, books)]}
    decision = decide(reports, 3)
    assert decision.books is not None
    assert decision.books.left_out == [left]
    next_one = Office((8, 8, 8), rebalance=False)
    next_one.coordinator._rebuild = lambda *_: (next_one.machine, lambda instructions: None)
    next_one.coordinator.go_on(decision, reports)
    assert next_one.coordinator.left_out == [left]


def test_a_change_of_mode_that_has_been_asked_for_is_known_after_a_death():
    """A rule, or a controller, would go on with the mode that the drain ends, and ask for that again."""
    asked = Settings(0, 1.0)
    machine = make_machine([8, 8], Settings(8, 0.1), 1000)
    machine.handle(SettingsChanged(asked))
    office = Office((8, 8, 8), rebalance=False)
    office.coordinator._rebuild = lambda *_: (machine, lambda instructions: None)
    reports = {rank: Report(rank, 0, Holding()) for rank in (1, 2)}
    office.coordinator.go_on(Decision(Action.GO_ON, 0, (1, 2), 1, books=Books([], [], 0)), reports)
    assert office.coordinator.settings == asked


def test_who_has_nothing_to_hear_gets_no_message():
    office = Office((4, 4))
    office.messages.clear()
    office.coordinator.handle([TaskStarted(0, office._next(0)[0], 0)])
    assert office.messages == []


# Members that leave.


@pytest.mark.parametrize("cap", [None, 22])
def test_whoever_leads_next_keeps_to_caps_that_others_have_found(cap):
    """Its machine has the shares of the job's beginning, and profiles know of no cap."""
    office = Office((20, 20, 20))
    sliced: list[dict[int, int]] = []

    def rebuild(decision, reports, shares):
        sliced.append(dict(shares))
        return make_machine(list(shares.values()), Settings(8, 0.1), 1000), lambda instructions: None

    office.coordinator._rebuild = rebuild
    reports = {1: Report(1, 0, Holding(), cap=cap), 2: Report(2, 0, Holding())}
    office.coordinator.go_on(Decision(Action.GO_ON, 0, (1, 2), 1, books=Books([], [], 0)), reports)
    assert sliced == [{1: 30, 2: 30} if cap is None else {1: 22, 2: 38}]


def capped_office(caps, pins):
    """Three ranks of equal shares that turn out to be of unequal speed."""
    office = Office((20, 20, 20))
    office.coordinator.speeds.caps = dict(enumerate(caps))
    office.coordinator.speeds.pins = pins
    return office


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_shares_keep_to_caps_and_pins_after_a_rank_has_left(gone):
    """The others keep their own caps and pins, by rank and not by place."""
    caps, pins = [None, 22, 30], {0: 20}
    office = capped_office(caps, pins)
    office.coordinator.handle([RankLeft(gone)])
    left = [rank for rank in range(3) if rank != gone]
    for _ in range(3 * LEAST_OBSERVATIONS):
        for rank, seconds in zip(left, (1.0, 3.0), strict=True):
            office.work(rank, seconds)
    shares = dict(zip(left, office.shares, strict=True))
    expected = {0: {1: 22, 2: 18}, 1: {0: 20, 2: 20}, 2: {0: 20, 1: 20}}
    assert shares == expected[gone]


def test_the_others_are_re_balanced_after_a_rank_has_withdrawn():
    """Before it was seen often enough: its speed decides nothing any more, and it gets no share."""
    office = capped_office([None, None, None], {})
    office.coordinator.handle([RankWithdrew(2)])
    for _ in range(3 * LEAST_OBSERVATIONS):
        for rank, seconds in zip((0, 1), (1.0, 3.0), strict=True):
            office.work(rank, seconds)
    fast, slow, gone = office.shares
    assert fast > 2 * slow > 0
    assert gone == 0


@pytest.mark.parametrize(
    ("caps", "pins", "expected"),
    [
        ([None] * 3, {}, [30, 30, 0]),
        ([25, None, None], {}, [25, 35, 0]),
        ([25, 25, None], {}, [25, 25, 0]),
        ([None] * 3, {0: 20}, [20, 40, 0]),
        ([None] * 3, {0: 20, 1: 20}, [20, 20, 0]),
    ],
)
def test_the_others_take_over_a_withdrawn_ranks_samples_of_each_batch(caps, pins, expected):
    office = Office((20, 20, 20), Settings(0, 1.0))
    office.coordinator.speeds.caps, office.coordinator.speeds.pins = dict(enumerate(caps)), pins
    office.coordinator.handle([RankWithdrew(2)])
    assert office.shares == expected


@pytest.mark.parametrize("pins", [{}, {1: 2}])
def test_ranks_that_had_no_samples_get_some_where_the_others_have_withdrawn(pins):
    """They are more than the samples that those who are left had."""
    office = Office((30, 2, 0, 0), Settings(2, 0.1))
    office.coordinator.speeds.pins = pins
    office.coordinator.handle([RankWithdrew(0)])
    office.coordinator.speeds._settled = {0, 1, 2, 3}
    office.coordinator._reconsider_from = 0
    office.coordinator.handle([])
    assert office.shares == [0, 2, 2, 2]


def test_a_cap_that_is_found_after_a_take_over_ends_no_job():
    office = Office((20, 20, 20), Settings(0, 1.0))
    office.coordinator.handle([RankWithdrew(2)])
    assert office.shares == [30, 30, 0]
    office.coordinator.handle([CapFound(0, 18), CapFound(1, 25)])
    office.coordinator.speeds._settled = {0, 1, 2}
    office.coordinator._reconsider_from = 0
    office.coordinator.handle([])
    assert office.shares == [18, 25, 0]


def test_all_ranks_take_part_in_each_batch_where_a_loop_counts_them():
    """A rank that has no part of a batch does not count it. Where slices are ranks' own, all have some anyway."""
    office = Office((16, 0, 16), Settings(0, 1.0))
    office.coordinator.handle([LoopCounts(0)])
    assert sum(office.shares) == 32
    assert min(office.shares) >= 2
    for rank in (0, 1, 2):  # slow as it may be found to be
        office.coordinator.speeds.presume(rank)
    office.coordinator._reconsider_from = 0
    office.coordinator.handle([LoopCounts(1)])
    assert min(office.shares) >= 2


def test_a_cap_that_is_found_while_training_limits_a_pin():
    office = Office((20, 20, 20))
    office.coordinator.speeds.pins = {1: 20}
    office.coordinator.handle([CapFound(1, 12)])
    assert office.coordinator.speeds.limits([0, 1, 2]) == ([None, 12, None], {1: 12})
    assert office.coordinator.speeds.limits([1, 2]) == ([12, None], {0: 12})


@pytest.mark.parametrize("settings", [Settings(0, 1.0), Settings(8, 0.1)])
def test_shares_that_are_fixed_stay_where_a_rank_has_withdrawn(settings):
    office = Office((20, 20, 20), settings, rebalance=settings.delay_bound > 0)
    office.coordinator.handle([RankWithdrew(2)])
    assert office.shares == [20, 20, 0]


# What other threads ask.


@pytest.fixture
def busy():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_the_loss_may_be_taken_while_a_rank_reports():
    """All samples have the same loss, so any mean of some of them is that."""
    office = Office((8, 8))
    taken = []

    class Interrupted(float):
        """Another thread looks while this is added."""

        def __radd__(self, other):
            taken.append(office.coordinator.take_loss())
            return other + float(self)

    office.work(0, loss_sum=16.0)
    office.work(1, loss_sum=Interrupted(16.0))
    taken.append(office.coordinator.take_loss())
    assert taken == [2.0, 2.0]


def test_the_display_can_be_told_while_rounds_land(busy):
    """New values of staleness come up all the time."""
    office, shown = Office((8, 8)), []
    session = SimpleNamespace(terms=SimpleNamespace(applied=0), seconds_training=lambda: 1.0)
    telling: Any = Telling(session, (), Telemetry(None), {}, 100, False)

    def count():
        while len(shown) < 100:
            office.machine.staleness.clear()
            for value in range(300):
                office.machine.staleness[value] += 1

    worker = threading.Thread(target=count)
    worker.start()
    try:
        for _ in range(100):
            shown.append(telling._moment(office.coordinator).staleness)
    finally:
        shown.extend([None] * 100)  # ends the other
        worker.join()


def test_settings_are_told_as_far_as_they_are_in_force():
    told = []
    telling: Any = Telling(SimpleNamespace(terms=SimpleNamespace(applied=0)), (), Telemetry(None), {}, 100, False)
    telling.say = told.append
    for settings in (Settings(4), Settings(4, 0.5, fragments=2, grace=1), Settings(2, 0.5, fragments=2, grace=1)):
        telling._tell_settings(settings)
    assert told == [
        "from now on accumulation 1, quorum 0.5, delay bound 4, grace 1, 2 fragments",
        "from now on accumulation 1, quorum 0.5, delay bound 2, 2 fragments",
    ]


def test_an_evaluation_is_told_though_the_next_one_begins_with_the_same_events():
    told = []
    office = Office(evaluate=16, on_evaluation=lambda evaluation: told.append(evaluation.round))
    snapshots = office.machine.snapshots
    while not snapshots.awaited:
        office.work(0)
        office.work(1)
    asked = office.machine.version - 1
    for _ in range(2):  # past the next mark, while both evaluate
        office.work(0)
        office.work(1)
    number, samples = office._next(0)
    office.coordinator.handle([Evaluated(0, asked, "rank 0's part"), TaskStarted(0, number, office.machine.version)])
    assert not told
    office.coordinator.handle([Evaluated(1, asked, "rank 1's part"), TaskFinished(0, number, samples, 1.0)])
    assert told == [asked]
    assert snapshots.awaited, "the next one has begun"


def test_one_more_rank_gets_its_part_of_the_batch():
    """By its profile, though the others had all of it."""
    office = Office(shares=(8, 8))
    office.coordinator._rebuild = lambda decision, reports, shares: (
        make_machine(list(shares.values()), Settings(8, 0.1), 1000),
        lambda instructions: None,
    )
    office.coordinator.speeds.join(2, StepTime(0.0, 2.0), None)
    reports = {rank: Report(rank, 0, Holding()) for rank in (0, 1, 2)}
    office.coordinator.go_on(Decision(Action.GO_ON, 0, (0, 1, 2), 0, books=Books([], [], 0)), reports)
    assert [member.share for member in office.coordinator.machine.members.values()] == [7, 6, 3]


@pytest.mark.parametrize(("later", "works"), [(1.0, True), (500.0, False)])
def test_nobody_idles_beside_a_quick_newcomer_for_having_been_slow(later, works):
    """After slow tasks, of ranks that waited for the newcomer, their smoothed speeds are far off for long."""
    office = Office(shares=(11, 11, 10), settings=Settings(0, 1.0))
    speeds = office.coordinator.speeds
    for ratio in [1.0] * 8 + [500.0] * 7 + [later] * LEAST_OBSERVATIONS:
        for rank in (0, 1):
            speeds.observe(rank, 11, 1, 11 * ratio)
    speeds.join(2, StepTime(0.0, 1.0), None)
    for _ in range(LEAST_OBSERVATIONS):
        speeds.observe(2, 10, 1, 10.0)
    office.coordinator._reconsider_from = 0
    office.coordinator.handle([])
    assert [share > 0 for share in office.shares] == [works, works, True]


def test_who_tunes_k_and_d_leaves_what_a_rule_has_found_besides():
    office = Office(settings=Settings(4, 0.25, fragments=2), rule=rule_for(SyncConfig(delay_bound=4)))
    office.coordinator.settings = replace(office.coordinator.settings, grace=1, fragments=4, wire="int8")
    office.coordinator.handle([SettingsChanged(Settings(8, 0.25, 2))])
    kept = Settings(8, 0.25, 2, fragments=4, grace=1, wire="int8")
    assert office.machine.settings == office.coordinator.settings == kept


def test_where_all_wait_slices_make_up_the_batch():
    office = Office(shares=(2, 2, 2), settings=Settings(4), batch=4)
    office.coordinator.handle([SettingsChanged(Settings(0, 1.0))])
    assert sorted(office.shares) == [0, 2, 2]
    office.coordinator.handle([SettingsChanged(Settings(4))])
    assert office.shares == [2, 2, 2]


def test_who_has_no_samples_is_looked_at_again_ever_more_rarely():
    """A rank that was slow for a while works again; a slow one is given few chances."""
    office = Office(shares=(6, 2), settings=Settings(4, 0.1))
    slow, joins = 40.0, []
    for _ in range(3000):
        for rank in (0, 1):
            if office.machine.members[rank].queued:
                office.work(rank, slow if rank else 1.0)
        if not joins or joins[-1][1] != office.shares[1]:
            joins.append((office.machine.version, office.shares[1]))
    aside = [version for version, share in joins if not share]
    assert len(aside) >= 3
    waits = [later - earlier for earlier, later in pairwise(aside)]
    assert all(later > 1.5 * earlier for earlier, later in pairwise(waits))
    slow = 1.0
    for _ in range(8000):
        for rank in (0, 1):
            if office.machine.members[rank].queued:
                office.work(rank)
    assert office.shares == [4, 4]


def test_where_delay_is_given_up_slices_make_up_the_batch_again():
    """With delay each rank has the least slice, together more than B; the slow one has none where all wait for it."""
    sync = SyncConfig(delay_bound="auto", quorum=0.25, grace=0, fragments=1)
    changes = []
    office = Office(
        (2, 2, 2),
        Settings(4, 0.25),
        batch=4,
        rule=rule_for(sync),
        guard=DelayGuard(4),
        on_rounds_change=changes.append,
    )
    office.work(0, loss_sum=math.nan)
    assert [lost.rank for lost in office.coordinator.lost] == [0]
    assert [change.delay_bound for change in changes] == [0]
    assert office.coordinator.settings.synchronous
    assert sum(member.share for member in office.machine.members.values()) == 4
    assert office.machine.rests.going_back
    office.work(1, loss_sum=math.nan)
    assert len(office.coordinator.lost) == 1, "all ranks tell of it, once is enough"
