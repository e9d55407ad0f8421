"""Control of a live job: rank 0's coordinator closes windows, hands them to the controller's process, and takes up
what that has decided meanwhile.

It runs inside rank 0's communication thread and never waits.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from hetsync.control.actions import Actions, Limits
from hetsync.control.observation import Observation, Totals
from hetsync.control.process import STOP_SECONDS, ControlProcess, Decided, Failed, Ready
from hetsync.errors import UserError
from hetsync.slicing import StepTime
from hetsync.sync.messages import Began, Completed, Event, Finished, Settings, Took
from hetsync.sync.policy import Policy
from hetsync.telemetry import Telemetry

# Between two looks at the queues and at the process.
LOOK_SECONDS = 0.1
# A controller that owes its first word or an answer for so long, or for so many windows if that is longer, is dead.
SILENCE_SECONDS = 120.0
SILENCE_WINDOWS = 3


def complain(sentence: str) -> None:
    print(f"hetsync: {sentence}", file=sys.stderr, flush=True)


class Meter:
    """Totals of a live job, from what its coordinator hears; an observation is the difference between two of them.

    Times are in seconds of training, which stand still while the job is at rest. What the ranks do when they do not
    compute is theirs to know: waiting is what device time leaves. A sum is under way from the last contributor's word
    to its arrival; in synchronous mode, for what a step took longer than its slowest rank computed.
    """

    def __init__(
        self, policy: Policy, times: Sequence[StepTime], solo_samples_per_second: float, now: float = 0.0
    ) -> None:
        """`times` are the ranks' profiled step times; `solo_samples_per_second` what they reach alone, together."""
        self._policy = policy
        self._times = times
        self._solo = solo_samples_per_second
        self._totals = Totals()
        self._losses: list[float] = []
        self._device_seconds = 0.0
        self._began: dict[int, float] = {}  # by rank that computes: when it began
        self._joined = (-1, now)  # the delayed round that contributors spoke of last, and when
        self._steps: dict[int, list[float]] = {}  # by synchronous round: device seconds of the ranks heard of
        self._stepped = now  # when the last synchronous step, or delayed round, was over
        self._mark = self._now(now)

    @property
    def rounds(self) -> int:
        """Rounds completed since the last observation."""
        return self._policy.version - self._mark.rounds

    def hear(self, event: Event, now: float) -> None:
        """Call with each event before the policy takes it in."""
        match event:
            case Began():
                self._began[event.rank] = now
            case Finished():
                self._finished(event, now)
            case Took():
                self._joined = (event.round, now)
            case Completed():
                number, joined = self._joined
                if number == event.round:  # else the sum was faster than the word
                    self._totals.communication_seconds += now - joined
                    self._stepped = now

    def _finished(self, event: Finished, now: float) -> None:
        self._began.pop(event.rank, None)
        self._device_seconds += event.seconds
        work = self._policy.members[event.rank].current
        assert work is not None
        self._totals.count(self._times[event.rank], event, len(work.piece.slices))
        if event.samples:
            self._losses.append(event.loss_sum / event.samples)
        if work.piece.synchronous_round is not None:
            self._step(work.piece.synchronous_round, event.seconds, now)

    def _step(self, number: int, seconds: float, now: float) -> None:
        ranks = self._steps.setdefault(number, [])
        ranks.append(seconds)
        if len(ranks) == len(self._policy.members):
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
        ledger = self._policy.ledger
        return Observation(
            **figures,
            losses=tuple(losses),
            noise_scale=None,
            progress=ledger.applied / ledger.total,
            settings=settings,
        )

    def _now(self, now: float) -> Totals:
        policy = self._policy
        under_way = sum(now - began for began in self._began.values())
        return replace(
            self._totals,
            at=now,
            rounds=policy.version,
            samples=policy.ledger.applied,
            wait_seconds=now - (self._device_seconds + under_way) / len(policy.members),
            staleness=policy.staleness.copy(),
        )


