"""Laws of a recovery, with any deaths at any step and messages in any order.

`mortal.py` plays the ranks and checks that no sample is lost or counted twice, that anchors and weights are one, that
no task is applied too late, that each rest and each evaluation takes place, and that every job ends.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mortal import Job, World

from hetsync.sync.lost_books import Tally, begun_anew
from hetsync.sync.messages import (
    NO_BOUND,
    AssignTask,
    CapFound,
    DrainRequested,
    HeldTask,
    Holding,
    Settings,
    SharesChanged,
    Standing,
    StartRound,
    Task,
    TaskFinished,
)
from hetsync.sync.milestones import CHECKPOINT, ROLLBACK, STOP, TOO_FEW, Milestone, marks_every, no_marks, rests_at
from hetsync.sync.recovery import (
    Action,
    Agreed,
    Books,
    CatchUp,
    GoOn,
    LandedRound,
    Ready,
    Recovery,
    Report,
    Send,
    decide,
    keepers,
    rebuilt,
    still_to_tell,
    too_few,
    unseen,
)

EXAMPLES = int(os.environ.get("HETSYNC_RECOVERY_EXAMPLES", "150"))
many = hypothesis_settings(max_examples=EXAMPLES, deadline=None)

bounds = st.sampled_from([1, 1, 2, 4, NO_BOUND])
delayed = st.builds(
    Settings, bounds, st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.0]), st.integers(1, 2), grace=st.integers(0, 1)
)
delayed_by_one = Settings(1, 0.1, 1)
synchronous = st.builds(Settings, st.just(0), st.just(1.0), st.integers(1, 2))


def jobs(settings, **others):
    shares = st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=7))
    return st.builds(
        Job,
        shares=shares.map(lambda drawn: (drawn[0], *drawn[1])),
        settings=settings,
        total=st.integers(1, 200),
        rest_every=st.none() | st.integers(5, 80),
        evaluate_every=st.none() | st.integers(5, 80),
        deaths=st.integers(1, 7),
        death_chance=st.sampled_from([0.003, 0.01, 0.05]),
        death_in_recovery=st.sampled_from([0.0, 0.02, 0.1]),
        seed=st.integers(0, 2**32),
        **others,
    )


@hypothesis_settings(max_examples=EXAMPLES // 3, deadline=None)
@given(jobs(delayed, spoils=st.sampled_from([0.05, 0.3])))
def test_tasks_that_are_left_out_go_out_again_whoever_dies(job):
    """Who keeps the books sees samples of rounds only: no left-out task may be taken for one that is in."""
    World(job).run()


@many
@given(jobs(delayed | synchronous, goes_back=st.just(True), changes=st.sampled_from([0.0, 0.02])))
def test_where_no_books_are_left_all_go_back_to_one_checkpoint(job):
    """And end with each sample once, whoever dies on the way there."""
    World(job).run()


@many
@given(jobs(delayed))
def test_whoever_dies_delayed_jobs_end_with_each_sample_once(job):
    World(job).run()


@many
@given(jobs(synchronous))
def test_synchronous_rounds_hold_the_same_batches_whoever_dies(job):
    world, undisturbed = World(job), World(replace(job, deaths=0))
    world.run()
    undisturbed.run()
    expected = undisturbed.batches()
    assert world.batches() == (expected[: len(world.batches())] if world.lost else expected)


@many
@given(
    jobs(
        delayed | synchronous,
        withdrawals=st.sampled_from([0.0, 0.3]),
        changes=st.sampled_from([0.02, 0.1]),
        least_ranks=st.sampled_from([None, 1, 3]),
    )
)
def test_loops_left_early_other_settings_and_an_end_for_too_few(job):
    World(job).run()


# One rule each.

rests = rests_at(marks_every(50, 100), CHECKPOINT, 100)


def standing(version=3, settings=delayed_by_one, **others):
    return Standing(version, settings, rests(0), **others)


def task(number, *span):
    return Task(number, ((span,),), 1, 0, 0, share=4)


def landed(number=2, **start):
    return LandedRound(StartRound(number, frozenset(), 0, **start), {})


def report(rank, version=3, holding=None, **others):
    return Report(rank, version, holding or Holding(), landed(version - 1), **others)


def going_on(*reports, shares=None):
    by_rank = {one.rank: one for one in reports}
    decision = decide(by_rank, len(reports))
    return rebuilt(decision, by_rank, shares or dict.fromkeys(by_rank, 4), 100, rests, no_marks)


def test_a_round_waits_for_whoever_began_before_the_newest():
    """D = 1: what rank 1 computes, from version 2, must be in round 3."""
    books = Books([standing()], [(0, 20)], version=3)
    ready, late = Holding((HeldTask(task(7, 20, 24), 3),)), Holding(current=HeldTask(task(8, 24, 28), 2))
    machine = going_on(report(0, holding=ready, books=books), report(1, holding=late), shares={0: 8, 1: 0})
    assert not [one for one in machine.first_instructions() if isinstance(one, StartRound)]
    (start,) = [one for one in machine.handle(TaskFinished(1, 8, 4)) if isinstance(one, StartRound)]
    assert start.number == 3
    assert start.contributors == {0, 1}


def test_books_of_a_later_attempt_hold():
    """Another went on after the first, and has asked for a rest since."""
    before = Books([standing()], [(0, 20)], version=3, next_task=4)
    after = Books([standing(requested=(STOP,))], [(0, 20)], version=3, next_task=9, attempt=1)
    for first, second in ((before, after), (after, before)):
        machine = going_on(report(0, books=first), report(1, books=second))
        assert machine.rests.requested == (STOP,)
        assert min(one.task.number for one in machine.first_instructions() if isinstance(one, AssignTask)) == 9


def test_who_has_left_its_loop_gets_no_work_again():
    books = Books([standing()], [(0, 20)], version=3)
    machine = going_on(report(0, books=books), report(1, holding=Holding(withdrawn=True)), shares={0: 8, 1: 0})
    given = [*machine.first_instructions(), *machine.handle(SharesChanged({0: 4, 1: 4}))]
    assert {one.rank for one in given if isinstance(one, AssignTask)} == {0}
    assert machine.members[1].withdrawn


def test_a_rest_that_all_have_come_out_of_is_over_even_if_the_books_do_not_know():
    books = Books([standing(version=2)], [(0, 50)], version=3)
    drain = landed(drain=CHECKPOINT)
    reports = [report(rank, books=books)._replace(newest=drain) for rank in (0, 1)]
    assert going_on(*reports).rests.next == Milestone(100, "end", final=True)
    again = going_on(*(one._replace(at_rest=True) for one in reports))
    assert again.rests.next == Milestone(50, CHECKPOINT)
    (start,) = again.first_instructions()
    assert start.drain == CHECKPOINT


def test_without_books_all_go_back():
    assert decide({3: report(3), 4: report(4)}, 3).action is Action.GO_BACK


def test_books_that_are_made_up_hold_as_many_samples_and_what_is_held():
    """Of which nothing goes out before all have gone back."""
    tally = Tally(delayed_by_one, no_marks, 20, {0: 12, 3: 8})
    reports = {3: report(3, holding=Holding((HeldTask(task(7, 4, 8), 3),))), 4: report(4)}
    decision = begun_anew(decide(reports, 5, least_ranks=1), reports, tally)
    assert decision.action is Action.GO_BACK
    assert decision.books.lost_at == decision.version == 3
    machine = rebuilt(decision, reports, {3: 4, 4: 4}, 100, rests, no_marks)
    assert (machine.ledger.applied, machine.ledger.outstanding()) == (20, 4)
    assert machine.samples_by_rank == {0: 12, 3: 8}
    (start,) = machine.first_instructions()
    assert (start.drain, start.contributors) == (ROLLBACK, {3})


def test_at_a_rest_that_begins_anew_lost_books_are_known():
    reports = {rank: report(rank, at_rest=True)._replace(newest=landed(drain=CHECKPOINT)) for rank in (3, 4)}
    tally = Tally(delayed_by_one, marks_every(30, 100), 50)
    decision = begun_anew(decide(reports, 5, least_ranks=1), reports, tally)
    assert (decision.action, decision.books.lost_at, decision.books.applied) == (Action.GO_ON, None, [(0, 50)])
    machine = rebuilt(decision, reports, {3: 4, 4: 4}, 100, rests, marks_every(30, 100))
    assert machine.rests.next == Milestone(50, CHECKPOINT)
    assert machine.snapshots.next == 60


def test_where_some_have_gone_back_no_other_rest_is_asked_for():
    """The machine had gone on from 0, and the books that are left still tell of 70."""
    told = standing()._replace(rest=Milestone(50, CHECKPOINT))
    books = Books([told], [(0, 70)], version=3)
    machine = going_on(report(0, books=books, at_rest=True)._replace(newest=landed(drain=ROLLBACK)))
    assert machine.rests.next == Milestone(70, ROLLBACK)
    assert machine.rests.requested == ()


def test_too_few_survivors_save_and_end():
    assert too_few(3, 4, None) is None
    assert too_few(1, 4, 1) is None
    assert too_few(2, 4, None) == (
        "2 of 4 ranks are left, and more than half of 4 must be: the job ends; go on with --resume (in a script:"
        " resume='auto')"
    )
    books = Books([standing()], [(0, 20)], version=3)
    reports = {0: report(0, books=books), 1: report(1)}
    assert decide(reports, 4).action is Action.END
    assert decide(reports, 4, least_ranks=2).action is Action.GO_ON


def test_who_is_cut_off_from_enough_to_go_on_writes_nothing():
    """They may live, and write the same run's checkpoints."""
    hosts = {0: "one", 1: "one", 2: "two", 3: "two", 4: "two"}
    reports = {rank: report(rank, books=Books([standing()], version=3)) for rank in range(5)}

    def action(*survivors, of=range(5), least=None):
        apart = unseen(of, survivors, hosts)
        return decide({rank: reports[rank] for rank in survivors}, len(of), least, len(apart)).action

    assert action(0, 1) is Action.GIVE_WAY
    assert action(2, 3, 4) is Action.GO_ON
    assert action(0, 2) is Action.END, "the others' hosts are reached: they have died"
    assert action(0, 1, of=range(4)) is action(2, 3, of=range(4)) is Action.END, "neither is enough"
    assert action(0, 1, least=4) is Action.END
    assert action(0, 1, least=3) is Action.GIVE_WAY
    assert unseen(range(5), (0, 1), {}) == (), "where hosts are not known yet"


