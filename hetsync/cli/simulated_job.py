"""What `hetsync simulate` does: from a recipe to the run folder of a job that never ran."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hetsync.balance.shares import solo_rates
from hetsync.cli.simulation_report import simulated_summary
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.emulation.cluster import load_cluster
from hetsync.errors import UserError
from hetsync.files import RECIPE, SUMMARY, write_atomically
from hetsync.plane.local import LocalPlane
from hetsync.simulate.calibrate import calibrated
from hetsync.simulate.learner import Learner
from hetsync.simulate.quadratic import NoisyQuadratic
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.replicas import MOST_RANKS, ReplicaLearner
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.script import Change, load_script
from hetsync.simulate.simulation import Simulation, spare_the_collector
from hetsync.simulate.telemetry import Telemetry
from hetsync.train.run_folder import working_folder
from hetsync.train.terminal import Terminal

LARGEST_TABLE = 32  # ranks that the screen shows one by one


def simulate(
    config: Config,
    ranks: int | None = None,
    gradients: bool = False,
    script: Path | None = None,
    calibrate: Path | None = None,
) -> dict[str, Any]:
    """One simulated job, from its recipe to its summary, which is returned and written."""
    torch.set_num_threads(1)  # as emulated ranks
    began = time.monotonic()
    if (profile := config.emulation.profile) is None:
        raise UserError("simulate needs a cluster: name its profile by --emulate")
    _check_known(config, gradients, calibrate is not None)
    if calibrate is not None:
        config = _unfragmented(config)
    built, model = build(config)
    scenario = scenario_of(config, load_cluster(profile), ranks, built, model)
    ranks = len(scenario.ranks)
    changes = load_script(script, ranks) if script is not None else []
    learner = _learner(config, scenario, built, model, gradients, calibrate)
    with working_folder(LocalPlane(), config.run, None) as folder:
        return _simulated(config, scenario, changes, learner, folder, began)


def _simulated(
    config: Config, scenario: Scenario, changes: Sequence[Change], learner: Learner, folder: Path, began: float
) -> dict[str, Any]:
    ranks = len(scenario.ranks)
    write_atomically(folder / RECIPE, yaml.safe_dump(asdict(config), sort_keys=False))
    # A line a round and rank: those of large clusters would fill the disk.
    telemetry = Telemetry(folder / "telemetry", ranks if ranks <= MOST_RANKS else 1)
    metrics: dict[str, float] = {}

    def on_evaluation(applied: int, seconds: float, found: dict[str, float]) -> None:
        metrics.update(found)
        telemetry.record(0, "evaluation", seconds, samples_applied=applied, train_seconds=seconds, **metrics)

    display = Terminal(scenario.total_samples)
    if ranks <= LARGEST_TABLE:
        display.ranks(
            scenario.ranks, scenario.shares, solo_rates(scenario.batch_size, scenario.ranks, scenario.sync.least_slice)
        )
    simulation = Simulation(scenario, learner, changes, on_evaluation, telemetry)
    spare_the_collector()
    simulation.advance()
    telemetry.flush()
    summary = simulated_summary(simulation, config, metrics, time.monotonic() - began)
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1))
    display.say(f"simulated in {summary['wall_seconds']:.1f} s; the run folder is {folder}")
    display.close(summary)
    return summary


def _check_known(config: Config, gradients: bool, calibrate: bool) -> None:
    """UserError for what would silently be left out."""
    run, learner = config.run, "--gradients" if gradients else "--calibrate"
    if run.early_stop.metric is not None:
        raise UserError(
            f"run.early_stop.metric is {run.early_stop.metric}, but a simulated job trains to its end: give"
            " --run.early_stop.metric null"
        )
    if config.control.name != "fixed":
        raise UserError(
            f"control.name is {config.control.name}, but a simulated job has no controller: give --control.name fixed"
        )
    if config.ema.decay is not None and (gradients or calibrate):
        raise UserError(
            f"ema.decay is {config.ema.decay}, but {learner} evaluates the weights themselves: give --ema.decay null"
        )
    if run.precision != "float32" and gradients:
        raise UserError(
            f"run.precision is {run.precision}, but --gradients trains in float32: give --run.precision float32"
        )


def _unfragmented(config: Config) -> Config:
    """For learners that merge all weights in each round. UserError where others are asked for."""
    if config.sync.fragments not in ("auto", 1):
        raise UserError(
            f"sync.fragments is {config.sync.fragments}, which --calibrate's model of progress does not know: leave it"
            " out, or use --gradients"
        )
    return replace(config, sync=replace(config.sync, fragments=1))


def _learner(
    config: Config, scenario: Scenario, built: Data, model: torch.nn.Module, gradients: bool, calibrate: Path | None
) -> Learner:
    ranks, total = len(scenario.ranks), scenario.total_samples
    if gradients and calibrate is not None:
        raise UserError("--gradients and --calibrate exclude each other: gradients need no model of them")
    if gradients:
        return ReplicaLearner(config, built, model, ranks, total)
    if calibrate is not None:
        return NoisyQuadratic(calibrated(calibrate), config, ranks, total)
    return Learner()
