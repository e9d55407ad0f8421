"""What training comes to on each wire, by the bytes that it sends: real gradients on the simulator's clock.

    python -m benchmarks.studies.wires --output results [--processes 2] [--quick]

The jobs of `benchmarks.studies.stability`, with AdamW and with momentum, each at one rate, synchronous (D = 0) and
delayed (D = 4), with contributions of one step and, of AdamW, of 16, on each wire. Gradients, at D = 0, travel in 8
bits at least. Bytes are those of a rank's sums, two ways, over those of an allreduce
in float32 for each batch, which is what DistributedDataParallel sends: 0.01 is a hundredth of its.

Results are kept in the output folder and not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from benchmarks.common.kept import results_of
from benchmarks.common.report import grouped, publish, spread
from benchmarks.studies.stability import BATCH, SAMPLES, TARGET, final, parser_of, simulated, times
from benchmarks.studies.stability import Cell as Job
from hetsync.config.schema import WireFormat
from hetsync.emulation.cluster import load_cluster
from hetsync.plane.wire import WIRE_FORMATS, encoded_bytes, of_gradients

CLUSTERS = ("v100-p100-k80", "slow-link")
MODES = {
    ("AdamW", 0.0025): ((0, 1), (4, 1), (4, 16)),
    ("momentum", 0.05): ((0, 1), (4, 1)),
}  # D, steps of a contribution


@dataclass(frozen=True)
class Cell:
    kind: str
    rate: float
    cluster: str
    delay_bound: int
    accumulation: int
    wire: WireFormat
    seed: int


def cells(seeds: int, clusters: Sequence[str]) -> Iterator[Cell]:
    for seed, cluster, (kind, rate) in product(range(seeds), clusters, MODES):
        for bound, accumulation in MODES[kind, rate]:
            wires = [wire for wire in WIRE_FORMATS if bound or of_gradients(wire) == wire]
            yield from (Cell(kind, rate, cluster, bound, accumulation, wire, seed) for wire in wires)


def job(cell: Cell) -> dict[str, Any]:
    plain = Job(cell.kind, cell.cluster, cell.delay_bound, cell.rate, cell.seed)
    sync = {"wire": cell.wire, "accumulation": cell.accumulation, "fragments": 1}
    return {**simulated(plain, load_cluster(cell.cluster), **sync), **asdict(cell)}


def bytes_of(record: Mapping[str, Any]) -> float:
    """Of its sums, over those of one in float32 for each batch."""
    values = record["values"]
    return record["rounds"] * encoded_bytes(values, record["wire"]) / (SAMPLES / BATCH * 4 * values)


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"| optimizer | cluster | D | K | wire | bytes, of DDP's | final accuracy | final loss | s to {TARGET} |",
        "| --- " * 9 + "|",
    ]
    for key, records in grouped(results, "kind", "cluster", "delay_bound", "accumulation", "wire").items():
        cells = [spread([bytes_of(record) for record in records], ".4f"), spread(list(map(final, records)), ".3f")]
        cells.append(spread([record["points"][-1]["loss"] for record in records], ".3f"))
        cells.append(spread(times(records), ".1f"))
        lines.append(f"| {' | '.join([*map(str, key), *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, one cluster")
    options = parser.parse_args()
    chosen = cells(1, CLUSTERS[:1]) if options.quick else cells(options.seeds, CLUSTERS)
    results = results_of(options.output, "wires", chosen, job, options.processes)
    publish(options.output, "studies.wires", markdown(results))


if __name__ == "__main__":
    main()
