"""Blocks in groups, so that there is less to place. Pure.

A group is a run of blocks in their order, which is topological: so groups never come to need each other in a circle,
whichever runs they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetsync.plan.evaluate import Evaluator
from hetsync.plan.graph import BATCH
from hetsync.plan.slices import BACKWARD, FORWARD, SAVED, WEIGHTS

APART = 2.0  # what a run is taken for that would join groups without an edge between them, times its size


@dataclass(frozen=True)
class Groups:
    """Runs of blocks. Group g has the blocks from `bounds[g]` to before `bounds[g + 1]`.

    Attributes:
        bounds: Ascending, from 0 to the number of blocks.
        edges: (source, target) between groups, source < target, with a sample's bytes: an output once a target.
        output_bytes: A sample's, by group: of the outputs that other groups need.
    """

    bounds: tuple[int, ...]
    edges: dict[tuple[int, int], float]
    output_bytes: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def blocks(self, group: int) -> range:
        return range(self.bounds[group], self.bounds[group + 1])

    def blocks_of(self, groups: Iterable[int]) -> tuple[int, ...]:
        """Of all of them, ascending."""
        return tuple(block for group in sorted(groups) for block in self.blocks(group))


def contract(evaluator: Evaluator, most: int) -> Groups:
    """At most so many groups: of two neighbours always those become one that are least, in time and memory, together;
    those without an edge between them late."""
    sizes = _sizes(evaluator)
    inner = [(edge.source, edge.target) for edge in evaluator.graph.edges if edge.source != BATCH]
    runs = [range(block, block + 1) for block in range(len(sizes))]
    joined = {(source, target) for source, target in inner}  # pairs of first blocks of runs
    while len(runs) > most:
        cost = [
            (sizes[a.start] + sizes[b.start]) * (1.0 if (a.start, b.start) in joined else APART)
            for a, b in pairwise(runs)
        ]
        at = cost.index(min(cost))
        first, second = runs[at].start, runs[at + 1].start
        sizes[first] += sizes[second]
        joined = {(first if a == second else a, first if b == second else b) for a, b in joined}
        runs[at : at + 2] = [range(first, runs[at + 1].stop)]
    return _groups(evaluator, [run.start for run in runs], inner)


def _sizes(evaluator: Evaluator) -> list[float]:
    """Of each block: its parts of the model's seconds, weights and activations."""
    figures = evaluator.figures
    seconds = figures[:, FORWARD] + figures[:, BACKWARD]
    parts = [column / (column.sum() or 1.0) for column in (seconds, figures[:, SAVED], figures[:, WEIGHTS])]
    sizes: list[float] = np.sum(parts, axis=0).tolist()
    return sizes


def _groups(evaluator: Evaluator, starts: Sequence[int], inner: Sequence[tuple[int, int]]) -> Groups:
    blocks = len(evaluator.graph.blocks)
    group_of = (np.searchsorted(starts, np.arange(blocks), side="right") - 1).tolist()
    needed = {(source, group_of[target]) for source, target in inner if group_of[source] != group_of[target]}
    edges: dict[tuple[int, int], float] = {}
    for source, target in sorted(needed):
        pair = (group_of[source], target)
        edges[pair] = edges.get(pair, 0.0) + float(evaluator.output_bytes[source])
    outputs = [0.0] * len(starts)
    for source in {source for source, _ in needed}:
        outputs[group_of[source]] += float(evaluator.output_bytes[source])
    return Groups((*starts, blocks), edges, tuple(outputs))
