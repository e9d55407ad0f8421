"""Passes over memory: what counts them, and that delayed rounds make no more of them than they did."""

from __future__ import annotations

import pytest
import torch

from benchmarks.round_cost import CACHE_BYTES, Streams, made, streamed

VALUES = CACHE_BYTES  # four times the cache


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda a, b, c: a.zero_(), 1),
        (lambda a, b, c: a.copy_(b), 2),
        (lambda a, b, c: a.add_(b), 3),
        (lambda a, b, c: torch.mul(a, 2.0, out=b), 2),
        (lambda a, b, c: torch.sub(a, b, out=c), 3),
        (lambda a, b, c: a + b, 3),
        (lambda a, b, c: torch._foreach_add_([a, b], [c, c]), 6),
        (lambda a, b, c: a.sum(), 1),
        (lambda a, b, c: a.view(-1), 0),
    ],
)
def test_a_pass_is_counted_once_read_and_once_written(operation, expected):
    tensors = [torch.zeros(VALUES) for _ in range(3)]
    with Streams() as streams:
        operation(*tensors)
    streams.flush()
    assert streams.bytes / (4 * VALUES) == pytest.approx(expected, abs=0.01)


def test_what_is_in_the_cache_is_not_read_again():
    tensor = torch.zeros(VALUES)
    with Streams() as streams:
        for segment in tensor.split(CACHE_BYTES // 16):
            segment.mul_(2.0).add_(1.0)
            segment.sum()
    streams.flush()
    assert streams.bytes / (4 * VALUES) == pytest.approx(2, abs=0.01)


def test_a_delayed_round_passes_over_memory_half_as_often_as_at_first():
    """At first 23 times for a contributor, 11 for an idle rank."""
    counted = {role: sum(streams.values()) for role, streams in streamed(made(VALUES)).items()}
    assert counted["contributes"] < 12.5
    assert counted["idle"] < 7.5
    assert counted["contributes, finishes again meanwhile"] < 15.5
