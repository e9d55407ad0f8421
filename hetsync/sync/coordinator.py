"""Rank 0's driver of the state machine: feeds it events, sends its instructions to the ranks, and watches speeds.

It runs inside rank 0's communication thread and knows neither tensors nor planes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from hetsync.balance.shares import SliceRule, rebalanced
from hetsync.balance.speed_tracker import LEAST_OBSERVATIONS, Speeds
from hetsync.errors import UserError
from hetsync.sync.delay_guard import DelayGuard, Lost
from hetsync.sync.messages import (
    STANDS_MORE,
    CapFound,
    DrainRequested,
    Event,
    Instruction,
    LoopCounts,
    Notice,
    RankWithdrew,
    Settings,
    SettingsChanged,
    SharesChanged,
    Standing,
    StartRound,
    TaskFinished,
    TaskLeftOut,
    TaskSpoiled,
)
from hetsync.sync.milestones import ROLLBACK, Evaluation
from hetsync.sync.polling import SHORTEST_CALM_POLL_SECONDS
from hetsync.sync.recovery import Decision, Report
from hetsync.sync.rounds_rule import RoundsChange, RoundsRule
from hetsync.sync.state_machine import LEAST_TASKS_HELD, RoundStateMachine

Send = Callable[[Mapping[int, Sequence[Notice]]], None]
"""Delivers messages by rank."""

Deliver = Callable[[Sequence[Instruction]], None]
"""Delivers instructions, each to the ranks that it is for, in order."""


Rebuild = Callable[[Decision, Mapping[int, Report], Mapping[int, int]], tuple[RoundStateMachine, Deliver]]
"""The machine by what survivors of a death have agreed on, their reports and their shares, and what delivers for it."""

LONE_SECONDS_HELD = 0.08  # of tasks, as long as a rank alone then takes to see a signal
ANSWER_SECONDS = 2 * SHORTEST_CALM_POLL_SECONDS  # until a rank that computes is told more: both ends come to poll
MOST_TASKS_HELD = 16
LOOK_AGAIN_ROUNDS = 200  # until a rank that was too slow for a slice is taken to be what it was; then twice as many


class Control(Protocol):
    """What may change the settings while the job runs."""

    def on_event(self, event: Event) -> None:
        """See an event, before the state machine takes it in."""

    def steer(self, settings: Settings) -> Settings | None:
        """Other settings than these, if it wants any. Must not wait."""

    def begin_anew(self, machine: RoundStateMachine) -> None:
        """After a death: events are of this machine from now on."""


class Coordinator:
    def __init__(
        self,
        machine: RoundStateMachine,
        speeds: Speeds,
        deliver: Deliver,
        *,
        rebalance: bool,
        control: Control | None = None,
        on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
        rule: RoundsRule | None = None,
        on_rounds_change: Callable[[RoundsChange], None] = lambda change: None,
        rebuild: Rebuild | None = None,
        on_left_out: Callable[[TaskLeftOut], None] = lambda left: None,
        goes_back: bool = False,
        guard: DelayGuard | None = None,
        batch: int | None = None,
    ) -> None:
        """`rebalance`: shares follow the smoothed speeds. `rule`: D, K, q, grace, fragments and wire follow what rounds
        cost, unless somebody sets them.

        `on_evaluation` is called with what all ranks together have found at a snapshot, `on_rounds_change` with what
        the rule has changed. `rebuild` makes the machine anew after a death. `on_left_out` is told what is about to be,
        and ends the job where that is too much. `goes_back`: then all come to rest, to go back to a checkpoint.
        `guard`, where there is a `rule`: they do so as well where it finds that delay has lost training, and go on
        without.
        `batch` is B where shares do not add up to it.
        """
        self.machine = machine
        self.settings = machine.settings  # asked for last; a change of mode comes into force only at a drain
        self.speeds = speeds
        self.losses = 0.0, 0  # their sum and their samples: replaced in one step, since other threads ask
        self._losses_taken = 0.0, 0
        self.device_seconds: dict[int, float] = defaultdict(float)
        self._device_samples: dict[int, int] = defaultdict(int)
        self._deliver = deliver
        self._rebalance = rebalance
        self._control = control
        self._on_evaluation = on_evaluation
        self._rule = rule
        self._on_rounds_change = on_rounds_change
        self._rebuild = rebuild
        self.left_out: list[TaskLeftOut] = []  # so far
        self.lost_at: int | None = None  # the version at which nobody was left who kept the books, the last time
        self._on_left_out = on_left_out
        self._goes_back = goes_back
        self._guard = guard
        self.lost: list[Lost] = []  # each time that delay had lost training
        self._batch = batch or machine.batch  # B
        machine.caps = speeds.caps
        self._all_take_part = False  # in each batch, where all wait in each round
        self._looks: dict[int, tuple[int, int]] = {}  # at ranks without samples: the version of the next, and its wait
        self._reconsider_from = machine.version + LEAST_OBSERVATIONS  # the version that shares are reconsidered at

    def start(self) -> None:
        """Hand out the first tasks."""
        self._deliver(self.machine.first_instructions())

    def go_on(self, decision: Decision, reports: Mapping[int, Report]) -> None:
        """After a death, or with one more rank, as members have agreed: B is sliced anew, and tasks are handed out."""
        assert self._rebuild is not None
        assert decision.books is not None
        self.left_out, self.lost_at = list(decision.books.left_out), decision.books.lost_at
        members = self.machine.members
        shares = {rank: members[rank].share if rank in members else 0 for rank in decision.survivors}
        working = {rank: share for rank, share in shares.items() if not reports[rank].holding.withdrawn}
        for rank in set(self.machine.members).difference(shares):
            self.speeds.forget(rank)
        found = {rank: report.cap for rank, report in reports.items() if report.cap is not None}
        self.speeds.caps = {**self.speeds.caps, **found}  # a new first rank has heard of none
        shares |= self._sliced_anew(working, anyway=not members.keys() >= shares.keys())
        self.machine, self._deliver = self._rebuild(decision, reports, shares)
        self.machine.caps = self.speeds.caps
        self.settings = self.machine.standing.pending or self.machine.settings
        self._reconsider_from = self.machine.version + LEAST_OBSERVATIONS
        if self._rule is not None:
            self._rule.restart(self.machine.version)
        if self._control is not None:
            self._control.begin_anew(self.machine)
        self.start()

    def handle(self, events: Sequence[Event]) -> None:
        """Events of some ranks; those of one in its order."""
        out: list[Instruction] = []
        for event in events:
            if isinstance(event, TaskFinished):
                out += self._observe(event)
            elif isinstance(event, CapFound):
                self.speeds.caps = self.machine.caps = {**self.speeds.caps, event.rank: event.samples}
            elif isinstance(event, LoopCounts):
                out += self._let_all_take_part()
            elif isinstance(event, SettingsChanged):
                before, event = self._rule_of_slices, self._tuned(event)
                if self._rule_of_slices.in_step != before.in_step:
                    out += self._sliced_for_mode()
            elif isinstance(event, TaskSpoiled):
                out.append(self._leave_out(event))
                if self._goes_back:  # first, or its samples would go out at once
                    out += self.machine.handle(DrainRequested(ROLLBACK))
            elif isinstance(event, RankWithdrew):
                self.speeds.forget(event.rank)
            if self._control is not None:
                self._control.on_event(event)
            out += self.machine.handle(event)
            # Before the next event, which may begin another one.
            if (evaluation := self.machine.snapshots.pop_complete()) is not None:
                self._on_evaluation(evaluation)
            if isinstance(event, RankWithdrew) and self.machine.settings.synchronous and self._rebalance:
                out += self._take_over()
        self._deliver(out)
        if self._rebalance:
            self._balance()
        if self._rule is not None:
            self._change_rounds(self._rule)
        if self._control is not None and (settings := self._control.steer(self.settings)) is not None:
            self.handle([SettingsChanged(settings)])

    def _tuned(self, event: SettingsChanged) -> SettingsChanged:
        """Somebody sets K, D and q: all else stays as asked for last, and the rule ends."""
        self._rule, self._guard, kept = None, None, self.settings
        self.settings = replace(event.settings, fragments=kept.fragments, grace=kept.grace, wire=kept.wire)
        return SettingsChanged(self.settings)

    def _leave_out(self, event: TaskSpoiled) -> TaskLeftOut:
        work = self.machine.members[event.rank].current
        assert work is not None
        own_round = work.task.synchronous_round
        number = self.machine.version if own_round is None else own_round
        known = own_round is not None and any(left.round == number for left in self.left_out)
        samples = work.samples if own_round is None else 0 if known else work.task.round_samples
        left = TaskLeftOut(event.rank, number, samples, event.spans)
        self._on_left_out(left)
        self.left_out.append(left)
        return left

    @property
    def _rule_of_slices(self) -> SliceRule:
        rule = SliceRule.of(self.machine.least_slice, self.settings.delay_bound, self.settings.quorum)
        return replace(rule, patience=math.inf) if rule.in_step and self._all_take_part else rule

    def _let_all_take_part(self) -> list[Instruction]:
        """Slow ranks, too, as far as the batch has room for their least slices."""
        self._all_take_part = True
        working = {rank: member.share for rank, member in self.machine.members.items() if not member.withdrawn}
        if all(working.values()) or not self._rule_of_slices.in_step:
            return []
        shares = self._sliced_anew(working, anyway=True)
        return [] if shares == working else self.machine.handle(SharesChanged(shares))

    def _sliced_for_mode(self) -> list[Instruction]:
        """Where all wait in each round, slices make up B, and the slowest may have none; elsewhere they are ranks' own.
        Nothing more is handed out before the mode changes."""
        working = {rank: member.share for rank, member in self.machine.members.items() if not member.withdrawn}
        if all(working.values()) and sum(working.values()) <= self._batch:
            return []
        return self.machine.handle(SharesChanged(self._sliced_anew(dict.fromkeys(working, 0))))

    @property
    def good(self) -> int:
        """Samples applied as losses were good the last time, where delay is guarded."""
        return 0 if self._guard is None else self._guard.good

    def take_loss(self) -> float | None:
        """Mean training loss of the samples reported since the last call."""
        (taken, taken_samples), (total, total_samples) = self._losses_taken, self.losses
        self._losses_taken = total, total_samples
        return (total - taken) / (total_samples - taken_samples) if total_samples > taken_samples else None

    def device_rate(self) -> float | None:
        """Samples/s that the devices were capable of in all tasks that are finished, together; None before any. From
        any thread."""
        samples = self._device_samples.copy()
        rates = [samples.get(rank, 0) / seconds for rank, seconds in self.device_seconds.copy().items() if seconds]
        return sum(rates) if rates else None

    def _observe(self, event: TaskFinished) -> list[Instruction]:
        if self._guard is not None:
            delayed, applied = not self.machine.settings.synchronous, self.machine.ledger.applied
            loss = self._guard.observe(event.loss_sum, event.samples - event.lossless, delayed, applied)
            if loss is not None:
                return self._give_up_delay(event.rank, loss)
        if not math.isfinite(event.loss_sum):
            raise UserError(
                f"the training loss became {event.loss_sum} on rank {event.rank} after "
                f"{self.machine.ledger.applied} samples: lower optimizer.learning_rate or look at the data"
                f"{'' if self.machine.settings.synchronous else STANDS_MORE}"
            )
        self._watch_task(event)
        self.device_seconds[event.rank] += event.seconds
        self._device_samples[event.rank] += event.samples
        self.machine.units.add(event.units, self._batch)
        total, samples = self.losses
        self.losses = total + event.loss_sum, samples + event.samples - event.lossless
        return []

    def _give_up_delay(self, rank: int, loss: float) -> list[Instruction]:
        """All go back to where training was good, and on at D = 0."""
        assert self._guard is not None
        assert self._rule is not None
        if self.machine.rests.going_back:  # several ranks tell of it
            return []
        self.lost.append(Lost(rank, self.machine.version, loss, self._guard.best, self._guard.good))
        self._guard.went_back()
        change = self._rule.give_up_delay(self.settings, self.machine.version, str(self.lost[-1]))
        self.settings = change.applied_to(self.settings)
        self._on_rounds_change(change)
        drained = self.machine.handle(DrainRequested(ROLLBACK))
        return [*drained, *self._sliced_for_mode(), *self.machine.handle(SettingsChanged(self.settings))]

    def _watch_task(self, event: TaskFinished) -> None:
        state = self.machine.members[event.rank].current
        # The small tasks before a rest would show a step's fixed costs rather than of the device.
        if state is None or event.samples < len(state.task.slices) * state.task.share:
            return
        self.machine.tasks_held = tasks_held(event.seconds, self.settings, len(self.machine.members))
        if self.speeds.observe(event.rank, event.samples, len(state.task.slices), event.seconds):
            self._reconsider_from = self.machine.version
        if self._rule is not None and len(state.task.slices) == self.settings.accumulation:
            self._rule.observe(event.rank, event.seconds, event.work_seconds, event.wait_seconds)

    def _change_rounds(self, rule: RoundsRule) -> None:
        """Other settings, where the rule finds that rounds are dear, or no more. At D = 0 K would be another batch."""
        shares = {rank: member.share for rank, member in self.machine.members.items() if member.share}
        change = rule.decide(self.settings, self.machine.version, shares)
        if change is not None:
            in_step = self._rule_of_slices.in_step
            self.settings = change.applied_to(self.settings)
            self._on_rounds_change(change)
            sliced = self._sliced_for_mode() if self._rule_of_slices.in_step != in_step else []
            self._deliver([*sliced, *self.machine.handle(SettingsChanged(self.settings))])

    def _balance(self) -> None:
        """New shares where these would make slices at least 5 % shorter; checked once in a few rounds, or when a rank's
        speed has jumped."""
        if self.machine.version < self._reconsider_from:
            return
        working = {rank: member for rank, member in self.machine.members.items() if not member.withdrawn}
        if not working or not self.speeds.settled([rank for rank, member in working.items() if member.share]):
            return
        self._look_again([rank for rank, member in working.items() if not member.share])
        ranks = list(working)
        self._reconsider_from = self.machine.version + LEAST_OBSERVATIONS
        old = tuple(member.share for member in working.values())
        caps, pins = self.speeds.limits(ranks)
        # Ranks without samples may be all that others have left, and a cap may have been found since.
        wanted = max(sum(old), min(self._batch, self._most(caps, pins, self.machine.least_slice)))
        total = min(wanted, self._most(caps, pins))
        new = self._rebalanced(old, ranks, total, caps, pins)
        if new != old:
            if self._rule is not None:
                self._rule.forget_promise()
            self._deliver(self.machine.handle(SharesChanged(dict(zip(ranks, new, strict=True)))))

    def _look_again(self, aside: Iterable[int]) -> None:
        """Nobody sees how fast ranks without samples are: what their profiles are off by is what it is with others."""
        version = self.machine.version
        for rank in aside:
            wait = LOOK_AGAIN_ROUNDS if self.speeds.seen(rank) else 0
            due, wait = self._looks.get(rank, (version + wait, LOOK_AGAIN_ROUNDS))
            if version >= due:
                self.speeds.presume(rank)
                wait *= 2
                due = version + wait
            self._looks[rank] = due, wait

    def _take_over(self) -> list[Instruction]:
        """The others compute a withdrawn rank's samples of each batch, so that it stays one of B, as far as their
        memory and pins let them. In delayed mode a rank's slices are its own, and so are its steps."""
        working = {rank: member.share for rank, member in self.machine.members.items() if not member.withdrawn}
        shares = self._sliced_anew(working)
        return [] if shares == working else self.machine.handle(SharesChanged(shares))

    def _sliced_anew(self, shares: dict[int, int], anyway: bool = False) -> dict[int, int]:
        """B among these ranks, as far as their memory and pins let them, where their shares come to less, or
        `anyway`."""
        caps, pins = self.speeds.limits(ranks := list(shares))
        total = min(self._batch, self._most(caps, pins))
        if total <= sum(shares.values()) and not anyway:
            return shares
        return dict(zip(ranks, self._rebalanced(tuple(shares.values()), ranks, total, caps, pins), strict=True))

    def _rebalanced(
        self,
        shares: Sequence[int],
        ranks: Sequence[int],
        total: int,
        caps: Sequence[int | None],
        pins: Mapping[int, int],
    ) -> tuple[int, ...]:
        times, at_best = self.speeds.times(ranks), self.speeds.at_best(ranks)
        return rebalanced(shares, times, total, caps, pins, rule=self._rule_of_slices, at_best=at_best)

    def _most(self, caps: Sequence[int | None], pins: Mapping[int, int], each: int | None = None) -> int:
        """Samples of a slice that these ranks can take together, `each` no more than so many unless pinned to them."""
        limit = self._batch if each is None else each
        return sum(pins.get(place, limit if cap is None else min(cap, limit)) for place, cap in enumerate(caps))


