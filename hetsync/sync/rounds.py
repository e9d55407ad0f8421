"""The rounds that a rank joins: each in order, with zeros where the rank has nothing to give; and between two of them
the sums that its main thread asks for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from hetsync.plane.base import Plane, Sums
from hetsync.plane.wire import of_gradients
from hetsync.sync.collectives import PendingCollectives, read
from hetsync.sync.deltas import Snapshot
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.gradients import Gradients, Stage
from hetsync.sync.log import Joined, Landed
from hetsync.sync.lone import LoneDeltas, LoneGradients
from hetsync.sync.messages import NormMeasured, RoundCompleted, StartRound
from hetsync.sync.milestones import ROLLBACK
from hetsync.sync.segmented import SegmentedDeltas
from hetsync.sync.shared_state import EngineOptions, Phase, SharedState, SumRequest
from hetsync.sync.tail import Tail
from hetsync.telemetry import Telemetry

COMPLETE = object()  # where a collective has nothing more to wait for

Around = Callable[[StartRound, Iterator[None]], Iterator[None]]  # what happens beside a round's steps
ModeTensors = FragmentedDeltas | LoneDeltas | SegmentedDeltas | Gradients | LoneGradients


class Listener(Protocol):
    """Who is told of rounds."""

    @property
    def keeps_going(self) -> bool:
        """Do ranks go on when another dies?"""

    def flush(self) -> int:
        """Send what is in the outbox."""

    def landed(self, start: StartRound, summed: ModeTensors | None) -> None:
        """Under the lock: the sums are in what was `summed`; None after a drain in step, which sums nothing."""

    def completed(self, event: RoundCompleted) -> None:
        """A sum is no rank's event: it passes by the outbox."""

    def has_closed(self, number: int) -> bool:
        """Are this round's books closed, where they are kept here?"""


