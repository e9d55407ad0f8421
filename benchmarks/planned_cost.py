"""What a job by a plan costs each rank beside the model's own compute: CPU time of executor, log and communication.

    python -m benchmarks.planned_cost --output results [--steps 60] [--repetitions 3]

Emulated devices, whose passes are padded by sleep, so that CPU time is the runtime's and the model's. One replica of
two stages in step (D = 0), two replicas of two stages in step and at D = 4. Parts of a core, while the job trains.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.local_job import launched, warn_of_overruns
from benchmarks.common.placements import Held, Subject, by_parts, chain, subject_of
from benchmarks.common.planned_job import costs_kept_in, emulated, finished
from benchmarks.common.report import grouped, keep, publish, spread
from hetsync.config.records import plain
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.plan.placement import as_plan_file

BATCH_SIZE, MICRO_BATCHES = 64, 4
RANK = ("-m", "benchmarks.planned_cost_rank")
RUNTIME = ("executor", "handing over", "log", "sums", "messages", "coordinator", "polling", "books")
GOAL_PARTS, GOAL = ("executor", "handing over", "log"), 0.03


class Case(NamedTuple):
    name: str
    replicas: Sequence[Held]
    delay_bound: int

    @property
    def ranks(self) -> int:
        return sum(len(ranks) for held in self.replicas for ranks, _ in held)


CASES = (
    Case("two stages", [chain(0, 1)], 0),
    Case("two replicas", [chain(0, 1), chain(2, 3)], 0),
    Case("two replicas", [chain(0, 1), chain(2, 3)], 4),
)


def run(case: Case, subject: Subject, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record a rank."""
    cluster = Cluster("alike", "made up", (DeviceGroup("alike", case.ranks),), Link())
    plan = plain(as_plan_file(by_parts(subject, case.replicas, MICRO_BATCHES), subject.graph, BATCH_SIZE))
    with tempfile.TemporaryDirectory() as folder, emulated(cluster) as devices:
        start = ["--", sys.executable, *RANK, folder]
        recipe = [*subject.words, *devices, "--emulation.samples_per_second", BATCH_SIZE / options.seconds]
        recipe += ["--run.seed", seed, "--optimizer.max_grad_norm", 10]
        done = finished(
            plan, recipe, options.steps, lambda words: launched(case.ranks, [*start, *words]), case.delay_bound
        )
        found = [json.loads((Path(folder) / f"parts-{rank}.json").read_text()) for rank in range(case.ranks)]
    warn_of_overruns(done.summary["overrun_fraction"], f"{case.name}, D = {case.delay_bound}")
    told = {"plan": case.name, "delay_bound": case.delay_bound, "seed": seed}
    step = done.summary["plan"]["measured_step_seconds"]
    return [{**told, "rank": rank, "step_seconds": step, "parts": parts_of(spent)} for rank, spent in enumerate(found)]


def parts_of(spent: Mapping[str, float]) -> dict[str, float]:
    """Of a core."""
    return {name: seconds / spent["seconds"] for name, seconds in spent.items() if name != "seconds"}


def of_goal(record: Mapping[str, Any]) -> float:
    return sum(float(record["parts"].get(part, 0.0)) for part in GOAL_PARTS)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Medians and ranges over repetitions, by rank."""
    columns = (*RUNTIME, "loading", "model")
    lines = [f"| plan | D | s a step | rank | {' | '.join(columns)} | executor, handing over and log |"]
    lines.append("| --- " * (len(columns) + 5) + "|")
    for (plan, bound, rank), runs in grouped(records, "plan", "delay_bound", "rank").items():
        cells = [spread([one["parts"].get(part, 0.0) for one in runs], ".2%") for part in columns]
        cells.append(spread([of_goal(one) for one in runs], ".2%"))
        step = spread([one["step_seconds"] for one in runs], ".3f")
        lines.append(f"| {plan} | {bound} | {step} | {rank} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(records: Sequence[Mapping[str, Any]]) -> str:
    most = max(of_goal(one) for one in records)
    met = "met" if most <= GOAL else "missed"
    whole = max(sum(float(one["parts"].get(part, 0.0)) for part in RUNTIME) for one in records)
    return (
        f"Executor, handing over and log take {most:.2%} of a core at most, on any rank (goal: {GOAL:.0%}, {met});"
        f" all of HetSync {whole:.2%}."
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--model", default="digits", help="of benchmarks/common/planning.py")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a step on all devices at once")
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="for the model's blocks, about")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    records: list[dict[str, Any]] = []
    with costs_kept_in(options.output / "costs"):
        subject = subject_of(options.model, BATCH_SIZE, options.profile_seconds)
        for seed in range(options.repetitions):
            for case in CASES:
                records += run(case, subject, seed, options)
                most = max(of_goal(one) for one in records[-case.ranks :])
                print(f"seed {seed}  {case.name}, D = {case.delay_bound}: {most:.2%} at most", flush=True)
                keep(options.output, "planned_cost", records=records)
    publish(options.output, "planned_cost", verdict(records), table(records))


if __name__ == "__main__":
    main()
