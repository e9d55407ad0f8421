"""HetSync beside what users would pick instead: the same jobs, one after the other, and the truth in tables.

    python -m benchmarks.peers.compare --quick                      three clusters, short jobs
    python -m benchmarks.peers.compare --repetitions 3 --tune       everything: hours

Every job is a process a rank under mpirun, one thread each. Within one repetition all peers run once on each cluster,
one after the other, so that a drift of the machine meets them alike. docs/results/peers.md says what is measured how.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import warn_of_overruns
from benchmarks.common.plots import can_plot
from benchmarks.common.report import Record, command, grouped, machine
from benchmarks.peers.cells import (
    PEERS,
    WORKLOADS,
    Cell,
    Scenario,
    Workload,
    equal_rate,
    ideal_rate,
    phases,
    scenarios,
)
from benchmarks.peers.report import final_metric, markdown, overruns, plots, rate, time_to_target
from benchmarks.peers.starter import OPTIONAL, Starter
from benchmarks.peers.timeline import plot
from hetsync.errors import UserError
from hetsync.files import write_atomically

QUICK_CLUSTERS = ("v100-p100-k80", "heavy-jitter", "homogeneous")
QUICK_PEERS = ("ddp-equal", "ddp-by-speed", "post-local-sgd", "hetsync-sync", "hetsync-delayed")
TUNE_FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the workload's learning rate, for each peer alike
TUNE_CLUSTER = "v100-p100-k80"
TUNE_SEED = 1000  # no comparison uses its order of samples
TUNE_ABOUT_EQUAL = 0.01  # final metrics that differ by no more than this part of the best end about equally well

LearningRates = dict[str, dict[str, float]]  # by workload and peer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/peers"), help="folder for JSON, Markdown, plots")
    parser.add_argument("--quick", action="store_true", help="a few peers and clusters, short jobs")
    parser.add_argument("--peers", nargs="+", choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--clusters", nargs="+", metavar="CLUSTER", help=", ".join(scenarios(None)))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["digits"], help="default: digits")
    words = "samples of a step, of every peer; the workload's learning rate changes in proportion"
    parser.add_argument("--batch", type=int, help=words)
    parser.add_argument("--repetitions", type=int, default=1, help="each with a seed of its own: 0, 1, ...")
    parser.add_argument("--traces", type=Path, help="folder with Alibaba's job_1_norm.csv")
    parser.add_argument("--data", type=Path, help="folder with cifar10_lossless, deeptte_chengdu and ptb")
    for package in OPTIONAL:
        words = f"interpreter of an environment with {package} and HetSync, where this one lacks it"
        parser.add_argument(f"--{package}-python", metavar="PYTHON", help=words)
    parser.add_argument("--tune", action="store_true", help="first choose each peer's learning rate")
    parser.add_argument("--learning-rates", type=Path, help="learning-rates.json of an earlier --tune")
    return parser.parse_args()


def choose(options: argparse.Namespace) -> tuple[dict[str, Scenario], tuple[str, ...]]:
    """Clusters and peers as asked for."""
    known = scenarios(options.traces)
    names = options.clusters or (QUICK_CLUSTERS if options.quick else known)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--clusters has {', '.join(unknown)}: choose from {', '.join(known)}")
    if options.batch is not None and options.learning_rates is not None:
        raise UserError("--learning-rates are for the workload's own batch: give --tune beside --batch instead")
    peers = options.peers or (QUICK_PEERS if options.quick else PEERS)
    return {name: known[name] for name in names}, tuple(peers)


def workload_of(options: argparse.Namespace, name: str) -> Workload:
    """As it stands, or with the batch that was asked for."""
    workload = WORKLOADS[name]
    batch = options.batch or workload.batch
    return replace(workload, batch=batch, scaled=workload.scaled * batch / workload.batch)


def size_of(workload: Workload, quick: bool) -> tuple[int, float]:
    """Samples of a job, and samples/s of the emulated cluster."""
    return (workload.quick_samples, workload.quick_rate) if quick else (workload.samples, workload.rate)


# Jobs.


def measure(
    options: argparse.Namespace, starter: Starter, rates: LearningRates, records: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Interleaved: each repetition runs every cell once; yields the timelines so far, of the first one, after each."""
    bars: list[dict[str, Any]] = []
    clusters, peers = choose(options)
    for seed in range(options.repetitions):
        for name in options.workloads:
            workload = workload_of(options, name)
            samples, rate_all = size_of(workload, options.quick)
            for cluster, scenario in clusters.items():
                base = Cell(workload, cluster, scenario, "alone", seed, samples, rate_all)
                stretches = phases(scenario, rate_all) if scenario.cluster else solo_rates(starter, base)
                if scenario.cluster is None and not isinstance(stretches, str):
                    base = as_long_as_emulated(base, stretches[0])
                for peer in peers:
                    cell = replace(base, peer=peer, learning_rate=rates.get(name, {}).get(peer))
                    outcome = {"missing": stretches} if isinstance(stretches, str) else starter.run(cell)
                    timeline = outcome.pop("timeline", None)
                    records.append(record(cell, outcome, stretches))
                    if timeline is not None and seed == 0:
                        bars.append(bar(records[-1], workload.batch, timeline))
                    tell(records[-1])
                    yield bars