class Rounds:
    """Of a communication thread, which calls `proceed` at every poll."""

    def __init__(
        self,
        plane: Plane,
        options: EngineOptions,
        shared: SharedState,
        listener: Listener,
        telemetry: Telemetry,
        around: Around,
    ) -> None:
        """`around` is given the steps of each round."""
        self._plane = plane
        self._options = options
        self._shared = shared
        self._listener = listener
        self._telemetry = telemetry
        self._around = around
        self._starts: deque[StartRound] = deque()  # of rounds to be joined, in order
        self._collective: Iterator[None] | None = None  # under way: a round, or a request of the main thread
        self._pending = PendingCollectives(plane, options.measure_norms)  # of that collective
        self.gradients: Gradients | LoneGradients  # set before the first round, and at rests

    @property
    def under_way(self) -> bool:
        """Has a collective begun that is not complete?"""
        return self._collective is not None

    @property
    def summing(self) -> bool:
        """Are sums under way?"""
        return self._pending.under_way

    @property
    def bytes_sent(self) -> int:
        return self._pending.bytes_sent

    def announce(self, start: StartRound) -> None:
        """Under the lock: to be joined, after those before it."""
        self._starts.append(start)

    def drop(self) -> None:
        """None of them will come to an end: a rank has gone. Copies that they have begun are on streams that nobody
        follows any more, and what they read and write is about to be used anew."""
        self._shared.order.wait()
        self._starts.clear()
        self._collective = None
        self._pending.drop()

    def proceed(self) -> int:
        """Move the collective under way, and those behind it once it is complete; returns how much has moved.

        At rest, rounds wait for the main thread, since what it asks for comes first on every rank. Otherwise

            rank 0: round 8 ...                      rank 1: allreduce of the optimizer state, round 8 ...
        """
        shared = self._shared
        if self._collective is None and not self._starts and not shared.requests:
            return 0
        completed = 0
        before = shared.landed + self._plane.moves
        while (collective := self._collective or self._next_collective()) is not None:
            self._collective = collective
            if next(collective, COMPLETE) is not COMPLETE:
                break
            self._collective = None
            completed += 1
        return completed + shared.landed + self._plane.moves - before

    def _next_collective(self) -> Iterator[None] | None:
        if self._starts and self._shared.phase is not Phase.RESTING:
            return self._begin(self._starts.popleft())
        if self._shared.requests:
            return self._serve(self._shared.requests.popleft())
        return None

    def _begin(self, start: StartRound) -> Iterator[None]:
        self._pending.begin_round()
        with self._shared.changed:
            self._shared.phase = Phase.TRAINING if start.drain is None else Phase.DRAINING
            self._shared.worker.join(start.number)
            self._shared.changed.notify_all()  # a task may start that was not to be in this round
        # Where all come once more to go back, some have done so, and weights differ: nothing is made of them.
        going_back = start.drain == ROLLBACK and not start.contributors
        synchronous = start.synchronous or going_back
        return self._around(start, (self._synchronous_round if synchronous else self._delayed_round)(start))

    def _delayed_round(self, start: StartRound) -> Iterator[None]:
        shared = self._shared
        contribute = self._plane.rank in start.contributors
        began = time.monotonic()
        with shared.changed:
            deltas = shared.delayed_mode()
            staleness = None
            if contribute:
                contributed, staleness = shared.worker.contribute(start.number)
                shared.outbox.append(contributed)
            with shared.order.passing(deltas.packs_apart(start)):
                addends = deltas.pack(start, contribute, self._options.batch, start.wire)
            shared.followers.tell(Joined(start, contribute))
        parts, packed = deltas.summed, deltas.packed
        self._pending.post_addends(parts, addends, start.wire)
        self._listener.flush()
        yield from self._sum_tails(*((part.tail, part.sums) for part in parts))
        yield from self._report_norm(start, *packed)
        while not shared.followers.have_summed(start.number):
            yield
        with shared.changed, shared.order.passing(deltas.lands_apart(start)):
            deltas.apply_sum()
            shared.followers.tell(Landed(start))
            self._listener.landed(start, deltas)
            if start.drain:
                deltas.reset_to_anchor()
                shared.worker.version = start.number + 1
            elif start.evaluate:
                shared.snapshot = deltas.snapshot(start.number)
                shared.evaluating = start.number
        yield from self._complete_round(start, began, staleness)

    def _synchronous_round(self, start: StartRound) -> Iterator[None]:
        shared = self._shared
        began = time.monotonic()
        if start.drain:
            if self._listener.keeps_going:  # nobody has landed this one, either, before all have landed that before
                self._pending.post(torch.zeros(1, dtype=torch.float32), "float32", in_norms=False)
                yield from self._pending.wait(shared.order)
            with shared.changed:
                shared.deltas = None
                shared.worker.version = start.number + 1
                self._listener.landed(start, None)
        else:
            for stage in self.gradients.stages:
                yield from self._sum_stage(stage, start)
            with shared.changed:
                self._listener.landed(start, self.gradients)
                if start.evaluate:  # the main thread makes its step before it asks for its next task
                    shared.evaluating = shared.marked.popleft()
                    shared.snapshot = Snapshot(shared.evaluating, time.monotonic())
        samples = None if start.drain else self.gradients.summed_samples
        spoiled = samples is not None and self.gradients.sum_is_spoiled
        yield from self._complete_round(start, began, 0, samples, spoiled)

    def _sum_stage(self, stage: Stage, start: StartRound) -> Iterator[None]:
        gradients, wire = self.gradients, of_gradients(start.wire)
        for index in range(stage.first, stage.stop):
            yield from self._until_released()
            with self._shared.order:
                addend = gradients.pack(index, wire)
            self._pending.post(addend, wire, gradients.buckets[index].residual)
        yield from self._until_released()
        self._shared.order.follow()  # who has packed the tail
        samples = gradients.samples  # while the main thread waits
        yield from self._sum_tails((stage.tail, None))
        if stage is gradients.stages[-1]:
            yield from self._report_norm(start, samples, 0)
        else:
            with self._shared.changed:
                self._shared.stages_summed += 1
                self._shared.changed.notify_all()

    def _until_released(self) -> Iterator[None]:
        while self._shared.void or not self.gradients.released():
            self._pending.poll()
            yield

    def _sum_tails(self, *tails: tuple[Tail, Sums | None]) -> Iterator[None]:
        """Until the round's sums are all in."""
        yield from self._pending.sum_tails(tails, self._shared.order)
        self._shared.order.leave()

    def _report_norm(self, start: StartRound, samples: int, steps: int) -> Iterator[None]:
        if self._options.measure_norms and samples:
            norms = yield from read(self._shared.order, self._pending.addends_norms)
            norm = sum(map(float, norms))
            self._shared.outbox.append(NormMeasured(self._plane.rank, start.number, samples, steps, norm))
            self._listener.flush()  # before the round's end is told

    def _serve(self, request: SumRequest) -> Iterator[None]:
        self._shared.order.follow()
        self._pending.post(request.tensor, "float32")
        yield from self._pending.wait(self._shared.order)
        request.done.set()

    def _complete_round(
        self,
        start: StartRound,
        began: float,
        staleness: int | None,
        samples: int | None = None,
        spoiled: bool = False,
    ) -> Iterator[None]:
        shared = self._shared
        with shared.changed:
            shared.worker.complete_round(start.number)
            shared.landed = start.number + 1
            shared.changed.notify_all()
        seconds = round(time.monotonic() - began, 6)
        self._telemetry.record("round", round=start.number, seconds=seconds, staleness=staleness)
        self._listener.completed(RoundCompleted(start.number, self._pending.sums_norm, samples, spoiled))
        if start.drain:
            while not self._listener.has_closed(start.number):
                yield  # until every `Contributed` is in: the books must be closed before anybody reads them
            with shared.changed:
                shared.drained, shared.phase = start, Phase.RESTING
                shared.changed.notify_all()
