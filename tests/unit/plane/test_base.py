"""What every plane shares."""

from __future__ import annotations

from hetsync.plane.base import wait_limit
from hetsync.plane.local import LocalPlane
from hetsync.plane.some_ranks import SomeRanks


def test_rank_0_gives_up_first_as_it_knows_most_about_who_is_late() -> None:
    assert wait_limit(0, 10.0) == 10.0
    assert wait_limit(1, 10.0) == wait_limit(7, 10.0) == 15.0


class Told(LocalPlane):
    """To which ranks 0 to 3 have said something."""

    def receive(self) -> list[tuple[int, str]]:
        return [(rank, f"of {rank}") for rank in (3, 0, 2, 1)]


def test_what_others_say_to_some_ranks_is_put_aside() -> None:
    plane = SomeRanks(Told(), [2, 0])
    assert (plane.members, plane.size, plane.take_aside()) == ((0, 2), 2, [])
    assert plane.receive() == [(0, "of 0"), (2, "of 2")]
    assert plane.take_aside() == [(3, "of 3"), (1, "of 1")]
    assert plane.take_aside() == []
