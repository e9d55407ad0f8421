"""Sums of each tensor over its holders: of every replica, where they make each step together, or of a stage that
several ranks share.

A segment is what has the same holders. Each of them adds up a shard of it, in the order of replicas, and tells the
others the sum: so all hold the same bits, and as many bytes travel as in a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hetsync.errors import UserError
from hetsync.plan.graph import BlockGraph
from hetsync.plan.placement import Placement
from hetsync.plane.base import Channels
from hetsync.sync.buffers import WRITTEN, Unruled, buffers_of
from hetsync.sync.reals import summed_in
from hetsync.sync.tail import added_buffers, shared_buffers

Segments = Mapping[tuple[int, ...], Sequence[str]]  # names of tensors, by their holders


def segments_of(placement: Placement, graph: BlockGraph) -> Segments:
    """Of a model's float tensors; holders are in the order of replicas."""
    found: dict[tuple[int, ...], list[str]] = {}
    for number, block in enumerate(graph.blocks):
        stages = [replica.stages[replica.stage_of[number]] for replica in placement.replicas]
        holders = tuple(rank for stage in stages for rank in stage.ranks)
        found.setdefault(holders, []).extend(block.parameters)
    return found


def sum_over(holders: tuple[int, ...], addend: torch.Tensor, rank: int, channels: Channels) -> torch.Tensor:
    """Of flat tensors on the host, by all holders together; the same bits on each."""
    others = [holder for holder in holders if holder != rank]
    shards = addend.tensor_split(len(holders))
    for holder, shard in zip(holders, shards, strict=True):
        if holder != rank:
            channels.send(None, [shard], holder)
    own = shards[holders.index(rank)]
    addends = [own if holder == rank else channels.receive(holder)[1][0] for holder in holders]
    total = torch.stack(addends).sum(dim=0)
    for holder in others:
        channels.send(None, [total], holder)
    found = torch.cat([total if holder == rank else channels.receive(holder)[1][0] for holder in holders])
    channels.flush()
    return found


class SegmentSums:
    """One rank's part. Both methods are for all holders together."""

    def __init__(self, segments: Segments, model: nn.Module, rank: int, channels: Channels) -> None:
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        shared = {id(buffer) for buffer in shared_buffers(model)}
        buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) in shared}
        own = {holders: names for holders, names in sorted(segments.items()) if rank in holders}
        self._weights = {
            holders: [weights[name] for name in names if name in weights] for holders, names in own.items()
        }
        self._buffers = {
            holders: [buffers[name] for name in names if name in buffers] for holders, names in own.items()
        }
        self._added = {id(buffer) for buffer in added_buffers(model)}
        self._unruled = Unruled(model)
        if told := [name for name, buffer in buffers_of(model, *WRITTEN).items() if buffer.is_floating_point()]:
            raise UserError(
                f"buffer {told[0]} has values that ranks write, which ranks that hold a part of the model together do"
                " not tell each other: leave the plan out"
            )
        self._before: dict[torch.Tensor, torch.Tensor] = {}
        self._rank, self._channels = rank, channels

    def begin(self) -> None:
        """A slice begins, with buffers that are the same on all holders."""
        self._unruled.begin()
        self._before = {buffer: buffer.clone() for each in self._buffers.values() for buffer in each}

    @torch.no_grad()
    def finish(self, weight: float, of_buffers: float | None = None, of_added: float = 1.0) -> None:
        """Gradients become their sum, and buffers move by that of their changes, each times its holder's `weight`;
        `of_buffers` is that of changes, where it is another, and `of_added` that of increments that add up.

        A gradient that no holder has stays None.
        """
        self._unruled.check()
        weights = (weight, weight if of_buffers is None else of_buffers, of_added)
        shards = {holders: self._packed(holders, *weights).tensor_split(len(holders)) for holders in self._weights}
        for holders, own in shards.items():
            self._tell(holders, dict(zip(holders, own, strict=True)))
        sums = {holders: self._sum_of_own_shard(holders, own) for holders, own in shards.items()}
        for holders, total in sums.items():
            self._tell(holders, dict.fromkeys(holders, total))
        for holders, total in sums.items():
            parts = [total if holder == self._rank else self._from(holder) for holder in holders]
            self._unpack(holders, torch.cat(parts))
        self._channels.flush()

    def _tell(self, holders: tuple[int, ...], tensors: Mapping[int, torch.Tensor]) -> None:
        for holder in holders:
            if holder != self._rank:
                self._channels.send(None, [tensors[holder]], holder)

    def _from(self, holder: int) -> torch.Tensor:
        return self._channels.receive(holder)[1][0]

    def _sum_of_own_shard(self, holders: tuple[int, ...], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        own = shards[holders.index(self._rank)]
        addends = [own if holder == self._rank else self._from(holder) for holder in holders]
        return torch.stack(addends).sum(dim=0)

    def _packed(self, holders: tuple[int, ...], weight: float, of_buffers: float, of_added: float) -> torch.Tensor:
        """Whether there are gradients, the gradients, and what buffers have changed by."""
        weights, buffers = self._weights[holders], self._buffers[holders]
        there = torch.tensor([float(each.grad is not None) for each in weights])
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad * weight for each in weights]
        changes = [
            (buffer - self._before[buffer]) * (of_added if id(buffer) in self._added else of_buffers)
            for buffer in buffers
        ]
        dtype = summed_in([*weights, *buffers])
        return torch.cat([there.to(dtype), *(each.flatten().to(dtype).cpu() for each in (*gradients, *changes))])

    def _unpack(self, holders: tuple[int, ...], flat: torch.Tensor) -> None:
        weights, buffers = self._weights[holders], self._buffers[holders]
        there, *values = flat.split([len(weights), *(each.numel() for each in (*weights, *buffers))])
        for weight, has, value in zip(weights, there, values[: len(weights)], strict=True):
            weight.grad = value.view_as(weight).to(weight) if has else None
        for buffer, value in zip(buffers, values[len(weights) :], strict=True):
            buffer.copy_(self._before[buffer] + value.view_as(buffer).to(buffer))
