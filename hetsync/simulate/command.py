"""`hetsync simulate`: from a recipe to the run folder of a job that never ran."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from hetsync.config import Config
from hetsync.data import Data
from hetsync.disk import write_atomically
from hetsync.errors import UserError
from hetsync.plane.local import LocalPlane
from hetsync.profiling.cluster import load_cluster
from hetsync.runs import run_folder
from hetsync.simulate.calibrate import calibrated
from hetsync.simulate.learner import Learner
from hetsync.simulate.quadratic import NoisyQuadratic
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.records import Records
from hetsync.simulate.replicas import MOST_RANKS, Replicas
from hetsync.simulate.report import summarise
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.script import load_script
from hetsync.simulate.simulation import Simulation, spare_the_collector
from hetsync.terminal import Terminal

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
    if config.emulate is None:
        raise UserError("simulate needs a cluster: name its profile by --emulate")
    built, model = build(config)
    scenario = scenario_of(config, load_cluster(config.emulate), ranks, built, model)
    ranks = len(scenario.ranks)
    changes = load_script(script, ranks) if script is not None else []
    learner = _learner(config, scenario, built, model, gradients, calibrate)
    folder = run_folder(LocalPlane(), config.run, None)
    write_atomically(folder / "recipe.yaml", yaml.safe_dump(asdict(config), sort_keys=False))
    # A line a round and rank: those of large clusters would fill the disk.
    records = Records(folder / "telemetry", ranks if ranks <= MOST_RANKS else 1)
    metrics: dict[str, float] = {}

    def on_evaluation(applied: int, seconds: float, found: dict[str, float]) -> None:
        metrics.update(found)
        records.record(0, "evaluation", seconds, samples_applied=applied, train_seconds=seconds, **metrics)

    display = Terminal(scenario.total_samples)
    if ranks <= LARGEST_TABLE:
        display.ranks(scenario.ranks, scenario.shares())
    simulation = Simulation(scenario, learner, changes, on_evaluation, records)
    spare_the_collector()
    simulation.advance()
    records.flush()
    summary = summarise(simulation, config, metrics, time.monotonic() - began)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1))
    display.say(f"simulated in {summary['wall_seconds']:.1f} s; the run folder is {folder}")
    display.close(summary)
    return summary


def _learner(
    config: Config, scenario: Scenario, built: Data, model: torch.nn.Module, gradients: bool, calibrate: Path | None
) -> Learner:
    ranks, total = len(scenario.ranks), scenario.total_samples
    if gradients and calibrate is not None:
        raise UserError("--gradients and --calibrate exclude each other: gradients need no model of them")
    if gradients:
        return Replicas(config, built, model, ranks, total)
    if calibrate is not None:
        return NoisyQuadratic(calibrated(calibrate), config, ranks, total)
    return Learner()
