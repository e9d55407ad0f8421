"""Time to a target behind slow links, each way of training at its own best rate: real gradients on virtual time.

    python -m benchmarks.studies.links --output results [--kinds AdamW momentum] [--seeds 3] [--processes 2]

The jobs of `benchmarks.studies.stability` at a few rates, on ranks of the quickstart's speeds behind links on which a
sum of all weights takes 0.5 to 100 slices. Rivals are settings that are exactly them, with shares by speed and
a bfloat16 wire: DistributedDataParallel with its hook (D = 0; in 8 bits, too), and, with a rank's K local steps between
two averages that travel while it goes on, local SGD and DiLoCo (Nesterov outside, three settings), at the best of three
K. Ratios are to the best of these by seed; bytes are those of a rank's sums, over those of a float32 sum a batch.

Results are kept in the output folder and not repeated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any

from benchmarks.common.kept import results_of
from benchmarks.common.report import grouped, publish, spread
from benchmarks.studies.stability import BATCH, SAMPLES, TARGET, final, parser_of, simulated, times
from benchmarks.studies.stability import Cell as Job
from hetsync.config.schema import OuterConfig
from hetsync.emulation.cluster import Link, load_cluster
from hetsync.plane.wire import encoded_bytes

LINKS = (0.5, 3.0, 12.0, 100.0)  # slices that a sum of all weights takes
RATES = {"AdamW": (0.0025, 0.005), "momentum": (0.025, 0.05, 0.1)}
LOCAL = {"delay_bound": 1, "quorum": 1.0, "grace": 0, "wire": "bfloat16"}
OUTER = ((0.7, 0.9), (0.7, 0.5), (0.3, 0.5))  # rate and momentum
STEPS = (2, 8, 32)  # of a rank between two averages
RIVALS: dict[str, dict[str, Any]] = {
    **{f"DDP, {wire}": {"delay_bound": 0, "wire": wire, "bucket_bytes": 16384} for wire in ("bfloat16", "int8")},
    **{f"local SGD, K = {steps}": {**LOCAL, "accumulation": steps} for steps in STEPS},
    **{
        f"DiLoCo, K = {steps}, {rate}, {momentum}": {
            **LOCAL,
            "accumulation": steps,
            "outer": OuterConfig("nesterov", rate, momentum),
        }
        for steps, (rate, momentum) in product(STEPS, OUTER)
    },
}
OURS: dict[str, dict[str, Any]] = {
    "by rule": {"delay_bound": "auto"},
    "by rule, float32": {"delay_bound": "auto", "wire": "float32"},
    "D = 4, top64": {"delay_bound": 4, "wire": "top64"},
    "D = 4, K = 4, top64": {"delay_bound": 4, "accumulation": 4, "wire": "top64"},
    "D = 8, q = 0.5, top64": {"delay_bound": 8, "quorum": 0.5, "wire": "top64"},
}
ARMS = {**RIVALS, **OURS}


@dataclass(frozen=True)
class Cell:
    kind: str
    link: float
    arm: str
    rate: float
    seed: int


def cells(kinds: Sequence[str], seeds: int) -> Iterator[Cell]:
    for seed, kind in product(range(seeds), kinds):
        yield from (Cell(kind, link, arm, rate, seed) for link, arm, rate in product(LINKS, ARMS, RATES[kind]))


def job(cell: Cell) -> dict[str, Any]:
    cluster = replace(load_cluster("slow-link"), link=Link(compute_fraction=cell.link))
    settings = dict(ARMS[cell.arm])
    plain = Job(cell.kind, cluster.name, settings.pop("delay_bound"), cell.rate, cell.seed)
    return {**simulated(plain, cluster, **settings), **asdict(cell)}


def best_rate(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of one arm behind one link: its records, by seed, at the rate at which it comes to the target soonest; where no
    rate brings all seeds there, at that which brings most."""
    rates = grouped(records, "rate").values()

    def late(of_rate: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
        reached = [found for found in times(of_rate) if found is not None]
        return -len(reached), statistics.median(reached) if reached else 0.0

    return sorted(min(rates, key=late), key=lambda record: record["seed"])


def bytes_of(record: Mapping[str, Any]) -> float:
    """Of its sums, over those of one in float32 for each batch."""
    changes = [(0, ARMS[record["arm"]].get("wire", "float32")), *record["wires"], (record["rounds"], None)]
    values = record["values"]
    sent = sum((end - begin) * encoded_bytes(values, wire) for (begin, wire), (end, _) in pairwise(changes))
    return float(sent / (SAMPLES / BATCH * 4 * values))


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"| optimizer | link, slices | way | rate | bytes, of DDP's | s to {TARGET}"
        " | best rival's over it | final accuracy |",
        "| --- " * 8 + "|",
    ]
    for (kind, link), records in grouped(results, "kind", "link").items():
        arms = {arm: best_rate(of_arm) for (arm,), of_arm in grouped(records, "arm").items()}
        seconds = {arm: times(of_arm) for arm, of_arm in arms.items()}
        by_seed = zip(*(seconds[arm] for arm in RIVALS), strict=True)
        best = [min(filter(None, of_seed), default=None) for of_seed in by_seed]
        for arm, of_arm in arms.items():
            pairs = zip(best, seconds[arm], strict=True)
            ratios = [theirs / mine if theirs and mine else None for theirs, mine in pairs]
            figures = [spread(list(map(bytes_of, of_arm)), ".3f"), spread(seconds[arm], ".1f"), spread(ratios, ".2f")]
            figures.append(spread(list(map(final, of_arm)), ".3f"))
            lines.append(f"| {kind} | {link:g} | {arm} | {of_arm[0]['rate']:g} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=RATES, default=["AdamW"], help="optimizers")
    options = parser.parse_args()
    results = results_of(options.output, "links", cells(options.kinds, options.seeds), job, options.processes)
    publish(options.output, "studies.links", markdown(results))


if __name__ == "__main__":
    main()
