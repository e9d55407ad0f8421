"""What a replica of the model does, however many ranks it is on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hetsync.plan.calls import Scored
from hetsync.plan.schedule import micro_batch_sizes
from hetsync.replica.passes import Passes


class MicroBatch(NamedTuple):
    """A part of a slice that goes through the model at once, and its samples."""

    batch: Any
    samples: int


@dataclass(frozen=True)
class MicroBatches:
    """Collates samples to as many micro-batches, or to one for each where there are fewer."""

    collate: Callable[[list[Any]], Any]
    count: int

    def __call__(self, samples: list[Any]) -> list[MicroBatch]:
        found, first = [], 0
        for size in micro_batch_sizes(len(samples), min(self.count, len(samples))):
            found.append(MicroBatch(self.collate(samples[first : first + size]), size))
            first += size
        return found


class Replica(ABC):
    """One rank's part in a replica. All methods but `held` are for all its ranks together, in the same order.

    Attributes:
        model: The whole model; what of it is not `held` may be out of date.
        passes: Seconds of this rank's passes.
        activation_bytes_sent: To other stages, gradients among them.
    """

    model: nn.Module
    passes: Passes
    activation_bytes_sent: int = 0

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
    def clip_grad_norm(self, greatest: float) -> float:
        """Scale the gradients of all weights, wherever they are, to a norm of at most `greatest`; the norm before."""

    @abstractmethod
    def gather(self) -> None:
        """Bring the whole model up to date, on every rank."""

    @abstractmethod
    def merged(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """What all ranks have by some keys, tensors and plain values, on the leader; elsewhere what this rank has."""

    def evaluate(self, metrics: Scored, batches: Iterable[Any]) -> dict[str, float]:
        """What metrics say of batches of this rank's own, summed, by the whole model. Leaves its mode as it was."""
        self.gather()
        training = self.model.training
        self.model.eval()
        sums: Counter[str] = Counter()
        try:
            with torch.no_grad():
                for batch in batches:
                    sums.update(metrics(self.model, batch))
        finally:
            self.model.train(training)
        return dict(sums)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are held: what this rank's optimizer steps."""
        return [tensor for tensor in self.held.values() if isinstance(tensor, nn.Parameter)]


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Of their gradients, in double precision."""
    norms = [parameter.grad.double().norm() for parameter in parameters if parameter.grad is not None]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def scale_to(parameters: Iterable[nn.Parameter], norm: float, greatest: float) -> None:
    """Scale gradients that have this norm together, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = min(1.0, greatest / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
