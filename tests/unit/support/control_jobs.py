"""Small simulated jobs for the controllers' tests."""

from __future__ import annotations

import numpy as np

from hetsync.config.schema import Config, DataConfig, OptimizerConfig, RunConfig, SyncConfig
from hetsync.control.learning.jobs import Job, devices
from hetsync.emulation.cluster import Cluster, Link
from hetsync.simulate.quadratic import Landscape

BATCH = 16


def job(seed: int = 0, bound: int = 0, curvature: float = 2.0, batches: int = 160, link: float = 4.0) -> Job:
    """Two ranks behind a network that takes as long as `link` slices."""
    cluster = Cluster("two", "made up", devices([2.0, 1.0]), Link(compute_fraction=link))
    config = Config(
        run=RunConfig(seed=seed),
        data=DataConfig(batch_size=BATCH),
        optimizer=OptimizerConfig("sgd", 0.05, 0.0),
        sync=SyncConfig(delay_bound=bound),
    )
    return Job(config, cluster, 2, Landscape(1.0, 0.0, curvature, 1.0), BATCH / 0.2, batches)


def same_job(random: np.random.Generator) -> Job:
    return job(seed=int(random.integers(1000)))
