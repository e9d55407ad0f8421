"""From 8 to 10,000 ranks: efficiency, events and latency by the simulator, and what rank 0 can really answer.

    launch/local 4 -- python -m benchmarks.coordinator_load 8 64 512 4096 10000 --output FOLDER    (for the MPI column)
    python -m benchmarks.scale [--ranks 8 64 512 4096 10000] [--output FOLDER]

The job: ResNet-50's weights; V100, P100 and K80 devices two to two to four, with measured rates (the cluster profile
v100-p100-k80); slices of 64 samples a rank on average; the jitter of production jobs (alibaba-jitter); D = 4, q = 0.25,
K = 1. The network: an allreduce of n ranks takes log2(n) times the latency of a message, and each rank's link carries
2 (n - 1) / n times the weights (a tree's latency, a ring's volume).

The simulator's coordinator answers at once. The real one's CPU time a round, measured beside it, says whether it could:
above a load of 1 the efficiency of that line would not be reached.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.common.report import command, machine, source
from benchmarks.coordinator_load import FloodedAlone, Load
from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, Link, load_cluster
from hetsync.simulate import Scenario, Simulation, Traffic
from hetsync.simulate.polling import PollTimes
from hetsync.simulate.recipe import scaled
from hetsync.simulate.simulation import spare_the_collector
from hetsync.simulate.telemetry import Telemetry

MODEL = "resnet50"
WEIGHTS = 25_557_032
SAMPLES = 64  # of a slice, a rank, on average
LATENCY_SECONDS = 5e-6
BYTES_PER_SECOND = 12.5e9  # 100 Gbit/s
ROUNDS_PER_SECOND = 5  # that rank 0 should be able to serve
WARM_UP = 8  # rounds


@dataclass(frozen=True)
class Line:
    """One size. Events are what ranks tell rank 0; latency is from a round's start to its last landing."""

    ranks: int
    efficiency: float
    staleness: float
    rounds_per_second: float
    round_latency_seconds: float
    tasks_per_round: float
    events_per_second: float
    wall_seconds: float  # of the simulation


class Tally(Telemetry):
    """Counts contributions and times rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.contributions = 0
        self.latencies: list[float] = []

    def delayed_round(self, number: int, joins: PollTimes, lands: PollTimes, staleness: Mapping[int, int]) -> None:
        self.contributions += len(staleness)
        self.latencies.append(lands.last - joins.first)


def scenario(ranks: int) -> Scenario:
    devices, jitter = load_cluster("v100-p100-k80"), load_cluster("alibaba-jitter").jitter
    link = Link(math.ceil(math.log2(ranks)) * LATENCY_SECONDS, BYTES_PER_SECOND)
    cluster: Cluster = replace(scaled(devices, ranks), jitter=jitter, link=link)
    groups = [group for group in devices.devices for _ in range(group.count)]
    profiles = [
        RankProfile(group.name, "", StepTime(0.0, 1 / group.samples_per_second[MODEL]), True)
        for group in (groups[rank % len(groups)] for rank in range(ranks))
    ]
    batch = SAMPLES * ranks
    return Scenario(cluster, profiles, SyncConfig(4, fragments=1), batch, 10**15, traffic=Traffic(WEIGHTS))


def simulated(ranks: int, rounds: int) -> Line:
    tally = Tally()
    simulation = Simulation(scenario(ranks), telemetry=tally)
    spare_the_collector()
    simulation.advance(rounds=WARM_UP)
    simulation.observe()
    contributions, tasks, done = tally.contributions, simulation.totals.tasks, len(tally.latencies)
    began = time.process_time()
    simulation.advance(rounds=rounds)
    wall_seconds = time.process_time() - began
    seen = simulation.observe()
    contributions, tasks = tally.contributions - contributions, simulation.totals.tasks - tasks
    latencies = tally.latencies[done:]
    events = 2 * tasks + contributions  # begun, finished; put into a round
    return Line(
        ranks,
        seen.efficiency,
        seen.staleness,
        seen.rounds / seen.seconds,
        sum(latencies) / len(latencies),
        tasks / rounds,
        events / seen.seconds,
        wall_seconds,
    )


def loaded(output: Path, ranks: int) -> Load | None:
    """What coordinator_load.py has found over MPI."""
    path = output / "coordinator-mpi.json"
    found = [Load(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    return next((load for load in found if load.ranks == ranks), None)


def saturation(loads: list[Load]) -> float | None:
    """Ranks at which serving `ROUNDS_PER_SECOND` takes all of rank 0's time, between sizes by interpolation of logs."""
    sizes = sorted(loads, key=lambda load: load.ranks)
    for small, large in pairwise(sizes):
        if large.rounds_per_second < ROUNDS_PER_SECOND <= small.rounds_per_second:
            fall = math.log(small.rounds_per_second / large.rounds_per_second)
            part = math.log(small.rounds_per_second / ROUNDS_PER_SECOND) / fall
            return float(small.ranks * (large.ranks / small.ranks) ** part)
    return None


