"""Finds the noisy quadratic that learns as a real run did: its noise measured, the rest fitted to the run's losses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsync.cli import CONFIG_FILE, make_parser, parse_recipe
from hetsync.config import Config
from hetsync.data import Data
from hetsync.data.loader import EpochOrder
from hetsync.data.workers import fetch
from hetsync.errors import UserError
from hetsync.optimizers import build_optimizer
from hetsync.profiling.cluster import Cluster, DeviceGroup, load_cluster
from hetsync.simulate.quadratic import Landscape, NoisyQuadratic, Row, Steps
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.simulation import Simulation

PARTS = 8  # of a batch, for gradients at two batch sizes
MOST_STEPS = 100  # of training in which the noise is measured
BINS = 20  # of a loss curve


def calibrated(run: Path) -> Landscape:
    """The landscape of the run in this folder. UserError where there is no finished run with losses."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        records = losses_of(run)
    except (OSError, ValueError) as error:
        raise UserError(f"--calibrate {run} holds no finished run: {error}") from error
    if len(records) < 2 * BINS:
        raise UserError(f"--calibrate {run} tells {len(records)} losses: take a run with at least {2 * BINS}")
    config = parse_recipe(make_parser("hetsync simulate", ""), [str(run / CONFIG_FILE)])[0]
    built, model = build(config)
    scenario = scenario_of(config, _cluster(config, summary), int(summary["ranks"]), built, model)
    noise = measure_noise_scale(config, built, model, scenario.total_samples)
    return fit(binned(records), noise, config, scenario)


def losses_of(run: Path) -> list[tuple[int, float]]:
    """(samples, mean loss) of every piece of the run, in the order in which they were finished."""
    told: list[dict[str, Any]] = []
    for path in sorted((run / "telemetry").glob("rank-*.jsonl")):
        told += [json.loads(line) for line in path.read_text().splitlines()]
    pieces = [record for record in told if record["kind"] == "piece" and record["loss"] is not None]
    return [(piece["samples"], piece["loss"]) for piece in sorted(pieces, key=lambda piece: float(piece["at"]))]


def _cluster(config: Config, summary: dict[str, Any]) -> Cluster:
    """The one that the run emulated, or one of the speeds that it had."""
    if config.emulate is not None:
        return load_cluster(config.emulate)
    speeds = [rank["device_samples_per_second"] for rank in summary["per_rank"]]
    return Cluster("measured", "the calibration run", tuple(DeviceGroup("device", 1, speed) for speed in speeds))


def measure_noise_scale(config: Config, built: Data, model: torch.nn.Module, total_samples: int) -> float:
    """Gradient noise scale in samples over the first quarter of a training in one process, which changes the model.

    From the squared norms of gradients at two batch sizes, each batch and its eighths (McCandlish et al. 2018, appendix
    A.1); numerator and denominator are averaged over steps separately, as their quotient is biased.
    """
    size = PARTS * max(1, round(config.data.batch_size / PARTS))
    steps = max(1, min(MOST_STEPS, total_samples // 4 // size))
    optimizer = build_optimizer(config.optimizer, model)
    order = EpochOrder(len(built.train), config.run.seed, built.costs)  # type: ignore[arg-type]
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    variances, squares = [], []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        part_norms, before = [], torch.zeros(sum(w.numel() for w in weights))
        for part in range(PARTS):
            start = step * size + part * size // PARTS
            batch = fetch(built.train, order.indices([(start, start + size // PARTS)]), built.collate)
            (built.loss(model, batch) / PARTS).backward()
            summed = _flat_gradient(weights)
            part_norms.append(float((PARTS * (summed - before)).square().sum()))
            before = summed
        small, big = sum(part_norms) / PARTS, float(before.square().sum())
        squares.append((PARTS * big - small) / (PARTS - 1))
        variances.append((small - big) * size / (PARTS - 1))
        optimizer.step()
    variance, squared_norm = sum(variances), sum(squares)
    if not 0 < variance < float("inf") or squared_norm <= 0:
        raise UserError(
            "the gradient noise cannot be told from the gradient over the run's first steps:"
            " calibrate with a larger data.batch_size"
        )
    return variance / squared_norm


def _flat_gradient(weights: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in weights])


def binned(pieces: Sequence[tuple[int, float]]) -> Row:
    """Mean losses over `BINS` equal parts of the samples, from (samples, mean loss) of each piece in order."""
    samples, losses = (np.array(column, dtype=float) for column in zip(*pieces, strict=True))
    ends = np.cumsum(samples)
    bins = np.minimum((BINS * (ends - samples / 2) / ends[-1]).astype(int), BINS - 1)
    weights = np.bincount(bins, samples, BINS)
    filled: Row = np.bincount(bins, samples * losses, BINS) / np.maximum(weights, 1)
    return np.where(weights > 0, filled, np.nan)


def fit(curve: Row, noise_scale: float, config: Config, scenario: Scenario) -> Landscape:
    """The landscape under which a simulation of the run has this loss curve, by least squares.

    With the noise scale given, the excess loss over the floor scales with the first excess: so for each curvature,
    floor and first excess follow from a line, and only the curvature is searched.
    """
    steps = Steps.of(config)
    unit = (1 - steps.momentum) / steps.learning_rate

    def misfit(curvature: float) -> tuple[float, Landscape]:
        shape = simulated_curve(Landscape(1.0, 0.0, curvature, noise_scale), config, scenario)
        there = np.isfinite(shape) & np.isfinite(curve)
        x, y = shape[there], curve[there]
        excess, floor = np.polyfit(x, y, 1) if len(x) > BINS // 2 else (0.0, 0.0)
        if floor < 0:
            excess, floor = x @ y / (x @ x), 0.0
        error = float(np.square(y - floor - excess * x).sum()) if excess > 0 else float("inf")
        return error, Landscape(float(floor + excess), float(floor), curvature, noise_scale)

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
