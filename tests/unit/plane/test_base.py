"""What every plane shares."""

from __future__ import annotations

from hetsync.plane.base import wait_limit


def test_rank_0_gives_up_first_as_it_knows_most_about_who_is_late() -> None:
    assert wait_limit(0, 10.0) == 10.0
    assert wait_limit(1, 10.0) == wait_limit(7, 10.0) == 15.0
