"""At a rest, after ranks have died: places among the members are no numbers of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hetsync.plane.base import Plane
from hetsync.sync import agreement, digests
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
        self.sent = 0  # bytes of tensors

    @property
    def leads(self) -> bool:
        return self.rank == self.members[0]

    def gather_objects(self, value: Any) -> list[Any]:
        self.sent += bytes_of(value)
        return self._room.gather(self.rank, value)

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]


def bytes_of(value: Any) -> int:
    """Of the tensors in it."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("members", [(0, 1, 2), (1, 2, 3), (0, 2, 5)])
@pytest.mark.parametrize("stepped", [0, 1, 2])
def test_all_take_over_the_weights_of_who_has_stepped(members: tuple[int, ...], stepped: int) -> None:
    room = Room(members)

    def weights_after(place: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 10.0 if place == stepped else 1.0)
        agreement = Agreement(cast(Plane, Seat(room, members[place])), model, [])
        agreement.take_over(agreement.values(None), [stepped], CPU, 3)
        return model.weight.item()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(weights_after, range(3))) == [10.0] * 3


class Adapted(nn.Module):
    """A frozen base of 400 bytes, and 24 that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(10, 10), requires_grad=False)
        self.adapter, self.head = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))


def test_only_what_differs_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    members = (0, 1)
    room, kinds = Room(members), iter("ab")
    monkeypatch.setattr(agreement, "processor", lambda device: next(kinds))

    def reached(rank: int) -> tuple[float, int, bool]:
        model, seat = Adapted(), Seat(room, rank)
        with torch.no_grad():
            model.adapter[2] += rank * 1e-6
        one = Agreement(cast(Plane, seat), model, [])
        taken = one.reach(one.values(None), CPU, 3)
        return model.adapter[2].item(), seat.sent, taken

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(reached, members)) == [(1.0, 16, True), (1.0, 0, True)]


def test_a_frozen_base_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = digests.weights_sha256
    monkeypatch.setattr(digests, "weights_sha256", lambda given: hashed.append(bytes_of(given)) or real(given))
    room = Room((0, 1))

    def rest_thrice(rank: int) -> None:
        model = Adapted()
        one = Agreement(cast(Plane, Seat(room, rank)), model, [])
        for _ in range(3):
            one.reach(one.values(None), CPU, 3)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rest_thrice, room.members))
    assert sorted(hashed) == 6 * [8] + 6 * [16] + 2 * [400]


def test_a_rank_alone_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(digests, "weights_sha256")
    one = Agreement(cast(Plane, Seat(Room((0,)), 0)), Adapted(), [])
    assert not one.reach(one.values(None), CPU, 3)


def test_imaginary_parts_differ_too() -> None:
    mine, theirs = ({"weight": torch.complex(torch.ones(3), torch.full((3,), part))} for part in (1.0, 1.5))
    assert _greatest_difference(mine, theirs) == pytest.approx(0.5 / 1.5)
