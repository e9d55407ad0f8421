"""What a live job's coordinator hears, as windows for a controller."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from hetsync.balance.profile import StepTime
from hetsync.sync.messages import Contributed, Event, NormMeasured, RoundCompleted, Settings, TaskFinished, TaskStarted
from hetsync.sync.noise_scale import Addend, NoiseScale
from hetsync.sync.observation import Observation, Totals
from hetsync.sync.state_machine import RoundStateMachine

ROUNDS_LATE = 2  # a rank that has joined round r has told all of what it put into round r − 2


class WindowMeter:
    """Totals of a live job, from what its coordinator hears; an observation is the difference between two of them.

    Times are in seconds of training, which stand still while the job is at rest. What the ranks do when they do not
    compute is theirs to know: waiting is what device time leaves. A sum is under way from the last contributor's word
    to its arrival; in synchronous mode, for what a step took longer than its slowest rank computed.
    """

    def __init__(
        self,
        machine: RoundStateMachine,
        times: Sequence[StepTime],
        solo_samples_per_second: float,
        now: float = 0.0,
        momentum: float = 0.0,
        learning_rate: Callable[[int], float] = lambda applied: 1.0,
    ) -> None:
        """`times` are the ranks' profiled step times; `solo_samples_per_second` what they reach alone, together;
        `momentum` is that of the ranks' own steps, `learning_rate` its factor after so many samples."""
        self._machine = machine
        self._times = times
        self._solo = solo_samples_per_second
        self._totals = Totals()
        self._losses: list[float] = []
        self._device_seconds = 0.0
        self._began: dict[int, float] = {}  # by rank that computes: when it began
        self._joined = (-1, now)  # the delayed round that contributors spoke of last, and when
        self._steps: dict[int, list[float]] = {}  # by synchronous round: device seconds of the ranks heard of
        self._stepped = now  # when the last synchronous step, or delayed round, was over
        self._learning_rate = learning_rate
        self._noise = {synchronous: NoiseScale(momentum) for synchronous in (False, True)}
        self._addends: dict[int, list[Addend]] = defaultdict(list)  # by round
        self._sum_norms: dict[int, float] = {}
        self._mark = self._now(now)

    @property
    def rounds(self) -> int:
        """Rounds completed since the last observation."""
        return self._machine.version - self._mark.rounds

    @property
    def settings(self) -> Settings:
        """In force."""
        return self._machine.settings

    def begin_anew(self, machine: RoundStateMachine, now: float) -> None:
        """Go on with a machine that has other ranks, and in a new window: what is under way begins now."""
        self._machine = machine
        shares = {rank: member.share for rank, member in machine.members.items() if member.share}
        self._solo = sum(self._times[rank].rate(share) for rank, share in shares.items())
        self._began = {rank: now for rank, member in machine.members.items() if member.current is not None}
        self._joined, self._stepped = (-1, now), now
        self._losses = []
        self._steps.clear()
        self._addends.clear()
        self._sum_norms.clear()
        self._mark = self._now(now)

    def add_event(self, event: Event, now: float) -> None:
        """Call with each event before the state machine takes it in."""
        match event:
            case TaskStarted():
                self._began[event.rank] = now
            case TaskFinished():
                self._finished(event, now)
            case Contributed():
                self._joined = (event.round, now)
            case NormMeasured():
                self._addends[event.round].append(Addend(event.samples, event.steps, event.squared_norm))
            case RoundCompleted():
                self._sum_norms[event.round] = event.squared_norm
                self._weigh(event.round - ROUNDS_LATE)
                number, joined = self._joined
                if number == event.round:  # else the sum was faster than the word
                    self._totals.communication_seconds += now - joined
                    self._stepped = now

    def _weigh(self, number: int) -> None:
        """All that ranks had to say of this round has been heard; what comes later still is dropped."""
        total = self._sum_norms.pop(number, 0.0)
        for heard in [heard for heard in self._addends if heard <= number]:
            addends = self._addends.pop(heard)
            if heard == number:
                self._noise[addends[0].steps == 0].add(addends, total)

    def _finished(self, event: TaskFinished, now: float) -> None:
        self._began.pop(event.rank, None)
        self._device_seconds += event.seconds
        work = self._machine.members[event.rank].current
        assert work is not None
        self._totals.count(self._times[event.rank], event, len(work.task.slices))
        if event.mean_loss is not None:
            self._losses.append(event.mean_loss)
        if work.task.synchronous_round is not None:
            self._step(work.task.synchronous_round, event.seconds, now)

    def _step(self, number: int, seconds: float, now: float) -> None:
        ranks = self._steps.setdefault(number, [])
        ranks.append(seconds)
        if len(ranks) == len(self._machine.members):
            del self._steps[number]
            self._totals.communication_seconds += max(0.0, now - self._stepped - max(ranks))
            self._stepped = now

    def observe(self, settings: Settings, now: float) -> Observation:
        """What has happened since the last call; `settings` are those in force."""
        before, self._mark = self._mark, self._now(now)
        losses, self._losses = self._losses, []
        figures = self._mark.since(before, self._solo)
        # What began in one window and ends in another is counted where it ends, or has been estimated.
        for share in ("communication_share", "waiting_share"):
            figures[share] = min(1.0, max(0.0, figures[share]))
        ledger = self._machine.ledger
        return Observation(
            **figures,
            losses=tuple(losses),
            noise_scale=self._noise[settings.synchronous].samples,
            progress=ledger.applied / ledger.total,
            learning_rate=self._learning_rate(ledger.applied),
            settings=settings,
        )

    def _now(self, now: float) -> Totals:
        machine = self._machine
        under_way = sum(now - began for began in self._began.values())
        return replace(
            self._totals,
            at=now,
            rounds=machine.version,
            samples=machine.ledger.applied,
            wait_seconds=now - (self._device_seconds + under_way) / len(machine.members),
            staleness=machine.staleness.copy(),
        )
