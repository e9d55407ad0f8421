"""A plan as text: its stages, its three costs, and who does what when."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from string import ascii_lowercase, digits

from hetsync.plan.evaluate import Costs, Evaluator, Span
from hetsync.plan.placement import Placement
from hetsync.plan.plan_file import PlanFile, Predicted, SearchRecord

COLUMNS = 96  # of a timeline
MOST_NAMES = 4  # of a stage's blocks on a line
IDLE = "·"
COSTS = ("time", "bytes", "memory")


def predicted(costs: Costs) -> Predicted:
    """What a plan file says of the costs, to five digits."""
    seconds, rate, size = (
        float(f"{value:.5g}") for value in (costs.step_seconds, costs.samples_per_second, costs.bytes_per_sample)
    )
    return Predicted(seconds, rate, size, dict(costs.memory_bytes))


def told_costs(costs: Predicted) -> list[str]:
    """The three, a line each."""
    memory = ", ".join(f"{rank}: {size / 2**20:,.1f}" for rank, size in costs.memory_bytes.items())
    return [
        f"time    {costs.step_seconds:.4g} s a step, {costs.samples_per_second:.4g} samples/s",
        f"bytes   {costs.bytes_per_sample:,.0f} a sample over all links",
        f"memory  in MiB by rank: {memory}",
    ]


def told_stages(plan: PlanFile) -> list[str]:
    """Replicas with their stages, as the file has them."""
    lines = []
    for index, replica in enumerate(plan.replicas):
        share = "a share by speed" if replica.share is None else f"{replica.share} samples"
        pieces = f" in {replica.micro_batches} micro-batches" if replica.micro_batches > 1 else ""
        lines.append(f"replica {index}: {share}{pieces}")
        for number, stage in enumerate(replica.stages):
            names = [*stage.blocks[:MOST_NAMES], *([f"{len(stage.blocks)} names"] if stage.blocks[MOST_NAMES:] else [])]
            in_flight = "" if stage.in_flight is None else f", {stage.in_flight} in flight"
            lines.append(f"  stage {number} on rank {_listed(stage.ranks)}: {', '.join(names)}{in_flight}")
    return lines


def told_timeline(evaluator: Evaluator, placement: Placement) -> list[str]:
    """A line a rank: micro-batches by digits (forward) and letters (backward), and the part in which it waits.

    Where replicas are not in step, a rank whose replica has ended its slice waits no more, but begins its next one.
    """
    spans = evaluator.timeline(placement)
    ends = _ends(evaluator, spans)
    whole = max(ends.values())
    lines = [f"a slice of {whole:.4g} s, forward by digits, backward by letters, waiting by {IDLE}"]
    for rank, of_rank in groupby(spans, key=lambda span: span.rank):
        own = list(of_rank)
        busy = sum(span.end - span.begin for span in own) / ends[rank]
        name = evaluator.cluster.device_of(rank).name
        row = _row(own, whole, ends[rank])
        lines.append(f"rank {rank:<3} {name[:12]:<12} {row:<{COLUMNS}} waits {1 - busy:.0%}")
    return lines


def _ends(evaluator: Evaluator, spans: Sequence[Span]) -> dict[int, float]:
    """By rank, when its slice has ended: its replica's, or that of all in step."""
    in_step = evaluator.training.sync.most_delay_bound == 0
    last: dict[int, float] = {}
    for span in spans:
        last[span.replica] = max(last.get(span.replica, 0.0), span.end)
    return {span.rank: max(last.values()) if in_step else last[span.replica] for span in spans}


def told_search(search: SearchRecord) -> list[str]:
    """How the plan was found, and how far from the least objective it may be."""
    weights = ", ".join(f"{cost} {weight:.3g}" for weight, cost in zip(search.weights, COSTS, strict=False) if weight)
    gap = "" if search.gap is None else f": the gap is {search.gap:.1%}"
    spent = f"{search.evaluations} evaluations and {search.seconds:.1f} s"
    lines = [f"search  {search.method} found objective {search.objective:.4g} ({weights}), after {spent}"]
    lines.append(f"        no plan with one rank a stage has less than {search.bound:.4g}{gap}")
    for one in search.tried:
        found = "nothing" if one.objective is None else f"{one.objective:.4g}"
        lines.append(f"        {one.method:<18} {found:>8} in {one.evaluations} evaluations, {one.seconds:.1f} s")
    return lines


def told_reasons(evaluator: Evaluator, placement: Placement) -> list[str]:
    """What holds the plan up: the busiest rank, the ranks that wait most or have nothing to do, the fullest link."""
    spans = evaluator.timeline(placement)
    ends = _ends(evaluator, spans)
    busy = {
        rank: sum((span.end - span.begin) / end for span in spans if span.rank == rank)
        for rank, end in sorted(ends.items())
    }
    most, least = max(busy, key=lambda rank: busy[rank]), min(busy, key=lambda rank: busy[rank])
    idle = f"; most idle is rank {least}, {1 - busy[least]:.0%}" if least != most else ""
    lines = [f"busiest  rank {most}, {busy[most]:.0%} of its slice{idle}"]
    if unused := sorted(set(range(len(evaluator.times))) - set(busy)):
        lines.append(f"unused   rank {_listed(unused)}")
    links = {pair: seconds / ends[pair[0]] for pair, seconds in evaluator.link_seconds(placement).items()}
    if links:
        one, other = max(links, key=lambda pair: links[pair])
        lines.append(f"fullest  link from rank {one} to {other}, taken for {links[one, other]:.0%} of a slice")
    return lines


def _row(spans: Sequence[Span], whole: float, end: float) -> str:
    """Each column shows what goes on in its middle; nothing after the slice's `end`."""
    row = [IDLE] * round(end / whole * COLUMNS)
    for span in spans:
        first, last = (round(at / whole * COLUMNS) for at in (span.begin, span.end))
        signs = digits if span.forward else ascii_lowercase
        row[first:last] = signs[span.micro_batch % 10] * (last - first)
    return "".join(row)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
