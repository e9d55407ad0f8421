"""Steps of jobs by a plan, as predicted and as measured: pipelines, stages that ranks share, replicas; slow links.

    python -m benchmarks.planned --output results [--quick] [--steps 10] [--random 20] [--seconds 1]

Devices are emulated, so that block times are given: what is shown is that schedule, links and overheads are what the
evaluator says. A slow link takes as long for what it carries of a step as `LINK` of the step on all devices at once.
Random plans are of one model on one cluster: cuts, order of ranks, micro-batches and those in flight are drawn.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.placements import Held, Subject, by_parts, chain, placed, subject_of
from benchmarks.common.planned_job import PlannedRun, costs_kept_in, run_planned
from benchmarks.common.report import keep, publish, spearman
from hetsync.config.records import plain
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, PairLink
from hetsync.plan.placement import Placement, as_plan_file

BATCH_SIZE = 32
FIXED_SECONDS = 2e-3  # of each micro-batch on any device, so that many small ones are not free
LINK = 0.5
GOALS = {"each": 0.10, "median": 0.05, "spearman": 0.9}


class Case(NamedTuple):
    """`replicas`: of each, its stages. `slow`: whether links are, and between which hosts."""

    model: str
    name: str
    speeds: Sequence[float]
    replicas: Sequence[Held]
    micro_batches: int = 8
    in_flight: int | None = None
    slow: str = ""  # everywhere, between


CASES = (
    Case("nasnet", "two stages", (2, 1), [[((0,), 2 / 3), ((1,), 1 / 3)]]),
    Case("nasnet", "four stages, slow links", (3, 2, 1, 1), [chain(0, 1, 2, 3)], slow="everywhere"),
    Case("nasnet", "four stages, GPipe, slow links", (1, 1, 1, 1), [chain(0, 1, 2, 3)], 8, 8, "everywhere"),
    Case("nasnet", "two replicas between hosts", (2, 2, 1, 1), [chain(0, 2), chain(1, 3)], 4, slow="between"),
    Case("deeptte", "three stages", (1, 3, 1), [[((0,), 0.2), ((1,), 0.6), ((2,), 0.2)]]),
    Case("deeptte", "two stages, slow links", (2, 1), [chain(0, 1)], slow="everywhere"),
    Case("deeptte", "a shared stage", (2, 1, 1), [[((0,), 0.5), ((1, 2), 0.5)]], 4),
    Case("inception_v3", "four stages, slow links", (1, 1, 1, 1), [chain(0, 1, 2, 3)], slow="everywhere"),
    Case(
        "inception_v3", "a shared stage, slow links", (3, 2, 1), [[((1, 2), 0.4), ((0,), 0.6)]], 4, None, "everywhere"
    ),
    Case("inception_v3", "three replicas", (3, 2, 2, 1), [chain(0), chain(1, 3), chain(2)], 4),
    Case("nmt", "two stages between hosts", (2, 1), [chain(0, 1)], slow="between"),
    Case("nmt", "three stages", (1, 1, 1), [chain(0, 1, 2)], 4),
    Case("pnasnet", "four stages between hosts", (2, 2, 1, 1), [chain(0, 1, 2, 3)], slow="between"),
    Case("pnasnet", "one shared stage", (3, 2, 1), [[((0, 1, 2), 1.0)]], 2),
)
QUICK = (
    Case("digits", "two stages, slow links", (2, 1), [chain(0, 1)], 4, slow="everywhere"),
    Case("digits", "a shared stage", (2, 1, 1), [[((0,), 0.5), ((1, 2), 0.5)]], 4),
)
RANDOM = ("nasnet", (3.0, 2.0, 1.0, 1.0))


def cluster_of(speeds: Sequence[float], slow: str, carried: float, seconds: float) -> Cluster:
    """`carried` bytes of a step take `LINK` of its `seconds` over a slow link."""
    bandwidth = max(1.0, carried) / (LINK * seconds)
    half = (len(speeds) + 1) // 2
    devices = tuple(
        DeviceGroup(f"d{rank}", speed=speed, fixed_seconds=FIXED_SECONDS, host="one" if rank < half else "two")
        for rank, speed in enumerate(speeds)
    )
    if slow == "everywhere":
        one = tuple(DeviceGroup(each.name, speed=each.speed, fixed_seconds=FIXED_SECONDS) for each in devices)
        return Cluster("measured", "made up", one, Link(5e-3, bandwidth))
    links = (PairLink(("one", "two"), 2e-2, bandwidth),) if slow == "between" else ()
    return Cluster("measured", "made up", devices if links else _on_one_host(devices), Link(), links=links)


def _on_one_host(devices: Sequence[DeviceGroup]) -> tuple[DeviceGroup, ...]:
    return tuple(DeviceGroup(each.name, speed=each.speed, fixed_seconds=FIXED_SECONDS) for each in devices)


def run_placement(subject: Subject, placement: Placement, cluster: Cluster, options: argparse.Namespace) -> PlannedRun:
    plan = plain(as_plan_file(placement, subject.graph, BATCH_SIZE))
    rate = ["--emulation.samples_per_second", BATCH_SIZE / options.seconds]
    return run_planned(plan, cluster, [*subject.words, *rate], options.steps)


def run_case(case: Case, subject: Subject, options: argparse.Namespace) -> PlannedRun:
    placement = by_parts(subject, case.replicas, case.micro_batches, case.in_flight)
    cuts = [stage.blocks[0] for replica in placement.replicas for stage in replica.stages[1:]]
    carried = max((BATCH_SIZE * subject.carried_bytes(cut) for cut in cuts), default=0.0)
    cluster = cluster_of(case.speeds, case.slow, carried, options.seconds)
    return run_placement(subject, placement, cluster, options)


def random_placements(subject: Subject, ranks: int, count: int) -> Iterator[Placement]:
    """One replica of two stages or more, on all ranks or fewer where stages share some."""
    draw = random.Random(0)
    blocks = len(subject.graph.blocks)
    for _ in range(count):
        order = draw.sample(range(ranks), ranks)
        stages = draw.randint(2, ranks)
        bounds = sorted(draw.sample(range(1, ranks), stages - 1))
        held = [(order[first:end], 0.0) for first, end in zip([0, *bounds], [*bounds, ranks], strict=True)]
        cuts = [0, *sorted(draw.sample(range(1, blocks), stages - 1))]
        micro_batches = draw.choice((2, 4, 8))
        yield Placement((placed(subject, held, micro_batches, draw.choice((None, micro_batches)), cuts),))


def table(records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| model | plan | links | predicted | measured | error | of which links |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for one in records:
        shown = f"{one['predicted']:.3f} s | {one['measured']:.3f} s | {100 * one['error']:+.1f} %"
        links = f"{100 * one['plan']['communication_fraction']:.0f} %"
        lines.append(f"| {one['model']} | {one['name']} | {one['slow'] or 'free'} | {shown} | {links} |")
    return "\n".join(lines)


def verdict(records: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, Any]]) -> str:
    errors = [abs(one["error"]) for one in records]
    far = sum(error > GOALS["each"] for error in errors)
    lines = [
        f"{far} of {len(errors)} are more than {GOALS['each']:.0%} away; the median is {statistics.median(errors):.1%}"
        f" (goals: none, and {GOALS['median']:.0%})."
    ]
    if len(drawn) > 2:
        found = spearman([one["predicted"] for one in drawn], [one["measured"] for one in drawn])
        lines.append(f"Spearman over {len(drawn)} random plans: {found:.3f} (goal: {GOALS['spearman']}).")
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--quick", action="store_true", help="two plans of a small model and three random ones")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--random", type=int, default=20, help="random plans")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of a step on all devices at once: no plan's is less"
    )
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="for a model's blocks, about")
    options = parser.parse_args(words)
    options.cases, options.drawn = CASES, RANDOM
    if options.quick:
        options.cases, options.drawn = QUICK, ("digits", (2.0, 1.0))
        options.steps, options.random, options.seconds, options.profile_seconds = 6, 3, 0.5, 0.2
    return options


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    model, speeds = options.drawn
    subjects = {
        name: subject_of(name, BATCH_SIZE, options.profile_seconds)
        for name in dict.fromkeys([*(case.model for case in options.cases), model])
    }
    records, drawn = [], []
    for case in options.cases:
        found = run_case(case, subjects[case.model], options)
        told = {"model": case.model, "name": case.name, "slow": case.slow}
        records.append({**told, "error": found.error, **found.figures})
        print(f"{case.model}, {case.name}: {found.predicted:.3f} s predicted, {found.error:+.1%}", flush=True)
    subject = subjects[model]
    carried = statistics.median(subject.carried_bytes(cut) for cut in range(1, len(subject.graph.blocks)))
    cluster = cluster_of(speeds, "everywhere", BATCH_SIZE * carried, options.seconds)
    for placement in random_placements(subject, len(speeds), options.random):
        found = run_placement(subject, placement, cluster, options)
        drawn.append({"error": found.error, **found.figures})
        print(f"random: {found.predicted:.3f} s predicted, {found.error:+.1%}", flush=True)
    return records, drawn


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    with costs_kept_in(options.output / "costs"):
        records, drawn = run(options)
    keep(options.output, "planned", records=records, random=drawn)
    publish(options.output, "planned", verdict(records, drawn), table(records))


if __name__ == "__main__":
    main()
