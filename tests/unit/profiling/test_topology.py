"""Links between hosts: who measures whom when, and what comes of the times."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetsync.plane.base import Channels
from hetsync.plane.local import LocalPlane
from hetsync.profiling.topology import MOST_BYTES, measure_links, measure_pair, turns


@given(st.integers(2, 41))
def test_each_pair_has_one_turn_and_nobody_two_at_once(count):
    found = turns(count)
    assert sorted(pair for turn in found for pair in turn) == list(combinations(range(count), 2))
    assert len(found) == count - 1 + count % 2
    for turn in found:
        members = [member for pair in turn for member in pair]
        assert len(members) == len(set(members))


class SlowChannels(Channels):
    """A link on a clock of its own; the other side answers at once."""

    def __init__(self, latency_seconds: float, bytes_per_second: float) -> None:
        self.latency_seconds, self.bytes_per_second = latency_seconds, bytes_per_second
        self.seconds = 0.0
        self.largest = 0
        self.told_to_end = False

    def send(self, note, tensors, to):
        size = sum(4 * tensor.numel() for tensor in tensors)
        self.seconds += self.latency_seconds + size / self.bytes_per_second
        self.largest = max(self.largest, size)
        self.told_to_end = not note

    def receive(self, source):
        self.seconds += self.latency_seconds
        return True, [torch.zeros(1)]

    def flush(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(("latency", "rate", "largest"), [(1e-3, 1e6, 64 * 1024), (1e-5, 1.25e10, MOST_BYTES)])
def test_a_link_is_found_and_a_slow_one_soon(latency, rate, largest):
    link = SlowChannels(latency, rate)
    assert measure_pair(link, 1, lambda: link.seconds) == pytest.approx((latency, rate), rel=0.01)
    assert link.largest == largest
    assert link.told_to_end


def test_on_one_host_there_is_nothing_to_tell():
    assert measure_links(LocalPlane(), ["here"]) == ()
