"""How fast a rank is: the seconds of a step by its samples, and what is known of the rank. Pure: no tensors, no MPI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step (forward, backward, optimizer) on n samples: `fixed_seconds + seconds_per_sample·n`.

    The fixed part is what a step costs however small it is (kernel launches, Python, weight gradients).
    """

    fixed_seconds: float
    seconds_per_sample: float

    def __post_init__(self) -> None:
        parts = (self.fixed_seconds, self.seconds_per_sample)
        if not all(math.isfinite(part) and part >= 0 for part in parts):
            raise ValueError(f"{self} needs finite, non-negative seconds")

    def seconds(self, samples: int) -> float:
        """Seconds for this many samples; a rank without samples takes no step, so 0 samples take 0 s."""
        return self.fixed_seconds + self.seconds_per_sample * samples if samples else 0.0

    def rate(self, samples: int) -> float:
        """Samples/s when a step has this many samples; infinite where a step takes no time."""
        seconds = self.seconds(samples)
        return samples / seconds if seconds else math.inf if samples else 0.0


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> StepTime:
    """The non-negative line through measured (size, seconds) pairs with the least squared relative error.

    Relative, because a step's jitter grows with its length: otherwise the noise of the longest steps would
    decide the fixed part. The pairs are medians already, so outliers are the caller's business. One size
    gives a line through the origin. ValueError where there is nothing to fit or a value is not positive.
    """
    if not sizes or len(sizes) != len(seconds) or min(sizes) <= 0 or min(seconds) <= 0:
        raise ValueError(f"cannot fit step times to sizes {list(sizes)} and seconds {list(seconds)}")
    # With x = 1/t and y = n/t the line is a·x + c·y = 1.
    x, y = [1 / t for t in seconds], [n / t for n, t in zip(sizes, seconds, strict=True)]
    xx, yy, xy = _dot(x, x), _dot(y, y), _dot(x, y)
    fixed, slope = 0.0, sum(y) / yy
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:  # else all sizes are the same
        inner = ((yy * sum(x) - xy * sum(y)) / determinant, (xx * sum(y) - xy * sum(x)) / determinant)
        edges = [(0.0, sum(y) / yy), (sum(x) / xx, 0.0)]
        candidates = [inner] if min(inner) >= 0 else edges
        fixed, slope = min(candidates, key=lambda ac: _misfit(ac, x, y))
    return StepTime(fixed, slope)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def _misfit(line: tuple[float, float], x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum((line[0] * a + line[1] * b - 1) ** 2 for a, b in zip(x, y, strict=True))


@dataclass(frozen=True)
class RankProfile:
    """What a rank is, measured or emulated.

    `cap` is the largest slice that its memory holds. `uncertainty` is half of the 95 % interval of `time`, as a part of
    it (0: exact, None: unknown). `load_seconds_per_sample` is what loading takes beside it, on one thread (0: unknown).
    """

    device: str
    host: str
    time: StepTime
    emulated: bool = False
    cap: int | None = None
    uncertainty: float | None = 0.0
    load_seconds_per_sample: float = 0.0
