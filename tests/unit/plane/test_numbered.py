"""Messages with numbers: what is lost on its way is noticed, and begins anew with a mended plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hetsync.plane.base import DamagedError, Plane
from hetsync.plane.local import LocalMessages, LocalSums
from hetsync.plane.numbered import NumberedPlane


class Wire(LocalMessages):
    """What is sent to rank 0 arrives as if from rank 1."""

    members = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Any] = []

    def send(self, message: Any, to: int) -> None:
        self.under_way.append(message)

    def receive(self) -> Sequence[tuple[int, Any]]:
        arrived, self.under_way = self.under_way, []
        return [(1, message) for message in arrived]

    def mend(self) -> None:
        self.under_way = []


class WireSums(LocalSums):
    def among(self, messages: Any) -> WireSums:
        return self


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def plane(wire: Wire) -> NumberedPlane:
    return NumberedPlane(Plane(wire, WireSums()))


def test_messages_are_what_they_were(plane: NumberedPlane) -> None:
    for message in ("one", "two"):
        plane.send(message, 0)
    assert plane.receive() == [(1, "one"), (1, "two")]
    plane.send("three", 0)
    assert plane.receive() == [(1, "three")]


def test_one_that_is_lost_is_noticed_with_the_next(plane: NumberedPlane, wire: Wire) -> None:
    for message in ("one", "two", "three"):
        plane.send(message, 0)
    del wire.under_way[1]
    with pytest.raises(DamagedError, match="a message of rank 1 has been lost") as noticed:
        plane.receive()
    assert noticed.value.sender == 1


def test_a_mended_plane_counts_anew(plane: NumberedPlane, wire: Wire) -> None:
    plane.send("lost", 0)
    plane.mend()
    assert plane.times_mended == 1
    plane.send("first", 0)
    assert plane.receive() == [(1, "first")]
