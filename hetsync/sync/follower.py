"""A rank of a replica that is not its leader: it does what its leader's log says, in that order.

Both threads work the log off together: the main thread takes what it does itself (slices, what is applied between them,
what is finished), the communication thread the rounds. What neither may do yet, as the other's part comes first, waits.
So the calls to this rank's deltas are those of the leader to its own, one by one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from hetsync.plane.base import Plane, StalledError, wait_limit
from hetsync.sync.collectives import PendingCollectives
from hetsync.sync.communicator import hand_over
from hetsync.sync.device_order import device_order
from hetsync.sync.log import Applied, Began, Closed, Coming, Entry, Finished, Joined, Landed, LogBatch, Summed
from hetsync.sync.messages import DrainRequested, StartRound, Task
from hetsync.sync.overhead import MainThreadTimer
from hetsync.sync.polling import pause_seconds
from hetsync.sync.rounds import COMPLETE
from hetsync.sync.segmented import Segment, SegmentedDeltas
from hetsync.sync.shared_state import EngineOptions, MainThread, Phase, SharedState
from hetsync.sync.steps import require_finite
from hetsync.sync.worker import Worker
from hetsync.telemetry import Telemetry
from hetsync.threads import cpu_seconds, single_threaded

Kind = TypeVar("Kind", bound=Entry)


class Follower:
    """The calls of an engine, so that a loop need not know whose it is."""

    def __init__(
        self,
        plane: Plane,
        leader: int,
        device: torch.device,
        segments: Sequence[Segment],
        options: EngineOptions,
        *,
        on_task: Callable[[Task], None] = lambda task: None,
        telemetry: Telemetry | None = None,
        version: int = 0,
    ) -> None:
        """`on_task` is called with each task as soon as it is known, from the communication thread."""
        self.timer = MainThreadTimer()
        self._plane, self._leader, self._options = plane, leader, options
        self._on_task = on_task
        self._telemetry = telemetry or Telemetry(None)
        self.worker = Worker(plane.rank, version)  # of which only the version is used
        self._shared = SharedState(self.worker, None, options, segments=segments)
        self._shared.order = device_order(device)
        self._log: deque[Entry] = deque()  # under the lock
        self._pending = PendingCollectives(plane)
        self._collective: Iterator[None] | None = None
        self._limit_seconds = wait_limit(leader, options.timeout_seconds)
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(None, single_threaded(self._run), "hetsync-communication", daemon=True)

    # Main thread.

    def start(self) -> None:
        """Call once, when all ranks have identical weights."""
        self._shared.delayed_mode()
        self._shared.order.leave()
        self._heard_at = time.monotonic()
        self._thread.start()

    def next_work(self) -> Task | StartRound:
        """Wait for the leader's next task, or for the drain round that brought all to rest."""
        shared = self._shared
        with shared.changed, self.timer.waiting:
            shared.phase, self._heard_at = Phase.TRAINING, time.monotonic()
            while (drained := shared.drained) is None:
                if (began := self._come(Began)) is not None:
                    return began.task
                self._wait()
            shared.drained, shared.phase = None, Phase.RESTING
            shared.order.follow()
            return drained

    def close_slice(self, task: Task) -> None:
        """After a slice's inner step."""
        with self._shared.changed:
            self._await(Closed)

    def finish(self, task: Task, seconds: float, loss_sum: float, lift: float = 1.0) -> None:
        """The task is computed. The leader tells the coordinator."""
        shared = self._shared
        with shared.changed:
            finished = self._await(Finished)
            assert finished.task == task.number
            with self.timer.working, shared.order:
                total = self._deltas.finish(task.samples, len(task.slices), lift)
        require_finite(total, self._plane.rank, task)

    def report(self, event: DrainRequested) -> None:
        """From the main thread."""
        self._shared.outbox.append(event)
        self._shared.bell.ring()

    def report_from_signal(self, event: DrainRequested) -> None:
        """The same from a signal handler: it takes no lock."""
        self._shared.outbox.append(event)

    def stop(self) -> None:
        """After the final drain, or when giving up."""
        self._shared.main_thread = MainThread.STOPPED
        self._shared.bell.ring()
        if self._thread.is_alive():
            self._thread.join(self._options.timeout_seconds)

    def cpu_seconds(self) -> float:
        """What synchronisation has cost this rank so far."""
        return self.timer.cpu_seconds + cpu_seconds(self._thread)

    @property
    def bytes_sent(self) -> int:
        return self._pending.bytes_sent

    @property
    def buffer_bytes(self) -> int:
        """Memory that delayed mode takes on this rank."""
        return self._deltas.buffer_bytes

    @property
    def _deltas(self) -> SegmentedDeltas:
        deltas = self._shared.deltas
        assert isinstance(deltas, SegmentedDeltas)
        return deltas

    def _await(self, kind: type[Kind]) -> Kind:
        with self.timer.waiting:
            self._heard_at = time.monotonic()
            while (entry := self._come(kind)) is None:
                self._wait()
            return entry

    def _come(self, kind: type[Kind]) -> Kind | None:
        """The next entry, if it is of this kind. What comes before it of the main thread's is done."""
        while self._log and isinstance(entry := self._log[0], Applied):
            self._log.popleft()
            with self._shared.order.applying():
                applied = self._deltas.apply()
            assert applied, "the leader could apply it"
            self.worker.version = entry.version
            self._shared.bell.ring()
        if not (self._log and isinstance(self._log[0], kind)):
            return None
        found = self._log.popleft()
        self._shared.bell.ring()
        assert isinstance(found, kind)
        return found

    def _wait(self) -> None:
        shared = self._shared
        if shared.failure is not None:
            shared.failure_raised = True
            raise shared.failure
        if time.monotonic() - self._heard_at > self._limit_seconds:
            raise StalledError(f"no word from rank {self._leader}, which leads, for {self._limit_seconds:.0f} s")
        shared.main_thread = MainThread.WAITING
        shared.bell.ring()
        shared.changed.wait(1.0)
        shared.main_thread = MainThread.COMPUTING

    # Communication thread.

    def _run(self) -> None:
        try:
            with self._shared.order.beside():
                self._poll_on()
        except BaseException as failure:
            hand_over(failure, self._shared, self._plane)

    def _poll_on(self) -> None:
        shared, news_at = self._shared, time.monotonic()
        while shared.main_thread is not MainThread.STOPPED:
            moved = self._poll()
            now = time.monotonic()
            news_at = now if moved else news_at
            seconds = pause_seconds(shared, self._pending.under_way, now - news_at)
            if not seconds:
                os.sched_yield()
            if shared.bell.wait(seconds):
                news_at = now

    def _poll(self) -> bool:
        return self._receive() + self._send() + self._proceed() > 0

    def _receive(self) -> int:
        entries: list[Entry] = []
        for sender, message in self._plane.receive():
            assert sender == self._leader
            assert isinstance(message, LogBatch)
            entries += message.entries
        for entry in entries:
            if isinstance(entry, Coming):
                self._on_task(entry.task)
        if entries:
            with self._shared.changed:
                self._log.extend(entry for entry in entries if not isinstance(entry, Coming))
                self._heard_at = time.monotonic()
                self._shared.changed.notify_all()
        return len(entries)

    def _send(self) -> int:
        outbox = self._shared.outbox
        events = [outbox.popleft() for _ in range(len(outbox))]
        for event in events:
            self._plane.send(event, self._leader)
        return len(events)

    def _proceed(self) -> int:
        """Join rounds and land them, as far as it is the log's turn."""
        done = 0
        while True:
            if self._collective is not None:
                if next(self._collective, COMPLETE) is not COMPLETE:
                    return done
                self._collective = None
            with self._shared.changed:
                entry = self._log[0] if self._log else None
                if not isinstance(entry, Joined | Landed):
                    return done
                self._log.popleft()
                if isinstance(entry, Joined):
                    self._collective = self._join(entry)
                else:
                    self._land(entry.start)
                self._shared.changed.notify_all()
            done += 1

    def _join(self, joined: Joined) -> Iterator[None]:
        """Under the lock. Returns what sums this rank's part, and tells the leader."""
        with self._shared.order.passing(self._deltas.packs_apart(joined.start)):
            addends = self._deltas.pack(joined.start, joined.contributes, self._options.batch, "float32")
        return self._sum(joined.start, addends)

    def _sum(self, start: StartRound, addends: Sequence[torch.Tensor]) -> Iterator[None]:
        began, order, parts = time.monotonic(), self._shared.order, self._deltas.summed
        self._pending.begin_round()
        self._pending.post_addends(parts, addends, "float32")
        yield from self._pending.sum_tails([(part.tail, part.sums) for part in parts], order)
        order.leave()
        self._plane.send(Summed(start.number), self._leader)
        seconds = round(time.monotonic() - began, 6)
        self._telemetry.record("round", round=start.number, seconds=seconds, staleness=None)

    def _land(self, start: StartRound) -> None:
        """Under the lock."""
        with self._shared.order.passing(self._deltas.lands_apart(start)):
            self._deltas.apply_sum()
            if start.drain is not None:
                self._deltas.reset_to_anchor()
                self.worker.version = start.number + 1
                self._shared.drained = start