def test_who_was_about_to_end_saves_whoever_goes_besides():
    reports = {0: report(0, books=Books([standing()], version=3), requested=(TOO_FEW,))}
    assert decide(reports, 4, unseen_ranks=3).action is Action.END


def test_nobody_goes_on_before_all_are_ready():
    """Rank 2, behind, catches up from rank 1, the lowest, which decides."""
    books = Books([standing()], [(0, 20)], version=3)
    recoveries = {
        rank: Recovery(report(rank, 2 if rank == 2 else 3, books=books), [1, 2], lambda reports: decide(reports, 3))
        for rank in (1, 2)
    }
    assert recoveries[1].begin() == []
    (told,) = recoveries[2].begin()
    assert told == Send(1, recoveries[2]._report)
    sent, gives = recoveries[1].handle(told.message)
    assert gives == CatchUp(1, (2,))
    assert recoveries[2].handle(sent.message) == [CatchUp(1, (2,))]
    assert recoveries[2].caught_up() == [Send(1, Ready(2))]
    agreed, on = recoveries[1].handle(Ready(2))
    assert agreed == Send(2, Agreed())
    assert isinstance(on, GoOn)
    assert recoveries[2].handle(Agreed()) == [GoOn(sent.message)]


def test_keepers_are_the_first_ranks():
    """In their order: who has joined in the place of a dead one comes last, whatever its number."""
    assert keepers((2, 4, 7, 9)) == (2, 4, 7)
    assert keepers((1, 2, 3, 0)) == (1, 2, 3)


