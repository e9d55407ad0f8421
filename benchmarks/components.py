"""DeepTTE by components: attributes, geo-convolution, LSTM, entire and local head, each on a device of its own.

    python -m benchmarks.components --output results [--quick] [--repetitions 3] [--steps 12]

A full factorial of data parallelism (two replicas, of equal shares, in step), component parallelism (five devices a
replica, of which those that need nothing of each other run side by side), and accumulation (four micro-batches; by
components they follow each other as in a pipeline). All devices are emulated and alike, with links that cost nothing,
and all arms see the same batches: `away` is how far the loss of a step is from that of a device alone at most.

By Amdahl's law no placement of components is faster than the work over that of the largest, however it is scheduled:
a component is not divided. `bound` is that, times the replicas.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.local_job import RECIPES
from benchmarks.common.planned_job import PlannedRun, costs_kept_in, run_planned
from benchmarks.common.report import keep, publish, spread
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link

COMPONENTS = {
    "attributes": ["attributes"],
    "geo-conv": ["path", "geo_conv"],
    "LSTM": ["lstm", "upper_lstm"],
    "local head": ["local"],
    "entire head": ["query", "entire"],
}
REPLICAS, MICRO_BATCHES = 2, 4
GOAL = 1e-5  # how far a loss may be away


class Arm(NamedTuple):
    data: bool
    component: bool
    accumulation: bool

    @property
    def name(self) -> str:
        return " + ".join(part for part, on in self._asdict().items() if on) or "single"

    @property
    def replicas(self) -> int:
        return REPLICAS if self.data else 1

    @property
    def ranks(self) -> int:
        return self.replicas * (len(COMPONENTS) if self.component else 1)

    def plan(self, batch_size: int) -> dict[str, Any]:
        parts = list(COMPONENTS.values()) if self.component else [["*"]]
        replicas = [
            {
                "share": batch_size // self.replicas,
                "micro_batches": MICRO_BATCHES if self.accumulation else 1,
                "stages": [
                    {"ranks": [number * len(parts) + stage], "blocks": blocks} for stage, blocks in enumerate(parts)
                ],
            }
            for number in range(self.replicas)
        ]
        return {"format": 1, "model": {"name": "deeptte"}, "batch_size": batch_size, "replicas": replicas}


ARMS = [Arm(*on) for on in product((False, True), repeat=3)]


def job(arm: Arm, options: argparse.Namespace, seed: int) -> PlannedRun:
    """Any number of devices has the same speed each: that of the whole cluster grows with it."""
    cluster = Cluster("alike", "made up", (DeviceGroup("alike", arm.ranks),), Link())
    rate = arm.ranks * options.batch / options.seconds
    words = [RECIPES / "deeptte_synthetic_city.yaml", "--run.seed", seed, "--data.batch_size", options.batch]
    words += ["--emulation.samples_per_second", rate, "--run.profile_seconds", options.profile_seconds]
    return run_planned(arm.plan(options.batch), cluster, words, options.steps)


def fractions(run: PlannedRun) -> dict[str, float]:
    """The components' parts of a step."""
    rows = [row for row in run.summary["per_rank"] if row["replica"] == 0]
    return {name: rows[stage]["step_fraction"] for stage, name in enumerate(COMPONENTS)}


def away(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def table(found: dict[Arm, list[PlannedRun]]) -> str:
    single = found[Arm(False, False, False)]
    parts = fractions(found[Arm(False, True, False)][0])
    bound = 1 / max(parts.values())
    lines = [f"Parts of a step: {', '.join(f'{name} {100 * part:.1f} %' for name, part in parts.items())}.", ""]
    lines += ["| arm | devices | s a step | predicted | times single | bound | a device | away |"]
    lines += ["| --- | ---: | --- | ---: | --- | ---: | ---: | ---: |"]
    for arm, runs in found.items():
        gains = [alone.measured / run.measured for alone, run in zip(single, runs, strict=True)]
        most = max(away(run.losses, alone.losses) for run, alone in zip(runs, single, strict=True))
        cells = [
            spread([run.measured for run in runs], ".3f"),
            f"{runs[0].predicted:.3f}",
            spread(gains, ".3f"),
            f"{(bound if arm.component else 1) * arm.replicas:.2f}",
            f"{statistics.median(gains) / arm.ranks:.2f}",
            f"{most:.1e}" + ("" if most <= GOAL else " (too far)"),
        ]
        lines.append(f"| {arm.name} | {arm.ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--quick", action="store_true", help="once, six short steps")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a step on one emulated device")
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="for the model's blocks, about")
    options = parser.parse_args(words)
    if options.quick:
        options.repetitions, options.steps, options.seconds, options.profile_seconds = 1, 6, 1.0, 0.5
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    found: dict[Arm, list[PlannedRun]] = {arm: [] for arm in ARMS}
    with costs_kept_in(options.output / "costs"):
        for seed in range(options.repetitions):
            for arm, runs in found.items():
                runs.append(job(arm, options, seed))
                print(f"seed {seed}  {arm.name}: {runs[-1].measured:.3f} s a step", flush=True)
    records = [{"arm": arm.name, **run.figures, "losses": run.losses} for arm, runs in found.items() for run in runs]
    keep(options.output, "components", records=records)
    publish(options.output, "components", table(found))


if __name__ == "__main__":
    main()
