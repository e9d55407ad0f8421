"""What the two threads of a rank share: which fields, and what keeps each of them whole.

The main thread computes (`engine.py`), the communication thread joins collectives (`communicator.py`). A signal handler
may interrupt the main thread anywhere, also while it holds a lock: it takes none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from hetsync.plane.base import Allocate, allocate_anywhere
from hetsync.sync.constraints import NO_CONSTRAINTS, Constraints
from hetsync.sync.deltas import Nesterov, Snapshot
from hetsync.sync.device_order import DeviceOrder
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.log import Followers
from hetsync.sync.lone import LoneDeltas
from hetsync.sync.messages import Event, StartRound
from hetsync.sync.reals import count_reals
from hetsync.sync.segmented import Segment, SegmentedDeltas
from hetsync.sync.worker import Worker
from hetsync.threads import Bell


@dataclass(frozen=True)
class EngineOptions:
    """`batch` is B, samples of one slice of all ranks; `timeout_seconds` bounds every wait for other ranks.
    `fragments_for`: into how many fragments the weights are cut, by their values, for delayed mode
    (`FragmentedDeltas`). With `measure_norms` the norms of what ranks put into sums are told (`NormMeasured`,
    `RoundCompleted`). `on_host`: the model is computed by the cores that the communication thread takes, too.
    `least_ranks`: see `fault.least_ranks`. `skips`: what is not finite is left out of rounds. `guarded`: delayed
    progress that is not finite is told as a loss, and goes into none (`delay_guard.py`). A rank that gives no sign of
    life for `silent_seconds`, or (`slow_factor`) takes so many times as long as it did, is excluded, where the
    others outlive that; None: never."""

    batch: int
    fragments_for: Callable[[int], int] = lambda values: 1
    bucket_bytes: int = 4 * 2**20
    overlap: bool = True
    timeout_seconds: float = 600.0
    measure_norms: bool = False
    on_host: bool = False
    least_ranks: int | None = None
    skips: bool = False
    guarded: bool = False
    silent_seconds: float | None = None
    slow_factor: float | None = None


class MainThread(Enum):
    """What the main thread does. It alone writes this; the communication thread polls by it."""

    COMPUTING = auto()  # a task; at a rest also what is done there: evaluating, saving
    WAITING = auto()  # for other ranks: for a task, for a round's sum, at a rest for a sum of its own
    EVALUATING = auto()  # its part of an evaluation, while rounds go on
    STOPPED = auto()  # the job is over, or given up: the communication thread ends


class Phase(Enum):
    """Where the job is, as this rank sees it.

    Not one enum with `MainThread`: a drain lands while the main thread still waits for a task, and at a rest it waits
    for sums of its own.
    """

    TRAINING = auto()  # tasks and rounds go on
    DRAINING = auto()  # a drain is under way: no task starts, although those that follow it may have come already
    RESTING = auto()  # the drain has landed: rounds wait until the main thread asks for a task again


class NoLock(threading.Condition):
    """Of a process whose main thread does the communication thread's work: nobody else is there to be kept out."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *failure: object) -> None:
        pass

    def notify_all(self) -> None:
        pass


class NoBell(Bell):
    """There is nobody to wake either."""

    def ring(self) -> None:
        pass


class SumRequest(NamedTuple):
    """A flat tensor of float32 or float64 that the main thread wants summed over all ranks, in place."""

    tensor: torch.Tensor
    done: threading.Event


