"""Steps of jobs by a plan on processes that really are slower, as predicted and as measured: no emulation.

    python -m benchmarks.planned_quotas --output results [--quick] [--steps 15] [--repetitions 3]

Each rank is a process in a cgroup (version 1) with a quota of a core. What is predicted: blocks, measured once by one
process without a quota, take as many times their seconds as the quota is of a core, and so do their updates; links cost
nothing. What is measured: the median of steps (forward, backward, sums, optimizer, and all that HetSync does besides).
`own` is what the job itself predicted, from the speeds that it measured under the quotas at its start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.local_job import launched
from benchmarks.common.placements import Held, Subject, by_parts, chain, subject_of
from benchmarks.common.planned_job import Finished, costs_kept_in, finished
from benchmarks.common.quotas import MOST_PERCENT, permitted, quotas
from benchmarks.common.report import grouped, keep, publish, spread
from hetsync.balance.profile import StepTime
from hetsync.config.records import plain
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement, as_plan_file

BATCH_SIZE = 64
RANK = ("-m", "benchmarks.common.under_quota")
GOAL = 0.15


class Case(NamedTuple):
    """`percents`: of a core, by rank. `replicas`: of each, its stages."""

    model: str
    name: str
    percents: Sequence[int]
    replicas: Sequence[Held]
    micro_batches: int = 8


CASES = (
    Case("nasnet", "two stages", (80, 40), [[((0,), 2 / 3), ((1,), 1 / 3)]]),
    Case("nasnet", "four stages", (60, 40, 30, 20), [chain(0, 1, 2, 3)]),
    Case("nasnet", "a shared stage", (60, 50, 30), [[((0,), 0.4), ((1, 2), 0.6)]]),
    Case("nasnet", "two replicas", (60, 40, 30, 20), [chain(0, 2), chain(1, 3)], 4),
    Case("inception_v3", "three stages", (70, 50, 30), [chain(0, 1, 2)]),
    Case("inception_v3", "a shared stage", (60, 50, 30), [[((1, 2), 0.6), ((0,), 0.4)]]),
    Case("inception_v3", "two replicas", (60, 40, 30, 20), [chain(0, 2), chain(1, 3)], 4),
    Case("deeptte", "two stages", (80, 40), [chain(0, 1)]),
)
QUICK = (
    Case("nasnet", "two stages", (80, 40), [[((0,), 2 / 3), ((1,), 1 / 3)]], 4),
    Case("nasnet", "a shared stage", (60, 50, 30), [[((0,), 0.4), ((1, 2), 0.6)]], 4),
)


def evaluator_of(subject: Subject, percents: Sequence[int]) -> Evaluator:
    """Of devices that have these parts of the core on which blocks were measured."""
    each = [(cost.forward_seconds + cost.backward_seconds) for cost in subject.costs]
    passes = [(cost.fixed_forward_seconds + cost.fixed_backward_seconds) for cost in subject.costs]
    fixed = [*passes, *(cost.update_seconds for cost in subject.costs)]
    times = [StepTime(sum(fixed) * 100 / percent, sum(each) * 100 / percent) for percent in percents]
    cluster = Cluster("quotas", "made up", tuple(DeviceGroup(f"{percent} %") for percent in percents))
    training = Training(BATCH_SIZE, SyncConfig(delay_bound=0))
    return Evaluator(subject.graph, subject.costs, cluster, times, training)


def prediction(case: Case, subject: Subject) -> tuple[Placement, float]:
    """The case's plan with the replicas' shares, and seconds of a step."""
    evaluator = evaluator_of(subject, case.percents)
    placement = evaluator.with_shares(by_parts(subject, case.replicas, case.micro_batches))
    return placement, evaluator.evaluate(placement).step_seconds


def throttled(percents: Sequence[int], plan: Mapping[str, Any], recipe: Sequence[object], steps: int) -> Finished:
    with quotas(percents) as groups:
        start = ["--", sys.executable, *RANK, groups]
        return finished(plan, recipe, steps, lambda words: launched(len(percents), [*start, *words]))


def measure(case: Case, subject: Subject, seed: int, steps: int) -> dict[str, Any]:
    placement, predicted = prediction(case, subject)
    plan = plain(as_plan_file(placement, subject.graph, BATCH_SIZE))
    done = throttled(case.percents, plan, [*subject.words, "--run.seed", seed], steps)
    measured = statistics.median(done.step_seconds)
    own = done.summary["plan"]["predicted_step_seconds"]
    told = {"model": case.model, "name": case.name, "percents": list(case.percents), "seed": seed}
    kept = {"steps": done.step_seconds, "plan": done.summary["plan"], "per_rank": done.summary["per_rank"]}
    return {
        **told, "predicted": predicted, "measured": measured, "error": measured / predicted - 1,
        "own": own, "own_error": measured / own - 1, **kept,
    }  # fmt: skip


def table(records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| model | plan | quotas | predicted | measured | error | error of the job's own |"]
    lines += ["| --- | --- | --- | ---: | --- | --- | --- |"]
    for (model, name), runs in grouped(records, "model", "name").items():
        cells = [
            " ".join(map(str, runs[0]["percents"])),
            f"{runs[0]['predicted']:.3f} s",
            spread([one["measured"] for one in runs], ".3f"),
            spread([one["error"] for one in runs], "+.1%"),
            spread([one["own_error"] for one in runs], "+.1%"),
        ]
        lines.append(f"| {model} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(records: Sequence[Mapping[str, Any]]) -> str:
    errors = [statistics.median(one["error"] for one in runs) for runs in grouped(records, "model", "name").values()]
    far = sum(abs(error) > GOAL for error in errors)
    middle = statistics.median(map(abs, errors))
    return f"{far} of {len(errors)} plans are more than {GOAL:.0%} away (goal: none); the median is {middle:.1%}."


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--quick", action="store_true", help="two plans of one model, once, six steps")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="for a model's blocks, about")
    options = parser.parse_args(words)
    options.cases = CASES
    if options.quick:
        options.cases, options.repetitions, options.steps, options.profile_seconds = QUICK, 1, 6, 1.0
    if not permitted():
        parser.error("CPU quotas by cgroup (version 1) are not permitted here: run it as root where they are")
    assert all(sum(case.percents) <= MOST_PERCENT for case in options.cases)
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    records = []
    with tempfile.TemporaryDirectory() as fresh, costs_kept_in(Path(fresh)):  # of this machine, as it is now
        names = dict.fromkeys(case.model for case in options.cases)
        subjects = {name: subject_of(name, BATCH_SIZE, options.profile_seconds) for name in names}
        for seed in range(options.repetitions):
            for case in options.cases:
                records.append(measure(case, subjects[case.model], seed, options.steps))
                one = records[-1]
                told = f"{one['predicted']:.3f} s predicted, {one['error']:+.1%}, the job's own {one['own_error']:+.1%}"
                print(f"seed {seed}  {case.model}, {case.name}: {told}", flush=True)
                keep(options.output, "planned_quotas", records=records)
    publish(options.output, "planned_quotas", verdict(records), table(records))


if __name__ == "__main__":
    main()
