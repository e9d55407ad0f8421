"""Messages between the ranks and the coordinator, which lives in rank 0's communication thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from hetsync.simulate.clock import Clock
from hetsync.simulate.polling import Polling, Runtime
from hetsync.simulate.virtual_rank import VirtualRank, VirtualRanks
from hetsync.sync.messages import Event, Task
from hetsync.sync.router import GROUP


class Router:
    """A message takes `message_seconds`, and is read when the receiver's thread polls next.

    Messages to rank 0 that come before one poll are read together: with thousands of ranks that saves many events.
    """

    def __init__(
        self,
        runtime: Runtime,
        clock: Clock,
        polling: Polling,
        ranks: VirtualRanks,
        on_events: Callable[[Sequence[Event]], None],
        poll_interval: Callable[[float], float],
    ) -> None:
        """`on_events` hears what rank 0's thread reads; `poll_interval` is that thread's by a moment of arrival."""
        # A message that a leader passes on waits for one poll more: half an interval on average.
        passed_on = len(ranks) > GROUP
        self.message_seconds = runtime.message_seconds + passed_on * runtime.idle_poll_seconds / 2
        self._runtime = runtime
        self._clock = clock
        self._polling = polling
        self._ranks = ranks
        self._on_events = on_events
        self._poll_interval = poll_interval
        self._inbox: deque[tuple[float, VirtualRank, Sequence[Event]]] = deque()  # on their way, by time of arrival

    def send_events(self, rank: VirtualRank, events: Sequence[Event]) -> None:
        """To the coordinator."""
        clock = self._clock
        if rank.number == 0:
            clock.at(clock.now, self._on_events, events)
            return
        arrival = clock.now + self.message_seconds
        self._inbox.append((arrival, rank, events))
        if len(self._inbox) == 1:
            self._await_poll(arrival)

    def _await_poll(self, arrival: float) -> None:
        """Rank 0's thread will poll some time after the message has come, and read what has come until then."""
        self._clock.at(arrival + self._polling.until_next(self._poll_interval(arrival)), self._poll)

    def _poll(self) -> None:
        inbox, present, now = self._inbox, self._ranks.present, self._clock.now
        events: list[Event] = []
        while inbox and inbox[0][0] <= now:
            _, sender, told = inbox.popleft()
            if present.get(sender.number) is sender:  # nobody listens to those who have left
                events += told
        self._on_events(events)
        if inbox:
            self._await_poll(inbox[0][0])

    def assign(self, rank: VirtualRank, task: Task) -> None:
        """From the coordinator."""
        now = arrival = self._clock.now
        if rank.number != 0:
            arrival += self.message_seconds
            if rank.idle_since is None:
                if rank.assigned_at <= now and rank.slice_ends_at > arrival + self._runtime.idle_poll_seconds:
                    rank.worker.assign(task)  # nobody asks for it before it arrives: no need for an event
                    return
                interval = self._polling.interval(math.inf, waiting=False, collective=False)
            else:
                interval = self._polling.interval(now - rank.idle_since, waiting=True, collective=False)
            rank.assigned_at = arrival = max(arrival + self._polling.until_next(interval), rank.assigned_at)
        self._clock.at(arrival, rank.receive, task)
