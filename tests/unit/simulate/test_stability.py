"""Delayed training at rates that synchronous training survives: real gradients on the virtual clock. Imports no MPI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import hetsync.models
from hetsync.config.parser import read_recipe
from hetsync.config.schema import EmulationConfig
from hetsync.emulation.cluster import load_cluster
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.replicas import ReplicaLearner
from hetsync.simulate.simulation import Simulation

DIGITS = Path(hetsync.models.__file__).parent / "recipes" / "digits.yaml"


@pytest.mark.each_value(1)
@pytest.mark.parametrize("bound", [4, "auto"])
@pytest.mark.parametrize(
    ("optimizer", "rate", "cluster"),
    [
        ("sgd", 0.1, "v100-p100-k80"),  # slices of one sample with momentum 0.9: nan, before steps on them were short
        ("adamw", 0.01, "homogeneous"),  # at chance, while local steps had √(B / n) times the rate
    ],
)
def test_delay_costs_no_rate_that_synchronous_training_survives(
    optimizer: str, rate: float, cluster: str, bound: int | Literal["auto"]
) -> None:
    read = read_recipe(DIGITS)
    config = replace(
        read,
        run=replace(read.run, seed=0, samples=7200),
        data=replace(read.data, batch_size=40),
        optimizer=replace(read.optimizer, name=optimizer, learning_rate=rate),
        sync=replace(read.sync, delay_bound=bound),
        emulation=EmulationConfig(cluster, 400.0),
    )
    data, model = build(config)
    scenario = scenario_of(config, load_cluster(cluster), None, data, model)
    learner = ReplicaLearner(config, data, model, len(scenario.ranks), scenario.total_samples)
    simulation = Simulation(scenario, learner)
    simulation.advance()
    assert learner.evaluate()["accuracy"] > 0.9
