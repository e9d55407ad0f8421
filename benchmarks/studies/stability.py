"""What delay does to the rates that train, and to the time to a target: real gradients on the simulator's clock.

    python -m benchmarks.studies.stability --output results [--processes 2] [--quick]

Digits, batch 40, eight ranks at 400 samples/s in all, constant rates, with SGD, SGD with momentum, and AdamW,
synchronous (D = 0), delayed (D = 4) and by rule (auto), on a ladder of learning rates by factors of √2. Three figures a
cell:

- the stable range: the largest rate whose median final accuracy is within noise of the best rate's, as a fraction of
  that of D = 0. Noise is the range of the seeds at the best rate, and at least 0.01;
- time to the target at each arm's own best rate, that of D = 0 over that of the arm. The best rate is the one that
  reaches it soonest in the median;
- the final accuracy at the rate where that is best.

Results are kept in the output folder and not repeated.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.common.kept import results_of
from benchmarks.common.local_job import RECIPES
from benchmarks.common.report import grouped, publish, spread, until_target
from hetsync.config.parser import read_recipe
from hetsync.config.schema import Config, EmulationConfig
from hetsync.emulation.cluster import Cluster, load_cluster
from hetsync.errors import UserError
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.replicas import ReplicaLearner
from hetsync.simulate.script import Change
from hetsync.simulate.simulation import Simulation
from hetsync.simulate.telemetry import Telemetry
from hetsync.sync.rounds_rule import RoundsChange

CLUSTERS = ("homogeneous", "v100-p100-k80", "quickstart", "heavy-jitter", "slow-link")
Bound = int | Literal["auto"]
BOUNDS: tuple[Bound, ...] = (0, 4, "auto")
BATCH, SAMPLES, SAMPLES_PER_SECOND = 40, 12_000, 400.0
TARGET = 0.95
LEAST_NOISE = 0.01  # of accuracy


@dataclass(frozen=True)
class Kind:
    """An optimizer, and the lowest rate of its ladder."""

    name: str
    momentum: float
    lowest: float


KINDS = {"SGD": Kind("sgd", 0.0, 0.25), "momentum": Kind("sgd", 0.9, 0.025), "AdamW": Kind("adamw", 0.0, 0.0025)}
RUNGS = 7


@dataclass(frozen=True)
class Cell:
    kind: str
    cluster: str
    delay_bound: Bound
    rate: float
    seed: int


class BoundsTold(Telemetry):
    """When the delay bound was set by rule, and to what."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds: list[tuple[float, int]] = []

    def rounds_changed(self, now: float, change: RoundsChange) -> None:
        super().rounds_changed(now, change)
        self.bounds.append((round(now, 3), change.delay_bound))


def cells(seeds: int, clusters: Sequence[str], rungs: int) -> Iterator[Cell]:
    for seed in range(seeds):
        for cluster in clusters:
            for name, kind in KINDS.items():
                rates = [round(kind.lowest * 2 ** (rung / 2), 6) for rung in range(rungs)]
                yield from (Cell(name, cluster, bound, rate, seed) for rate in rates for bound in BOUNDS)


def job(cell: Cell) -> dict[str, Any]:
    return simulated(cell, load_cluster(cell.cluster))


