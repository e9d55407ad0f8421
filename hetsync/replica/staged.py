"""A replica cut into stages, each on a rank of its own, through which micro-batches go one behind the other.

Every rank has the batch; only what stages compute for each other travels. From one stage to another there are values of
micro-batches in their order, the other way their gradients: so who receives knows what comes next, and nothing has to
be told apart. At the end of a slice the last stage tells the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hetsync.errors import UserError
from hetsync.plan.blocks import Cut
from hetsync.plan.calls import Scored, observed_call, stand_in
from hetsync.plan.parts import RETURNED, Gradients, Pass, check_call, detached, gradients_of, split
from hetsync.plan.schedule import schedules, stage_order
from hetsync.plane.base import Channels
from hetsync.replica.base import MicroBatch, Replica, scale_to, squared_norm
from hetsync.replica.passes import Passes


@dataclass(frozen=True)
class Stages:
    """How a model is cut.

    Attributes:
        stage_of: Stages of the blocks, by block.
        ranks: Ranks of the stages, by stage; no rank twice.
        in_flight: Most micro-batches whose forward ran and whose backward has not, by stage; None is 1F1B's.
    """

    stage_of: Sequence[int]
    ranks: Sequence[int]
    in_flight: Sequence[int | None]

    def __post_init__(self) -> None:
        if set(self.stage_of) != set(range(len(self.ranks))) or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"stages {sorted(set(self.stage_of))} on ranks {list(self.ranks)}")
        if len(self.in_flight) != len(self.ranks):
            raise ValueError(f"{len(self.in_flight)} limits in flight for {len(self.ranks)} stages")

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
    ) -> None:
        if cut.traced is None:
            name = type(model).__name__
            raise UserError(f"{name} cannot be cut into stages: {cut.opaque[name]}: put all of it on one rank")
        self.model, self._loss, self._stages, self._channels = model, loss, stages, channels
        self.passes = passes or Passes()
        self._traced, self._training = cut.traced, model.training
        self._edges = stages.edges(cut)
        self._stage = stages.ranks.index(rank)
        self._last = stage_order(len(stages.ranks), self._edges)[-1]
        parts = split(model, cut.traced, stages.stage_of, self._last)
        self._part = parts[self._stage]
        # What the model returns may go from a stage to the last one past all others.
        self._edges |= {(source, stage) for stage, part in enumerate(parts) for source in part.reads}
        self._owner = _owners(model, cut, stages, [part.module for part in parts])

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor for name, tensor in _state(self.model).items() if self._owner[name] == self._stage}

    def run(self, micro_batches: Sequence[MicroBatch]) -> float:
        if self.model.training != self._training:
            raise ValueError("the model was cut in another mode than it is in now")
        work = schedules(len(self._stages.ranks), self._edges, len(micro_batches), self._stages.in_flight)
        samples = sum(each.samples for each in micro_batches)
        under_way: dict[int, Pass] = {}
        total = 0.0
        for kind, index in work[self._stage]:
            if kind == "forward":
                under_way[index], loss = self._forward(micro_batches[index], micro_batches[index].samples / samples)
                total += loss
            else:
                self._backward(under_way.pop(index), micro_batches[index].samples)
        self._check_gradients()
        return self._told_by_last(total)

    def clip_grad_norm(self, greatest: float) -> float:
        norm = math.sqrt(sum(self._gathered(squared_norm(self.parameters))))
        scale_to(self.parameters, norm, greatest)
        return norm

    def gather(self) -> None:
        state = _state(self.model)
        own = list(self.held.values())
        for _, rank in self._others():
            self._channels.send(None, own, rank)
        with torch.no_grad():
            for stage, rank in self._others():
                _, tensors = self._channels.receive(rank)
                names = [name for name in state if self._owner[name] == stage]
                for name, tensor in zip(names, tensors, strict=True):
                    state[name].copy_(tensor)
        self._channels.flush()

    def merged(self, values: Mapping[int, Any]) -> dict[int, Any]:
        found, ranks = dict(values), self._stages.ranks
        leader = ranks.index(min(ranks))
        if self._stage == leader:
            for stage, _ in self._others():
                found |= self._receive(stage)
        else:
            self._send(values, leader)
        self._channels.flush()
        return found

    def _check_gradients(self) -> None:
        """What the loss computes besides calling the model must not take weights, which may be another stage's."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and self._owner[name] != self._stage:
                holder = self._stages.ranks[self._owner[name]]
                raise UserError(
                    f"the loss computes with {name} itself, which rank {holder} holds: let the model's forward return"
                    " what the loss needs"
                )

    def _forward(self, micro_batch: MicroBatch, weight: float) -> tuple[Pass, float]:
        call = observed_call(self.model, self._loss, micro_batch.batch)
        check_call(call, self._traced)
        inputs: dict[str, Any] = {}
        for source in self._part.reads:
            inputs.update(self._receive(source))
        with self.passes.timed(micro_batch.samples, backward=False):
            under_way = Pass(self._part, call, inputs)
            loss = self._loss_of(under_way, micro_batch.batch, weight) if self._stage == self._last else 0.0
        for target, names in self._part.writes.items():
            self.activation_bytes_sent += self._send({name: under_way.outputs[name] for name in names}, target)
        return under_way, loss

    def _loss_of(self, under_way: Pass, batch: Any, weight: float) -> float:
        """Weighted; its gradient is that of what the model returns."""
        returned = detached(under_way.outputs[RETURNED])
        loss: torch.Tensor = self._loss(stand_in(self.model, lambda *_, **__: returned), batch) * weight
        loss.backward()
        under_way.add_gradients(RETURNED, gradients_of(returned))
        return loss.item()

    def _backward(self, under_way: Pass, samples: int) -> None:
        for target, names in self._part.writes.items():
            for name, gradients in zip(names, self._receive_gradients(target), strict=True):
                under_way.add_gradients(name, gradients)
        with self.passes.timed(samples, backward=True):
            under_way.backward()
        for source, names in self._part.reads.items():
            self._send_gradients([under_way.gradients(name) for name in names], source)

    def _send(self, values: Mapping[Any, Any], stage: int) -> int:
        """Returns the bytes of tensors among them."""
        tensors: list[torch.Tensor] = []

        def stowed(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return _Stowed(len(tensors) - 1, value.requires_grad)
            return _Device() if isinstance(value, torch.device) else value

        note = tree_map(stowed, dict(values))
        self._channels.send(note, tensors, self._stages.ranks[stage])
        return sum(tensor.nbytes for tensor in tensors)

    def _receive(self, stage: int) -> dict[Any, Any]:
        note, tensors = self._channels.receive(self._stages.ranks[stage])

        def unstowed(value: Any) -> Any:
            if isinstance(value, _Stowed):
                return tensors[value.place].to(self._device).requires_grad_(value.requires_grad)
            return self._device if isinstance(value, _Device) else value

        values: dict[Any, Any] = tree_map(unstowed, note)
        return values

    def _send_gradients(self, gradients: Sequence[Gradients], stage: int) -> None:
        note = [[gradient is not None for gradient in each] for each in gradients]
        tensors = [gradient for each in gradients for gradient in each if gradient is not None]
        self._channels.send(note, tensors, self._stages.ranks[stage])
        self.activation_bytes_sent += sum(tensor.nbytes for tensor in tensors)

    def _receive_gradients(self, stage: int) -> list[Gradients]:
        note, tensors = self._channels.receive(self._stages.ranks[stage])
        arrived = iter(tensors)
        return [[next(arrived).to(self._device) if there else None for there in each] for each in note]

    def _told_by_last(self, loss: float) -> float:
        """The loss of the last stage, which alone knows it; and all that was sent has arrived."""
        if self._stage == self._last:
            for _, rank in self._others():
                self._channels.send(loss, [], rank)
        else:
            loss, _ = self._channels.receive(self._stages.ranks[self._last])
        self._channels.flush()
        return loss

    def _gathered(self, value: float) -> list[float]:
        """Every stage's, on every rank in the same order: sums of them have the same bits."""
        for _, rank in self._others():
            self._channels.send(value, [], rank)
        told = {stage: self._channels.receive(rank)[0] for stage, rank in self._others()}
        self._channels.flush()
        return [told.get(stage, value) for stage in range(len(self._stages.ranks))]

    def _others(self) -> list[tuple[int, int]]:
        return [(stage, rank) for stage, rank in enumerate(self._stages.ranks) if stage != self._stage]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(frozen=True)
class _Stowed:
    """Where a tensor was among the values of a note."""

    place: int
    requires_grad: bool


@dataclass(frozen=True)
class _Device:
    """A device among the values: the receiver's own."""


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _owners(model: nn.Module, cut: Cut, stages: Stages, modules: Sequence[nn.Module]) -> dict[str, int]:
    """The stage that holds each parameter and buffer; counters among the buffers are no block's."""
    owners = {
        name: stage for block, stage in zip(cut.graph.blocks, stages.stage_of, strict=True) for name in block.parameters
    }
    reading = {id(buffer): stage for stage, module in enumerate(modules) for buffer in module.buffers()}
    return {name: owners.get(name, reading.get(id(tensor), 0)) for name, tensor in _state(model).items()}
