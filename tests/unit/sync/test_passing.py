"""Rounds do not wait for slices that a device has still to compute: streams are played, with a clock of their own.

A played device works off what is queued in virtual seconds. A slice takes one; all else takes none, so a round is as
late as what it waits for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from sanitized_streams import CPU, PlayedEvent, PlayedStream, Sanitizer, sanitized_streams

from hetsync.balance.device import MOST_SLICES_QUEUED
from hetsync.plane.base import Handle
from hetsync.plane.local import LocalPlane
from hetsync.sync.deltas import Nesterov
from hetsync.sync.device_order import StreamOrder
from hetsync.sync.engine import Engine
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.messages import StartRound
from hetsync.sync.rounds import Rounds
from hetsync.sync.shared_state import EngineOptions
from hetsync.telemetry import Telemetry

BATCH = 8
POLLS = 10  # in which whatever can be done is done


class TimedStream(PlayedStream):
    """At `done` it has worked off what is queued."""

    done = 0.0

    def record_event(self) -> TimedEvent:
        return TimedEvent(self)

    def wait_event(self, event: Any) -> None:
        self.done = max(self.done, event.done)
        super().wait_event(event)


class TimedEvent(PlayedEvent):
    def __init__(self, stream: TimedStream) -> None:
        super().__init__(stream)
        self.done = stream.done


class PlayedPlane(LocalPlane):
    """Notes at which moment of the device a sum can be posted; it comes once `comes`."""

    def __init__(self, stream: TimedStream) -> None:
        super().__init__()
        self.stream, self.comes = stream, True
        self.posted: list[float] = []

    def allreduce(self, tensor: torch.Tensor, wire: Any = "float32", residual: Any = None) -> Handle:
        self.posted.append(self.stream.done)
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
        sanitizer: Sanitizer,
        worker: ThreadPoolExecutor,
        fragments: int = 1,
        dtype: Any = None,
        **more: Any,
    ) -> None:
        self.sanitizer = sanitizer
        self.main, self.beside = TimedStream(sanitizer, "the default stream"), TimedStream(sanitizer, "another stream")
        self.plane = PlayedPlane(self.beside)
        options = EngineOptions(BATCH, lambda values: fragments)
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

    def slice(self) -> None:
        """Queue one, as `QueueingDevice` lets the host; then take over what rounds have brought."""
        if len(self.ends) >= MOST_SLICES_QUEUED:
            self.now = max(self.now, self.ends[-MOST_SLICES_QUEUED])
        self.main.done = max(self.main.done, self.now) + 1.0
        self.ends.append(self.main.done)
        with torch.no_grad():
            for weight in self.shared.weights:
                weight += 0.25
        with self.shared.changed:
            self.engine._apply()

    def finish(self, slices: int) -> None:
        """Once the device is done."""
        self.now = self.main.done
        with self.shared.changed:
            self.engine._apply()
            with self.shared.order:
                self.shared.delayed_mode().finish(BATCH, slices)

    def announce(self, start: StartRound) -> None:
        with self.shared.changed:
            if start.contributors:
                self.shared.worker.contribute = lambda number: ("contributed", 0)  # type: ignore[assignment,method-assign]
            self.rounds.announce(start)

    def proceed(self) -> None:
        """The communication thread polls."""

        def run() -> None:
            self.beside.done = max(self.beside.done, self.now)
            with self.sanitizer.entered(self.beside):
                for _ in range(POLLS):
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
def sanitizer() -> Iterator[Sanitizer]:
    with sanitized_streams() as sanitizer:
        yield sanitizer


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as worker:
        yield worker


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_round_does_not_wait_for_slices(sanitizer: Sanitizer, worker: ThreadPoolExecutor, slices: int) -> None:
    """One that comes while a task is computed sums zeros, one that comes at its end what it has brought."""
    played = PlayedRank(sanitizer, worker)
    late, number = [], 0
    with sanitizer.entered(played.main):
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


def compute(rank: PlayedRank, chance: random.Random) -> int:
    """Some slices; returns how many tasks are finished then."""
    finished = 0
    for _ in range(chance.randrange(4)):
        rank.slice()
        if chance.random() < 0.3:
            rank.finish(1)
            finished += 1
    return finished


def run_rounds(rank: PlayedRank, fragments: int, seed: int, **settings: Any) -> None:
    """Whatever comes between a round's beginning and its end."""
    chance, finished = random.Random(seed), 0
    with rank.sanitizer.entered(rank.main):
        with rank.shared.changed:
            rank.shared.delayed_mode()
        for number in range(40):
            finished += compute(rank, chance)
            gives = finished > 0 and chance.random() < 0.6
            finished = 0 if gives else finished
            rank.plane.comes = False
            evaluate = chance.random() < 0.1
            rank.announce(
                StartRound(
                    number, frozenset({0} if gives else ()), 0, evaluate=evaluate, fragments=fragments, **settings
                )
            )
            rank.proceed()
            finished += compute(rank, chance)
            rank.plane.comes = True
            rank.proceed()
            assert rank.shared.landed == number + 1
            rank.shared.snapshot = None


@pytest.mark.each_value
@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fragments", "outer"), [(1, None), (1, Nesterov(0.7, 0.9, BATCH)), (2, None)])
@pytest.mark.parametrize("seed", range(5))
def test_what_a_round_passes_it_does_not_touch(
    sanitizer: Sanitizer, worker: ThreadPoolExecutor, seed: int, fragments: int, outer: Any, dtype: Any, wire: Any
) -> None:
    run_rounds(PlayedRank(sanitizer, worker, fragments, dtype, outer=outer), fragments, seed, wire=wire)
    assert not sanitizer.told


@pytest.mark.parametrize("passes", ["packs_apart", "lands_apart"])
def test_a_round_that_passes_what_it_touches_is_told(
    sanitizer: Sanitizer, worker: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, passes: str
) -> None:
    monkeypatch.setattr(FragmentedDeltas, passes, lambda deltas, start: True)
    run_rounds(PlayedRank(sanitizer, worker), 1, seed=4)
    assert "deltas" in sanitizer.told
