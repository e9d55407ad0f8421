"""At a rest, after ranks have died: places among the members are no numbers of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import pytest
import torch
from torch import nn

from hetsync.plane.base import Plane
from hetsync.sync.agreement import Agreement, _greatest_difference

CPU = torch.device("cpu")


class Room:
    """Where these members gather what they tell."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members, self._told = members, dict[int, Any]()
        self._barrier = Barrier(len(members), timeout=10)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait()
        told = [self._told[member] for member in self.members]
        self._barrier.wait()
        return told


class Seat:
    """A plane, as an agreement asks it."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.members, self._room = rank, room.members, room

    @property
    def leads(self) -> bool:
        return self.rank == self.members[0]

    def gather_objects(self, value: Any) -> list[Any]:
        return self._room.gather(self.rank, value)


@pytest.mark.parametrize("members", [(0, 1, 2), (1, 2, 3), (0, 2, 5)])
@pytest.mark.parametrize("stepped", [0, 1, 2])
def test_all_take_over_the_weights_of_who_has_stepped(members: tuple[int, ...], stepped: int) -> None:
    room = Room(members)

    def weights_after(place: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 10.0 if place == stepped else 1.0)
        agreement = Agreement(cast(Plane, Seat(room, members[place])), model, [])
        agreement.take_over(agreement.values(None, ()), [stepped], CPU, 3)
        return model.weight.item()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(weights_after, range(3))) == [10.0] * 3


def test_imaginary_parts_differ_too() -> None:
    mine, theirs = ({"weight": torch.complex(torch.ones(3), torch.full((3,), part))} for part in (1.0, 1.5))
    assert _greatest_difference(mine, theirs) == pytest.approx(0.5 / 1.5)