class LiveControl:
    """What the coordinator consults: it tells every event, and asks for settings after each letter."""

    def __init__(
        self,
        process: ControlProcess,
        meter: Meter,
        clock: Callable[[], float],
        telemetry: Telemetry,
        say: Callable[[str], None] = complain,
    ) -> None:
        """`clock` tells the seconds of training so far, as for the meter. `say` hears at most one sentence."""
        self.died: str | None = None  # why
        self._process = process
        self._meter = meter
        self._clock = clock
        self._telemetry = telemetry
        self._say = say
        self._actions = Actions(Limits.of(process.config))
        self._interval = process.config.interval_seconds
        self._patience = max(SILENCE_SECONDS, SILENCE_WINDOWS * self._interval)
        self._began = clock()
        self._window_ends = self._began + self._interval
        self._look_at = self._began
        self._ready = False
        self._unanswered: deque[tuple[float, Observation]] = deque()  # with the time at which each was put
        self._decisions = self._changes = self._dropped = 0
        self._in_force: set[Settings] = set()
        self._start_cpu_seconds = self._cpu_seconds = 0.0

    def hear(self, event: Event) -> None:
        """Call with each event before the policy takes it in."""
        if self.died is None:
            self._meter.hear(event, self._clock())

    def steer(self, settings: Settings) -> Settings | None:
        """Settings to change to, if there are any; `settings` are those in force.

        UserError where the controller cannot be made for a mistake of the user's.
        """
        now = self._clock()
        if self.died is not None or now < self._look_at:
            return None
        self._look_at = now + LOOK_SECONDS
        wanted = settings
        exit_code = self._process.exit_code  # looked at first: it may have answered before it ended
        for answer in self._process.answers():
            match answer:
                case Ready():
                    self._ready = True
                    self._start_cpu_seconds = self._cpu_seconds = answer.cpu_seconds
                case Decided():
                    wanted = self._decided(answer, wanted)
                case Failed():
                    self._failed(answer, wanted)
        if self.died is None:
            self._check(exit_code, now, wanted)
        if self._ready and self.died is None and now >= self._window_ends and self._meter.rounds:
            self._close_window(wanted, now)
        self._in_force |= {settings, wanted}
        return wanted if wanted != settings else None

    def _decided(self, answer: Decided, current: Settings) -> Settings:
        _, seen = self._unanswered.popleft()
        settings, reason = self._actions.clipped(answer.decision.settings), answer.decision.reason
        if seen.settings != current:
            settings, reason = current, f"void, since other settings are in force by now: {reason}"
        self._cpu_seconds = answer.cpu_seconds
        self._decisions += 1
        self._changes += settings != current
        self._telemetry.record(
            "control",
            **_figures(seen),
            decision=asdict(settings),
            reason=reason,
            cpu_seconds=round(answer.cpu_seconds, 3),
        )
        return settings

    def _failed(self, answer: Failed, current: Settings) -> None:
        if answer.mistake and not self._ready:
            raise UserError(answer.error)
        self._give_up(f"failed ({answer.error}; more in {self._process.log or 'its output'})", current)

    def _check(self, exit_code: int | None, now: float, current: Settings) -> None:
        """Is it alive, and does it answer?"""
        if exit_code is not None:
            how = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
            self._give_up(f"was ended {how}", current)
        elif now > self._owes_since(now) + self._patience:
            self._give_up(f"has not answered for {self._patience:g} s", current)

    def _owes_since(self, now: float) -> float:
        if not self._ready:
            return self._began
        return self._unanswered[0][0] if self._unanswered else now

    def _give_up(self, why: str, current: Settings) -> None:
        self.died = why
        self._process.kill()
        self._telemetry.record("control", died=why)
        self._say(
            f"the controller {why}: training goes on without it, with accumulation {current.accumulation} and"
            f" delay bound {current.delay_bound}"
        )

    def _close_window(self, settings: Settings, now: float) -> None:
        self._window_ends = now + self._interval
        seen = self._meter.observe(settings, now)
        if self._process.offer(seen):
            self._unanswered.append((now, seen))
        else:
            self._dropped += 1

    def summary(self) -> dict[str, Any]:
        """What it did. CPU seconds are the process's up to its last word; `start_cpu_seconds` until it was ready."""
        bounds = [settings.delay_bound for settings in self._in_force]
        slices = [settings.accumulation for settings in self._in_force]
        return {
            "name": self._process.config.name,
            "decisions": self._decisions,
            "changes": self._changes,
            "dropped": self._dropped,
            "died": self.died,
            "accumulation": [min(slices), max(slices)],
            "delay_bound": [min(bounds), max(bounds)],
            "start_cpu_seconds": self._start_cpu_seconds,
            "cpu_seconds": self._cpu_seconds,
        }

    def close(self) -> None:
        """At the end of the job. Who still starts has nothing to end in order."""
        self._process.close(STOP_SECONDS if self._ready and self.died is None else 0.0)


def _figures(seen: Observation) -> dict[str, Any]:
    """For telemetry, which has each piece's loss already."""
    figures = asdict(seen)
    losses = figures.pop("losses")
    return {**figures, "loss": fmean(losses) if losses else None}
