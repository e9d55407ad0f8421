"""Marks of checkpoints: where batches end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetsync.sync.milestones import CALL, CHECKPOINT, Milestone, Rests, checkpoints_every, marks_every, rests_at


def ends_of_batches(batch: int, interval: int | None, total: int) -> list[int]:
    """By counting."""
    ends, position = [], 0
    while position < total:
        left = total - position if interval is None else interval - position % interval
        position += min(batch, left, total - position)
        ends.append(position)
    return ends


@given(
    samples=st.integers(1, 70),
    batch=st.integers(1, 40),
    interval=st.none() | st.integers(1, 100),
    total=st.integers(1, 400),
)
def test_checkpoints_are_at_the_first_ends_of_batches_at_or_after_their_marks(
    samples: int, batch: int, interval: int | None, total: int
) -> None:
    ends = ends_of_batches(batch, interval, total)
    due = {next(end for end in ends if end >= mark) for mark in range(samples, total, samples)}
    expected = sorted(due - {total})  # where the job rests anyway
    marks, found, position = checkpoints_every(samples, batch, interval, total), [], 0
    while (mark := marks(position)) is not None:
        assert all(marks(before) == mark for before in range(position, mark))  # from wherever one goes on
        found.append(mark)
        position = mark
    assert found == expected


def test_without_samples_there_are_none() -> None:
    assert checkpoints_every(None, 16, 410, 1000)(0) is None


def test_as_in_an_epoch_of_410_samples() -> None:
    marks, found, position = checkpoints_every(200, 16, 410, 820), [], 0
    while (mark := marks(position)) is not None:
        found.append(position := mark)
    assert found == [208, 400, 602, 810]


def test_a_rest_that_is_asked_for_twice_is_one() -> None:
    rests = Rests(rests_at(marks_every(100, 1000), CHECKPOINT, 1000), 0)
    rests.request(32, CALL)
    rests.request(32, CALL)  # by another rank, before all rest
    assert rests.next == Milestone(32, CALL)
    assert rests.requested == ()
    rests.advance(32)
    rests.request(100, CALL)  # all is handed out up to the checkpoint
    rests.request(100, CALL)
    assert (rests.next, rests.requested) == (Milestone(100, CHECKPOINT), (CALL,))


def test_a_rest_that_is_far_away_does_not_stand_for_one_that_is_asked_for() -> None:
    rests = Rests(rests_at(marks_every(100, 1000), CHECKPOINT, 1000), 0)
    rests.request(32, CHECKPOINT)
    assert rests.next == Milestone(32, CHECKPOINT)