def simulated(cell: Cell, cluster: Cluster, script: Sequence[Change] = (), **sync: Any) -> dict[str, Any]:
    """As `trained` tells; `sync` are other settings of the recipe's."""
    read, kind = read_recipe(RECIPES / "digits.yaml"), KINDS[cell.kind]
    config = replace(
        read,
        run=replace(read.run, seed=cell.seed, samples=SAMPLES, evaluate_every=SAMPLES // 20),
        data=replace(read.data, batch_size=BATCH),
        optimizer=replace(read.optimizer, name=kind.name, momentum=kind.momentum, learning_rate=cell.rate),
        schedule=replace(read.schedule, name="constant"),
        sync=replace(read.sync, delay_bound=cell.delay_bound, **sync),
        emulation=EmulationConfig(cluster.name, SAMPLES_PER_SECOND),
    )
    return {**asdict(cell), **trained(config, cluster, script)}


def trained(config: Config, cluster: Cluster, script: Sequence[Change] = ()) -> dict[str, Any]:
    """A job's points over virtual seconds, its rounds, when the delay bound and the wire have changed, and what ended
    it early, if anything did."""
    torch.set_num_threads(1)
    data, model = build(config)
    scenario = scenario_of(config, cluster, None, data, model)
    learner = ReplicaLearner(config, data, model, len(scenario.ranks), scenario.total_samples)
    points: list[dict[str, float]] = []
    telemetry = BoundsTold()
    simulation = Simulation(
        scenario,
        learner,
        script=script,
        on_evaluation=lambda _, seconds, found: points.append({"seconds": seconds, **found}),
        telemetry=telemetry,
    )
    ended = None
    try:
        simulation.advance()
    except UserError as error:
        ended = str(error)
    return {
        "points": points,
        "bounds": telemetry.bounds,
        "wires": [(change.round, change.wire) for change in telemetry.rounds_changes],
        "rounds": simulation.machine.version,
        "values": scenario.traffic.values,
        "ended": ended,
    }


def final(record: Mapping[str, Any]) -> float:
    """Accuracy at the end; none where it came early."""
    return 0.0 if record["ended"] else float(record["points"][-1]["accuracy"])


def largest_rate(by_rate: Mapping[float, Sequence[float]]) -> float:
    """Whose median final accuracy is within noise of the best rate's."""
    best = max(by_rate, key=lambda rate: statistics.median(by_rate[rate]))
    noise = max(LEAST_NOISE, max(by_rate[best]) - min(by_rate[best]))
    enough = statistics.median(by_rate[best]) - noise
    return max(rate for rate, finals in by_rate.items() if statistics.median(finals) >= enough)


def times(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    return [until_target(record["points"], "accuracy", TARGET, falling=False) for record in records]


def best_times(by_rate: Mapping[float, Sequence[Mapping[str, Any]]]) -> list[float | None]:
    """At the rate that reaches the target soonest, by the median in which jobs that never do are the last."""
    found = [times(records) for records in by_rate.values()]
    return min(found, key=lambda some: statistics.median([float("inf") if each is None else each for each in some]))


def best_finals(by_rate: Mapping[float, Sequence[Mapping[str, Any]]]) -> list[float]:
    """Final accuracies at the rate whose median is the best."""
    return max(([final(record) for record in records] for records in by_rate.values()), key=statistics.median)


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| optimizer | cluster | largest rate at D = 0 | of it at D = 4 | auto"
        f" | s to {TARGET}, D = 0 | D = 4 | auto | final, D = 0 | D = 4 | auto |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, cluster), records in grouped(results, "kind", "cluster").items():
        arms = {bound: grouped(some, "rate") for (bound,), some in grouped(records, "delay_bound").items()}
        by_rate = {bound: {rate: some for (rate,), some in arms[bound].items()} for bound in BOUNDS}
        rates = [largest_rate({rate: list(map(final, some)) for rate, some in by_rate[b].items()}) for b in BOUNDS]
        fractions = [f"{rate / rates[0]:.2f}" for rate in rates[1:]]
        seconds = [spread(best_times(by_rate[bound]), ".1f") for bound in BOUNDS]
        finals = [spread(best_finals(by_rate[bound]), ".3f") for bound in BOUNDS]
        cells = [kind, cluster, f"{rates[0]:g}", *fractions, *seconds, *finals]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parser_of(doc: str) -> argparse.ArgumentParser:
    """Of a study of such jobs."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="jobs side by side")
    parser.add_argument("--seeds", type=int, default=3, help="jobs of each cell")
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, two clusters, the three lowest rates")
    options = parser.parse_args()
    chosen = cells(1, CLUSTERS[:2], 3) if options.quick else cells(options.seeds, CLUSTERS, RUNGS)
    results = results_of(options.output, "stability", chosen, job, options.processes)
    publish(options.output, "studies.stability", markdown(results))


if __name__ == "__main__":
    main()
