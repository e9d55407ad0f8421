"""Carries the policy's instructions out on one rank: a main thread that computes, a thread that communicates.

The main thread asks for work (`next_work`), computes, and hands over (`finish`). The communication thread receives
instructions, joins every round in order (with zeros where the rank has nothing to give), and on rank 0 hosts the
coordinator. They share one lock (`_changed`), under which weights, deltas and the worker's books change.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetsync.errors import complain
from hetsync.plane.base import Plane, WireFormat
from hetsync.sync import naps
from hetsync.sync.coordinator import Coordinator, Send
from hetsync.sync.deltas import Deltas, Outer, Snapshot
from hetsync.sync.gradients import Gradients
from hetsync.sync.messages import Alive, Completed, Event, Give, Instruction, Piece, StartRound, Weighed
from hetsync.sync.post import Post
from hetsync.sync.spent import Spent
from hetsync.sync.sums import Sums
from hetsync.sync.watch import Watch
from hetsync.sync.worker import Worker
from hetsync.telemetry import Telemetry
from hetsync.threads import cpu_seconds, single_threaded

GRACE_SECONDS = 10.0  # for the main thread to take over a failure


@dataclass(frozen=True)
class EngineOptions:
    """`batch` is B, samples of one slice of all ranks; `timeout_seconds` bounds every wait for other ranks. With
    `weigh` the norms of what ranks put into sums are told (`Weighed`, `Completed`)."""

    batch: int
    wire: WireFormat = "float32"
    bucket_bytes: int = 4 * 2**20
    timeout_seconds: float = 600.0
    weigh: bool = False


class Engine:
    def __init__(
        self,
        plane: Plane,
        model: torch.nn.Module,
        options: EngineOptions,
        coordinator: Callable[[Send], Coordinator] | None = None,
        outer: Outer | None = None,
        pace: Callable[[float], None] = lambda fraction: None,
        on_piece: Callable[[Piece], None] = lambda piece: None,
        telemetry: Telemetry | None = None,
        version: int = 0,
    ) -> None:
        """`coordinator` makes rank 0's; `on_piece` hears of work as soon as it is known (to load its data)."""
        self.worker = Worker(plane.rank, version)
        self.spent = Spent()
        self._post = Post(plane)
        self.coordinator = coordinator(self._post.deliver) if coordinator else None
        self._plane = plane
        self._options = options
        self._outer = outer
        self._on_piece = on_piece
        self._telemetry = telemetry or Telemetry(None)
        self._wake = threading.Event()
        weights = [p for p in model.parameters() if p.requires_grad]
        self._local = weights + [b for b in model.buffers() if b.is_floating_point()]
        self._gradients = Gradients(model, options.bucket_bytes, pace, self._wake.set)
        self._deltas: Deltas | None = None
        self._changed = threading.Condition()
        self._outbox: list[Event] = []
        self._rounds: deque[StartRound] = deque()
        self._requests: deque[tuple[torch.Tensor, threading.Event]] = deque()
        self._task: Iterator[None] | None = None
        self._sums = Sums(plane, options.weigh)  # of that task
        self._snapshot: Snapshot | None = None
        self._drained: StartRound | None = None
        self._landed = version  # rounds complete here
        self._failure: BaseException | None = None
        self._failed_at: float | None = None
        policy = self.coordinator.policy if self.coordinator else None
        self._watch = Watch(plane, policy, options.timeout_seconds)
        self._stopping = False
        self._waiting = False  # the main thread waits for others
        self._draining = False  # what comes after the drain may be known here before the drain has landed
        self._resting = False  # the main thread evaluates, saves, or is done
        self._evaluating = False  # the main thread does its part of an evaluation, while rounds go on
        self._thread = threading.Thread(None, single_threaded(self._communicate), "hetsync-communication", daemon=True)

    # The main thread.

    def start(self) -> None:
        """Call once, on every rank, with identical weights."""
        self._thread.start()

    def next_work(self) -> Piece | Snapshot | StartRound:
        """Wait for the next piece, for a snapshot to evaluate, or for the drain round that brought all to rest."""
        with self._changed, self.spent.waiting():
            self._resting = self._drained is not None
            while True:
                self._raise_failure()
                if self._snapshot is not None:
                    snapshot, self._snapshot = self._snapshot, None
                    return snapshot
                if self._drained is not None:
                    drained, self._drained = self._drained, None
                    return drained
                self._apply()
                if self.worker.may_begin() and not self._draining:
                    return self._begin()
                self._wait()

    def _wait(self) -> None:
        self._waiting = True
        self._wake.set()
        self._changed.wait(1.0)
        self._waiting = False

    def _begin(self) -> Piece:
        piece, began = self.worker.begin()
        if piece.synchronous_round is None:
            self._ensure_deltas()
        else:
            self._deltas = None
        self._watch.moved()
        self._outbox.append(began)
        self._wake.set()
        return piece

    @contextmanager
    def showing(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, the model holds the snapshot's weights. No drain begins before this rank has told its score, so
        nothing else touches local weights meanwhile."""
        self._evaluating = True
        try:
            if snapshot.weights is None:
                yield
            else:
                assert self._deltas is not None
                with self._deltas.showing(snapshot.weights):
                    yield
        finally:
            self._evaluating = False

    def open_slice(self, piece: Piece, samples: int, last: bool) -> None:
        """Before the forward pass of a slice of `samples`."""
        if piece.synchronous_round is not None:
            self._gradients.open_slice(samples, last)

    def close_slice(self) -> None:
        """After an inner step: take over what rounds have brought."""
        with self._changed, self.spent.working():
            self._apply()

    def reduce(self, piece: Piece) -> None:
        """Synchronous mode, after the last backward: gradients become the mean over the round's samples."""
        assert piece.synchronous_round is not None
        self._gradients.flush(piece.samples)
        with self._changed, self.spent.waiting():
            while self._landed <= piece.synchronous_round:
                self._raise_failure()
                self._wait()
        self._gradients.collect(piece.round_samples)

    def finish(self, piece: Piece, seconds: float, loss_sum: float) -> None:
        """The piece is computed; `seconds` of device time, `loss_sum` over its samples."""
        with self._changed, self.spent.working():
            if piece.synchronous_round is None:
                assert self._deltas is not None
                self._apply()
                self._deltas.finish(piece.samples, len(piece.slices))
            else:
                self.worker.version = piece.synchronous_round + 1
            self._outbox.append(self.worker.finish(seconds, loss_sum))

    def cpu_seconds(self) -> float:
        """What synchronisation has cost this rank so far: its thread, and the main thread's part."""
        return self.spent.cpu_seconds + cpu_seconds(self._thread)

    def tell(self, event: Event) -> None:
        """Say something to the coordinator."""
        with self._changed:
            self._outbox.append(event)
        self._wake.set()

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Sum a flat float32 tensor over all ranks, which must all be at rest at the same drain."""
        done = threading.Event()
        self._requests.append((tensor, done))
        self._wake.set()
        while not done.wait(1.0):
            self._raise_failure()

    def stop(self) -> None:
        """After the final drain, or when giving up."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def bytes_sent(self) -> int:
        return self._sums.bytes_sent

    @property
    def anchor(self) -> list[torch.Tensor]:
        """The weights that all ranks share, at rest."""
        return self._local if self._deltas is None else [self._deltas.anchor]

    def _apply(self) -> None:
        if self._deltas is not None and self.worker.version < self._landed and self._deltas.apply():
            self.worker.version = self._landed

    def _ensure_deltas(self) -> Deltas:
        """Made when delayed mode begins: until then all ranks' local weights are the anchor."""
        if self._deltas is None:
            self._deltas = Deltas(self._local, self._outer)
        return self._deltas

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failed_at = self._failure, None
            raise failure

    # The communication thread.

    def _communicate(self) -> None:
        try:
            if self.coordinator is not None:
                self.coordinator.begin()
            roused_at = time.monotonic()
            while not self._stopping:
                self._wake.clear()
                moved = self._receive() + self._flush() + self._proceed()
                if moved or self._resting or self._evaluating:
                    self._watch.moved()
                else:
                    self._watch.check(self._sign)
                now = time.monotonic()
                roused_at = now if moved else roused_at
                if self._wake.wait(self._nap_seconds(now - roused_at)):
                    roused_at = now
        except BaseException as failure:
            self._fail(failure)

    def _nap_seconds(self, quiet_seconds: float) -> float:
        longest = naps.LONGEST_COLLECTIVE_SECONDS if self._sums.under_way else naps.LONGEST_IDLE_SECONDS
        fraction = naps.FRACTION_WAITING if self._waiting else naps.FRACTION_COMPUTING
        calm = self._deltas is not None and not (self._waiting or self._resting)
        shortest = naps.SHORTEST_DELAYED_SECONDS if calm else naps.SHORTEST_SECONDS
        return naps.nap_seconds(quiet_seconds, fraction, longest, shortest)

    @property
    def _sign(self) -> Alive:
        return Alive(self._plane.rank, self._landed + (self._task is not None), self._waiting)

    def _fail(self, failure: BaseException) -> None:
        """Let the main thread end the job with the failure; if it cannot (it computes, or hangs), end it here."""
        with self._changed:
            self._failure, self._failed_at = failure, time.monotonic()
            self._changed.notify_all()
        while self._failed_at is not None and not self._stopping:
            if time.monotonic() > self._failed_at + GRACE_SECONDS:
                complain(f"rank {self._plane.rank}: {failure}")
                self._plane.abort(1)
            time.sleep(0.05)

    def _receive(self) -> int:
        """Take in what arrived; returns how much of it is news (signs of life are not)."""
        mail = self._post.receive()
        for sign in mail.signs:
            self._watch.answer(sign, self._sign)
        for events in mail.events:
            assert self.coordinator is not None
            self.coordinator.on(events)
        instructions = [*mail.instructions, *self._post.own()]
        for letter in instructions:
            self._take_in(letter)
        return mail.passed_on + len(mail.events) + len(instructions)

    def _take_in(self, instructions: Sequence[Instruction]) -> None:
        with self._changed:
            for instruction in instructions:
                if isinstance(instruction, Give):
                    self.worker.give(instruction.piece)
                    self._on_piece(instruction.piece)
                else:
                    self._rounds.append(instruction)
            self._changed.notify_all()

    def _flush(self) -> int:
        with self._changed:
            events, self._outbox = self._outbox, []
        if self.coordinator is None:
            self._post.tell(events)
        elif events:
            self.coordinator.on(events)
        return len(events)

    def _proceed(self) -> int:
        """Move the collective under way, or begin the next.

        At rest, rounds wait for the main thread, since what it asks for comes first on every rank. Otherwise

            rank 0: round 8 ...                      rank 1: allreduce of the optimizer state, round 8 ...
        """
        if self._task is None:
            if self._rounds and not self._resting:
                start = self._rounds.popleft()
                self._draining = start.drain is not None
                self._task = self._synchronous_round(start) if start.synchronous else self._delayed_round(start)
            elif self._requests:
                self._task = self._request(*self._requests.popleft())
            else:
                return 0
        before = self._landed + self._plane.moves
        try:
            next(self._task)
            return self._landed + self._plane.moves - before
        except StopIteration:
            self._task = None
            return 1

    def _delayed_round(self, start: StartRound) -> Iterator[None]:
        contribute = self._plane.rank in start.contributors
        wire: WireFormat = "float32" if start.drain else self._options.wire
        began = time.monotonic()
        with self._changed:
            deltas = self._ensure_deltas()
            staleness = None
            if contribute:
                took, staleness = self.worker.take(start.number)
                self._outbox.append(took)
            addend = deltas.load(contribute, self._options.batch, wire)
        self._sums.post(addend, wire)
        if contribute:
            self._tell_norm(start, *deltas.loaded)
        self._flush()
        yield from self._sums.wait()
        with self._changed:
            deltas.land()
            if start.drain:
                deltas.settle()
                self.worker.version = start.number + 1
            elif start.evaluate:
                self._snapshot = Snapshot(start.number, time.monotonic(), deltas.anchor.clone())
        yield from self._land(start, began, staleness)

    def _synchronous_round(self, start: StartRound) -> Iterator[None]:
        began = time.monotonic()
        if start.drain:
            with self._changed:
                self._deltas = None
                self.worker.version = start.number + 1
        else:
            for index in range(len(self._gradients.buckets) + 1):
                while not self._gradients.released():
                    self._sums.arrived()
                    yield
                self._sums.post(*self._gradients.load(index, self._options.wire), index < len(self._gradients.buckets))
            self._tell_norm(start, self._gradients.samples, 0)
            yield from self._sums.wait()
            if start.evaluate:  # the main thread makes its step before it looks for more
                with self._changed:
                    self._snapshot = Snapshot(start.number, time.monotonic())
        yield from self._land(start, began, 0)

    def _tell_norm(self, start: StartRound, samples: int, steps: int) -> None:
        if self._options.weigh:
            with self._changed:
                self._outbox.append(Weighed(self._plane.rank, start.number, samples, steps, self._sums.addends_norm))

    def _request(self, tensor: torch.Tensor, done: threading.Event) -> Iterator[None]:
        self._sums.post(tensor, "float32")
        yield from self._sums.wait()
        done.set()

    def _land(self, start: StartRound, began: float, staleness: int | None) -> Iterator[None]:
        with self._changed:
            self.worker.complete(start.number)
            self._landed = start.number + 1
            self._changed.notify_all()
        seconds = round(time.monotonic() - began, 6)
        self._telemetry.record("round", round=start.number, seconds=seconds, staleness=staleness)
        if self.coordinator is not None:
            self.coordinator.on([Completed(start.number, self._sums.sums_norm)])
        if start.drain:
            while self.coordinator is not None and self.coordinator.policy.version <= start.number:
                yield  # until every contributor's word is in: the books must be closed before anybody reads them
            with self._changed:
                self._drained, self._resting, self._draining = start, True, False
                self._changed.notify_all()
