"""What rounds cost and save that sum a fragment of the weights each: time to a target and bytes, with real gradients.

    python -m benchmarks.studies.fragments --output results [--processes 2]

The workloads and clusters of `benchmarks.studies.rounds`, on the same virtual time: where sums are free, what an arm
loses by merging a part of the weights later; behind a link whose sum of all weights takes several slices, both. Ratios
are to the first arm of the same workload, cluster, link and seed. Results are kept in the output folder and not
repeated.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.common.kept import results_of
from benchmarks.common.report import grouped, source, spread
from benchmarks.studies.rounds import CLUSTERS, LINKS, WORKLOADS, by_arm, found_of
from benchmarks.studies.rounds import KEYS as KEYS_OF_ROUNDS
from hetsync.files import write_atomically

Arm = tuple[int, float, int | Literal["auto"], int, int]  # D, q, K, grace, fragments
KEYS = (*KEYS_OF_ROUNDS, "fragments")
PLAIN_ARMS: tuple[Arm, ...] = tuple((4, 0.25, 1, 0, fragments) for fragments in (1, 2, 4, 8))
FREE_ARMS: tuple[Arm, ...] = (
    *PLAIN_ARMS,
    *((4, 0.5, 1, 0, fragments) for fragments in (1, 2, 4)),
    *((4, 0.5, 1, 1, fragments) for fragments in (1, 2, 4)),
)
LINKED_ARMS: tuple[Arm, ...] = (*PLAIN_ARMS, (8, 0.5, 1, 0, 1), (16, 0.5, "auto", 0, 1))
FREE = ("digits, constant", "digits, cosine", "DeepTTE")
LINKED = ("digits, constant", "digits, low rate", "DeepTTE")


@dataclass(frozen=True)
class Cell:
    workload: str
    cluster: str
    link: float
    delay_bound: int
    quorum: float
    accumulation: int | Literal["auto"]
    grace: int
    fragments: int
    seed: int


def cells() -> Iterator[Cell]:
    for name in FREE:
        for cluster in CLUSTERS:
            yield from (Cell(name, cluster, 0.0, *arm, seed) for arm in FREE_ARMS for seed in WORKLOADS[name].seeds)
    for name in LINKED:
        for link in LINKS:
            for arm in LINKED_ARMS:
                yield from (Cell(name, CLUSTERS[0], link, *arm, seed) for seed in WORKLOADS[name].seeds)


def sums_a_batch(result: Mapping[str, Any]) -> float:
    """Of all weights, so many; DDP makes one."""
    workload = WORKLOADS[result["workload"]]
    return float(result["rounds"] / result["fragments"] * workload.batch / workload.samples)


def markdown(results: Iterable[Mapping[str, Any]]) -> str:
    columns = ("workload", "cluster", "link, slices", "D, q, K, grace, fragments", "sums of all weights a batch")
    lines = [f"| {' | '.join(columns)} | time to target, of the first | seconds in all | at the end |"]
    lines += ["| --- " * 8 + "|"]
    for (name, cluster, link), jobs in grouped(results, "workload", "cluster", "link").items():
        workload = WORKLOADS[name]
        for arm, (mine, ratios) in by_arm(jobs, KEYS, PLAIN_ARMS[0]).items():
            whole = [one["points"][-1] for one in mine if one["ended"] is None]
            ends = f"{workload.metric} {spread([point[workload.metric] for point in whole], '.3f')}"
            seconds = spread([point["seconds"] for point in whole], ".0f")
            sums = statistics.mean(map(sums_a_batch, mine))
            figures = f"{sums:.2f} | {spread(ratios, '.2f')} | {seconds} | {ends}"
            lines.append(f"| {name} | {cluster} | {link:g} | {', '.join(map(str, arm))} | {figures} |")
    return "\n".join(lines) + "\n"


def verdict(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Means over rows, by arm: of the medians of times to a target, and of sums a batch."""
    lines = []
    for link, name in ((False, "where sums are free"), (True, "behind links")):
        some = [one for one in results if bool(one["link"]) == link]
        for arm in PLAIN_ARMS[1:] if link else FREE_ARMS[1:]:
            medians, sums = [], []
            for _, jobs in grouped(some, "workload", "cluster", "link").items():
                mine, ratios = by_arm(jobs, KEYS, PLAIN_ARMS[0])[arm]
                if reached := [found for found in ratios if found is not None]:
                    medians.append(statistics.median(reached))
                sums.append(statistics.mean(map(sums_a_batch, mine)))
            _, quorum, _, grace, fragments = arm
            lines.append(
                f"{name}, q = {quorum:g}, grace {grace}, {fragments} fragments:"
                f" {statistics.mean(medians):.2f} of the time to the target [{min(medians):.2f}, {max(medians):.2f}],"
                f" {statistics.mean(sums):.2f} sums of all weights a batch"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="jobs at once")
    options = parser.parse_args()
    results = results_of(options.output, "fragments", cells(), partial(found_of, keys=KEYS), options.processes)
    text = "\n".join([source("studies.fragments"), "", markdown(results), *verdict(results)])
    write_atomically(options.output / "fragments.md", text)
    print(text)


if __name__ == "__main__":
    main()
