"""Efficiency on ranks that really are slower: processes under CPU quotas, beside the same ranks without any exchange.

    python -m benchmarks.quotas --data DIR [--percents 80 40 20 20] [--repetitions 5] [--seconds 30]

Each rank is a process in a cgroup (version 1) with a quota of a core. Arms run in turn: `unsynchronised` ranks train
on their part of the samples and exchange nothing, so they show what the machine gives to so many at once;
`hetsync-delayed` is HetSync with D = 4. Whatever HetSync does beside training counts against a rank's quota. Its
samples/s, from the first slice to the last rest, over those of the unsynchronised ranks while each of these had work,
is the figure; that ranks without exchange end apart, since their shares were measured beforehand only, does not count
against them.

`--arms` takes any of `benchmarks.peers` that needs no emulation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.quotas import MOST_PERCENT
from benchmarks.common.report import grouped, keep, publish, spread
from benchmarks.peers.cells import CPU_PERCENT, PEERS, WORKLOADS, Cell, Scenario
from benchmarks.peers.report import final_metric, kilobytes_per_sample, rate, runtime_cpu
from benchmarks.peers.starter import Starter
from benchmarks.peers.timeline import Timeline

CONTROL = "unsynchronised"
ARMS = (CONTROL, "hetsync-delayed")
FIRST_BATCHES = 20  # of the job that tells how many samples last for `--seconds`
GOAL = 0.92


def at_work(result: dict[str, Any], timelines: Sequence[Timeline]) -> float:
    """Samples/s of all ranks, each while it had work: from its first slice to its last."""
    spans = [[(begun, ended) for kind, begun, ended in timeline if kind == "compute"] for timeline in timelines]
    seconds = [slices[-1][1] - slices[0][0] for slices in spans]
    return sum(rank["samples"] / taken for rank, taken in zip(result["per_rank"], seconds, strict=True))


def measure(options: argparse.Namespace, starter: Starter) -> Iterator[dict[str, Any]]:
    """A record a job; those of one repetition follow each other."""
    scenario = Scenario("CPU quotas", None, cpu_percent=options.percents)
    for name in options.workloads:
        # An evaluation during the job would be one of HetSync's only.
        workload = replace(WORKLOADS[name], evaluations=1)
        first = Cell(workload, "quotas", scenario, CONTROL, 0, FIRST_BATCHES * workload.batch, workload.rate)
        told = record(first, starter.run(first))
        if "missing" in told:
            yield told
            continue
        batches = max(1, round(options.seconds * told["at_work"] / workload.batch))
        base = replace(first, samples=batches * workload.batch, rate=told["at_work"])
        for seed in range(options.repetitions):
            for arm in options.arms:
                cell = replace(base, peer=arm, seed=seed)
                yield record(cell, starter.run(cell))


def record(cell: Cell, outcome: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a job."""
    kept = {"workload": cell.workload.name, "peer": cell.peer, "seed": cell.seed, "target": cell.workload.target}
    if "missing" in outcome:
        return {**kept, "missing": outcome["missing"]}
    return {**kept, "result": outcome["result"], "at_work": at_work(outcome["result"], outcome["timeline"])}


# Tables.


def ratios(jobs: Sequence[dict[str, Any]], control: dict[int, dict[str, Any]]) -> list[float | None]:
    """Of these jobs' samples/s to those of the unsynchronised ranks at work in the same repetition."""
    return [(rate(job) or 0.0) / control[job["seed"]]["at_work"] for job in jobs if job["seed"] in control]


def markdown(records: Sequence[dict[str, Any]]) -> str:
    lines = ["| workload | | samples/s | while at work | of unsynchronised | runtime CPU | kB sent a sample | final |"]
    lines += ["| --- " * 8 + "|"]
    for (workload,), cells in grouped(records, "workload").items():
        done = [cell for cell in cells if "result" in cell]
        control = {cell["seed"]: cell for cell in done if cell["peer"] == CONTROL}
        for (peer,), jobs in grouped(done, "peer").items():
            figures = [spread([rate(job) for job in jobs], ".0f"), spread([job["at_work"] for job in jobs], ".0f")]
            figures += [spread(ratios(jobs, control), ".3f"), spread([runtime_cpu(job) for job in jobs], ".3f")]
            figures += [spread([kilobytes_per_sample(job) for job in jobs], ".2f")]
            lines.append(f"| {workload} | {peer} | {' | '.join(figures)} | {finals(jobs)} |")
        lines += [
            f"| {workload} | {cell['peer']} | {cell['missing']} |" + " |" * 5 for cell in cells if "missing" in cell
        ]
    return "\n".join(lines) + "\n"


def finals(jobs: Sequence[dict[str, Any]]) -> str:
    """The metric in the end; ranks without exchange have none that means anything."""
    return "–" if jobs[0]["peer"] == CONTROL else spread([final_metric(job) for job in jobs], ".4f")


def tell(told: dict[str, Any]) -> None:
    where = f"seed {told['seed']}  {told['workload']}  {told['peer']}"
    if "missing" in told:
        print(f"{where}: {told['missing']}", flush=True)
    else:
        print(f"{where}: {rate(told):.0f} samples/s, {told['at_work']:.0f} while at work", flush=True)


def verdict(records: Sequence[dict[str, Any]]) -> list[str]:
    """Against the goal, a line a workload."""
    lines = []
    for (workload,), cells in grouped([cell for cell in records if "result" in cell], "workload").items():
        control = {cell["seed"]: cell for cell in cells if cell["peer"] == CONTROL}
        ours = [value for value in ratios([c for c in cells if c["peer"] == ARMS[1]], control) if value is not None]
        if ours:
            middle = statistics.median(ours)
            lines.append(f"{workload}: {middle:.3f}, the goal is {GOAL}: {'reached' if middle >= GOAL else 'missed'}")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--data", type=Path, help="folder with cifar10_lossless")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["digits", "cifar10"])
    parser.add_argument("--arms", nargs="+", choices=PEERS, metavar="ARM", default=list(ARMS), help=", ".join(PEERS))
    parser.add_argument("--percents", nargs="+", type=int, default=list(CPU_PERCENT), help="of a core, by rank")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="that a job lasts, about")
    options = parser.parse_args()
    if sum(options.percents) > MOST_PERCENT or min(options.percents) < 1:
        parser.error(
            f"--percents are {' '.join(map(str, options.percents))}: give 1 or more to each rank, and"
            f" {MOST_PERCENT} at most together, or the machine has nothing left for what else it does"
        )
    return options


def main() -> None:
    options = parse()
    starter = Starter(options.data, {"torchft": None, "horovod": None})
    records: list[dict[str, Any]] = []
    try:
        for told in measure(options, starter):
            records.append(told)
            tell(told)
            keep(options.output, "quotas", jobs=records)
    except KeyboardInterrupt:
        print(f"interrupted: {len(records)} jobs are in {options.output}", file=sys.stderr)
    publish(options.output, "quotas", markdown(records), *verdict(records))


if __name__ == "__main__":
    main()
