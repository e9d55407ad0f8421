"""Finds the noisy quadratic that learns as a real run did: its noise measured, the rest fitted to the run's losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hetsync.config.parser import read_recipe
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.data.loader import EpochOrder
from hetsync.data.workers import fetch
from hetsync.emulation.cluster import Cluster, DeviceGroup, load_cluster
from hetsync.errors import UserError
from hetsync.files import RECIPE, SUMMARY
from hetsync.simulate.quadratic import Landscape, NoisyQuadratic, Row, inner_momentum
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.simulation import Simulation
from hetsync.sync.optimizers import build_optimizer

PARTS = 8  # of a batch, for gradients at two batch sizes
MOST_STEPS = 400  # of training in which the noise is measured
BINS = 20  # of a loss curve
SETTLED = 0.5  # of the first loss: below, a network refines what it has found, as a quadratic does from the start


class Noise(NamedTuple):
    """Of gradients, as `Landscape` has it."""

    scale: float
    power: float


def calibrated(run: Path) -> Landscape:
    """The landscape of the run in this folder. UserError where there is no finished run with losses."""
    try:
        summary = json.loads((run / SUMMARY).read_text())
        records = losses_of(run)
    except (OSError, ValueError) as error:
        raise UserError(f"--calibrate {run} holds no finished run: {error}") from error
    if len(records) < 2 * BINS:
        raise UserError(f"--calibrate {run} tells {len(records)} losses: take a run with at least {2 * BINS}")
    config = read_recipe(run / RECIPE)
    built, model = build(config)
    scenario = scenario_of(config, _cluster(config, summary), int(summary["ranks"]), built, model)
    noise = measure_noise(config, built, model, scenario.total_samples)
    return fit(binned(records), noise, config, scenario)


def losses_of(run: Path) -> list[tuple[int, float]]:
    """(samples, mean loss) of every task of the run, in the order in which they were finished, over resumes; without
    those that were done again from a checkpoint."""
    kept: list[tuple[float, float]] = []
    applied = 0.0
    for _, goes_on, samples, loss in sorted(_told_by(run), key=lambda told: told[:2]):
        if not goes_on:
            kept.append((samples, loss))
            applied += samples
            continue
        while kept and applied - kept[-1][0] / 2 > samples:  # a line of several tasks counts by its middle
            applied -= kept.pop()[0]
        applied = samples
    return [(int(samples), loss) for samples, loss in kept if not math.isnan(loss)]


def _told_by(run: Path) -> Iterator[tuple[float, bool, float, float]]:
    """Seconds on the clock of all ranks and starts, and a task's samples and loss; or (True) the samples that the job
    goes on from."""
    for path in sorted((run / "telemetry").glob("rank-*.jsonl")):
        began = 0.0  # a simulated run has one clock, without a time of day
        for line in path.read_text().splitlines():
            record = json.loads(line)
            kind, at = record["kind"], began + record["at"]
            if kind == "start":
                began = datetime.fromisoformat(record["wall_clock"]).timestamp()
            elif kind == "piece":
                yield at, False, record["samples"], math.nan if record["loss"] is None else float(record["loss"])
            elif kind == "rollback":
                yield at, True, record["checkpoint_samples"], 0.0
            elif kind == "profile" and path.stem == "rank-0000":  # before anybody has a task
                yield at, True, record["samples_applied"], 0.0


def _cluster(config: Config, summary: dict[str, Any]) -> Cluster:
    """The one that the run emulated, or one of the speeds that it had."""
    if config.emulation.profile is not None:
        return load_cluster(config.emulation.profile)
    speeds = [rank["device_samples_per_second"] for rank in summary["per_rank"]]
    return Cluster("measured", "the calibration run", tuple(DeviceGroup("device", 1, speed) for speed in speeds))


def measure_noise(config: Config, built: Data, model: torch.nn.Module, total_samples: int) -> Noise:
    """The noise of gradients over a training in one process, or its first steps, which changes the model.

    From the squared norms of gradients at two batch sizes, each batch and its eighths (McCandlish et al. 2018, appendix
    A.1). The scale is that of the first quarter; numerator and denominator are averaged over steps separately, as their
    quotient is biased. UserError where it cannot be told.
    """
    size = PARTS * max(1, round(config.data.batch_size / PARTS))
    steps = max(1, min(MOST_STEPS, total_samples // size))
    optimizer = build_optimizer(config.optimizer, model)
    order = EpochOrder(len(built.train), config.run.seed, built.costs)  # type: ignore[arg-type]
    first_rates = [group["lr"] for group in optimizer.param_groups]
    losses, variances, squares = [], [], []
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, first_rates, strict=True):
            group["lr"] = rate * config.schedule.factor(step * size, total_samples)
        starts = range(step * size, (step + 1) * size, size // PARTS)
        parts = [order.indices([(start, start + size // PARTS)]) for start in starts]
        loss, small, big = _norms_of(model, built, parts, optimizer)
        losses.append(loss)
        squares.append((PARTS * big - small) / (PARTS - 1))
        variances.append((small - big) * size / (PARTS - 1))
        optimizer.step()
    quarter = -(-steps // 4)
    variance, squared_norm = sum(variances[:quarter]), sum(squares[:quarter])
    if not 0 < variance < float("inf") or squared_norm <= 0:
        raise UserError(
            "the gradient noise cannot be told from the gradient over the run's first steps:"
            " calibrate with a larger data.batch_size"
        )
    return Noise(variance / squared_norm, noise_power(losses, variances))


def _norms_of(
    model: torch.nn.Module, built: Data, parts: Iterable[list[int]], optimizer: torch.optim.Optimizer
) -> tuple[float, float, float]:
    """The loss, the mean squared norm of the parts' gradients, and that of all, which is left for the optimizer."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    loss, small, before = 0.0, 0.0, torch.zeros(sum(w.numel() for w in weights))
    for indices in parts:
        loss_of_part = built.loss(model, fetch(built.train, indices, built.collate)) / PARTS
        loss_of_part.backward()
        loss += loss_of_part.item()
        summed = _flat_gradient(weights)
        small += float((PARTS * (summed - before)).square().sum()) / PARTS
        before = summed
    return loss, small, float(before.square().sum())