def solo_rates(starter: Starter, base: Cell) -> list[list[float]] | str:
    """What each throttled rank reaches with slices of its share and nobody to wait for, or why that cannot be had.

    A short job says how many samples a job of the emulated clusters' length has, and that one is measured.
    """
    rates = []
    percents = base.scenario.cpu_percent
    for rank, percent in enumerate(percents):
        part = percent / sum(percents)
        workload = replace(base.workload, batch=round(base.workload.batch * part))
        samples = math.ceil(base.samples * part / 2)
        for _ in range(2):
            outcome = starter.run(replace(base, workload=workload, solo_rank=rank, samples=samples))
            if "missing" in outcome:
                return str(outcome["missing"])
            rate = outcome["result"]["samples"] / outcome["result"]["train_seconds"]
            samples = math.ceil(rate * base.samples / base.rate)
        rates.append(rate)
    return [rates]


def as_long_as_emulated(base: Cell, rates: list[float]) -> Cell:
    """For real devices of these solo rates: quotas are refilled ten times a second; a second tells little."""
    batches = round(sum(rates) * base.samples / base.rate / base.workload.batch)
    return replace(base, samples=max(1, batches) * base.workload.batch, known_rates=tuple(rates))


def record(cell: Cell, outcome: Mapping[str, Any], stretches: list[list[float]] | str) -> dict[str, Any]:
    """What is kept of a job, with what it is measured against."""
    workload = cell.workload
    references: dict[str, float] = {}
    if not isinstance(stretches, str):
        references = {"ideal": ideal_rate(stretches), "equal": equal_rate(stretches)}
    return {
        "workload": workload.name,
        "cluster": cell.cluster,
        "title": cell.scenario.title,
        "peer": cell.peer,
        "seed": cell.seed,
        "learning_rate": cell.learning_rate or workload.learning_rate,
        "target": list(workload.target),
        "falling": workload.falling,
        **references,
        **outcome,
    }


def bar(job: Record, batch: int, timeline: Any) -> dict[str, Any]:
    """What is plotted of a job's ranks."""
    kept = {key: job[key] for key in ("workload", "cluster", "title", "peer")}
    return {**kept, "batch_seconds": batch / job["ideal"], "ranks": timeline}


def tell(job: Record) -> None:
    where = f"seed {job['seed']}  {job['workload']}  {job['cluster']}  {job['peer']}"
    if "missing" in job:
        print(f"{where}: {job['missing']}", flush=True)
        return
    speed, metric = rate(job) or 0.0, job["target"][0]
    print(f"{where}: efficiency {speed / job['ideal']:.3f}  {metric} {final_metric(job):.4f}", flush=True)
    warn_of_overruns(overruns(job), where)


# Learning rates.


def tune(options: argparse.Namespace, starter: Starter) -> LearningRates:
    """A learning rate for each workload and peer: `best_rate` of a job with each factor."""
    _, peers = choose(options)
    scenario = scenarios(None)[TUNE_CLUSTER]
    chosen: LearningRates = {}
    for name in options.workloads:
        workload = workload_of(options, name)
        samples, rate_all = size_of(workload, options.quick)
        base = Cell(workload, TUNE_CLUSTER, scenario, "alone", TUNE_SEED, samples, rate_all)
        chosen[name] = {}
        for peer in peers:
            tried: dict[float, Record] = {}
            for factor in TUNE_FACTORS:
                cell = replace(base, peer=peer, learning_rate=factor * workload.learning_rate)
                job = record(cell, starter.run(cell), phases(scenario, rate_all))
                if "result" in job:
                    tried[cell.learning_rate or 0.0] = job
            if tried:
                chosen[name][peer] = best_rate(tried)
                print(f"tuned  {name}  {peer}: {chosen[name][peer]:g}", flush=True)
    return chosen


def best_rate(tried: Mapping[float, Record]) -> float:
    """Of the rates that end about as well as the best, the one that needs the fewest samples to the target."""

    def order(rate: float) -> tuple[float, float]:
        needed = time_to_target(tried[rate], "samples")
        return (math.inf if needed is None else needed, losses[rate])

    losses = {rate: _loss(job) for rate, job in tried.items()}
    best = min(losses.values())
    return min((rate for rate in tried if losses[rate] <= best + TUNE_ABOUT_EQUAL * abs(best)), key=order)


def _loss(job: Record) -> float:
    """The final metric, less is better; a diverged job is worse than any."""
    final = final_metric(job)
    if final is None or math.isnan(final):
        return math.inf
    return final if job["falling"] else -final


# Results.


def write(records: list[dict[str, Any]], bars: list[dict[str, Any]], output: Path) -> None:
    """Everything measured so far: an interrupted benchmark keeps it."""
    kept = {"command": command("peers.compare"), "machine": machine(), "jobs": records}
    write_atomically(output / "peers.json", json.dumps(kept, indent=1))
    write_atomically(output / "timelines.json", json.dumps(bars))
    write_atomically(output / "peers.md", markdown(records))


def draw(records: list[dict[str, Any]], bars: list[dict[str, Any]], output: Path) -> None:
    if not can_plot():
        return
    plots(records, output)
    for (workload, cluster), jobs in grouped(bars, "workload", "cluster").items():
        plot(jobs, output / f"timeline-{workload}-{cluster}.png")


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        choose(options)
    except UserError as mistake:
        sys.exit(f"peers: {mistake}")
    starter = Starter(options.data, {package: vars(options)[f"{package}_python"] for package in OPTIONAL})
    rates: LearningRates = json.loads(options.learning_rates.read_text()) if options.learning_rates else {}
    if options.tune:
        rates = tune(options, starter)
        write_atomically(options.output / "learning-rates.json", json.dumps(rates, indent=1))
    records: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    try:
        for bars in measure(options, starter, rates, records):
            write(records, bars, options.output)
    except KeyboardInterrupt:
        print(f"interrupted: {len(records)} jobs are in {options.output}", file=sys.stderr)
    if any("result" in job for job in records):
        draw(records, bars, options.output)
    print(markdown(records))


if __name__ == "__main__":
    main()
