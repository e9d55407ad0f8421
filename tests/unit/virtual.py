"""A virtual cluster for the policy: ranks with scripted speeds, messages with scripted delays, one event queue."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from hetsync.sync.messages import Completed, Event, Give, Instruction, Piece, StartRound
from hetsync.sync.policy import Policy
from hetsync.sync.worker import Worker


class VirtualCluster:
    """Runs a policy to its end. `compute(rank, samples)`, `delay()` and `communicate()` return virtual seconds.

    Delays differ from message to message; from one sender to one receiver order is kept, as MPI keeps it.
    """

    def __init__(
        self,
        policy: Policy,
        compute: Callable[[int, int], float],
        delay: Callable[[], float] = lambda: 0.0,
        communicate: Callable[[], float] = lambda: 0.0,
        before: Callable[[Policy, int], list[Event]] = lambda policy, step: [],
    ) -> None:
        self.policy, self.compute, self.before = policy, compute, before
        self.delay, self.communicate = delay, communicate
        self.now = 0.0
        self.workers = {rank: Worker(rank) for rank in policy.members}
        self.busy = dict.fromkeys(policy.members, 0.0)
        self.drains: list[tuple[int, str]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._last: dict[tuple[int, int], float] = {}  # (sender, receiver) -> last arrival
        self._started: dict[int, StartRound] = {}
        self._posted: dict[int, set[int]] = {}
        self._next_round = dict.fromkeys(policy.members, policy.version)
        self._computing: set[int] = set()
        self._waiting: dict[int, Event] = {}

    def run(self, steps: int = 1_000_000) -> None:
        self._dispatch(self.policy.begin())
        for step in range(steps):
            for event in self.before(self.policy, step):
                self._dispatch(self.policy.on(event))
            if not self._queue:
                break
            self.now, _, action = heapq.heappop(self._queue)
            action()
        assert self.policy.ended, f"stuck; waited for {self.policy.waited_for()}"

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._ticket), action))

    def _message(self, sender: int, receiver: int, action: Callable[[], None]) -> None:
        arrival = max(self.now + self.delay(), self._last.get((sender, receiver), 0.0))
        self._last[sender, receiver] = arrival
        self._at(arrival, action)

    def _tell(self, rank: int, *events: Event) -> None:
        def arrive() -> None:
            for event in events:
                self._dispatch(self.policy.on(event))

        self._message(rank, -1, arrive)

    def _dispatch(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Give):
                self._message(-1, instruction.rank, lambda i=instruction: self._given(i))
            else:
                self._started[instruction.number] = instruction
                self._posted[instruction.number] = set()
                for rank in self.policy.members:
                    self._message(-1, rank, lambda r=rank: self._join(r))

    def _given(self, give: Give) -> None:
        self.workers[give.rank].give(give.piece)
        self._advance(give.rank)

    def _advance(self, rank: int, *events: Event) -> None:
        worker = self.workers[rank]
        if rank not in self._computing and worker.may_begin():
            piece, began = worker.begin()
            self._computing.add(rank)
            seconds = self.compute(rank, piece.samples)
            self.busy[rank] += seconds
            self._at(self.now + seconds, lambda: self._finish(rank, piece, seconds))
            events = (*events, began)
        if events:
            self._tell(rank, *events)

    def _finish(self, rank: int, piece: Piece, seconds: float) -> None:
        finished = self.workers[rank].finish(seconds, 0.0)
        if piece.synchronous_round is None:
            self._computing.discard(rank)
            self._advance(rank, finished)
        else:  # its gradients are in; it goes on when the round is complete
            self._waiting[rank] = finished
            self._post(rank, piece.synchronous_round)

    def _join(self, rank: int) -> None:
        """Collectives are posted in order; a synchronous one when the rank's gradients are there."""
        started = self._started.get(self._next_round[rank])
        if started is None or (started.synchronous and started.drain is None):
            return
        if rank in started.contributors:
            self._tell(rank, self.workers[rank].take(started.number))
        self._post(rank, started.number)

    def _post(self, rank: int, number: int) -> None:
        self._next_round[rank] = number + 1
        self._posted[number].add(rank)
        if self._posted[number] == set(self.workers):
            self._at(self.now + self.communicate(), lambda: self._complete(number))

    def _complete(self, number: int) -> None:
        started = self._started[number]
        if started.drain:
            self.drains.append((self.policy.ledger.applied, started.drain))
        for rank, worker in self.workers.items():
            worker.complete(number)
            worker.version = number + 1
            finished = self._waiting.pop(rank, None)
            self._computing -= {rank} if finished else set()
            self._advance(rank, *([finished] if finished else []))
        self._tell(0, Completed(number))
