"""The ranks' communication threads: they carry messages and join every round; rank 0's hosts the coordinator.

A delayed round costs three events, and one for each rank that waits for it: every rank joins at a moment of its own,
the sum travels, and lands on each rank at another such moment. A rank that computes finds out at its next slice what
has landed meanwhile. What it had finished when its thread joined goes into the round at its next finish, or when all
have joined, whichever comes first: nobody could tell the difference, as nothing is decided before it has heard from all
contributors.

A synchronous round's buckets travel while ranks compute, and all go on when the sums are in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hetsync.balance.speed_tracker import Speeds
from hetsync.plane.wire import of_gradients
from hetsync.simulate.clock import Clock
from hetsync.simulate.evaluations import Evaluations
from hetsync.simulate.learner import Learner
from hetsync.simulate.polling import Polling
from hetsync.simulate.rounds import DelayedRound, SynchronousRound
from hetsync.simulate.router import Router
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.telemetry import Telemetry
from hetsync.simulate.virtual_rank import VirtualRank, VirtualRanks
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.delay_guard import DelayGuard
from hetsync.sync.messages import AssignTask, Event, Instruction, RoundCompleted, StartRound, Task
from hetsync.sync.rounds_rule import RoundsChange, rule_for
from hetsync.sync.state_machine import RoundStateMachine


class Communicator:
    def __init__(
        self,
        *,
        scenario: Scenario,
        clock: Clock,
        polling: Polling,
        ranks: VirtualRanks,
        machine: RoundStateMachine,
        learner: Learner,
        telemetry: Telemetry,
        evaluations: Evaluations,
        on_rest: Callable[[StartRound], None],
    ) -> None:
        """`on_rest` hears of the drain that has brought all ranks to rest, once its books are closed."""
        self.machine = machine
        self.draining = False  # nobody begins what follows a drain before it has landed
        self._clock = clock
        self._polling = polling
        self._ranks = ranks
        self._learner = learner
        self._telemetry = telemetry
        self._evaluations = evaluations
        self._on_rest = on_rest
        self._router = Router(scenario.runtime, clock, polling, ranks, self.handle_events, self._poll_interval)
        self._coordinator = _coordinator(
            scenario, machine, self._deliver, evaluations, self._on_rounds_change, learner.learns
        )
        self._heard_at = 0.0  # when rank 0's thread last heard of anything
        self._drained: StartRound | None = None  # waits for its books to be closed
        self._delayed: DelayedRound | None = None  # under way, without its sum
        self._landing: DelayedRound | None = None  # the newest whose sum is there
        self._synchronous: dict[int, SynchronousRound] = {}  # under way, by number
        traffic = scenario.traffic
        self._scenario = scenario
        self.link_slow_by = 1.0
        wire = of_gradients(scenario.sync.first_wire)
        self._bucket_seconds = [scenario.link_seconds(values, wire) for values in traffic.buckets]
        self._bucket_shares = traffic.bucket_shares if scenario.sync.overlap else [1.0] * len(traffic.buckets)
        self._tail_seconds = scenario.link_seconds(traffic.tail)
        self._step_seconds = scenario.cluster.step_seconds

    # The coordinator's messages.

    def _on_rounds_change(self, change: RoundsChange) -> None:
        self._telemetry.rounds_changed(self._clock.now, change)

    def start(self) -> None:
        """The coordinator hands out the first work."""
        if self._scenario.begun is not None:
            self._on_rounds_change(self._scenario.begun)
        self._coordinator.start()

    def send_events(self, rank: VirtualRank, events: Sequence[Event]) -> None:
        """A rank's message to the coordinator."""
        self._router.send_events(rank, events)

    def handle_events(self, events: Sequence[Event]) -> None:
        """What rank 0's thread learns while it is awake."""
        self._heard_at = self._clock.now
        self._coordinator.handle(events)
        self._close_drain()

    def _poll_interval(self, arrival: float) -> float:
        """Of rank 0's thread, when a message arrives."""
        waiting, collective = self._ranks.present[0].idle_since is not None, self._delayed is not None
        return self._polling.interval(arrival - self._heard_at, waiting, collective)

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, AssignTask):
                self._router.assign(self._ranks.present[instruction.rank], instruction.task)
            elif isinstance(instruction, StartRound):
                self.draining = self.draining or instruction.drain is not None
                start = self._start_synchronous if instruction.synchronous else self._start_delayed
                start(instruction)

    # Delayed rounds.

    def _start_delayed(self, start: StartRound) -> None:
        """Every rank joins when its thread polls; contributors say what they put in."""
        now = self._clock.now
        first, quiet = now + self._router.message_seconds, math.inf
        if self._landing is not None and self._landing.lands is not None:
            first = max(first, self._landing.lands.last)
            quiet = now - self._landing.lands.first
        interval = self._polling.interval(quiet, self._ranks.all_idle, collective=False)
        joins = self._polling.times(first, interval, len(self._ranks))
        self._delayed = delayed = DelayedRound(start, joins, set(start.contributors))
        self._clock.at(joins.last, self._all_joined, delayed)

    def join(self, rank: VirtualRank) -> None:
        """The rank is about to finish a task: should its thread have joined before?"""
        delayed = self._delayed
        if delayed is None or rank.number not in delayed.missing:
            return
        if delayed.joins.at(rank.number) <= self._clock.now:
            self._join(rank, delayed)

    def _join(self, rank: VirtualRank, delayed: DelayedRound) -> None:
        self._notice_landing(rank)
        delayed.missing.discard(rank.number)
        contributed, delayed.staleness[rank.number] = rank.worker.contribute(delayed.number)
        delayed.contributed.append(contributed)
        rank.in_flight = delayed.number
        self._learner.pack(rank.number, delayed.start)

    def _all_joined(self, delayed: DelayedRound) -> None:
        present, start = self._ranks.present, delayed.start
        for number in sorted(delayed.missing):
            self._join(present[number], delayed)
        if delayed.contributed:
            self._router.send_events(present[max(start.contributors)], delayed.contributed)
        self._learner.sum_deltas(start)
        interval = self._polling.interval(math.inf, self._ranks.all_idle, collective=True)
        seconds = self._sum_seconds(start) + self._polling.sum_seconds(interval, len(self._ranks))
        self._telemetry.totals.communication_seconds += seconds
        self._clock.at(self._clock.now + seconds, self._delayed_summed, delayed, interval)

    def _sum_seconds(self, start: StartRound) -> float:
        """Of what a delayed round sums; buffers go with the last fragment of the weights."""
        scenario, traffic = self._scenario, self._scenario.traffic
        parts = scenario.sync.most_fragments
        summed = sum(start.sums(part, parts) for part in range(parts))
        seconds = scenario.link_seconds(-(-traffic.weights * summed // parts), start.wire)
        if traffic.buffers and start.sums(parts - 1, parts):
            seconds += scenario.link_seconds(traffic.buffers)
        return seconds * self.link_slow_by

    def _delayed_summed(self, delayed: DelayedRound, interval: float) -> None:
        clock, start = self._clock, delayed.start
        delayed.lands = lands = self._polling.times(clock.now, interval, len(self._ranks))
        self._landing, self._delayed = delayed, None
        self._telemetry.delayed_round(start.number, delayed.joins, lands, delayed.staleness)
        clock.at(lands.at(0), self.handle_events, [RoundCompleted(start.number)])
        for number, rank in self._ranks.idle.items():
            clock.at(lands.at(number), rank.wake)
        if start.drain is not None:
            clock.at(lands.last, self._drain_landed, start)
        elif start.evaluate:
            clock.at(lands.at(0), self._evaluate_delayed, start)

    def _evaluate_delayed(self, start: StartRound) -> None:
        self._notice_landing(self._ranks.present[0])
        self.handle_events(self._evaluations.evaluate(start.number))

    # What a rank sees of them.

    def take_over(self, rank: VirtualRank) -> None:
        """Between two slices: what has landed, into the local weights."""
        self._notice_landing(rank)
        if rank.worker.version < rank.landed:
            self._learner.apply(rank.number)
            rank.worker.version = rank.landed

    def wake_after_landing(self, rank: VirtualRank) -> None:
        """The rank has begun to wait: a sum may be there, but not yet on this rank."""
        newest = self._landing
        if newest is not None and newest.lands is not None and self._clock.now < newest.lands.at(rank.number):
            self._clock.at(newest.lands.at(rank.number), rank.wake)

    def _notice_landing(self, rank: VirtualRank) -> None:
        newest = self._landing
        if newest is None or rank.landed > newest.number:
            return
        assert newest.lands is not None
        # A round begins only after the one before has landed everywhere.
        landed = newest.number + (self._clock.now >= newest.lands.at(rank.number))
        if landed > rank.landed:
            self._land(rank, landed)

    def _land(self, rank: VirtualRank, landed: int) -> None:
        """The sums of the rounds below `landed` have arrived on the rank."""
        rank.landed = landed
        self._learner.apply_sum(rank.number, landed - 1)
        if rank.in_flight is not None and rank.in_flight < landed:
            rank.worker.complete_round(rank.in_flight)
            rank.in_flight = None

    # Synchronous rounds.

    def _start_synchronous(self, start: StartRound) -> None:
        if start.drain is None:
            self._synchronous[start.number] = SynchronousRound(start, self._bucket_shares, len(start.contributors))
            return
        now = self._clock.now  # nothing to sum
        self._telemetry.synchronous_round(start.number, now, now)
        self._clock.at(now, self.handle_events, [RoundCompleted(start.number)])
        self._clock.at(now + self._router.message_seconds, self._drain_landed, start)

    def release(self, task: Task, seconds: float) -> None:
        """A rank begins the task's last slice, which takes so long."""
        assert task.synchronous_round is not None
        self._synchronous[task.synchronous_round].release(self._clock.now, seconds)

    def reduce(self, rank: VirtualRank, task: Task, then: Callable[[VirtualRank, Task], None]) -> None:
        """The rank has computed, and waits for the sums; `then` follows its step."""
        assert task.synchronous_round is not None
        now = self._clock.now
        self._ranks.wait(rank, now)
        under_way = self._synchronous[task.synchronous_round]
        under_way.first_at = min(under_way.first_at, now)
        under_way.missing -= 1
        if under_way.missing:
            return
        interval = self._polling.interval(now - under_way.first_at, waiting=True, collective=True)
        overhead = self._polling.sum_seconds(interval, len(self._ranks)) + self._step_seconds
        buckets = [seconds * self.link_slow_by for seconds in self._bucket_seconds]
        summed = under_way.summed_at(now, buckets, self._tail_seconds * self.link_slow_by) + overhead
        self._telemetry.totals.communication_seconds += summed - now
        self._clock.at(summed, self._synchronous_summed, under_way.start, task.round_samples, then)

    def _synchronous_summed(
        self, start: StartRound, round_samples: int, then: Callable[[VirtualRank, Task], None]
    ) -> None:
        clock, first_at = self._clock, self._synchronous.pop(start.number).first_at
        self._learner.reduce_gradients(start.number, round_samples)
        self._telemetry.synchronous_round(start.number, first_at, clock.now)
        interval = self._polling.interval(clock.now - first_at, waiting=True, collective=True)
        lands = self._polling.times(clock.now, interval, len(self._ranks))
        clock.at(lands.at(0), self.handle_events, [RoundCompleted(start.number)])
        for number, rank in self._ranks.present.items():
            clock.at(lands.at(number), self._step, rank, start, then)

    def _step(self, rank: VirtualRank, start: StartRound, then: Callable[[VirtualRank, Task], None]) -> None:
        assert rank.task is not None
        self._ranks.end_wait(rank, self._clock.now)
        self._learner.step(rank.number)
        if start.evaluate and rank.number == 0:
            self.handle_events(self._evaluations.evaluate(start.number))
        rank.landed = rank.worker.version = start.number + 1
        then(rank, rank.task)

    # Drains.

    def _drain_landed(self, start: StartRound) -> None:
        """Everywhere."""
        self._drained = start
        self._close_drain()

    def _close_drain(self) -> None:
        """Go on once every contributor's word is in, too: the books must be closed before anybody reads them."""
        start = self._drained
        if start is None or self.machine.version <= start.number:
            return
        self._drained = None
        for rank in self._ranks.present.values():
            if rank.landed <= start.number:
                self._land(rank, start.number + 1)
            rank.worker.version = start.number + 1
        if not start.synchronous:
            self._learner.reset_to_anchor()
        self.draining = False
        self._on_rest(start)


def _coordinator(
    scenario: Scenario,
    machine: RoundStateMachine,
    deliver: Callable[[Sequence[Instruction]], None],
    evaluations: Evaluations,
    on_rounds_change: Callable[[RoundsChange], None],
    learns: bool,
) -> Coordinator:
    """As `train.session` makes it. Where nothing `learns` no losses tell that delay has lost it."""
    sync, profiles = scenario.sync, dict(enumerate(scenario.ranks))
    times, caps = ({r: p.time for r, p in profiles.items()}, {r: p.cap for r, p in profiles.items()})
    rebalance = sync.rebalance and sync.shares == "speed"
    speeds = Speeds(times, caps, sync.pins)
    several = len(scenario.ranks) > 1
    rule = rule_for(sync, adaptive=scenario.adaptive, begun=scenario.begun) if several else None
    return Coordinator(
        machine,
        speeds,
        deliver,
        rebalance=rebalance,
        on_evaluation=evaluations.report,
        rule=rule,
        on_rounds_change=on_rounds_change,
        guard=DelayGuard(scenario.batch_size) if learns and rule is not None and sync.delay_bound == "auto" else None,
        batch=scenario.batch_size,
    )
