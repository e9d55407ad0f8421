"""Clusters that change while a job trains: does delay by rule follow? Real gradients on the simulator's clock.

    python -m benchmarks.studies.changing --output results [--processes 2] [--seeds 3]

The jobs of `studies/stability.py` with SGD with momentum and with AdamW, synchronous (D = 0), delayed (D = 4) and by
rule (auto), on three clusters that are quiet until `CHANGES_AT` and then are not: a link becomes twelve times as slow,
a rank four times, or the time of each rank's slices jitters. Told are the seconds to the target, each arm at its own
best rate, and what auto has done.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common.kept import results_of
from benchmarks.common.report import grouped, publish, spread
from benchmarks.studies.stability import BOUNDS, SAMPLES, SAMPLES_PER_SECOND, Cell, best_times, parser_of, simulated
from hetsync.emulation.cluster import Cluster, load_cluster
from hetsync.emulation.link import Link
from hetsync.simulate.script import Change

CHANGES_AT = 4.0  # seconds
ENDS_AT = 4 * SAMPLES / SAMPLES_PER_SECOND  # nothing changes any more
JITTER, JITTER_LASTS = 0.5, 0.4  # sigma of its logarithm; seconds
RATES = {"momentum": (0.025, 0.035355, 0.05, 0.070711), "AdamW": (0.0035, 0.005, 0.007, 0.01)}


def a_slow_link(seed: int, ranks: int) -> list[Change]:
    return [Change(CHANGES_AT, None, "slow_by", 12.0)]


def a_slow_rank(seed: int, ranks: int) -> list[Change]:
    return [Change(CHANGES_AT, ranks - 1, "slow_by", 4.0)]


def jitter(seed: int, ranks: int) -> list[Change]:
    drawn = random.Random(seed)
    moments = range(math.ceil((ENDS_AT - CHANGES_AT) / JITTER_LASTS))
    return [
        Change(CHANGES_AT + moment * JITTER_LASTS, rank, "slow_by", drawn.lognormvariate(-(JITTER**2) / 2, JITTER))
        for moment in moments
        for rank in range(ranks)
    ]


@dataclass(frozen=True)
class Situation:
    """What a cluster is like until it changes, and how it does."""

    profile: str
    changes: Callable[[int, int], list[Change]]  # by seed and number of ranks
    link: Link | None = None

    @property
    def cluster(self) -> Cluster:
        loaded = load_cluster(self.profile)
        return loaded if self.link is None else replace(loaded, link=self.link)


SITUATIONS = {
    "a link 12 times as slow": Situation("homogeneous", a_slow_link, Link(compute_fraction=0.05)),
    "a rank 4 times as slow": Situation("homogeneous", a_slow_rank),
    "jitter that begins": Situation("quickstart", jitter),
}


def cells(seeds: int) -> Iterator[Cell]:
    for seed in range(seeds):
        for situation in SITUATIONS:
            for kind, rates in RATES.items():
                yield from (Cell(kind, situation, bound, rate, seed) for rate in rates for bound in BOUNDS)


def job(cell: Cell) -> dict[str, Any]:
    situation = SITUATIONS[cell.cluster]
    cluster = situation.cluster
    return simulated(cell, cluster, situation.changes(cell.seed, cluster.size))


def bounds_told(records: Sequence[Mapping[str, Any]]) -> str:
    """After how many seconds auto first went with delay, in the median of its jobs; in how many it did."""
    first = [next((at for at, bound in record["bounds"] if bound), None) for record in records]
    found = [at for at in first if at is not None]
    return f"{statistics.median(found):.1f} s, {len(found)} of {len(first)}" if found else f"none of {len(first)}"


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| optimizer | after 4 s | s to 0.95, D = 0 | D = 4 | auto | auto delays after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, situation), records in grouped(results, "kind", "cluster").items():
        arms = {bound: some for (bound,), some in grouped(records, "delay_bound").items()}
        by_rate = {b: {rate: some for (rate,), some in grouped(arms[b], "rate").items()} for b in BOUNDS}
        seconds = [spread(best_times(by_rate[bound]), ".1f") for bound in BOUNDS]
        lines.append(f"| {kind} | {situation} | {' | '.join(seconds)} | {bounds_told(arms['auto'])} |")
    return "\n".join(lines)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    results = results_of(options.output, "changing", cells(options.seeds), job, options.processes)
    publish(options.output, "studies.changing", markdown(results))


if __name__ == "__main__":
    main()
