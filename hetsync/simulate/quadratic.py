"""Progress without gradients: the noisy quadratic model (Zhang et al. 2019, "Which algorithmic choices matter at which
batch sizes?", section 2) under HetSync's own rules of merging.

The loss is floor + ½ Σ h_j w_j² with curvatures h_j = h_1 / j. The gradient of n samples is h_j w_j plus normal noise
of variance c_j / n, c proportional to h and to a power of the loss: with power 0 the noise stays as it is, with power 1
it vanishes with the loss, as where a model can fit every sample (Ma, Bassily and Belkin 2018, "The power of
interpolation"). A rank's inner steps, the weight of its addend, what it keeps while a sum is on its way, and the
averages at a drain are those of `sync/deltas.py`, on a handful of numbers instead of a model: so K, D, the batch and
staleness cost what they cost there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetsync.config.schema import Config
from hetsync.data.ledger import length
from hetsync.simulate.learner import Learner
from hetsync.sync.deltas import make_outer
from hetsync.sync.messages import StartRound, Task
from hetsync.sync.steps import LocalSteps

DIMENSIONS = 16
DRAWS = 4096  # at a time

Row = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Landscape:
    """A noisy quadratic.

    Args:
        first_loss: Loss at the start.
        floor: Loss that no amount of training falls below.
        curvature: h_1, the largest curvature, in units of 1 / learning rate.
        noise_scale: Gradient noise scale at the start in samples: the variance of one sample's gradient, summed over
            weights, over the squared norm of the mean gradient (McCandlish et al. 2018, "An empirical model of
            large-batch training", equation 2.9).
        noise_power: Of the loss, which the variance of gradients is proportional to.
    """

    first_loss: float
    floor: float
    curvature: float
    noise_scale: float
    noise_power: float = 0.0

    @property
    def curvatures(self) -> Row:
        return self.curvature / np.arange(1.0, DIMENSIONS + 1)

    @property
    def first_weights(self) -> Row:
        """Alike in all dimensions, as in Zhang et al."""
        excess = self.first_loss - self.floor
        return np.full(DIMENSIONS, (2 * excess / self.curvatures.sum()) ** 0.5)

    @property
    def variances(self) -> Row:
        """c, of one sample's gradient at the start."""
        squared_norm = float(((self.curvatures * self.first_weights) ** 2).sum())
        return self.noise_scale * squared_norm * self.curvatures / self.curvatures.sum()


def inner_momentum(config: Config) -> float:
    """Of the optimizer, as the model sees it: Adam's steps count as plain ones of the same learning rate."""
    return config.optimizer.momentum if config.optimizer.name == "sgd" else 0.0


class NoisyQuadratic(Learner):
    """Arrays have one row a rank and one column a dimension (RJ), of each of the runs.

    `runs` differ in their gradients' noise only, side by side at the same times; losses are their
    means. One is what a real job is; many tell settings apart that one would not.
    """

    learns = True

    def __init__(self, landscape: Landscape, config: Config, ranks: int, total_samples: int, runs: int = 1) -> None:
        self.landscape = landscape
        self._runs = runs
        self._learning_rate = config.optimizer.learning_rate
        self._momentum = inner_momentum(config)
        self._outer = make_outer(config.sync, config.data.batch_size)
        self._schedule = config.schedule
        self._batch = config.data.batch_size
        self._local = LocalSteps(self._batch, ranks, adaptive=False)
        self._total = total_samples
        self._h = np.tile(landscape.curvatures, runs)
        self._first_deviations = np.tile(np.sqrt(landscape.variances), runs)
        first_weights = np.tile(landscape.first_weights, runs)
        self._anchors = {-1: first_weights}  # after the newest rounds, by number
        self._newest = -1
        self._outer_velocity = np.zeros(self._h.size)
        self._base_RJ = np.tile(first_weights, (ranks, 1))  # the anchor that a rank has taken over
        # Local weights are base + own. What is finished and in no round yet is pending; what a round carries is in
        # flight; what has landed on the rank, and leaves its own progress with the next `apply`, is merged.
        self._own_RJ, self._pending_RJ, self._in_flight_RJ, self._merged_RJ, self._velocity_RJ = (
            np.zeros((ranks, self._h.size)) for _ in range(5)
        )
        self._landed = [-1] * ranks  # the newest round that has landed on a rank
        self._flight_round = [0] * ranks  # that a rank's contribution is in
        self._rates = [0.0] * ranks
        self._samples, self._merged_steps = [0] * ranks, [0.0] * ranks  # that are pending, as `Deltas` counts them
        self._step = np.zeros(self._h.size)  # the round's sum, as far as it is packed
        self._step_samples = 0  # in it
        self._gradient = np.zeros(self._h.size)  # summed over the samples of a synchronous round
        self.keep()
        self._random = np.random.default_rng(config.run.seed)
        self._noise: Iterator[Row] = iter(())

    @property
    def anchor(self) -> Row:
        return self._anchors[self._newest]

    def _draw(self) -> Row:
        drawn = next(self._noise, None)
        if drawn is None:
            self._noise = iter(self._random.standard_normal((DRAWS // self._runs, self._h.size)))
            drawn = next(self._noise)
        return drawn

    def begin_task(self, rank: int, task: Task) -> None:
        rate = self._learning_rate * self._schedule.factor(task.position, self._total)
        self._rates[rank] = rate * self._local.rate(task, adaptive=False)

    def compute_slice(self, rank: int, task: Task, index: int) -> float:
        samples = length(task.slices[index])
        weights = self._base_RJ[rank] + self._own_RJ[rank]
        losses = self._losses(weights)
        gradient = self._h * weights + samples**-0.5 * self._deviations(losses) * self._draw()
        if task.synchronous_round is None:
            self._velocity_RJ[rank] = self._momentum * self._velocity_RJ[rank] + gradient
            self._own_RJ[rank] -= self._rates[rank] * self._velocity_RJ[rank]
        else:
            self._gradient += samples * gradient
        return float(losses.sum()) / self._runs  # what `mean` gives, in half the time

    def _losses(self, weights: Row) -> Row:
        """Of each run."""
        return self.landscape.floor + 0.5 * (self._h * weights * weights).reshape(self._runs, DIMENSIONS).sum(1)

    def _deviations(self, losses: Row) -> Row:
        """Of one sample's gradient where the runs have these losses."""
        if not self.landscape.noise_power:
            return self._first_deviations
        grown = (losses / self.landscape.first_loss) ** (self.landscape.noise_power / 2)
        return self._first_deviations * np.repeat(grown, DIMENSIONS)

    def finish_task(self, rank: int, task: Task) -> None:
        if task.synchronous_round is None:
            self._pending_RJ[rank] = self._own_RJ[rank] - self._in_flight_RJ[rank]
            self._samples[rank] += task.samples
            self._merged_steps[rank] += len(task.slices) / self._local.lift(task)

    def pack(self, rank: int, start: StartRound) -> None:
        self._step += self._samples[rank] / (self._merged_steps[rank] * self._batch) * self._pending_RJ[rank]
        self._step_samples += self._samples[rank]
        self._in_flight_RJ[rank] = self._pending_RJ[rank]
        self._flight_round[rank] = self._newest + 1
        self._samples[rank], self._merged_steps[rank] = 0, 0.0

    def sum_deltas(self, start: StartRound) -> None:
        moved = self._step
        if self._outer is not None:
            velocity_weight, decay = self._outer.factors(self._step_samples)
            self._outer_velocity += self._step
            moved = self._outer.learning_rate * (self._step + velocity_weight * self._outer_velocity)
            self._outer_velocity *= decay
        self._move(start.number, self.anchor + moved)
        self._step, self._step_samples = np.zeros(self._h.size), 0

    def _move(self, number: int, anchor: Row) -> None:
        """The round before has landed everywhere, but not every rank has taken it over."""
        self._anchors = {self._newest: self.anchor, number: anchor}
        self._newest = number

    def apply_sum(self, rank: int, number: int) -> None:
        self._landed[rank] = number
        if self._flight_round[rank] <= number:
            self._merged_RJ[rank] += self._in_flight_RJ[rank]
            self._in_flight_RJ[rank] = 0

    def apply(self, rank: int) -> None:
        self._base_RJ[rank] = self._anchors[self._landed[rank]]
        self._own_RJ[rank] -= self._merged_RJ[rank]
        self._merged_RJ[rank] = 0

    def reset_to_anchor(self) -> None:
        self._base_RJ[:] = self.anchor
        for array_RJ in (self._own_RJ, self._pending_RJ, self._in_flight_RJ, self._merged_RJ):
            array_RJ[:] = 0

    def reduce_gradients(self, number: int, round_samples: int) -> None:
        """All ranks make the same step, so it is made once; at a momentum that all of them share."""
        velocity = self._momentum * self._velocity_RJ[0] + self._gradient / round_samples
        self._velocity_RJ[:] = velocity
        self._move(number, self.anchor - self._rates[0] * velocity)
        self._base_RJ[:] = self.anchor
        self._gradient = np.zeros(self._h.size)

    def at_rest(self, samples: Mapping[int, int], applied: int, synchronous: bool) -> None:
        total = sum(samples.values())
        if not synchronous and total:
            ranks = list(samples)
            weights = np.array([samples[rank] for rank in ranks]) / total
            self._velocity_RJ[:] = weights @ self._velocity_RJ[ranks]

    def keep(self) -> None:
        self._kept = self.anchor.copy(), self._velocity_RJ.copy(), self._outer_velocity.copy()

    def go_back(self, applied: int) -> None:
        anchor, velocity_RJ, outer = self._kept
        self._move(self._newest, anchor.copy())
        self._velocity_RJ[:], self._outer_velocity = velocity_RJ, outer.copy()
        self.reset_to_anchor()

    @property
    def squares(self) -> Row:
        """Of the anchor's weights (J), the means over the runs."""
        return (self.anchor**2).reshape(self._runs, DIMENSIONS).mean(0)

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(self._losses(self.anchor).mean())}

    def learning_rate(self, applied: int) -> float:
        return self._schedule.factor(applied, self._total)

    @property
    def noise_scale(self) -> float:
        squared_norm = float(((self._h * self.anchor) ** 2).sum())
        return float((self._deviations(self._losses(self.anchor)) ** 2).sum()) / max(squared_norm, 1e-300)
