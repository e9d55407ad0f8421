"""In which order a stage runs the forward and backward passes of its micro-batches. Pure: no tensors, no clock.

Each stage runs down a list of its own and waits where the next entry needs a tensor that has not come: a forward pass
needs those of the stages before, a backward pass those of the stages behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter
from typing import Literal

from hetsync.balance.shares import apportion

Work = tuple[Literal["forward", "backward"], int]  # with the index of the micro-batch
StageEdges = Collection[tuple[int, int]]  # (source, target), indices into stages


def micro_batch_sizes(share: int, micro_batches: int) -> tuple[int, ...]:
    """Samples of each micro-batch of a share: as equal as can be, the larger ones first."""
    parts = apportion(share, dict.fromkeys(range(micro_batches), 1))
    return tuple(parts.values())


def stage_order(stages: int, edges: StageEdges) -> tuple[int, ...]:
    """The stages, each after those that it needs. graphlib.CycleError where stages wait for each other."""
    before: dict[int, set[int]] = {stage: set() for stage in range(stages)}
    for source, target in edges:
        before[target].add(source)
    return tuple(TopologicalSorter(before).static_order())


def stages_left(stages: int, edges: StageEdges) -> tuple[int, ...]:
    """By stage: stages on the longest way from it to the end, itself included. 1F1B has as many in flight."""
    left = [1] * stages
    for stage in reversed(stage_order(stages, edges)):
        behind = [left[target] for source, target in edges if source == stage]
        left[stage] = 1 + max(behind, default=0)
    return tuple(left)


def bounded_in_flight(
    stages: int, edges: StageEdges, micro_batches: int, in_flight: Sequence[int | None]
) -> tuple[int, ...]:
    """Micro-batches that each stage has in flight at most; None stands for the stages left (1F1B).

    No more than there are, nor than any stage before it has: the next micro-batch would not come before a backward pass
    that the stage has yet to run, and both would wait for ever.
    """
    wanted = [
        left if given is None else given for given, left in zip(in_flight, stages_left(stages, edges), strict=True)
    ]
    bounded = [min(number, micro_batches) for number in wanted]
    for stage in stage_order(stages, edges):
        bounded[stage] = min([bounded[stage], *(bounded[source] for source, target in edges if target == stage)])
    return tuple(bounded)


def schedule(micro_batches: int, in_flight: int) -> tuple[Work, ...]:
    """One stage's list: forward passes until `in_flight` are under way, then one backward for one forward.

    `in_flight` = 1 … `micro_batches`; the latter is GPipe.
    """
    work: list[Work] = [("forward", index) for index in range(in_flight)]
    for index in range(micro_batches):
        work.append(("backward", index))
        if index + in_flight < micro_batches:
            work.append(("forward", index + in_flight))
    return tuple(work)


def schedules(
    stages: int, edges: StageEdges, micro_batches: int, in_flight: Sequence[int | None]
) -> tuple[tuple[Work, ...], ...]:
    """Every stage's list. They cannot come to wait for each other, whatever `in_flight` says."""
    return tuple(
        schedule(micro_batches, number) for number in bounded_in_flight(stages, edges, micro_batches, in_flight)
    )
