"""A privileged controller: it knows the landscape of a simulated job, which a policy can only guess. It shows policies
what to do, and how much there is to be gained.

Delayed steps are as many as there are slices, of the noise of a batch B; synchronous steps of K slices are K times of
a K-th of that noise's variance. Which of them a job needs, and when, follows from its curvatures, its noise and the
learning rates to come: in expectation, a noisy quadratic is followed step by step in closed form (Zhang et al. 2019,
"Which algorithmic choices matter at which batch sizes?", section 2). So the expert tries out when to go over to
synchronous steps, and of which K, and goes over once nothing promises a lower loss when the time is up than to do it
now. Until then it does what the goodput controller does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hetsync.control.actions import Actions, Limits
from hetsync.control.baselines import Goodput, predicted_efficiency
from hetsync.control.controller import Decision
from hetsync.control.learning.episodes import Episode
from hetsync.control.learning.jobs import WINDOW_BATCHES, Job
from hetsync.simulate.quadratic import NoisyQuadratic, Row
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

# Windows after which to go over, as far as so many are left.
WAITS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
GAIN = 0.98  # of the loss without synchronous steps: what they must promise


@dataclass(frozen=True)
class Outlook:
    """Expected squares of the weights (J), and samples applied."""

    squares: Row
    applied: float


class Forecast:
    """How the expected loss of a job's landscape goes on."""

    def __init__(self, job: Job) -> None:
        self._job = job
        optimizer = job.config.optimizer
        momentum = optimizer.momentum if optimizer.name == "sgd" else 0.0
        self._learning_rate = optimizer.learning_rate / (1 - momentum)  # of all that a gradient moves in the end

    def after(self, outlook: Outlook, windows: int, slices: int, pace: float) -> Outlook:
        """`slices` of all ranks make a step; `pace` is the part of the samples that ranks without waits would apply."""
        job, landscape = self._job, self._job.landscape
        total, batch = job.batches * job.batch_size, slices * job.batch_size
        squares, applied = outlook.squares, outlook.applied
        for _ in range(windows):
            samples = min(pace * WINDOW_BATCHES * job.batch_size, total - applied)
            rate = self._learning_rate * job.config.schedule.factor(int(applied), total)
            kept = np.clip(1 - rate * landscape.curvatures, -0.999, 0.999) ** 2  # of the squares, by a step
            loss = self.loss(Outlook(squares, applied))
            fallen = (loss / landscape.first_loss) ** landscape.noise_power
            limit = rate**2 * fallen * landscape.variances / batch / np.maximum(1 - kept, 1e-12)
            squares = limit + kept ** (samples / batch) * (squares - limit)
            applied += samples
        return Outlook(squares, applied)

    def loss(self, outlook: Outlook) -> float:
        return self._job.landscape.floor + 0.5 * float(self._job.landscape.curvatures @ outlook.squares)


class Expert:
    """Goodput's controller until synchronous steps promise more by the time limit."""

    def __init__(self, episode: Episode, limits: Limits) -> None:
        self._episode = episode
        self._actions = Actions(limits)
        self._goodput = Goodput(limits, episode.job.batch_size)
        self._forecast = Forecast(episode.job)

    def decide(self, seen: Observation) -> Decision:
        otherwise = self._goodput.decide(seen)
        if self._actions.ladders["delay_bound"][0] > 0:
            return otherwise
        plans = self._plans(seen, otherwise)
        never = plans.pop((math.inf, 0))
        if not plans:  # K cannot change
            return otherwise
        wait, slices = min(plans, key=lambda plan: plans[plan])
        promised = plans[wait, slices]
        if wait or promised > GAIN * never:
            return otherwise
        reason = f"synchronous steps of {slices} slices promise a loss of {promised:.3g}, delayed ones {never:.3g}"
        goal = replace(seen.settings, accumulation=slices, delay_bound=0)
        return Decision(self._actions.towards(seen.settings, goal), reason)

    def _plans(self, seen: Observation, otherwise: Decision) -> dict[tuple[float, int], float]:
        """The loss when the time is up, by windows to wait and the first K of synchronous steps; (inf, 0) has none."""
        job, simulation, forecast = self._episode.job, self._episode.simulation, self._forecast
        ladder = self._actions.ladders["accumulation"]
        ways = [(k, k) for k in ladder if k > 1] + list(pairwise(ladder))  # K at first, and in the second half
        left = max(1, round((job.time_limit - simulation.now) / job.window_seconds))
        paces = {k: self._pace(replace(seen.settings, accumulation=k, delay_bound=0)) for k in ladder}
        learner = simulation.learner
        assert isinstance(learner, NoisyQuadratic)
        outlook, waited = Outlook(learner.squares, simulation.machine.ledger.applied), 0
        plans: dict[tuple[float, int], float] = {}
        for wait in (*(wait for wait in WAITS if wait < left), left):
            outlook, waited = forecast.after(outlook, wait - waited, 1, self._pace(otherwise.settings)), wait
            half = (left - wait) // 2
            for first, second in ways if wait < left else ():
                middle = forecast.after(outlook, left - wait - half, first, paces[first])
                loss = forecast.loss(forecast.after(middle, half, second, paces[second]))
                plans[wait, first] = min(loss, plans.get((wait, first), math.inf))
        plans[math.inf, 0] = forecast.loss(outlook)
        return plans

    def _pace(self, settings: Settings) -> float:
        return predicted_efficiency(settings, self._goodput.network, self._goodput.jitter)
