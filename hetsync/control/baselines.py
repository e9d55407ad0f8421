"""Controllers that do not learn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hetsync.control.actions import CHOICES, DECREASE, INCREASE, KEEP, TUNED, Actions, Limits, described
from hetsync.control.controller import Decision
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation


class Fixed:
    """Leaves everything as it is."""

    def decide(self, seen: Observation) -> Decision:
        return Decision(seen.settings, "fixed")


class Random:
    """Any action, each as likely as any other."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self._actions = Actions(limits)
        self._dice = np.random.default_rng(seed)

    def decide(self, seen: Observation) -> Decision:
        action = self._dice.integers(len(CHOICES), size=len(TUNED)).tolist()
        return Decision(self._actions.apply(seen.settings, action), "drawn")


class Schedule:
    """By hand: delayed at first; larger contributions with progress, as when a learning rate falls, and synchronous in
    the last quarter where the bounds allow it."""

    STEPS = ((0.75, 4, 0), (0.5, 2, 2), (0.0, 1, 4))  # from this part of the samples on: K, D

    def __init__(self, limits: Limits) -> None:
        self._actions = Actions(limits)

    def decide(self, seen: Observation) -> Decision:
        begin, slices, bound = next(step for step in self.STEPS if seen.progress >= step[0])
        goal = self._actions.clipped(replace(seen.settings, accumulation=slices, delay_bound=bound))
        return Decision(goal, f"{described(goal)} from {begin:.0%} of the samples on")


class Proportional:
    """D follows what ranks wait, K what the network has to do.

    D rises while ranks wait, and falls where nobody waits and the bound is far above the staleness that occurs. K
    rises while sums are under way nearly always, and falls where the network is idle.
    """

    WAITS, WAITS_NOT = 0.05, 0.01  # share of the ranks' time
    BUSY, IDLE = 0.8, 0.2  # share of the time with a sum under way

    def __init__(self, limits: Limits) -> None:
        self._actions = Actions(limits)

    def decide(self, seen: Observation) -> Decision:
        bound = seen.settings.delay_bound
        if seen.waiting_share > self.WAITS:
            d = INCREASE
        elif seen.waiting_share < self.WAITS_NOT and 2 * seen.staleness + 1 < bound:
            d = DECREASE
        else:
            d = KEEP
        busy = seen.communication_share
        k = INCREASE if busy > self.BUSY else DECREASE if busy < self.IDLE else KEEP
        settings = self._actions.apply(seen.settings, (k, d))
        return Decision(settings, f"ranks wait {seen.waiting_share:.1%}, the network is busy {busy:.0%}")


class Goodput:
    """Goes, rung by rung, where throughput times statistical efficiency is predicted to be greatest.

    Statistical efficiency is Pollux's (Qiao et al., OSDI 2021, equation 5): (φ + B) / (φ + M) for a noise scale φ and
    updates of M samples: K·B for synchronous steps; B for delayed ones, whose K slices are K inner steps. Throughput is
    a model of its own of what the window tells: `predicted_efficiency`. An unknown φ counts as B.
    """

    GAIN = 1.02  # what a change must promise
    RECENT = 0.3  # weight of a window in the smoothed figures

    def __init__(self, limits: Limits, batch_size: int) -> None:
        self._actions = Actions(limits)
        self._batch = batch_size
        self._round_seconds: float | None = None
        self.network = 0.0  # what a round's sum takes, in slices
        self.jitter = 0.0

    def decide(self, seen: Observation) -> Decision:
        if not seen.rounds or not seen.samples or seen.efficiency <= 0:
            return Decision(seen.settings, "nothing was applied")
        slice_seconds = self._batch * seen.seconds * seen.efficiency / seen.samples
        round_seconds = seen.communication_share * seen.seconds / seen.rounds
        before = round_seconds if self._round_seconds is None else self._round_seconds
        self._round_seconds = before + self.RECENT * (round_seconds - before)
        self.jitter += self.RECENT * (seen.jitter - self.jitter)
        noise = seen.noise_scale if seen.noise_scale is not None else float(self._batch)
        self.network = self._round_seconds / slice_seconds

        def goodput(settings: Settings) -> float:
            samples = self._batch * (settings.accumulation if settings.synchronous else 1)
            statistical = (noise + self._batch) / (noise + samples)
            return predicted_efficiency(settings, self.network, self.jitter) * statistical

        # The mildest of those that are about as good as the best.
        candidates = self._actions.all(seen.settings)
        most = max(map(goodput, candidates))
        best = next(settings for settings in candidates if self.GAIN * goodput(settings) >= most)
        now = goodput(seen.settings)
        if most < self.GAIN * now:
            return Decision(seen.settings, f"a goodput of {now:.3f} of the ideal, {most:.3f} at best")
        reason = f"towards {described(best)}: a goodput of {goodput(best):.3f} of the ideal instead of {now:.3f}"
        return Decision(self._actions.towards(seen.settings, best), reason)


def predicted_efficiency(settings: Settings, network: float, jitter: float) -> float:
    """Throughput over that of ranks with nobody to wait for.

    `network` is what a round's sum takes, in slices; `jitter` the coefficient of variation of a slice's time. K slices
    vary by √K times a slice's. A synchronous step waits for the slowest of some eight ranks (1.4 standard deviations
    late) and for the sum; a delayed rank waits where D tasks take less time than a sum and the usual differences.
    """
    slices = settings.accumulation
    spread = jitter * math.sqrt(slices)
    if settings.synchronous:
        return slices / (slices + 1.4 * spread + network)
    slack = settings.delay_bound * slices / max(1e-9, network + 2 * spread)
    return slack / (1 + slack**3) ** (1 / 3) if slack < 1e3 else 1.0
