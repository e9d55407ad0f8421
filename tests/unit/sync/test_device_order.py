"""Where two threads touch the same tensors, the second one's stream follows the first one's, and no further."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import hetsync
from hetsync.plane.local import LocalPlane
from hetsync.sync import engine
from hetsync.sync.deltas import Deltas
from hetsync.sync.device_order import DeviceOrder, StreamOrder, device_order

CPU = torch.device("cpu")


class FakeStream:
    """Knows all that its future work comes after."""

    def __init__(self, name: str) -> None:
        self.name, self.queued = name, 0
        self.behind: dict[str, int] = {}

    def launch(self) -> None:
        self.queued += 1

    def record_event(self) -> dict[str, int]:
        return {**self.behind, self.name: self.queued}

    def wait_event(self, event: dict[str, int]) -> None:
        for name, place in event.items():
            self.behind[name] = max(place, self.behind.get(name, 0))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeStream]:
    """Of each thread, by its ident."""
    streams: dict[int, FakeStream] = {}

    def current(device: torch.device) -> FakeStream:
        return streams[threading.get_ident()]

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    return streams


def in_thread(streams: dict[int, FakeStream], stream: FakeStream, work: Callable[[], None]) -> None:
    """Which is another than any before: idents may come again."""

    def run() -> None:
        streams[threading.get_ident()] = stream
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_the_second_thread_follows_what_the_first_has_left_and_not_what_it_queues_later(
    streams: dict[int, FakeStream],
) -> None:
    order = StreamOrder(CPU)
    main, other = FakeStream("main"), FakeStream("other")
    streams[threading.get_ident()] = main
    with order:
        main.launch()  # finish
    main.launch()  # a whole slice

    def pack() -> None:
        with order:
            assert other.behind == {"main": 1}
            other.launch()

    in_thread(streams, other, pack)
    assert main.behind == {}
    with order:
        assert main.behind["other"] == 1


def test_a_thread_does_not_wait_for_itself(streams: dict[int, FakeStream]) -> None:
    order = StreamOrder(CPU)
    main = streams[threading.get_ident()] = FakeStream("main")
    for _ in range(3):
        with order:
            main.launch()
    assert main.behind == {}


def test_a_processor_needs_no_order() -> None:
    assert type(device_order(CPU)) is DeviceOrder


class Watched(DeviceOrder):
    """Knows whether a block is open."""

    def __init__(self) -> None:
        self.open = 0
        self.followed = 0

    def follow(self) -> None:
        self.followed += 1

    def __enter__(self) -> None:
        self.open += 1

    def __exit__(self, *failure: object) -> None:
        self.open -= 1


@contextlib.contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch, order: Watched, *names: str) -> Iterator[dict[str, int]]:
    """Calls of these methods of Deltas, all of which must be within the order."""
    calls = dict.fromkeys(names, 0)

    def guard(name: str, method: Any) -> Any:
        def called(*words: Any, **named: Any) -> Any:
            assert order.open, f"{name} outside of the order"
            calls[name] += 1
            return method(*words, **named)

        return called

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(Deltas, name, guard(name, getattr(Deltas, name)))
        yield calls


def test_all_that_delayed_mode_does_with_its_tensors_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Watched()
    monkeypatch.setattr(engine, "device_order", lambda device: order)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ("adopt", "finish", "apply", "pack", "apply_sum", "reset_to_anchor")
    with guarded(monkeypatch, order, *names) as calls:
        outer = {"name": "nesterov"}  # or a rank alone would have no deltas
        with hetsync.join(plane=LocalPlane(), delay_bound=2, outer=outer, progress=False) as job:
            job.prepare(model, optimizer)
            batches = job.loader(TensorDataset(torch.ones(16, 3)), 4)
            for _ in job.epochs(2):
                for (batch,) in batches:
                    job.backward(model(batch).mean())
                    job.step()
    assert min(calls.values()) > 0, calls
    assert order.followed > 0  # the main thread, after a drain
