"""A replica cut into stages, each on one rank or several, through which micro-batches go one behind the other.

Every rank has the batch; only what stages compute for each other travels. From one rank to another there are values of
pieces of micro-batches in their order, the other way their gradients: so who receives knows what comes next, and
nothing has to be told apart. At the end of a slice the last stage tells the loss, and ranks that share a stage add up
their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetsync.balance.profile import StepTime
from hetsync.data import Data
from hetsync.data.evaluation import evaluate_range
from hetsync.data.random_state import set_aside
from hetsync.errors import UserError
from hetsync.plan.blocks import Cut, state_of
from hetsync.plan.calls import Scored, observed_call, stand_in
from hetsync.plan.division import Division
from hetsync.plan.parts import RETURNED, Pass, check_call, detached, gradients_of, split
from hetsync.plan.schedule import schedules, stage_order
from hetsync.plane.base import Channels
from hetsync.replica.base import MicroBatch, Replica, copy_on_host, own_part, scale_to, squared_norms
from hetsync.replica.exchange import Exchange
from hetsync.replica.lockstep import Lockstep, sizes_of
from hetsync.replica.passes import Passes
from hetsync.replica.scores import StagedScores, stages_of_blocks


@dataclass(frozen=True)
class Stages:
    """How a model is cut.

    Attributes:
        stage_of: Stages of the blocks, by block.
        ranks: Ranks of the stages, by stage; no rank twice.
        in_flight: Most micro-batches whose forward ran and whose backward has not, by stage; None is 1F1B's.
        times: Of all ranks, by rank; none are needed where each stage has one.
        least: Samples that go through a stage at once at least, where there are so many.
    """

    stage_of: Sequence[int]
    ranks: Sequence[Sequence[int]]
    in_flight: Sequence[int | None]
    times: Sequence[StepTime] = ()
    least: int = 1

    def __post_init__(self) -> None:
        all_ranks = self.all_ranks
        if set(self.stage_of) != set(range(len(self.ranks))) or len(set(all_ranks)) < len(all_ranks):
            raise ValueError(f"stages {sorted(set(self.stage_of))} on ranks {list(self.ranks)}")
        if len(self.in_flight) != len(self.ranks):
            raise ValueError(f"{len(self.in_flight)} limits in flight for {len(self.ranks)} stages")

    @property
    def all_ranks(self) -> list[int]:
        return [rank for ranks in self.ranks for rank in ranks]

    @property
    def division(self) -> Division:
        return Division(self.ranks, self.times, self.least)

    def edges(self, cut: Cut) -> set[tuple[int, int]]:
        """Between stages."""
        pairs = {
            (self.stage_of[edge.source], self.stage_of[edge.target]) for edge in cut.graph.edges if edge.source >= 0
        }
        return {(source, target) for source, target in pairs if source != target}


class StagedReplica(Replica):
    """One rank's stage.

    Args:
        model: The whole model, in training mode, on this rank's device. The stage trains what of it is `held`.
        cut: The model's blocks.
        loss: Of (model, batch); it calls the model once.
        stages: Which stage is where; those after which no other comes in the graph compute the loss.
        rank: This rank.
        channels: Between the ranks; used by nobody else.
        passes: Times this rank's.
        scoring: The model's forward outside of training, if metrics do nothing with the model but call it: they are
            computed through the stages then, else by the whole model.

    Raises:
        UserError: for a model that cannot be cut.
        graphlib.CycleError: where stages wait for each other.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        loss: Scored,
        stages: Stages,
        rank: int,
        channels: Channels,
        passes: Passes | None = None,
        scoring: Cut | None = None,
    ) -> None:
        if cut.traced is None:
            name = type(model).__name__
            raise UserError(f"{name} cannot be cut into stages: {cut.opaque[name]}: put all of it on one rank")
        super().__init__(model, passes)
        self._loss, self._stages, self._channels = loss, stages, channels
        self._exchange = Exchange(channels, self.device)
        self._traced, self._training = cut.traced, model.training
        self._edges = stages.edges(cut)
        self._rank, self._division = rank, stages.division
        self._stage = next(stage for stage, ranks in enumerate(stages.ranks) if rank in ranks)
        self._last = stage_order(len(stages.ranks), self._edges)[-1]
        parts = split(model, cut.traced, stages.stage_of, self._last)
        self._part = parts[self._stage]
        # What the model returns may go from a stage to the last one past all others.
        self._edges |= {(source, stage) for stage, part in enumerate(parts) for source in part.reads}
        self._owner = _owners(model, cut, stages, [part.module for part in parts])
        self._lockstep = Lockstep(self._division, self._stage, rank, list(self.held), model, channels)
        self._seed = self._begun = 0  # of what losses draw, and micro-batches since
        self._scores: StagedScores | None = None
        if scoring is not None:
            blocks = {block.name: stage for block, stage in zip(cut.graph.blocks, stages.stage_of, strict=True)}
            stage_of = stages_of_blocks(model, scoring, self._owner, blocks)
            if stage_of is not None:
                self._scores = StagedScores(model, scoring, stage_of, self._first_ranks, rank, self._exchange)

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor for name, tensor in state_of(self.model).items() if self._owner[name] == self._stage}

    @property
    def activation_bytes_sent(self) -> int:
        return self._exchange.bytes_sent

    def release(self) -> None:
        """What this rank's operations read it keeps: buffers, and what is held."""
        needed = {id(tensor) for tensor in (*self.held.values(), *self._part.module.parameters())}
        for parameter in self.model.parameters():
            if id(parameter) not in needed:
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    def run(self, micro_batches: Sequence[MicroBatch]) -> float:
        if self.model.training != self._training:
            raise ValueError("the model was cut in another mode than it is in now")
        work = schedules(len(self._stages.ranks), self._edges, len(micro_batches), self._stages.in_flight)
        samples = sum(each.samples for each in micro_batches)
        under_way: dict[int, dict[int, Pass]] = {}
        total = 0.0
        self._lockstep.begin()
        for kind, index in work[self._stage]:
            with self.memory.saving(index):
                if kind == "forward":
                    under_way[index] = self._forward(index, micro_batches[index])
                else:
                    total += self._backward(index, under_way.pop(index), micro_batches[index], samples)
            if kind == "backward":
                self.memory.freed(index)
        self._begun += len(micro_batches)
        self.memory.end_slice()
        self._check_gradients()
        total = self._told_by_last(total)
        self._lockstep.finish(micro_batches)
        self._channels.flush()
        return total

    def seed_losses(self, seed: int) -> None:
        self._seed, self._begun = seed, 0

    def clip_grad_norm(self, greatest: float) -> float:
        squares = self._gathered(squared_norms(self.parameters))
        norm = math.sqrt(math.fsum(square for each in squares for square in each))
        scale_to(self.parameters, norm, greatest)
        return norm

    def whole(self, ranks: Collection[int]) -> nn.Module | None:
        own, first = self.held, self._rank == self._lockstep.ranks[0]
        for rank in ranks:
            if first and rank in self._stages.all_ranks and rank not in self._lockstep.ranks:
                self._channels.send(None, list(own.values()), rank)
        tensors = dict(own)
        if self._rank in ranks:
            for stage, rank in self._others():
                names = [name for name in self._owner if self._owner[name] == stage]
                tensors.update(zip(names, self._channels.receive(rank)[1], strict=True))
        self._channels.flush()
        return copy_on_host(self.model, tensors) if self._rank in ranks else None

    def evaluate(self, data: Data, first: int, stop: int) -> dict[str, float]:
        if self._scores is not None:
            return self._scores.sums(data, first, stop)
        model = self.whole(self._stages.all_ranks)
        assert model is not None
        return evaluate_range(model, data, *own_part(first, stop, self._stages.all_ranks, self._rank))

    def merged(self, values: Mapping[int, Any]) -> dict[int, Any]:
        found, leader = dict(values), min(self._stages.all_ranks)
        if self._rank == leader:
            for _, rank in self._others():
                found |= self._exchange.receive(rank)
        elif self._rank == self._lockstep.ranks[0] and leader not in self._lockstep.ranks:
            self._exchange.send(values, leader)
        self._channels.flush()
        return found

    def _check_gradients(self) -> None:
        """What the loss computes besides calling the model must not take weights, which may be another stage's."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and self._owner[name] != self._stage:
                holder = self._stages.ranks[self._owner[name]][0]
                raise UserError(
                    f"the loss computes with {name} itself, which rank {holder} holds: let the model's forward return"
                    " what the loss needs"
                )

    def _drawing(self, index: int, place: int) -> AbstractContextManager[None]:
        """Around each run of the loss on a piece: all of them, on whichever rank, draw the same at random. The model's
        own draws go on as if the loss had drawn nothing."""
        return set_aside(self.device, seed=hash((self._seed, self._begun + index, place)) & (2**63 - 1))

    def _forward(self, index: int, micro_batch: MicroBatch) -> dict[int, Pass]:
        """Passes of its own pieces by their places."""
        own, ways = self._lockstep.own(micro_batch), self._ways(micro_batch)
        calls, inputs = {}, {}
        for place, piece in own:
            with self._drawing(index, place):
                calls[place] = observed_call(self.model, self._loss, piece.batch)
            check_call(calls[place], self._traced)
            inputs[place] = dict[str, Any]()
            for source in sorted(self._part.reads.keys() - self._part.late):
                inputs[place].update(self._exchange.receive(ways[source][place]))
        under_way = {}
        with self.passes.timed(sizes_of(own), backward=False):
            for place, _ in own:
                under_way[place] = Pass(self._part, calls[place], inputs[place])
        for place, one in under_way.items():
            for target, names in self._part.writes.items():
                self._exchange.send({name: one.outputs[name] for name in names}, ways[target][place])
        return under_way

    def _ways(self, micro_batch: MicroBatch) -> list[tuple[int, ...]]:
        """By stage, the ranks that compute the pieces."""
        return [self._division.owners(stage, micro_batch.samples) for stage in range(len(self._stages.ranks))]

    def _backward(self, index: int, under_way: Mapping[int, Pass], micro_batch: MicroBatch, samples: int) -> float:
        """Its part of the loss, weighted by the slice's `samples`; 0 on all stages but the last.

        There the loss comes first: only it needs what the model returns of stages that run side by side with this one,
        so that the forward pass does not wait for them.
        """
        own, ways = self._lockstep.own(micro_batch), self._ways(micro_batch)
        for place, one in under_way.items():
            for source in sorted(self._part.late):
                one.complete(self._exchange.receive(ways[source][place]))
            for target, names in self._part.writes.items():
                for name, gradients in zip(names, self._exchange.receive_gradients(ways[target][place]), strict=True):
                    one.add_gradients(name, gradients)
        loss = 0.0
        with self.passes.timed(sizes_of(own), backward=True):
            for place, piece in own:
                if self._stage == self._last:
                    with self._drawing(index, place):
                        loss += self._loss_of(under_way[place], piece.batch, piece.samples / samples)
                under_way[place].backward()
        for place, one in under_way.items():
            for source, names in self._part.reads.items():
                self._exchange.send_gradients([one.gradients(name) for name in names], ways[source][place])
        return loss

    def _loss_of(self, under_way: Pass, batch: Any, weight: float) -> float:
        """Weighted; its gradient is that of what the model returns."""
        returned = detached(under_way.outputs[RETURNED])
        loss: torch.Tensor = self._loss(stand_in(self.model, lambda *_, **__: returned), batch) * weight
        loss.backward()
        under_way.add_gradients(RETURNED, gradients_of(returned))
        return loss.item()

    def _told_by_last(self, loss: float) -> float:
        """The sum of what the ranks of the last stage have of the loss, which they alone know."""
        told, last = {self._rank: loss}, self._stages.ranks[self._last]
        if self._stage == self._last:
            for rank in self._other_ranks():
                self._channels.send(loss, [], rank)
        for rank in last:
            if rank != self._rank:
                told[rank], _ = self._channels.receive(rank)
        return sum(told[rank] for rank in last)

    def _gathered(self, value: list[float]) -> list[list[float]]:
        """Every stage's, on every rank."""
        if self._rank == self._lockstep.ranks[0]:
            for rank in self._other_ranks():
                if rank not in self._lockstep.ranks:
                    self._channels.send(value, [], rank)
        told = {stage: self._channels.receive(rank)[0] for stage, rank in self._others()}
        self._channels.flush()
        return [told.get(stage, value) for stage in range(len(self._stages.ranks))]

    def _others(self) -> list[tuple[int, int]]:
        """The other stages, and the first rank of each, which speaks for it."""
        return [(stage, ranks[0]) for stage, ranks in enumerate(self._stages.ranks) if stage != self._stage]

    @property
    def _first_ranks(self) -> list[int]:
        return [ranks[0] for ranks in self._stages.ranks]

    def _other_ranks(self) -> list[int]:
        return [rank for rank in self._stages.all_ranks if rank != self._rank]


def _owners(model: nn.Module, cut: Cut, stages: Stages, modules: Sequence[nn.Module]) -> dict[str, int]:
    """The stage that holds each parameter and buffer; counters among the buffers are no block's."""
    owners = {
        name: stage for block, stage in zip(cut.graph.blocks, stages.stage_of, strict=True) for name in block.parameters
    }
    reading = {id(buffer): stage for stage, module in enumerate(modules) for buffer in module.buffers()}
    return {name: owners.get(name, reading.get(id(tensor), 0)) for name, tensor in state_of(model).items()}
