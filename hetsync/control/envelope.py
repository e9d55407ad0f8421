"""Safety around any controller, live and simulated alike.

    envelope = Envelope(make_controller(config.control, seed, batch_size), Limits.of(config.control))
    decision = envelope.decide(seen)  # once a window: decision.settings to tune to, decision.reason for telemetry

`decision.settings == seen.settings` means that nothing is to change. Nothing here raises.
"""

from __future__ import annotations

import math

from hetsync.control.actions import DECREASE, TUNED, Actions, Limits
from hetsync.control.controller import Controller, Decision
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

# So many windows in a row with a loss that is too high are a divergence, not noise.
PATIENCE = 3
# A loss is too high where it has lost this part of what was gained since the start, ...
LOST = 0.25
# ... and lies above its best by this part of it.
ABOVE_BEST = 0.5
# A loss that rises above so many times the first one diverges: no need for patience.
SOARING = 2.0


class Envelope:
    """A controller within limits: the settings stay within the bounds and change no more often than once an interval.

    Where the loss diverges (is not finite, rises far above the first, or stays far above its best for some windows) the
    settings go back to those under which it was lowest, or one rung down where those are in force; the controller is
    heard again once it has recovered.
    """

    def __init__(self, controller: Controller, limits: Limits) -> None:
        self._controller = controller
        self._actions = Actions(limits)
        self._interval = limits.interval_seconds
        self._since_change = 0.0
        self._first: float | None = None  # loss
        self._last = math.inf
        self._best = math.inf
        self._best_settings: Settings | None = None
        self._high = 0  # windows in a row with a loss that is too high
        self._fallen_back = False

    def decide(self, seen: Observation) -> Decision:
        """The controller's decision as far as it is allowed, with the reason."""
        proposed = self._controller.decide(seen)  # always, as it may remember what it sees
        self._since_change += seen.seconds
        self._watch(seen)
        if self._high >= PATIENCE:
            decision = self._fall_back(seen)
        elif self._fallen_back:
            decision = Decision(seen.settings, "the loss has not recovered yet")
        else:
            decision = self._allowed(seen.settings, proposed)
        if decision.settings != seen.settings:
            self._since_change = 0.0
        return decision

    def _allowed(self, current: Settings, proposed: Decision) -> Decision:
        if proposed.settings == current:
            return proposed
        if self._since_change < self._interval:
            wait = f"the last change is {self._since_change:.3g} s ago, less than {self._interval:g} s"
            return Decision(current, f"not changed ({wait}): {proposed.reason}")
        settings = self._actions.clipped(proposed.settings)
        if settings != proposed.settings:
            return Decision(settings, f"{proposed.reason} (kept within the bounds)")
        return proposed

    def _watch(self, seen: Observation) -> None:
        if not seen.losses:
            return
        loss = math.fsum(seen.losses) / len(seen.losses) if all(map(math.isfinite, seen.losses)) else math.inf
        if self._first is None and math.isfinite(loss):
            self._first = loss
        if loss < self._best:
            self._best, self._best_settings = loss, seen.settings
        before, self._last = self._last, loss
        if not math.isfinite(loss) or self._soars(loss, before):
            self._high = PATIENCE
        elif loss > self._highest_healthy():
            self._high += 1
        else:
            self._high, self._fallen_back = 0, False

    def _soars(self, loss: float, before: float) -> bool:
        return self._first is not None and 0 < SOARING * self._first < loss and before < loss

    def _highest_healthy(self) -> float:
        assert self._first is not None
        return self._best + max(LOST * (self._first - self._best), ABOVE_BEST * abs(self._best))

    def _fall_back(self, seen: Observation) -> Decision:
        self._high, self._fallen_back = 0, True
        settings, which = self._best_settings, f"back to those of the best, {self._best:.4g}"
        if settings is None or settings == seen.settings:
            settings, which = self._actions.apply(seen.settings, [DECREASE] * len(TUNED)), "one rung down"
            self._best_settings = settings  # those that diverged are not to come back
        return Decision(settings, f"the loss diverges (last {seen.losses[-1]:.4g}): {which}")
