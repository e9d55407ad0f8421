"""Threads beside the model's take one core; the model keeps its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import hetsync
from hetsync.data.workers import FetchThread
from hetsync.plane.local import LocalPlane
from hetsync.sync.engine import Engine
from hetsync.sync.shared_state import EngineOptions
from hetsync.threads import Bell, HelperThread, cpu_seconds, single_threaded


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_thread_takes_one_core_and_leaves_the_others_theirs() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=single_threaded(lambda: seen.append(torch.get_num_threads())))
    thread.start()
    thread.join()
    assert seen == [1]
    assert torch.get_num_threads() == 2


def test_a_main_thread_that_has_not_used_its_cores_yet_keeps_them() -> None:
    """Its number is settled at its first use, from what was set last: without care that is the other thread's."""
    seen: list[int] = []

    def newcomer() -> None:
        other = threading.Thread(target=single_threaded(lambda: None))
        other.start()
        other.join()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=newcomer)
    thread.start()
    thread.join()
    assert seen == [2]


def test_a_thread_computes_on_the_main_threads_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's is GPU 0: pinned memory and events would open a context there."""
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.append((threading.current_thread().name, index)))
    thread = threading.Thread(target=single_threaded(lambda: None), name="beside")
    thread.start()
    thread.join()
    assert chosen == [("beside", 3)]


def test_what_a_thread_takes_of_a_core_is_counted_while_it_lives() -> None:
    begin, computed, end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begin.wait(10)
        before = time.thread_time()
        while time.thread_time() < before + 0.05:
            pass
        computed.set()
        end.wait(10)

    thread = threading.Thread(target=work)
    assert cpu_seconds(thread) == 0.0
    thread.start()
    idle = cpu_seconds(thread)
    begin.set()
    assert computed.wait(10)
    assert cpu_seconds(thread) >= idle + 0.05
    end.set()
    thread.join()
    assert cpu_seconds(thread) == 0.0


def test_a_helper_does_what_it_is_given_in_order_and_drops_the_rest_when_it_is_closed() -> None:
    helper, begun, go_on = HelperThread("helper"), threading.Event(), threading.Event()
    done: list[int] = []
    first, failed = helper.submit(done.append, 1), helper.submit(int, "one")
    under_way = helper.submit(lambda: (begun.set(), go_on.wait(30), done.append(2)))
    dropped = helper.submit(done.append, 3)
    assert begun.wait(30)
    dropped.add_done_callback(lambda future: go_on.set())
    helper.close()
    assert isinstance(failed.exception(30), ValueError)
    assert first.done()
    assert under_way.done()
    assert dropped.cancelled()
    assert done == [1, 2]


def test_what_a_closed_helper_is_given_is_cancelled() -> None:
    helper = HelperThread("helper")
    helper.close()
    assert helper.submit(int).cancelled()
    helper.close()


def test_a_helper_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", fails)
    helper = HelperThread("helper")
    for _ in range(2):
        assert "illegal memory access" in str(helper.submit(int).exception(30))
    helper.close()


class Watched:
    """Notes the cores of every thread of a job that passes by."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}

    def note(self) -> None:
        self.seen.setdefault(threading.current_thread().name.rsplit("_", 1)[0], set()).add(torch.get_num_threads())


class Samples(Dataset[Any]):
    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self._watched.note()
        return torch.ones(3)


def test_the_loader_takes_one_core_whatever_other_threads_take() -> None:
    watched = Watched()
    loader = FetchThread(Samples(watched), None)
    loader.submit([0], 0).result(30)
    loader.close()
    assert watched.seen == {"hetsync-loader": {1}}


class WatchedPlane(LocalPlane):
    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self._watched = watched

    def receive(self) -> Sequence[tuple[int, Any]]:
        self._watched.note()
        return super().receive()


def test_a_job_computes_on_all_cores_and_loads_and_talks_on_one() -> None:
    watched = Watched()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetsync.join(plane=WatchedPlane(watched), progress=False) as job:
        job.prepare(model, optimizer)
        for batch in job.loader(Samples(watched), 4, epochs=1):
            watched.note()
            job.backward(model(batch).mean())
            job.step()
    main = watched.seen.pop("MainThread")
    assert main == {2}
    assert watched.seen == {"hetsync-loader": {1}}  # a rank alone talks to nobody


def test_a_rank_among_others_talks_on_one_core() -> None:
    watched = Watched()
    plane = WatchedPlane(watched)
    plane.members = (0, 1)
    engine = Engine(plane, torch.nn.Linear(3, 1), EngineOptions(4))
    engine.start()
    deadline = time.monotonic() + 10
    while not watched.seen and time.monotonic() < deadline:
        time.sleep(1e-3)
    engine.stop()
    assert watched.seen == {"hetsync-communication": {1}}


def test_a_bell_wakes_who_waits_and_is_heard_by_who_comes_later() -> None:
    bell, heard = Bell(), []
    assert not bell.wait(0.0)
    bell.ring()
    bell.ring()
    assert bell.wait(0.0), "it has rung before"
    assert not bell.wait(0.001), "two rings at once are heard once"
    thread = threading.Thread(target=lambda: heard.append(bell.wait(60.0)))
    thread.start()
    bell.ring()
    thread.join(30.0)
    assert heard == [True]
