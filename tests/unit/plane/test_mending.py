"""Planes around a plane, and sums under way, when a rank dies: played, without MPI."""

from __future__ import annotations

import pytest
import torch

from hetsync.emulation.link import EmulatedLink
from hetsync.plane.base import LostError, MembersLost, Messages, Plane, PlaneError, Sums
from hetsync.plane.faulty import FaultyPlane
from hetsync.plane.local import LocalMessages, LocalPlane, LocalSums
from hetsync.plane.polled import Lane, PolledSums, Post

FEW = torch.ones(3)


class PlayedMessages(LocalMessages):
    """Of rank 0 of 3, whose last dies before they are mended."""

    members = (0, 1, 2)
    tolerant = True

    def mend(self) -> None:
        self.members = (0, 1)


class PlayedLane(Lane):
    """Of a library that says at each look, until it is renewed, that a member has died."""

    def __init__(self, dead: bool = True) -> None:
        super().__init__()
        self.dead = dead

    def sum_in_place(self, values: torch.Tensor) -> Post:
        def test() -> bool:
            if self.dead:
                raise MembersLost("rank 2 has gone")
            return True

        return lambda: test

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        raise NotImplementedError

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        raise NotImplementedError


class PlayedSums(PolledSums):
    tolerant = True

    def __init__(self, size: int, dead: bool) -> None:
        lane = PlayedLane(dead)
        super().__init__("a play", 0, size, lane, lane)

    def among(self, messages: Messages) -> Sums:
        return PlayedSums(messages.size, dead=False)


def played_plane() -> Plane:
    return Plane(PlayedMessages(), PlayedSums(3, dead=True))


@pytest.mark.parametrize(
    "around", [lambda plane: plane, lambda plane: FaultyPlane(plane, ()), lambda plane: EmulatedLink(plane, 0, 1e9)]
)
def test_every_plane_sums_among_those_who_are_left(around) -> None:  # type: ignore[no-untyped-def]
    plane = around(played_plane())
    assert (plane.tolerant, plane.size) == (True, 3)
    for _ in range(2):  # also what comes after the first failure
        with pytest.raises(MembersLost, match="rank 2 has gone"):
            plane.allreduce(FEW.clone()).done()
    plane.mend()
    assert not plane.failed
    assert (plane.rank, plane.members, plane.size) == (0, (0, 1), 2)
    assert plane.allreduce(FEW.clone()).done()
    plane.close()


def test_a_plane_goes_on_only_where_messages_and_sums_do() -> None:
    plane = Plane(PlayedMessages(), LocalSums())
    assert not plane.tolerant
    with pytest.raises(LostError, match="sums by this process alone do not go on after a rank has gone"):
        plane.mend()
    assert not LocalPlane().tolerant
    with pytest.raises(LostError, match="messages by this process alone do not go on"):
        LocalPlane().mend()


class GrowingMessages(PlayedMessages):
    """Of rank 0 of 2, whom another joins in the place of rank 1."""

    members = (0, 2)

    def admit(self, rank: int, address: str) -> None:
        self.members = (*self.members, rank)


@pytest.mark.parametrize(
    "around", [lambda plane: plane, lambda plane: FaultyPlane(plane, ()), lambda plane: EmulatedLink(plane, 0, 1e9)]
)
def test_every_plane_sums_with_one_that_joins(around) -> None:  # type: ignore[no-untyped-def]
    plane = around(Plane(GrowingMessages(), PlayedSums(2, dead=False)))
    plane.admit(1, "there")
    assert (plane.members, plane.size, plane.leads) == ((0, 2, 1), 3, True)
    assert plane.allreduce(FEW.clone()).done()


def test_a_plane_without_others_admits_nobody() -> None:
    assert not LocalPlane().replaces
    with pytest.raises(PlaneError, match="messages by this process alone cannot be joined"):
        LocalPlane().summon(1, None)
