"""What recipes of other models come to on each wire: real gradients on the simulator's clock.

    python -m benchmarks.studies.wires_recipes --output results [--data FOLDER] [--processes 2] [--seeds 3]

Graph WaveNet and DeepTTE on synthetic data, each recipe as it is, and a transformer that models language on a seventh
of an epoch of PTB (only with `--data`, whose folder has `ptb/`). Ranks have the quickstart's speeds behind
a link on which a sum of all weights takes 3 slices; D = 4 on three wires, and D = 0 beside it. What counts is the
recipe's metric after the same samples, of which less is better, over that of D = 0 and of D = 4 in float32 with the
same seed.

Results are kept in the output folder and not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.kept import results_of
from benchmarks.common.local_job import RECIPES
from benchmarks.common.report import grouped, publish, spread
from benchmarks.studies.stability import parser_of, trained
from hetsync.config.parser import read_recipe
from hetsync.config.schema import EmulationConfig, WireFormat
from hetsync.emulation.cluster import Link, load_cluster
from hetsync.plane.wire import encoded_bytes

RECIPE_METRICS = {
    "sensors": "mae",
    "deeptte_synthetic_city": "mape",
    "ptb_transformer": "perplexity",
}
SAMPLES = {"ptb_transformer": 4_000}  # others as they say
WITH_FILES = ("ptb_transformer",)
ARMS: tuple[tuple[int, WireFormat], ...] = ((0, "float32"), (4, "float32"), (4, "int8"), (4, "top64"))
LINK = 3.0  # slices that a sum of all weights takes


@dataclass(frozen=True)
class Cell:
    recipe: str
    delay_bound: int
    wire: WireFormat
    seed: int
    data: str


def cells(seeds: int, data: Path | None) -> Iterator[Cell]:
    names = [name for name in RECIPE_METRICS if data is not None or name not in WITH_FILES]
    for seed, name, (bound, wire) in product(range(seeds), names, ARMS):
        yield Cell(name, bound, wire, seed, str(data / "ptb") if data and name in WITH_FILES else "")


def job(cell: Cell) -> dict[str, Any]:
    read, cluster = read_recipe(RECIPES / f"{cell.recipe}.yaml"), load_cluster("slow-link")
    samples, path = SAMPLES.get(cell.recipe), {"path": cell.data} if cell.data else {}
    length = {} if samples is None else {"samples": samples, "epochs": None}
    config = replace(
        read,
        run=replace(read.run, seed=cell.seed, evaluate_every=None, **length),
        data=replace(read.data, options={**read.data.options, **path}),
        sync=replace(read.sync, delay_bound=cell.delay_bound, wire=cell.wire, accumulation=1, fragments=1),
        emulation=EmulationConfig(cluster.name, 10.0 * read.data.batch_size),
    )
    return {**trained(config, replace(cluster, link=Link(compute_fraction=LINK))), **asdict(cell)}


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    head = ("recipe", "D", "wire", "bytes of a round", "rounds", "s", "metric", "over D = 0", "over float32")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for (recipe,), records in grouped(results, "recipe").items():
        arms = {key: of_arm for key, of_arm in grouped(records, "delay_bound", "wire").items()}
        metrics = {key: list(map(last, of_arm)) for key, of_arm in arms.items()}
        for (bound, wire), of_arm in arms.items():
            sent = encoded_bytes(records[0]["values"], wire) / (4 * records[0]["values"])
            figures = [f"{sent:.4f}", spread([record["rounds"] for record in of_arm], "g")]
            figures.append(spread([record["points"][-1]["seconds"] for record in of_arm], ".0f"))
            figures.append(spread(metrics[bound, wire], ".4f"))
            for other in ARMS[:2]:
                pairs = zip(metrics[bound, wire], metrics[other], strict=True)
                figures.append(spread([mine / others for mine, others in pairs], ".3f"))
            lines.append(f"| {recipe} | {bound} | {wire} | {' | '.join(figures)} |")
    return "\n".join(lines)


def last(record: Mapping[str, Any]) -> float:
    metric = RECIPE_METRICS[record["recipe"]]
    return float("nan") if record["ended"] else float(record["points"][-1][metric])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder with ptb/")
    options = parser.parse_args()
    results = results_of(options.output, "wires_recipes", cells(options.seeds, options.data), job, options.processes)
    publish(options.output, "studies.wires_recipes", markdown(results))


if __name__ == "__main__":
    main()
