"""Placements of a model by parts of its work, for jobs by a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.common.planning import WORKLOADS
from hetsync.config.parser import recipe_of
from hetsync.plan.graph import BATCH, BlockCost, BlockGraph
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.recipe import plannable_model
from hetsync.simulate.recipe import build

Held = Sequence[tuple[Sequence[int], float]]  # by stage: its ranks, and its part of the model's work


def chain(*ranks: int) -> Held:
    """Stages of equal work."""
    return [((rank,), 1 / len(ranks)) for rank in ranks]


class Subject(NamedTuple):
    """A model's blocks, and what a recipe says of it."""

    graph: BlockGraph
    costs: Sequence[BlockCost]
    words: list[object]

    def work(self, block: int) -> float:
        return self.costs[block].forward_seconds + self.costs[block].backward_seconds

    def carried_bytes(self, cut: int) -> float:
        """A sample's, from the blocks before the cut to those behind it, and back."""
        crossing = {e.source for e in self.graph.edges if e.source != BATCH and e.source < cut <= e.target}
        return 2.0 * sum(self.costs[source].output_bytes for source in crossing)


def subject_of(model: str, batch_size: int, profile_seconds: float) -> Subject:
    workload = WORKLOADS[model]
    model_section = {"name": workload.model, "options": workload.options}
    data_section = {"name": workload.data, "batch_size": batch_size, "options": workload.data_options}
    config = recipe_of({"run": {"profile_seconds": profile_seconds}, "model": model_section, "data": data_section})
    torch.set_num_threads(1)  # as ranks have it
    plannable = plannable_model(config, *build(config), 1)
    words = [
        *("--model.name", workload.model, "--model.options", json.dumps(workload.options)),
        *("--data.name", workload.data, "--data.options", json.dumps(workload.data_options)),
        *("--data.batch_size", batch_size, "--run.profile_seconds", profile_seconds),
    ]
    return Subject(plannable.cut.graph, plannable.costs, words)


def cuts_of(subject: Subject, parts: Sequence[float]) -> list[int]:
    """First blocks of the stages, whose work is about these parts of all; each has a block."""
    blocks = range(len(subject.graph.blocks))
    done = np.cumsum([subject.work(block) for block in blocks]) / sum(subject.work(block) for block in blocks)
    cuts = [0]
    for number, wanted in enumerate(np.cumsum(parts)[:-1], 1):
        cut = int(np.searchsorted(done, wanted)) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(blocks) - len(parts) + number))
    return cuts


def placed(subject: Subject, held: Held, micro_batches: int, in_flight: int | None, cuts: Sequence[int]) -> Replica:
    ends = [*cuts[1:], len(subject.graph.blocks)]
    stages = [
        Stage(tuple(ranks), tuple(range(first, end)), in_flight)
        for (ranks, _), first, end in zip(held, cuts, ends, strict=True)
    ]
    return Replica(tuple(stages), None, micro_batches)


def by_parts(subject: Subject, replicas: Sequence[Held], micro_batches: int, in_flight: int | None = None) -> Placement:
    """Each replica cut by its own parts."""
    return Placement(
        tuple(
            placed(subject, held, micro_batches, in_flight, cuts_of(subject, [part for _, part in held]))
            for held in replicas
        )
    )