def noise_power(losses: Sequence[float], variances: Sequence[float]) -> float:
    """The slope, from 0 to 1, of the variance's logarithm on the loss's, once the loss has fallen by half; 0 where it
    does not."""
    bins = np.array_split(np.array([losses, variances]), min(BINS, len(losses)), axis=1)
    means = np.array([part.mean(1) for part in bins])
    means = means[(means[:, 0] < SETTLED * means[0, 0]) & (means > 0).all(1)]
    if len(means) < BINS // 4:
        return 0.0
    slope, _ = np.polyfit(np.log(means[:, 0]), np.log(means[:, 1]), 1)
    return float(np.clip(slope, 0, 1))


def _flat_gradient(weights: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in weights])


def binned(tasks: Sequence[tuple[int, float]]) -> Row:
    """Mean losses over `BINS` equal parts of the samples, from (samples, mean loss) of each task in order."""
    samples, losses = (np.array(column, dtype=float) for column in zip(*tasks, strict=True))
    ends = np.cumsum(samples)
    bins = np.minimum((BINS * (ends - samples / 2) / ends[-1]).astype(int), BINS - 1)
    weights = np.bincount(bins, samples, BINS)
    filled: Row = np.bincount(bins, samples * losses, BINS) / np.maximum(weights, 1)
    return np.where(weights > 0, filled, np.nan)


def fit(curve: Row, noise: Noise, config: Config, scenario: Scenario) -> Landscape:
    """The landscape under which a simulation of the run has this loss curve, by least squares.

    With the noise given, the excess loss over the floor scales with the first excess: so for each curvature, floor and
    first excess follow from a line, and only the curvature is searched. (Where the noise falls with the loss, that is
    exact for a floor of 0 only.)
    """
    unit = (1 - inner_momentum(config)) / config.optimizer.learning_rate

    def misfit(curvature: float) -> tuple[float, Landscape]:
        shape = simulated_curve(Landscape(1.0, 0.0, curvature, *noise), config, scenario)
        there = np.isfinite(shape) & np.isfinite(curve)
        x, y = shape[there], curve[there]
        excess, floor = np.polyfit(x, y, 1) if len(x) > BINS // 2 else (0.0, 0.0)
        if floor < 0:
            excess, floor = x @ y / (x @ x), 0.0
        error = float(np.square(y - floor - excess * x).sum()) if excess > 0 else float("inf")
        return error, Landscape(float(floor + excess), float(floor), curvature, *noise)

    return _searched(misfit, unit)


def _searched(misfit: Callable[[float], tuple[float, Landscape]], unit: float) -> Landscape:
    """Over four decades of the curvature in half-decades, then finer about the best."""
    tried: list[tuple[float, Landscape]] = []
    for exponents in (np.arange(-4, 0.6, 0.5), np.arange(-0.4, 0.41, 0.1)):
        middle = min(tried, key=lambda pair: pair[0])[1].curvature if tried else unit
        tried += [misfit(float(middle * 10**exponent)) for exponent in exponents]
    error, best = min(tried, key=lambda pair: pair[0])
    if not error < float("inf"):
        raise UserError("the calibration run's losses do not fall: take a longer run, or one that learns")
    return best


def simulated_curve(landscape: Landscape, config: Config, scenario: Scenario) -> Row:
    """Binned losses of a simulated run; not a number where it diverges."""
    learner = NoisyQuadratic(landscape, config, len(scenario.ranks), scenario.total_samples)
    simulation = Simulation(scenario, learner)
    try:
        simulation.advance()
    except UserError:
        return np.full(BINS, np.nan)
    return binned(simulation.losses)
