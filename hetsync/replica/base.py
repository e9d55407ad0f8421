"""What a replica of the model does, however many ranks it is on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from hetsync.data import Data
from hetsync.data.workers import Collate, fetch
from hetsync.doubles import doubled
from hetsync.plan.blocks import state_of
from hetsync.plan.division import WHOLE, Division
from hetsync.plan.schedule import micro_batch_sizes
from hetsync.replica.memory import Memory
from hetsync.replica.passes import Passes


class Piece(NamedTuple):
    """What goes through the model at once, and its samples."""

    batch: Any
    samples: int


class MicroBatch(NamedTuple):
    """What goes through the stages together: in one piece, or in several where ranks share a stage."""

    pieces: Sequence[Piece]

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)


@dataclass(frozen=True)
class MicroBatches:
    """A loader's collate of indices: fetches their samples as so many micro-batches, or fewer where these would have
    fewer than the `division` has at least.

    `collate` of the `dataset`'s samples: PyTorch's default_collate where None. Cut by their indices, and not once they
    have been fetched, since a data set may return whole batches.
    """

    dataset: Dataset[Any]
    collate: Collate | None
    count: int
    division: Division = WHOLE

    def __call__(self, indices: Sequence[int]) -> list[MicroBatch]:
        coming, found = iter(indices), []
        count = max(1, min(self.count, len(indices) // self.division.least))
        for size in micro_batch_sizes(len(indices), count):
            pieces = [(list(islice(coming, part)), part) for part in self.division.pieces(size)]
            found.append(MicroBatch([Piece(fetch(self.dataset, taken, self.collate), part) for taken, part in pieces]))
        return found


class Replica(ABC):
    """One rank's part in a replica. Its methods, but for `release`, are for all its ranks together, in the same order.

    Attributes:
        model: The whole model; what of it is not `held` may be out of date, or released.
        passes: Seconds of this rank's passes.
        memory: What they need.
    """

    def __init__(self, model: nn.Module, passes: Passes | None) -> None:
        self.model = model
        self.passes = passes or Passes()
        self.memory = Memory(model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def activation_bytes_sent(self) -> int:
        """To other stages, gradients among them."""
        return 0

    @property
    @abstractmethod
    def held(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers that this rank trains, by their names in the model."""

    @abstractmethod
    def run(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Forward and backward; each rank gets the same micro-batches.

        Returns:
            Mean loss over the samples, on every rank. Its gradient is added to that of the weights that are held.
        """

    @abstractmethod
    def seed_losses(self, seed: int) -> None:
        """What losses draw at random begins anew, where several ranks must draw it alike; all get the same seed."""

    @abstractmethod
    def clip_grad_norm(self, greatest: float) -> float:
        """Scale the gradients of all weights, wherever they are, to a norm of at most `greatest`; the norm before."""

    def update(self, optimizer: torch.optim.Optimizer, greatest_norm: float | None) -> None:
        """A step on the gradients, scaled to a norm of at most so much, which are gone then."""
        if greatest_norm is not None:
            self.clip_grad_norm(greatest_norm)
        with self.passes.updating():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def release(self) -> None:
        """Give the memory back of what is not held. From now on the model can be run through its replica only."""

    @abstractmethod
    def whole(self, ranks: Collection[int]) -> nn.Module | None:
        """The model with all its weights up to date, in the host's memory, on those of the replica's ranks that are
        named; elsewhere None. To be read only: what is held need not be a copy."""

    @abstractmethod
    def merged(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """What all ranks have by some keys, tensors and plain values, on the leader; elsewhere what this rank has."""

    @abstractmethod
    def evaluate(self, data: Data, first: int, stop: int) -> dict[str, float]:
        """This rank's part of the sums of the metrics over test samples [first, stop), which its ranks share."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are held: what this rank's optimizer steps."""
        return [tensor for tensor in self.held.values() if isinstance(tensor, nn.Parameter)]


def squared_norms(parameters: Iterable[nn.Parameter]) -> list[float]:
    """Of each of their gradients, in double precision. Added up exactly (`math.fsum`) they have one sum, however the
    model is cut: replicas that clip alike step alike."""
    norms = [doubled(parameter.grad).norm() for parameter in parameters if parameter.grad is not None]
    return list(torch.stack(norms).square().tolist()) if norms else []


def scale_to(parameters: Iterable[nn.Parameter], norm: float, greatest: float) -> None:
    """Scale gradients that have this norm together, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = min(1.0, greatest / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def copy_on_host(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model with these parameters and buffers, by their names; those on the host are not copied."""
    placed: dict[int, Any] = {}
    for name, tensor in state_of(model).items():
        value = tensors[name].detach().cpu()
        is_weight = isinstance(tensor, nn.Parameter)
        placed[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_weight else value
    return deepcopy(model, placed)


def own_part(first: int, stop: int, ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Of samples [first, stop), those of a rank: as many as of every other."""
    begin, end = (first + (stop - first) * place // len(ranks) for place in (ranks.index(rank), ranks.index(rank) + 1))
    return begin, end
