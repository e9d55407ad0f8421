"""Gloo's groups, of ranks that are threads: what is pending when another rank has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetsync.plane.groups import abort, open_gloo

RANKS = 3
SECONDS = 20.0


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """Each rank's. They end together, as a group's destructor waits for what is pending in it."""
    store = dist.HashStore()
    with ThreadPoolExecutor(RANKS) as threads:
        groups = list(threads.map(lambda rank: open_gloo(store, "sums", rank, RANKS, SECONDS), range(RANKS)))
    yield groups
    while groups:
        threading.Thread(None, groups.pop, daemon=True).start()


@pytest.mark.parametrize("dead", [None, 2])
def test_what_is_pending_fails_where_it_waits_for_ranks_that_live(groups: list[Any], dead: int | None) -> None:
    """More than a group has threads for. Rank 0 waits for rank 1."""
    pending = [groups[0].allreduce([torch.ones(5000)]) for _ in range(4)]
    if dead is not None:
        del groups[dead]
    assert not pending[-1].is_completed()
    abort(groups[0])
    assert_failed(pending)
    assert_failed([groups[0].allreduce([torch.ones(5000)])])


def test_a_call_that_waits_for_another_rank_fails(groups: list[Any]) -> None:
    work = groups[0].recv([torch.ones(1)], 1, 0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(work.wait)
        abort(groups[0])
        with pytest.raises(RuntimeError):
            waiting.result(SECONDS)


def test_a_group_of_one_has_nothing_to_wait_for() -> None:
    abort(open_gloo(dist.HashStore(), "alone", 0, 1, SECONDS))


def assert_failed(pending: list[dist.Work]) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(work.is_completed() for work in pending):
        assert time.monotonic() < deadline, "still pending"
        time.sleep(0.001)
    for work in pending:
        with pytest.raises(RuntimeError):
            work.wait()
