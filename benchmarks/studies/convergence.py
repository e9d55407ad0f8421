"""Final metrics at equal samples, delayed against synchronous: recipes on real data, emulated V100, P100 and K80.

    python -m benchmarks.studies.convergence --data DIR --output results [--seeds 3] [--recipes NAME ...]

`DIR` has the folders cifar10_lossless, deeptte_chengdu and ptb; recipes whose folder is not there are left out. Every
cell is a job of its own, of eight ranks with real gradients; both modes of a seed run one after the other. What is in
`--output` already is kept: an interrupted benchmark goes on with the same command.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import RECIPES, run_job
from benchmarks.common.report import command, machine

RANKS = 8
CLUSTER = "v100-p100-k80"
JOB_SECONDS = 900
MODES = {"synchronous": ["--sync.delay_bound", "0"], "delayed": ["--sync.delay_bound", "4"]}


@dataclass(frozen=True)
class Workload:
    """A recipe, cut or fitted to two cores where needed.

    Args:
        recipe: File name in models/recipes.
        folder: Of its data below DIR; None where it needs none.
        metric: What is compared.
        rate: Samples/s of the emulated cluster; real compute stays below what two cores give.
        options: More of the command line.
    """

    recipe: str
    folder: str | None
    metric: str
    rate: float
    options: tuple[object, ...] = ()


WORKLOADS = (
    Workload("cifar10_resnet18", "cifar10_lossless", "accuracy", 220.0),
    Workload("deeptte_chengdu", "deeptte_chengdu", "mape", 200.0),
    Workload("deeptte_synthetic_city", None, "mape", 300.0),
    Workload("ptb_lstm_small", "ptb", "perplexity", 110.0, ("--run.samples", 13_280)),  # half of the epoch
)


@dataclass
class Row:
    """Summaries of a workload by mode, one a seed."""

    workload: Workload
    summaries: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    def metrics(self, mode: str) -> list[float]:
        return [summary["metrics"][self.workload.metric] for summary in self.summaries[mode]]


def words(workload: Workload, data: Path, seed: int) -> list[object]:
    given: list[object] = [RECIPES / f"{workload.recipe}.yaml"]
    given += ["--run.seed", seed, "--emulate", CLUSTER, "--emulation.samples_per_second", workload.rate]
    if workload.folder is not None:
        given += ["--data.options.path", data / workload.folder]
    return [*given, *workload.options]


def markdown(rows: list[Row]) -> str:
    """Means with the seeds' range; the difference counts as a loss only beyond the seeds' spread."""
    lines = ["| recipe | metric | synchronous | delayed | difference of means | spread of seeds (synchronous) |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        if not row.summaries["delayed"]:
            continue
        cells, means = [], {}
        for mode in MODES:
            values = row.metrics(mode)
            means[mode] = statistics.mean(values)
            cells.append(f"{means[mode]:.4g} ({min(values):.4g}–{max(values):.4g})")
        difference = means["delayed"] - means["synchronous"]
        spread = max(row.metrics("synchronous")) - min(row.metrics("synchronous"))
        facts = [row.workload.recipe, row.workload.metric, *cells, f"{difference:+.4g}", f"{spread:.4g}"]
        lines.append(f"| {' | '.join(facts)} |")
    return "\n".join(lines) + "\n"


def write(rows: list[Row], output: Path) -> None:
    record = {
        "command": command("studies.convergence"),
        "machine": machine(),
        "rows": [{"workload": vars(row.workload), "summaries": row.summaries} for row in rows],
    }
    (output / "convergence.json").write_text(json.dumps(record, indent=1, default=str))
    (output / "convergence.md").write_text(markdown(rows))


def read(rows: list[Row], output: Path) -> None:
    """What an interrupted benchmark has measured, of the same workloads."""
    path = output / "convergence.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    for row in rows:
        workload = json.loads(json.dumps(vars(row.workload)))
        for old in known:
            if old["workload"] == workload:
                row.summaries = old["summaries"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets' folders")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    parser.add_argument("--recipes", nargs="*", help="only these")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [
        Row(workload)
        for workload in WORKLOADS
        if (not options.recipes or workload.recipe in options.recipes)
        and (workload.folder is None or (options.data / workload.folder).is_dir())
    ]
    read(rows, options.output)
    for seed in range(options.seeds):
        for row in rows:
            if len(row.summaries["delayed"]) > seed:
                continue
            for mode, mode_words in MODES.items():
                summary = run_job(RANKS, [*words(row.workload, options.data, seed), *mode_words], JOB_SECONDS)
                row.summaries[mode].append(summary)
                figures = "  ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())
                print(f"seed {seed}  {row.workload.recipe}  {mode}: {figures}", flush=True)
            write(rows, options.output)  # so that an interrupted table is not lost
    print(markdown(rows))


if __name__ == "__main__":
    main()
