"""Sums of segments through a device's staging, by a library and a device that are played."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hetsync.plane.polled import SEGMENTS_IN_FLIGHT, Ahead, Lane, PolledSums, Post
from hetsync.plane.staging import HostStaging, Test

SEGMENT = 10
RANKS = 3


def after(polls: int, then: Callable[[], None] = lambda: None) -> Test:
    """Comes to its end at this poll, and then does something, once."""
    left = polls

    def test() -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            then()
        return left <= 0

    return test


class PlayedLane(Lane):
    """Of a library that sums what RANKS equal ranks give."""

    segment_values = SEGMENT

    def __init__(self, story: list[str], polls: int) -> None:
        super().__init__()
        self._story, self._polls = story, polls

    def sum_in_place(self, values: torch.Tensor) -> Post:
        def post() -> Test:
            self._story.append("post")
            return after(self._polls, lambda: self._ended(values))

        return post

    def _ended(self, values: torch.Tensor) -> None:
        values *= RANKS
        self._story.append("summed")

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        raise NotImplementedError

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        raise NotImplementedError


class PlayedStaging(HostStaging):
    """Of a device whose copies to the host, and back, take some polls each; what is read too early is wrong."""

    def __init__(self, story: list[str], polls: int) -> None:
        self._story, self._polls = story, polls

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Test]:
        self._story.append("out")
        values = torch.full_like(tensor, float("nan"))

        def there() -> None:
            values.copy_(tensor)
            self._story.append("there")

        return values, after(self._polls, there)

    def store(self, values: torch.Tensor, into: torch.Tensor) -> Test:
        self._story.append("back")
        summed = values.clone()
        return after(self._polls, lambda: (into.copy_(summed), None)[1])


def summed(segments: int, sum_polls: int, copy_polls: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """The tensor, its sum, and what happened."""
    story: list[str] = []
    lane = PlayedLane(story, sum_polls)
    sums = PolledSums("a play", 0, RANKS, lane, lane)
    sums._staging[torch.device("cpu")] = PlayedStaging(story, copy_polls)
    values = torch.arange(SEGMENT * segments - 3, dtype=torch.float32)
    tensor = values.clone()
    handle = sums.allreduce(tensor)
    for _ in range(1000):
        if handle.done():
            break
    else:
        pytest.fail("no end after 1000 polls")
    sums.close()
    return values, tensor, story


@pytest.mark.parametrize(("sum_polls", "copy_polls"), [(1, 1), (1, 7), (7, 1), (3, 2)])
@pytest.mark.parametrize("segments", [1, 2, SEGMENTS_IN_FLIGHT, 3 * SEGMENTS_IN_FLIGHT + 1])
def test_segments_through_a_device_give_the_sum_of_the_whole(segments: int, sum_polls: int, copy_polls: int) -> None:
    values, tensor, story = summed(segments, sum_polls, copy_polls)
    assert torch.equal(tensor, RANKS * values)
    assert [story.count(word) for word in ("out", "there", "post", "summed", "back")] == 5 * [segments]


def test_later_segments_are_copied_while_earlier_ones_are_summed() -> None:
    _, _, story = summed(3 * SEGMENTS_IN_FLIGHT, sum_polls=5, copy_polls=2)
    for index in range(1, story.count("post")):
        assert _place(story, "out", index) < _place(story, "summed", index - 1)
    assert _place(story, "post", SEGMENTS_IN_FLIGHT - 1) < _place(story, "summed", 0), "several are summed at a time"
    assert _place(story, "back", 0) < _place(story, "post", SEGMENTS_IN_FLIGHT), "sums go back before all are in"


def test_few_segments_are_held_on_the_host() -> None:
    """Pinned memory is dear: at most those that are summed and those that come next."""
    _, _, story = summed(20, sum_polls=3, copy_polls=2)
    held = most = 0
    for word in story:
        held += {"out": 1, "back": -1}.get(word, 0)
        most = max(most, held)
    assert most <= 2 * SEGMENTS_IN_FLIGHT + 1


def _place(story: list[str], word: str, index: int) -> int:
    return [place for place, each in enumerate(story) if each == word][index]


def test_ahead_changes_nothing_but_the_time() -> None:
    made: list[int] = []

    def items() -> list[int]:
        return list(Ahead((made.append(n) or n for n in range(7)), 3))  # type: ignore[func-returns-value]

    assert items() == list(range(7)) == made
    made.clear()
    ahead = Ahead((made.append(n) or n for n in range(7)), 3)  # type: ignore[func-returns-value]
    assert made == [0, 1, 2]
    assert next(ahead) == 0
    assert made == [0, 1, 2, 3]
