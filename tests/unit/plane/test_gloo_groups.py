"""Gloo's groups, of ranks that are threads: what is pending when another rank has gone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetsync.plane.groups import open_gloo

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
    groups[0].abort()
    assert_failed(pending)


def test_a_call_that_waits_for_another_rank_fails(groups: list[Any]) -> None:
    work = groups[0].recv([torch.ones(1)], 1, 0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(work.wait)
        groups[0].abort()
        with pytest.raises(RuntimeError):
            waiting.result(SECONDS)


def test_a_group_of_one_has_nothing_to_wait_for() -> None:
    open_gloo(dist.HashStore(), "alone", 0, 1, SECONDS).abort()


STOPS = """
import os, signal, sys, time
import torch, torch.distributed as dist
from hetsync.plane.groups import open_gloo
group = open_gloo(dist.FileStore(sys.argv[1], 2), "sums", 1, 2, 60.0)
work = group.broadcast([torch.ones(10_000_000)], dist.BroadcastOptions())
time.sleep(1)  # it has told rank 0 that it is ready to receive
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_message_that_is_half_sent_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Its group's destructor would for ever, in the thread that collects it."""
    store = str(tmp_path / "store")
    stopped = subprocess.Popen([sys.executable, "-c", STOPS, store])
    try:
        group = open_gloo(dist.FileStore(store, 2), "sums", 0, 2, 60.0)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        pending = group.broadcast([torch.ones(10_000_000)], dist.BroadcastOptions())
        time.sleep(0.5)  # until the connection takes no more
        group.abort()
        del group
        gc.collect()
        assert not pending.is_completed(), "or there is nothing to wait for"
    finally:
        stopped.kill()
        stopped.wait()


def assert_failed(pending: list[dist.Work]) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(work.is_completed() for work in pending):
        assert time.monotonic() < deadline, "still pending"
        time.sleep(0.001)
    for work in pending:
        with pytest.raises(RuntimeError):
            work.wait()
