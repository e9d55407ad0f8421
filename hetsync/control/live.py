"""Control of a live job: rank 0's coordinator closes windows, hands them to the controller's process, and takes up
what that has decided meanwhile.

It runs inside rank 0's communication thread and never waits.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any

from hetsync.control.actions import Actions, Limits
from hetsync.control.process import STOP_SECONDS, ControlProcess, Decided, Failed, Ready
from hetsync.control.window_meter import WindowMeter
from hetsync.errors import UserError, complain
from hetsync.sync.messages import Event, Settings
from hetsync.sync.observation import Observation
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.telemetry import Telemetry

# Between two polls of the queues and of the process.
POLL_SECONDS = 0.1
# A controller that owes its first word or an answer for so long, or for so many windows if that is longer, is dead.
SILENCE_SECONDS = 120.0
SILENCE_WINDOWS = 3


class LiveControl:
    """What the coordinator consults: it tells every event, and asks for settings after each message."""

    def __init__(
        self,
        process: ControlProcess,
        window_meter: WindowMeter,
        clock: Callable[[], float],
        telemetry: Telemetry,
        say: Callable[[str], None] = complain,
    ) -> None:
        """`clock` tells the seconds of training so far, as for the window meter. `say` hears at most one sentence."""
        self.died: str | None = None  # why
        self._process = process
        self._window_meter = window_meter
        self._clock = clock
        self._telemetry = telemetry
        self._say = say
        self._actions = Actions(Limits.of(process.config))
        self._interval = process.config.interval_seconds
        self._patience = max(SILENCE_SECONDS, SILENCE_WINDOWS * self._interval)
        self._began = clock()
        self._window_ends = self._began + self._interval
        self._next_poll = self._began
        self._ready = False
        self._unanswered: deque[tuple[float, Observation]] = deque()  # with the time at which each was put
        self._decisions = self._changes = self._dropped = 0
        self._in_force = {window_meter.settings}
        self._start_cpu_seconds = self._cpu_seconds = 0.0
        self._noise_scale: float | None = None  # the last one known

    def on_event(self, event: Event) -> None:
        """Call with each event before the state machine takes it in."""
        if self.died is None:
            self._window_meter.add_event(event, self._clock())

    def steer(self, settings: Settings) -> Settings | None:
        """Settings to change to, if there are any; `settings` are those in force.

        UserError where the controller cannot be made for a mistake of the user's.
        """
        now = self._clock()
        if self.died is not None or now < self._next_poll:
            return None
        self._next_poll = now + POLL_SECONDS
        wanted = settings
        exit_code = self._process.exit_code  # asked first: it may have answered before it ended
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
        if self._ready and self.died is None and now >= self._window_ends and self._window_meter.rounds:
            self._close_window(wanted, now)
        self._in_force |= {settings, wanted}
        return wanted if wanted != settings else None

    def begin_anew(self, machine: RoundStateMachine) -> None:
        """A window that a death has come in is of two clusters, and no controller sees it."""
        now = self._clock()
        self._window_meter.begin_anew(machine, now)
        self._window_ends = now + self._interval

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
        seen = self._window_meter.observe(settings, now)
        self._noise_scale = seen.noise_scale or self._noise_scale
        if self._process.offer(seen):
            self._unanswered.append((now, seen))
        else:
            self._dropped += 1

    def summary(self) -> dict[str, Any]:
        """What it did. CPU seconds are the process's up to its last word; `start_cpu_seconds` until it was ready; the
        gradient noise scale is the last one known, in samples."""
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
            "noise_scale": self._noise_scale,
            "start_cpu_seconds": self._start_cpu_seconds,
            "cpu_seconds": self._cpu_seconds,
        }

    def close(self) -> None:
        """At the end of the job. Who still starts has nothing to end in order."""
        self._process.close(STOP_SECONDS if self._ready and self.died is None else 0.0)


def _figures(seen: Observation) -> dict[str, Any]:
    """For telemetry, which has each task's loss already."""
    figures = asdict(seen)
    losses = figures.pop("losses")
    return {**figures, "loss": fmean(losses) if losses else None}
