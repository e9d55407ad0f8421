"""What groups of blocks take, summed over their blocks: by group, over all before a bound, or over a run. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetsync.plan.evaluate import Evaluator, saved_in_flight
from hetsync.plan.graph import BATCH
from hetsync.plan.search.groups import Groups
from hetsync.plan.slices import SAVED

Array = npt.NDArray[np.float64]


def group_figures(evaluator: Evaluator, groups: Groups) -> Array:
    """The columns of the evaluator's figures: a row a group."""
    summed: Array = np.add.reduceat(evaluator.figures, groups.bounds[:-1], axis=0)
    return summed


def group_saved_bytes(evaluator: Evaluator, groups: Groups, in_flight: int) -> Array:
    """By group, a sample's of what so many micro-batches save for backward, without what comes from other stages."""
    loss: Array = np.add.reduceat(evaluator.loss_bytes, groups.bounds[:-1])
    saved: Array = group_figures(evaluator, groups)[:, SAVED]
    return saved_in_flight(saved, loss, in_flight, np.ones(len(groups)))


def figures_before(evaluator: Evaluator, groups: Groups) -> Array:
    """The evaluator's figures of all groups before a bound: a row a bound."""
    return _before(group_figures(evaluator, groups))


def run_saved_bytes(evaluator: Evaluator, groups: Groups, received: Array, in_flight: int, samples: int) -> Array:
    """[i, j]: what so many micro-batches of `samples` each save on a stage that has the groups from i to before j.
    `received`: what `run_received_bytes` says."""
    by_block = np.column_stack([evaluator.figures[:, SAVED], evaluator.loss_bytes])
    by_block = np.column_stack([by_block, by_block[:, 0] * evaluator.unpadded_by_block(samples)])
    before = _before(np.add.reduceat(by_block, groups.bounds[:-1], axis=0))
    saved, loss, others = np.moveaxis(before[None, :, :] - before[:, None, :], 2, 0)
    unpadded = np.divide(others, saved, out=np.ones_like(saved), where=saved > 0)
    return samples * saved_in_flight(saved + received, loss, in_flight, unpadded)


def run_received_bytes(evaluator: Evaluator, groups: Groups) -> Array:
    """[i, j]: a sample's of what others have made, and the blocks of the groups from i to before j save: at most all
    that comes, and what several of them need once. For all runs at once, what `Slices.staged` says of a stage."""
    bounds = np.array(groups.bounds)
    found = np.zeros((len(bounds), len(bounds)))
    blocks = len(evaluator.graph.blocks)
    inner = [(edge.source, edge.target) for edge in evaluator.graph.edges if edge.source != BATCH]
    sources, targets = np.array(inner, dtype=int).reshape(-1, 2).T
    sinks = np.setdiff1d(np.arange(blocks), sources)
    for place, begin in enumerate(bounds[:-1]):
        across = (sources < begin) & (targets >= begin)
        needed, came = np.zeros(blocks), np.zeros(blocks)
        entered = np.unique(targets[across])
        needed[entered] = evaluator.needed_bytes[entered]
        first = np.full(blocks, blocks)
        np.minimum.at(first, sources[across], targets[across])
        sent = np.flatnonzero(first < blocks)
        np.add.at(came, first[sent], evaluator.output_bytes[sent])
        if len(sinks) > 1:  # what the model returns goes to the last stage, which computes the loss
            came[-1] += evaluator.output_bytes[sinks[sinks < begin]].sum()
        found[place] = np.minimum(*(np.concatenate([[0.0], each.cumsum()])[bounds] for each in (needed, came)))
    return found


def crossing_bytes(evaluator: Evaluator, groups: Groups) -> Array:
    """Bytes of a sample that cross each bound of the groups: outputs of blocks before that blocks behind need."""
    blocks = len(evaluator.graph.blocks)
    last_need = np.arange(blocks)
    for edge in evaluator.graph.edges:
        if edge.source != BATCH:
            last_need[edge.source] = max(last_need[edge.source], edge.target)
    places = np.array(groups.bounds)[:, None]
    needed = (np.arange(blocks) < places) & (last_need >= places)
    crossing: Array = needed @ evaluator.output_bytes
    return crossing


def _before(by_group: Array) -> Array:
    """Sums over all groups before a bound: a row a bound."""
    summed = by_group.cumsum(axis=0)
    return np.vstack([np.zeros(summed.shape[1]), summed])
