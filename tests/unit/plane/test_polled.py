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

    def __init__(self, story: list[str], polls: int, in_flight: int) -> None:
        super().__init__()
        self._story, self._polls = story, polls
        self.in_flight = in_flight

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


def summed(
    segments: int, sum_polls: int, copy_polls: int, in_flight: int = SEGMENTS_IN_FLIGHT
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """The tensor, its sum, and what happened."""
    story: list[str] = []
    lane = PlayedLane(story, sum_polls, in_flight)
    sums = PolledSums("a play", 0, RANKS, lane, lane)
    sums._staging[torch.device("cpu")] = PlayedStaging(story, copy_polls)
    values = torch.arange(SEGMENT * segments - 3, dtype=torch.float32)
    tensor = values.clone()
    handle = sums.allreduce(tensor)
    story.append("poll")
    for _ in range(1000):
        if handle.done():
            break
        story.append("poll")
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


IN_FLIGHT = pytest.mark.parametrize("in_flight", [2, SEGMENTS_IN_FLIGHT, 16])


@IN_FLIGHT
def test_later_segments_are_copied_while_earlier_ones_are_summed(in_flight: int) -> None:
    _, _, story = summed(3 * in_flight, sum_polls=5, copy_polls=2, in_flight=in_flight)
    for index in range(1, story.count("post")):
        assert _place(story, "out", index) < _place(story, "summed", index - 1)
    assert _place(story, "post", in_flight - 1) < _place(story, "summed", 0), "several are summed at a time"
    assert _place(story, "back", 0) < _place(story, "post", in_flight), "sums go back before all are in"


@IN_FLIGHT
def test_few_segments_are_held_on_the_host(in_flight: int) -> None:
    """Pinned memory is dear: at most those that are summed and those that come next."""
    _, _, story = summed(5 * in_flight, sum_polls=3, copy_polls=2, in_flight=in_flight)
    held = most = 0
    for word in story:
        held += {"out": 1, "back": -1}.get(word, 0)
        most = max(most, held)
    assert in_flight < most <= 2 * in_flight + 1


@IN_FLIGHT
def test_a_library_that_is_always_done_does_not_keep_its_caller(in_flight: int) -> None:
    """Who reads messages between two polls, too."""
    _, _, story = summed(5 * in_flight, sum_polls=1, copy_polls=1, in_flight=in_flight)
    posted = [words.count("post") for words in " ".join(story).split("poll")]
    assert max(posted) == in_flight
    assert sum(posted) == 5 * in_flight


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


class PlayedMemory:
    closed = False

    def allocate(self, count: int) -> torch.Tensor | None:
        return torch.full((count,), 7.0) if count < 5 else None

    def close(self) -> None:
        self.closed = True


class PlayedShared:
    least_values = 6

    def __init__(self) -> None:
        self.memory = PlayedMemory()
        self.begun: list[int] = []

    def segment_values(self, device: torch.device) -> int:
        return SEGMENT

    def begin(self, values: torch.Tensor) -> Test:
        self.begun.append(values.numel())
        return after(2, lambda: (values.mul_(RANKS), None)[1])


def test_where_ranks_share_memory_the_library_sums_what_is_small() -> None:
    story: list[str] = []
    lane, shared = PlayedLane(story, 3, SEGMENTS_IN_FLIGHT), PlayedShared()
    lane.segment_values = 4
    sums = PolledSums("a play", 0, RANKS, lane, lane, shared=shared)  # type: ignore[arg-type]
    assert sums.sums_by == "a play and shared memory"
    tensor = torch.arange(25.0)
    handle = sums.allreduce(tensor)
    while not handle.done():
        pass
    assert tensor.equal(RANKS * torch.arange(25.0))
    assert (shared.begun, story) == ([SEGMENT, SEGMENT], ["post", "summed"])
    assert sums.allocate(4, torch.device("cpu")).tolist() == [7] * 4
    assert sums.allocate(5, torch.device("cpu")).shape == (5,), "elsewhere"
    assert sums.allocate(4, torch.device("meta")).device.type == "meta"
    sums.close()
    assert shared.memory.closed