class SharedState:
    def __init__(
        self,
        worker: Worker,
        outer: Nesterov | None,
        options: EngineOptions,
        alone: bool = False,
        one_thread: bool = False,
        ranks_counted: int = 0,
        segments: Sequence[Segment] | None = None,
        followers: Followers | None = None,
        allocate: Allocate = allocate_anywhere,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> None:
        """`alone`: no other rank is there, and nobody wants to know what sums hold. `one_thread`: the main thread
        polls. `ranks_counted`: see `Deltas`. `segments` that this rank holds, where replicas are on several ranks (it
        may be none), and the `followers` of a leader. `allocate` gives what is summed.
        `constraints` are on weights that all ranks hold."""
        # The lock; notified when the main thread may have something to go on with. Under it change the fields below
        # and all weights outside an inner step. Deltas are used without it where the other thread cannot touch what
        # is used: at a rest, and while a snapshot is shown (`Deltas.showing`).
        self.changed = NoLock() if one_thread else threading.Condition()
        self.worker = worker
        self.deltas: FragmentedDeltas | LoneDeltas | SegmentedDeltas | None = None  # None in synchronous mode
        self.landed = worker.version  # rounds complete here
        self.stages_summed = 0  # of the synchronous round that this rank computes; zeroed by the main thread
        self.phase = Phase.TRAINING  # RESTING is ended by the main thread, all else is the other's
        self.snapshot: Snapshot | None = None  # to be evaluated
        self.drained: StartRound | None = None  # the drain that has landed, until the main thread takes it
        self.evaluating: int | None = None  # the round of the snapshot that is still to be reported on
        self.at_rest = False  # a drain has landed, and the main thread has not come out of its rest
        self.recovering = False  # the rank has reported what it holds, and survivors have not agreed yet
        self.recoveries = 0  # from deaths, by the communication thread
        self.rest_again = False  # the rest that the main thread is at has been broken off, and all come to it once more
        self.admit: Callable[[], None] | None = None  # at a rest: lets another rank join, in the communication thread
        self.void = False  # the main thread is still to give up a synchronous task, whose gradients nobody fetches
        self.adopted: Mapping[str, Any] | None = None  # by another rank's step: the main thread's to take over
        self.marked: deque[int] = deque()  # synchronous rounds to be evaluated that have not landed
        self.failure: BaseException | None = None  # of the communication thread

        # Without the lock: append and popleft are atomic, and only the communication thread takes out. The outbox holds
        # all that this rank tells the coordinator, in the order in which it happened. What comes of the worker's books
        # is put there under the lock that they change under, or `Contributed` might overtake its `TaskFinished`. A
        # signal handler appends, and does no more: the next poll is near.
        self.outbox: deque[Event] = deque()
        self.requests: deque[SumRequest] = deque()
        self.bell = NoBell() if one_thread else Bell()  # the communication thread is to poll now

        # Without it, too: written by one thread in one step, and the other may read the old value once more.
        self.main_thread = MainThread.COMPUTING  # written by the main thread
        self.failure_raised = False  # by the main thread
        self.acted_at = time.monotonic()  # by the main thread: the last moment at which it began or ended a task
        self.cap: int | None = None  # by the main thread: samples a slice that fit into memory, as it has found
        self.patience_seconds = 0.0  # by the main thread: it computes on for so long while a round lands
        self.polls = 0  # by the communication thread: it does not hang

        # Set before the communication thread starts. `order` is entered wherever both threads touch tensors.
        self.order = DeviceOrder()
        self.weights: Sequence[torch.Tensor] = ()
        self.buffers: Sequence[torch.Tensor] = ()
        self.added = 0  # the last of these, whose increments add up
        self.travel: Sequence[int] = ()  # buffers that travel from the first round of this rank on
        self.one_sum = not options.measure_norms  # see `Deltas`: norms are of weights alone
        self._outer = outer
        self.alone = alone
        self.ranks_counted = ranks_counted
        self._options = options
        self._segments = segments
        self._allocate = allocate
        self._constraints = constraints
        self.followers = followers or Followers()

    @property
    def queues(self) -> bool:
        """Does the main thread only queue slices, which a device computes apart from the host's cores?"""
        return bool(self.weights) and self.weights[0].is_cuda

    def delayed_mode(self) -> FragmentedDeltas | LoneDeltas | SegmentedDeltas:
        """Under the lock. Deltas are made when delayed mode begins: until then all ranks' weights are the anchor."""
        if self.deltas is None and self._segments is not None:
            with self.order:
                self.deltas = SegmentedDeltas(self._segments)
        elif self.deltas is None and self.alone and self._outer is None:
            self.deltas = LoneDeltas(self.weights, self.buffers, self._options.skips, self.added, self._constraints)
        elif self.deltas is None:
            with self.order:
                self.deltas = FragmentedDeltas(
                    self.weights,
                    self._outer,
                    self.buffers,
                    self.worker.rank,
                    self.ranks_counted,
                    self.one_sum,
                    self._options.fragments_for(sum(map(count_reals, self.weights))),
                    self._allocate,
                    self.added,
                    self._constraints,
                )
                self.deltas.tail.travel = list(self.travel)
        return self.deltas