def verdict(kind: str, loads: list[Load]) -> str:
    if not loads:
        return f"{kind}: not measured."
    ranks = saturation(loads)
    if ranks is not None:
        return f"{kind}: rank 0 is saturated by {ROUNDS_PER_SECOND} rounds/s at about {ranks:,.0f} ranks."
    able = max(loads, key=lambda load: load.ranks)
    more = "more" if able.rounds_per_second >= ROUNDS_PER_SECOND else "fewer"
    return f"{kind}: rank 0 is saturated by {ROUNDS_PER_SECOND} rounds/s at {more} than {able.ranks:,} ranks."


def markdown(lines: list[Line], alone: list[Load], over_mpi: list[Load]) -> str:
    out = [
        "| ranks | efficiency | staleness | rounds/s | round latency, ms | tasks a round | events/s needed |"
        " events/s possible | load | the same over MPI | its load | simulation, CPU s |",
        "| ---: " * 12 + "|",
    ]
    for line in lines:
        cells = [f"{line.ranks:,}", f"{line.efficiency:.3f}", f"{line.staleness:.2f}", f"{line.rounds_per_second:.2f}"]
        cells += [f"{1e3 * line.round_latency_seconds:.0f}", f"{line.tasks_per_round:,.0f}"]
        cells.append(f"{line.events_per_second:,.0f}")
        for loads in (alone, over_mpi):
            load = next((load for load in loads if load.ranks == line.ranks), None)
            possible = load.events_per_second if load is not None else math.nan
            cells += [f"{possible:,.0f}", f"{line.events_per_second / possible:.2f}"] if load is not None else ["", ""]
        cells.append(f"{line.wall_seconds:.1f}")
        out.append("| " + " | ".join(cells) + " |")
    sentences = [verdict("Coordinator alone", alone), verdict("Over MPI", over_mpi)]
    return "\n".join([*out, "", *sentences]) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 4096, 10_000], help="sizes of the job")
    parser.add_argument("--tasks", type=int, default=150_000, help="about how many to simulate at each size")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for scale.json and scale.md")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    lines, alone, over_mpi = [], [], []
    for ranks in options.ranks:
        lines.append(simulated(ranks, max(10, min(1000, options.tasks // ranks))))
        alone.append(FloodedAlone(ranks).measure(WARM_UP))
        load = loaded(options.output, ranks)
        over_mpi += [load] if load is not None else []
        print(f"{lines[-1]}\n{alone[-1]}", file=sys.stderr)
    text = f"{source('scale')}\n\n{markdown(lines, alone, over_mpi)}"
    results = {
        "command": command("scale"),
        "machine": machine(),
        "network": {"latency_seconds": LATENCY_SECONDS, "bytes_per_second": BYTES_PER_SECOND, "weights": WEIGHTS},
        "lines": [asdict(line) for line in lines],
        "coordinator": [asdict(load) for load in [*alone, *over_mpi]],
    }
    (options.output / "scale.json").write_text(json.dumps(results, indent=1))
    (options.output / "scale.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
