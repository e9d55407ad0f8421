"""Meetings of ranks of which one dies: they come to their end once, and to the same on all who are left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from hetsync.errors import UserError
from hetsync.plane.base import MembersLost
from hetsync.train.meetings import Meetings


class Room:
    """Where ranks meet; `lost` have gone."""

    def __init__(self, ranks: int) -> None:
        self.members = tuple(range(ranks))
        self.unheard: set[int] = set()  # ranks that a death keeps from hearing what the next meeting came to
        self.times_changed = 0
        self._come(self.members)

    def _come(self, members: tuple[int, ...]) -> None:
        self.members, self._values = members, dict[int, Any]()
        self._all_here, self._all_heard = Barrier(len(members)), Barrier(len(members))

    def lose(self, rank: int) -> None:
        self.change(tuple(one for one in self.members if one != rank))

    def change(self, members: tuple[int, ...]) -> None:
        self.times_changed += 1
        self._come(members)

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._all_here.wait(10)
        told = [self._values[member] for member in self.members]
        self._all_heard.wait(10)
        if rank in self.unheard:
            raise MembersLost("rank 2 has gone")
        return told


class Seat:
    """One rank's plane."""

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self.rank = room, rank
        self._changed_before = room.times_changed  # this plane knows of no change before it was made

    @property
    def times_mended(self) -> int:
        return self._room.times_changed - self._changed_before

    @property
    def members(self) -> tuple[int, ...]:
        return self._room.members

    def gather_objects(self, value: Any) -> list[Any]:
        return self._room.meet(self.rank, value)


def all_hold(meetings: list[Meetings], *whats: str) -> list[Any]:
    """What each has heard, or how it failed."""

    def hold(rank: int) -> Any:
        try:
            return [meetings[rank].hold(what, f"{what} {rank}") for what in whats]
        except (MembersLost, UserError) as failure:
            return failure

    with ThreadPoolExecutor(len(meetings)) as threads:
        return list(threads.map(hold, range(len(meetings))))


def test_who_has_not_heard_takes_over_what_the_others_have() -> None:
    room = Room(3)
    meetings = [Meetings(Seat(room, rank)) for rank in range(3)]  # type: ignore[arg-type]
    assert all_hold(meetings, "first") == [[["first 0", "first 1", "first 2"]]] * 3
    room.unheard = {1}
    heard, lost, _ = all_hold(meetings, "second")
    assert heard == [["second 0", "second 1", "second 2"]]
    assert isinstance(lost, MembersLost)
    room.unheard = set()
    room.lose(2)

    def go_on(rank: int) -> Any:
        missed = [meetings[1].hold("second", "second 1, once more")] if rank else []
        return [*missed, meetings[rank].hold("third", f"third {rank}")]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(go_on, range(2))
    assert first == [["third 0", "third 1"]]
    assert second == [["second 0", "second 1", "second 2"], ["third 0", "third 1"]]


def test_a_meeting_that_nobody_has_heard_is_held_once_more() -> None:
    room = Room(3)
    meetings = [Meetings(Seat(room, rank)) for rank in range(3)]  # type: ignore[arg-type]
    room.unheard = {0, 1, 2}
    assert all(isinstance(lost, MembersLost) for lost in all_hold(meetings, "first"))
    room.unheard = set()
    room.lose(2)
    assert all_hold(meetings[:2], "first") == [[["first 0", "first 1"]]] * 2


@pytest.mark.parametrize("mistaken", [0, 1])
def test_ranks_at_different_calls_are_told(mistaken: int) -> None:
    room = Room(2)
    meetings = [Meetings(Seat(room, rank)) for rank in range(2)]  # type: ignore[arg-type]

    def hold(rank: int) -> Any:
        with pytest.raises(UserError, match="rank 1 came to"):
            meetings[rank].hold("one" if rank == mistaken else "other", None)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(hold, range(2)))


@pytest.mark.parametrize("before", [2, 3])
def test_who_joins_meets_the_others_at_their_next_meeting(before: int) -> None:
    """What they have come to before is not for it; where one with its number has died, members look as they did."""
    room = Room(before)
    meetings = [Meetings(Seat(room, rank)) for rank in range(before)]  # type: ignore[arg-type]
    all_hold(meetings, "first", "second")
    room.change((0, 1, 2))
    joined = Meetings(Seat(room, 2), held=meetings[0].held)  # type: ignore[arg-type]
    assert all_hold([*meetings[:2], joined], "third") == [[["third 0", "third 1", "third 2"]]] * 3
