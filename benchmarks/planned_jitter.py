"""Two replicas of unequal stages under delayed synchronisation and heavy jitter: samples/s as predicted and measured.

    python -m benchmarks.planned_jitter --output results [--repetitions 5] [--steps 120]

Emulated devices of speeds 3, 2, 1 and 1, each slice of which takes exp(σz − σ²/2) times its mean (σ 0.5): two replicas
of a fast and a slow one, the digits CNN cut where half of its work is done, four micro-batches. Each repetition draws
jitter and samples of its own. The prediction knows the jitter's distribution.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import launched, warn_of_overruns
from benchmarks.common.placements import by_parts, chain, subject_of
from benchmarks.common.planned_job import costs_kept_in, emulated, finished
from benchmarks.common.report import keep, publish, spread
from hetsync.config.records import plain
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, LognormalJitter
from hetsync.plan.placement import as_plan_file

SPEEDS = (3.0, 2.0, 1.0, 1.0)
REPLICAS = (chain(0, 2), chain(1, 3))
SIGMA, DELAY_BOUND, MICRO_BATCHES, BATCH_SIZE = 0.5, 4, 4, 64
GOAL = 0.95


def cluster() -> Cluster:
    devices = tuple(DeviceGroup(f"d{rank}", speed=speed) for rank, speed in enumerate(SPEEDS))
    return Cluster("jitter", "made up", devices, Link(), jitter=LognormalJitter(SIGMA))


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    plan = summary["plan"]
    predicted, step = plan["predicted_samples_per_second"], plan["measured_step_seconds"]
    kept = {key: summary[key] for key in ("staleness", "overrun_fraction", "real_compute_cores", "per_rank")}
    measured = BATCH_SIZE / step
    return {"predicted": predicted, "measured": measured, "of_predicted": measured / predicted, **kept}


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| repetitions | predicted samples/s | measured | of predicted |", "| ---: | ---: | --- | --- |"]
    shown = [
        spread([one[key] for one in records], form) for key, form in (("measured", ".1f"), ("of_predicted", ".3f"))
    ]
    lines.append(f"| {len(records)} | {records[0]['predicted']:.1f} | {' | '.join(shown)} |")
    middle = statistics.median(one["of_predicted"] for one in records)
    return "\n".join([*lines, "", f"{middle:.3f}, the goal is {GOAL}: {'reached' if middle >= GOAL else 'missed'}"])


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step on all devices at once")
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="for the model's blocks, about")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    records = []
    with costs_kept_in(options.output / "costs"), emulated(cluster()) as devices:
        subject = subject_of("digits", BATCH_SIZE, options.profile_seconds)
        placement = by_parts(subject, REPLICAS, MICRO_BATCHES)
        plan = plain(as_plan_file(placement, subject.graph, BATCH_SIZE))
        rate = ["--emulation.samples_per_second", BATCH_SIZE / options.seconds]
        for seed in range(options.repetitions):
            recipe = [*subject.words, *devices, *rate, "--run.seed", seed]
            summary = finished(plan, recipe, options.steps, partial(launched, len(SPEEDS)), DELAY_BOUND).summary
            warn_of_overruns(summary["overrun_fraction"], f"seed {seed}")
            records.append({"seed": seed, **figures(summary)})
            print(f"seed {seed}: {records[-1]['of_predicted']:.3f} of the predicted samples/s", flush=True)
            keep(options.output, "planned_jitter", records=records)
    publish(options.output, "planned_jitter", markdown(records))


if __name__ == "__main__":
    main()
