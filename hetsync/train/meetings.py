"""What ranks' main threads tell each other at a rest, where a rank may die meanwhile."""

from __future__ import annotations

from typing import Any

from hetsync.plane.base import Plane, meet


class Meetings:
    """One rank's part in them, all in the same order.

    A death lets a meeting come to its end on some ranks and not on others. So the first one after it begins with what
    each rank has heard: whoever lacks the newest meeting takes over what it came to, and all go on with the same.
    """

    def __init__(self, plane: Plane, held: int | None = None) -> None:
        """`held`: how many the others have held, where this rank joins them."""
        self._plane = plane
        self._members = plane.members if held is None else ()
        self.held = held or 0
        self._newest: list[Any] = []

    def expect_another(self) -> None:
        """Another rank is about to join: members may be called the same as before a death."""
        self._members = ()

    def hold(self, what: str, value: Any) -> list[Any]:
        """Everybody's values; MembersLost where a rank has died, and `hold` is to be called once more."""
        members = self._plane.members
        if self._members != members:
            told = self._plane.gather_objects((self.held, self._newest, value))
            self._members = members
            held, newest, _ = max(told, key=lambda theirs: theirs[0])
            if held > self.held:
                self.held, self._newest = held, newest
                return newest
        newest = meet(self._plane, what, value)
        self.held, self._newest = self.held + 1, newest
        return newest
