"""Metrics of test batches by a model in stages: forward only, through the first rank of every stage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from graphlib import CycleError

import torch
from torch import nn

from hetsync.data import Data
from hetsync.data.evaluation import evaluating, numbers, test_batches
from hetsync.data.random_state import set_aside
from hetsync.errors import UserError
from hetsync.plan.blocks import Cut, cut, state_of, tensors_read
from hetsync.plan.calls import observed_call, stand_in, weight_used
from hetsync.plan.graph import BATCH
from hetsync.plan.parts import RETURNED, Pass, check_call, split
from hetsync.plan.schedule import stage_order
from hetsync.replica.exchange import Exchange

TOGETHER = 32  # test samples: as many as are looked at first, since metrics may call the model in pieces for more


def forward_outside_of_training(model: torch.nn.Module, data: Data, device: torch.device) -> Cut | None:
    """The model's forward outside of training, if metrics do nothing with the model but call it."""
    if not len(data.evaluated):  # type: ignore[arg-type]
        return None
    samples = min(TOGETHER, len(data.evaluated))  # type: ignore[arg-type]
    batch, _ = next(test_batches(data, 0, samples, device, samples))
    with evaluating(model):
        try:
            if weight_used(model, data.metrics, batch) is not None:
                return None
        except UserError:  # never called, or twice
            return None
        return cut(model, observed_call(model, data.metrics, batch))


def stages_of_blocks(
    model: nn.Module, found: Cut, owners: Mapping[str, int], named: Mapping[str, int]
) -> list[int] | None:
    """Stages of the blocks that forward has outside of training, each where its weights are.

    Args:
        model: The model.
        found: Its blocks outside of training.
        owners: Stages of all weights and buffers.
        named: Stages of the blocks that it has in training, by name, for blocks without weights.

    Returns:
        None where a block needs weights of several stages, or stages would wait for each other.
    """
    if found.traced is None:
        return None
    names = {id(tensor): name for name, tensor in state_of(model).items()}
    stages = defaultdict[int, set[int]](set)
    for node, of_block in found.traced.block_of.items():
        if of_block != BATCH:
            stages[of_block] |= {owners[names[id(each)]] for each in tensors_read(model, node) if id(each) in names}
    of: list[int] = []
    for number, block in enumerate(found.graph.blocks):
        before = [of[edge.source] for edge in found.graph.edges if edge.target == number and edge.source != BATCH]
        if len(stages[number]) > 1:
            return None
        of.append(next(iter(stages[number]), named.get(block.name, before[-1] if before else 0)))
    try:
        stage_order(max(of) + 1, _edges(found, of))
    except CycleError:
        return None
    return of


class StagedScores:
    """One rank's part.

    Args:
        model: The model.
        found: Its blocks outside of training.
        stage_of: Their stages.
        ranks: One rank of each stage.
        rank: This one, which need not be among them.
        exchange: Between the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Cut,
        stage_of: Sequence[int],
        ranks: Sequence[int],
        rank: int,
        exchange: Exchange,
    ) -> None:
        assert found.traced is not None
        self._model, self._traced, self._exchange, self._ranks = model, found.traced, exchange, ranks
        used = set(stage_of)
        self._last = [stage for stage in stage_order(max(used) + 1, _edges(found, stage_of)) if stage in used][-1]
        parts = split(model, found.traced, stage_of, self._last)
        self._stage = ranks.index(rank) if rank in ranks else None
        self._part = parts[self._stage] if self._stage in used else None

    @torch.no_grad()
    def sums(self, data: Data, first: int, stop: int) -> dict[str, float]:
        """Of the metrics over test samples [first, stop), where the last stage is; elsewhere nothing."""
        sums: Counter[str] = Counter()
        if self._part is None:
            return {}
        device = next(self._model.parameters()).device
        with evaluating(self._model), set_aside(device, seed=0):
            for number, batch in enumerate(batch for batch, _ in test_batches(data, first, stop, device, TOGETHER)):
                with set_aside(device, seed=number):
                    call = observed_call(self._model, data.metrics, batch)
                check_call(call, self._traced)
                inputs = {}
                for source in self._part.reads:
                    inputs.update(self._exchange.receive(self._ranks[source]))
                outputs = Pass(self._part, call, inputs).outputs
                for target, names in self._part.writes.items():
                    self._exchange.send({name: outputs[name] for name in names}, self._ranks[target])
                if self._stage == self._last:
                    returned = outputs[RETURNED]
                    standing = stand_in(self._model, lambda *_, returned=returned, **__: returned)
                    with set_aside(device, seed=number):  # once more: draws as those for the call
                        sums.update(numbers("data.metrics", data.metrics(standing, batch)))
                self._exchange.flush()
        return dict(sums)


def _edges(found: Cut, stage_of: Sequence[int]) -> set[tuple[int, int]]:
    pairs = {(stage_of[edge.source], stage_of[edge.target]) for edge in found.graph.edges if edge.source != BATCH}
    return {(source, target) for source, target in pairs if source != target}
