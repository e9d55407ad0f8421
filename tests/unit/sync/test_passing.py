"""Rounds do not wait for slices that a device has still to compute: streams are played, with a clock of their own.

A played device works off what is queued in virtual seconds. A slice takes one; all else takes none, so a round is as
late as what it waits for.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetsync.balance.device import MOST_SLICES_QUEUED
from hetsync.plane.base import Handle
from hetsync.plane.local import LocalPlane
from hetsync.sync.deltas import Nesterov
from hetsync.sync.device_order import StreamOrder
from hetsync.sync.engine import Engine
from hetsync.sync.messages import StartRound
from hetsync.sync.rounds import Rounds
from hetsync.sync.shared_state import EngineOptions
from hetsync.telemetry import Telemetry

BATCH = 8
CPU = torch.device("cpu")


class PlayedStream:
    """At `done` it has worked off what is queued, which comes after what `behind` tells, by streams."""

    def __init__(self) -> None:
        self.done, self.queued = 0.0, 0
        self.behind: dict[PlayedStream, int] = {}

    def record_event(self) -> tuple[float, dict[PlayedStream, int]]:
        return self.done, {**self.behind, self: self.queued}

    def wait_event(self, event: tuple[float, dict[PlayedStream, int]]) -> None:
        done, behind = event
        self.done = max(self.done, done)
        for stream, place in behind.items():
            self.behind[stream] = max(place, self.behind.get(stream, 0))


class Accesses(TorchDispatchMode):
    """Fails where a stream uses memory that another has written, or writes what another has used, and is not behind."""

    def __init__(self, stream: Callable[[], PlayedStream]) -> None:
        super().__init__()
        self.stream = stream
        self.on_host: set[int] = set()  # whose order is that of the lock
        # The last place on each stream, by memory and whether it was written there.
        self.uses: dict[tuple[int, bool], dict[PlayedStream, int]] = {}
        self.kept: list[torch.Tensor] = []  # no memory is used anew

    def __torch_dispatch__(self, operation: Any, types: Any, words: Any = (), named: Any = None) -> Any:
        named = named or {}
        stream = self.stream()
        stream.queued += 1
        for place, argument in enumerate(operation._schema.arguments):
            value = words[place] if place < len(words) else named.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor) and operation.__name__.split(".")[0] not in VIEWS:
                    self._use(stream, tensor, written, str(operation))
        return operation(*words, **named)

    def _use(self, stream: PlayedStream, tensor: torch.Tensor, written: bool, operation: str) -> None:
        memory = tensor.untyped_storage().data_ptr()
        if memory in self.on_host:
            return
        self.kept.append(tensor)
        for how in (True, False) if written else (True,):
            for other, place in self.uses.get((memory, how), {}).items():
                assert other is stream or stream.behind.get(other, 0) >= place, f"a race at {operation}"
        self.uses.setdefault((memory, written), {})[stream] = stream.queued


VIEWS = {"view", "detach", "slice", "split", "split_with_sizes", "as_strided", "alias", "select", "unbind"}


class PlayedPlane(LocalPlane):
    """Notes at which moment of the device a sum can be posted; it comes once `comes`."""

    def __init__(self, stream: Callable[[], PlayedStream]) -> None:
        super().__init__()
        self.stream, self.comes = stream, True
        self.posted: list[float] = []

    def allreduce(self, tensor: torch.Tensor, wire: Any = "float32", residual: Any = None) -> Handle:
        self.posted.append(self.stream().done)
        return PlayedHandle(self)


class PlayedHandle(Handle):
    def __init__(self, plane: PlayedPlane) -> None:
        self._plane = plane

    def done(self) -> bool:
        return self._plane.comes


class Listener:
    keeps_going = False

    def flush(self) -> int:
        return 0

    def landed(self, start: StartRound, summed: Any) -> None:
        pass

    def completed(self, event: Any) -> None:
        pass

    def has_closed(self, number: int) -> bool:
        return True


class PlayedRank:
    """Its main thread is this one."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        worker: ThreadPoolExecutor,
        fragments: int = 1,
        dtype: Any = None,
        **more: Any,
    ) -> None:
        self.streams: dict[int, PlayedStream] = {}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream())
        monkeypatch.setattr(StreamOrder, "read", lambda order, values: (values, lambda: True))
        self.plane = PlayedPlane(self.stream)
        options = EngineOptions(BATCH, more.pop("wire", "float32"), lambda values: fragments)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(dtype)
        self.engine = Engine(self.plane, model, options, **more)
        self.shared = shared = self.engine._shared
        shared.alone, shared.order = False, StreamOrder(CPU)
        shared.weights = list(model.parameters())
        shared.buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self.rounds = Rounds(self.plane, options, shared, Listener(), Telemetry(None), lambda start, steps: steps)
        self.worker = worker
        self.now = 0.0  # of the main thread's host
        self.ends: list[float] = []  # of slices

    def stream(self) -> PlayedStream:
        return self.streams.setdefault(threading.get_ident(), PlayedStream())

    def slice(self) -> None:
        """Queue one, as `QueueingDevice` lets the host; then take over what rounds have brought."""
        if len(self.ends) >= MOST_SLICES_QUEUED:
            self.now = max(self.now, self.ends[-MOST_SLICES_QUEUED])
        stream = self.stream()
        stream.done = max(stream.done, self.now) + 1.0
        self.ends.append(stream.done)
        with torch.no_grad():
            for weight in self.shared.weights:
                weight += 0.25
        with self.shared.changed:
            self.engine._apply()

    def finish(self, slices: int) -> None:
        """Once the device is done."""
        self.now = self.stream().done
        with self.shared.changed:
            self.engine._apply()
            with self.shared.order:
                self.shared.delayed_mode().finish(BATCH, slices)

    def announce(self, start: StartRound) -> None:
        with self.shared.changed:
            if start.contributors:
                self.shared.worker.contribute = lambda number: ("contributed", 0)  # type: ignore[assignment,method-assign]
            self.rounds.announce(start)

    def proceed(self, inside: AbstractContextManager[Any] | None = None) -> None:
        """The communication thread polls."""

        def run() -> None:
            stream = self.stream()
            stream.done = max(stream.done, self.now)
            with inside or nullcontext():
                for _ in range(5):
                    self.rounds.proceed()

        self.worker.submit(run).result()

    def round(self, number: int, contributes: bool) -> float:
        """Announced now: how much later it was posted."""
        self.plane.posted.clear()
        self.announce(StartRound(number, frozenset({0} if contributes else ()), 0))
        self.proceed()
        assert self.shared.landed == number + 1
        return max(self.plane.posted) - self.now


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedRank]:
    with ThreadPoolExecutor(1) as worker:
        yield PlayedRank(monkeypatch, worker)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_round_does_not_wait_for_slices(played: PlayedRank, slices: int) -> None:
    """One that comes while a task is computed sums zeros, one that comes at its end what it has brought."""
    late, number = [], 0
    with played.shared.changed:
        played.shared.delayed_mode()
    for _ in range(6):
        for place in range(slices):
            played.slice()
            if place % 2 == 1:  # the main thread has applied the round before, behind this slice
                late.append(played.round(number, contributes=False))
                number += 1
        played.finish(slices)
        late.append(played.round(number, contributes=True))
        number += 1
    assert max(late) == 0, late


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fragments", "outer"), [(1, None), (1, Nesterov(0.7, 0.9, BATCH)), (2, None)])
@pytest.mark.parametrize("seed", range(5))
def test_what_a_round_passes_it_does_not_touch(
    monkeypatch: pytest.MonkeyPatch, seed: int, fragments: int, outer: Any, dtype: Any, wire: Any
) -> None:
    """Whatever comes between a round's beginning and its end."""
    chance = random.Random(seed)
    with ThreadPoolExecutor(1) as worker:
        rank = PlayedRank(monkeypatch, worker, fragments, dtype, outer=outer, wire=wire)
        accesses = Accesses(rank.stream)
        deltas: Any = rank.shared.delayed_mode()
        accesses.on_host |= {part.tail.counts.untyped_storage().data_ptr() for part in deltas.parts}
        rank.shared.order.leave()
        finished = 0

        def compute() -> None:
            nonlocal finished
            with accesses:
                for _ in range(chance.randrange(4)):
                    rank.slice()
                    if chance.random() < 0.3:
                        rank.finish(1)
                        finished += 1

        for number in range(40):
            compute()
            gives = finished > 0 and chance.random() < 0.6
            finished = 0 if gives else finished
            rank.plane.comes = False
            evaluate = chance.random() < 0.1
            start = StartRound(number, frozenset({0} if gives else ()), 0, evaluate=evaluate, fragments=fragments)
            rank.announce(start)
            rank.proceed(accesses)
            compute()
            rank.plane.comes = True
            rank.proceed(accesses)
            assert rank.shared.landed == number + 1
            rank.shared.snapshot = None