def test_a_report_says_what_was_not_sent():
    assert still_to_tell([TaskFinished(0, 3, 4), DrainRequested(STOP), CapFound(0, 22)]) == []


def test_what_was_asked_for_is_not_forgotten():
    """By a survivor, by a controller, and for the time after a rest that begins anew."""
    books = Books([standing(pending=Settings(0))], [(0, 20)], version=3)
    machine = going_on(report(0, books=books), report(1, requested=(STOP,)))
    assert machine.rests.next == Milestone(20, STOP)
    assert machine.standing.pending == Settings(0)
    after = Books([standing()._replace(rest=Milestone(50, STOP))], [(0, 50)], version=3)
    machine = going_on(report(0, books=after, at_rest=True)._replace(newest=landed(drain=CHECKPOINT)))
    assert machine.rests.next == Milestone(50, CHECKPOINT)
    assert machine.rests.requested == (STOP,)


def test_who_was_to_go_back_again_still_is():
    """All have gone back once, and the next samples have spoiled a task before any round: no rest is over by that."""
    told = standing()._replace(rest=Milestone(20, ROLLBACK))
    books = Books([told], [(0, 20)], version=3)
    back = landed(drain=ROLLBACK)
    assert going_on(report(0, books=books)._replace(newest=back)).rests.next == Milestone(20, ROLLBACK)
    books = Books([told._replace(goes_back=True)], [(0, 20)], version=3)
    assert going_on(report(0, books=books)._replace(newest=back)).rests.next == Milestone(50, CHECKPOINT)


def test_at_a_quorum_of_one_nobody_counts_as_ahead_by_an_older_bound():
    """D was lowered while the rank had four tasks that no round has taken: the round after them would wait for its next
    task, and that for three rounds."""
    books = Books([standing(settings=Settings(1, 1.0, 1))], [(0, 20)], version=3)
    held = [HeldTask(task(number, at, at + 4)._replace(delay_bound=9), 3) for number, at in enumerate(range(20, 36, 4))]
    machine = going_on(report(0, holding=Holding(tuple(held)), books=books))
    assert max(one.task.not_before for one in machine.first_instructions() if isinstance(one, AssignTask)) <= 4


def test_who_joins_at_a_rest_is_agreed_on_without_another_rest():
    """It has landed what all have, holds nothing, and comes last, though its number is the lowest."""
    drained = LandedRound(StartRound(4, frozenset(), 50, True, "a rank joins", False), {})
    books = Books([standing(version=5)], [(0, 50)], 5)
    reports = {rank: Report(rank, 5, Holding(), drained, at_rest=True, books=books) for rank in (1, 2)}
    reports[0] = Report(0, 5, Holding())
    decision = decide(reports, 2)
    assert decision.survivors == (1, 2, 0)
    assert (decision.action, decision.version, decision.behind, decision.donor) == (Action.GO_ON, 5, (), 1)
    assert not decision.rest_again
    recovery = Recovery(reports[1], decision.survivors, lambda told: decide(told, 2))
    recovery.begin()
    recovery.handle(reports[0])
    recovery.handle(reports[2])
    assert list(recovery.reports) == [1, 2, 0]
