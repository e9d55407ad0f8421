"""What groups of blocks take, summed over their blocks: by group, or over all groups before a bound. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetsync.plan.evaluate import Evaluator
from hetsync.plan.graph import BATCH
from hetsync.plan.search.groups import Groups
from hetsync.plan.search.search import Problem
from hetsync.plan.slices import SAVED

Array = npt.NDArray[np.float64]


def group_figures(evaluator: Evaluator, groups: Groups) -> Array:
    """The columns of the evaluator's figures: a row a group."""
    summed: Array = np.add.reduceat(evaluator.figures, groups.bounds[:-1], axis=0)
    return summed


def group_saved_bytes(evaluator: Evaluator, groups: Groups, in_flight: int) -> Array:
    """By group, a sample's of what so many micro-batches save for backward: of the loss, one at a time."""
    loss: Array = np.add.reduceat(evaluator.loss_bytes, groups.bounds[:-1])
    return group_figures(evaluator, groups)[:, SAVED] * in_flight - loss * (in_flight - 1)


def figures_before(problem: Problem) -> Array:
    """The evaluator's figures of all groups before a bound: a row a bound."""
    summed = group_figures(problem.evaluator, problem.groups).cumsum(axis=0)
    return np.vstack([np.zeros(summed.shape[1]), summed])


def saved_bytes_before(problem: Problem, in_flight: int) -> Array:
    """`group_saved_bytes` of all groups before a bound, by bound."""
    saved = group_saved_bytes(problem.evaluator, problem.groups, in_flight)
    return np.concatenate([[0.0], saved.cumsum()])


def crossing_bytes(problem: Problem) -> Array:
    """Bytes of a sample that cross each bound of the groups: outputs of blocks before that blocks behind need."""
    evaluator = problem.evaluator
    blocks = len(evaluator.graph.blocks)
    last_need = np.arange(blocks)
    for edge in evaluator.graph.edges:
        if edge.source != BATCH:
            last_need[edge.source] = max(last_need[edge.source], edge.target)
    places = np.array(problem.groups.bounds)[:, None]
    needed = (np.arange(blocks) < places) & (last_need >= places)
    crossing: Array = needed @ evaluator.output_bytes
    return crossing