def tasks_held(task_seconds: float, settings: Settings, ranks: int) -> int:
    """Of a rank, where tasks are short: several. A rank alone keeps the books between its tasks: those of several at
    once, as one by one most of their time would go into bringing code and data back into the processor's cache. A rank
    among others tells of a task when it begins the next: what it then has left lasts until it is given more. That is no
    more than it can begin before a round lands, as rests and new settings come after what is held. At D = 0 it waits in
    each task, and then it polls; with q = 1 all keep pace."""
    if ranks > 1 and (settings.synchronous or settings.quorum >= 1):
        return LEAST_TASKS_HELD
    task_seconds = max(task_seconds, 1e-6)
    if ranks == 1:
        tasks, most = int(LONE_SECONDS_HELD / task_seconds), MOST_TASKS_HELD
    else:
        tasks, most = 1 + math.ceil(ANSWER_SECONDS / task_seconds), min(MOST_TASKS_HELD, settings.delay_bound + 2)
    return max(LEAST_TASKS_HELD, min(tasks, most))


def as_messages(machine: RoundStateMachine, send: Send, keepers: Collection[int] = ()) -> Deliver:
    """Sends one message a rank, in the order of the decisions. `keepers` of the books (`recovery.py`) are told all
    tasks, and what else the machine knows, before the round that comes after these."""
    told: Standing | None = None

    def ranks_of(instruction: Instruction) -> Iterable[int]:
        match instruction:
            case StartRound():
                return machine.members
            case TaskLeftOut():
                return keepers
            case _:
                return {instruction.rank, *keepers}

    def deliver(instructions: Sequence[Instruction]) -> None:
        nonlocal told
        messages: dict[int, list[Notice]] = defaultdict(list)
        if keepers and instructions and told != (standing := machine.standing):
            told = standing
            messages |= {rank: [standing] for rank in keepers}
        for instruction in instructions:
            for rank in ranks_of(instruction):
                messages[rank].append(instruction)
        send(messages)

    return deliver
