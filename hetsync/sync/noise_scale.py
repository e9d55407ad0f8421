"""The gradient noise scale of a live job, from what ranks put into its sums.

A rank's addend over n samples is n·s + e with |e|² = n·v on average: s is the signal, v the variance of one sample, and
the noise scale is v / |s|² samples (McCandlish et al. 2018). Addends of one round are drawn independently, so

    Σ|a|² = |s|²·Σn² + v·Σn      and      |Σa|² = |s|²·(Σn)² + v·Σn

are two equations for the two unknowns (their appendix A.1, for parts of unequal size). Addends of steps with momentum
hold past gradients too, so that k steps in a row are less noisy than k gradients: by a factor c(k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEPT = 0.98  # of what is known, when a round more is: about the last fifty count


@dataclass(frozen=True)
class Addend:
    """What one rank has put into a round: progress of so many samples in so many optimizer steps, or, with 0 steps, the
    sum of their gradients; and its squared norm."""

    samples: int
    steps: int
    squared_norm: float


class NoiseScale:
    def __init__(self, momentum: float = 0.0) -> None:
        """`momentum` of the steps whose progress is summed."""
        self._momentum = momentum
        # Of the rounds so far, fading: Σ|a|², |Σa|², Σn², (Σn)², Σn·c(k).
        self._sums = np.zeros(5)

    def add(self, addends: Sequence[Addend], squared_norm: float) -> None:
        """A round's addends, and the squared norm of their sum. One alone tells nothing, nor do infinite ones."""
        used = [addend for addend in addends if addend.samples]
        if len(used) < 2 or not math.isfinite(sum(addend.squared_norm for addend in used) + squared_norm):
            return
        samples = np.array([addend.samples for addend in used], dtype=float)
        noise = np.array([noise_of_steps(addend.steps, self._momentum) for addend in used])
        squares = sum(addend.squared_norm for addend in used)
        news = [squares, squared_norm, samples @ samples, samples.sum() ** 2, samples @ noise]
        self._sums = KEPT * self._sums + news

    @property
    def samples(self) -> float | None:
        """The noise scale; None while the signal or the noise cannot be told from zero."""
        squares, squared_norm, squared_samples, all_squared, noise_weight = self._sums
        if squared_norm <= squares:
            return None
        signal = (squared_norm - squares) / (all_squared - squared_samples)
        noise = (squares - signal * squared_samples) / noise_weight
        return float(noise / signal) if noise > 0 else None


def noise_of_steps(steps: int, momentum: float) -> float:
    """c(k): variance of the sum of k steps with momentum in a row, over that of k plain steps of the same mean.

    From the autocorrelation μ^j of steps j apart, in the long run: (1 − μ) / (1 + μ) for one step, towards 1 for many.
    Gradients (0 steps) are plain.
    """
    if steps == 0:
        return 1.0
    correlated = sum((steps - lag) * momentum**lag for lag in range(1, steps))
    return (1 - momentum) / (1 + momentum) * (1 + 2 * correlated / steps)
