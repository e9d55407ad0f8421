"""Plans, recipes and results of the jobs that tests run by plans, and of one process to compare them with."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from conftest import RANKS
from safetensors.torch import load_file

from hetsync.cli.train import train
from hetsync.config.schedule import ScheduleConfig
from hetsync.config.schema import Config, DataConfig, OptimizerConfig, PlanConfig, RunConfig, SyncConfig
from hetsync.plane.base import Plane
from hetsync.plane.local import LocalPlane
from hetsync.stop_signal import StopSignal
from hetsync.train import checkpoint
from hetsync.train.job import Job
from hetsync.train.trainer import Trainer

BATCH, EVERY, SAMPLES = 50, 170, 330  # slices before a rest and at the end are short ones


def stage(ranks: int | list[int], *blocks: str, in_flight: int | None = None) -> dict[str, Any]:
    return {"ranks": ranks if isinstance(ranks, list) else [ranks], "blocks": list(blocks), "in_flight": in_flight}


REPLICAS_OF_TWO = [
    {"share": 37, "micro_batches": 2, "stages": [stage(1, "*")]},
    {"share": 13, "stages": [stage(0, "*")]},
]

PLANS: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("pipeline", 2): [
        {"micro_batches": 3, "stages": [stage(1, "features", in_flight=3), stage(0, "classifier")]},
    ],
    ("pipeline", 4): [
        {
            "micro_batches": 4,
            "stages": [
                stage(3, "features.0"),
                stage(1, "features.2"),
                stage(0, "classifier.1"),
                stage(2, "classifier.3"),
            ],
        },
    ],
    ("replicas", 2): REPLICAS_OF_TWO,
    ("replicas", 4): [
        {"share": 31, "micro_batches": 2, "stages": [stage(0, "features"), stage(2, "classifier")]},
        {"share": 19, "micro_batches": 3, "stages": [stage(3, "features.0"), stage(1, "features.2", "classifier")]},
    ],
    ("shared", 2): [{"micro_batches": 3, "stages": [stage([1, 0], "*")]}],
    ("shared", 4): [
        {"share": 31, "micro_batches": 2, "stages": [stage(1, "features"), stage([3, 0], "classifier")]},
        {"share": 19, "stages": [stage(2, "*")]},
    ],
    ("mixed", 2): REPLICAS_OF_TWO,
    # A replica of three stages, led by rank 0, beside one of one rank.
    ("mixed", 4): [
        {
            "share": 34,
            "micro_batches": 3,
            "stages": [stage(2, "features.0"), stage(0, "features.2"), stage(3, "classifier")],
        },
        {"share": 16, "stages": [stage(1, "*")]},
    ],
    ("lockstep", 2): REPLICAS_OF_TWO,
    # Ranks that share a stage, beside others.
    ("lockstep", 4): [
        {
            "share": 34,
            "micro_batches": 3,
            "stages": [stage(0, "features.0", in_flight=3), stage([2, 3], "features.2", "classifier")],
        },
        {"share": 16, "stages": [stage(1, "*")]},
    ],
    # A whole replica on two, whose leader is not the first of them.
    ("couple", 4): [
        {"share": 25, "micro_batches": 2, "stages": [stage([3, 0], "*")]},
        {"share": 25, "stages": [stage(1, "features"), stage(2, "classifier")]},
    ],
}


class Asked(StopSignal):
    """A signal that has come already."""

    def __init__(self, caught: signal.Signals | None) -> None:
        self.caught = caught

    def listen(self, listener: Callable[[], None]) -> None:
        if self.caught is not None:
            listener()

    def over(self) -> None: ...


def recipe(folder: Path, optimizer: str = "sgd", clip: float | None = None, **run: Any) -> Config:
    run = {"dir": str(folder), "samples": SAMPLES, "checkpoint_every": EVERY, "profile_seconds": 0.1, **run}
    return Config(
        run=RunConfig(**run),
        data=DataConfig("digits", BATCH),
        optimizer=OptimizerConfig(optimizer, 0.01, weight_decay=0.01, max_grad_norm=clip),
        schedule=ScheduleConfig("cosine", warmup_samples=100),
        sync=SyncConfig(0, rebalance=False),
    )


def by_plan(
    plane: Plane, config: Config, kind: str, resume: bool = False, caught: signal.Signals | None = None, **more: Any
) -> int:
    """A job's exit status."""
    assert config.run.dir is not None
    path = Path(config.run.dir).parent / f"{kind}.yaml"
    if plane.rank == 0:
        content = {"format": 1, "batch_size": BATCH, "replicas": PLANS[kind, RANKS], **more}
        path.write_text(yaml.safe_dump(content))
    plane.barrier()
    folder = Path(config.run.dir) if resume else None
    return train(plane, replace(config, plan=PlanConfig(str(path))), folder, Asked(caught), "nothing")


def alone(plane: Plane, config: Config, resume: bool = False) -> None:
    """The same recipe without a plan, on one process."""
    if plane.rank == 0:
        with Job(config, LocalPlane(), resume=resume, show="nothing") as job:
            Trainer(config, job).train()
    plane.barrier()


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the newest checkpoint."""
    newest = checkpoint.complete(folder / "checkpoints")[-1]
    assert newest.name.endswith(f"{SAMPLES:012d}")
    return {**load_file(newest / checkpoint.MODEL), **load_file(newest / checkpoint.OPTIMIZER)}


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5)  # Adam makes much of a rounding


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def lines(folder: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    told = (folder / "telemetry" / f"rank-{rank:04d}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, told) if line["kind"] == kind]
