"""What Lightning's trainer and Fabric ask of all ranks, and their parts of test data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hetsync.errors import UserError
from hetsync.train.evaluation import EvaluationLoader
from hetsync.train.job import Job

REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda values: values.sum(0) / len(values),
    "avg": lambda values: values.sum(0) / len(values),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


class AtRest:
    """Of a strategy, the part that speaks with other ranks: before training, and at rest.

    Attributes:
        job: This rank's part in it.
        in_step: Does the script compute on a batch? Ranks have different numbers of these.
    """

    job: Job
    in_step = False

    def take_ranks(self) -> None:
        """From the job, for whoever asks the strategy."""
        self.global_rank, self.local_rank, self.world_size = self.job.rank, self.job.local_rank, self.job.size
        self.node_rank = 0

    @property
    def root_device(self) -> torch.device:
        return self.job.device

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_main

    def test_loader(self, loader: Any) -> EvaluationLoader:
        """UserError for fewer samples than ranks."""
        samples = len(loader.dataset)
        if samples < self.world_size:
            raise UserError(
                f"a data set to evaluate has {samples} samples for {self.world_size} ranks: give each one at least"
            )
        return self.job.test_loader(loader)

    def meet(self, what: str, value: Any = None) -> list[Any]:
        """Collective: everybody's values, in the order of ranks."""
        if self.in_step:
            raise UserError(
                f"{what} was asked of all ranks in a step, where each has batches of its own: ask at the end of an"
                " epoch, or of test data (on_validation_epoch_end, ModelCheckpoint(every_n_epochs=1),"
                " Timer(interval='epoch'))"
            )
        told = self.job.gather((what, value))
        for rank, (theirs, _) in enumerate(told):
            if theirs != told[0][0]:
                raise UserError(
                    f"rank {rank} came to {theirs} while rank 0 came to {told[0][0]}: all ranks must ask the same, in"
                    " the same order (not within a condition on the rank, or on its batches)"
                )
        return [theirs for _, theirs in told]

    def reduced(self, tensor: Any, reduce_op: Any) -> torch.Tensor:
        """Collective. `reduce_op`: a name, or an operation of torch.distributed."""
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in REDUCTIONS:
            raise UserError(f"ranks were to take the {reduce_op} of their values: they know {', '.join(REDUCTIONS)}")
        found = [torch.as_tensor(value, device=self.root_device) for value in self.meet("reduce", tensor)]
        return REDUCTIONS[name](torch.stack(found))

    def barrier(self, name: str | None = None) -> None:
        self.meet("barrier" if name is None else f"barrier {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.meet("broadcast", obj if self.global_rank == src else None)[src]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Of shape (ranks, ...); of one rank its own."""
        if sync_grads:
            raise UserError("all_gather was called with sync_grads: ranks carry no gradients through it")
        found = [value.to(self.root_device) for value in self.meet("all_gather", tensor)]
        if len(shapes := {tuple(value.shape) for value in found}) > 1:
            raise UserError(
                f"all_gather got tensors of the shapes {', '.join(map(str, sorted(shapes)))}, as ranks have parts of"
                " unequal size: take strategy.job.gather(tensor), which returns a list, or a metric"
            )
        return torch.stack(found) if len(found) > 1 else found[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = self.meet("a decision", bool(decision))
        return min(decisions) if all else max(decisions)


class RankPart:
    """In place of a `DataLoader` to evaluate on, over which a script loops by itself: this rank's part."""

    def __init__(self, loader: EvaluationLoader, stepping: Callable[[bool], None] = lambda within: None) -> None:
        """`stepping` is told when the script computes on a batch, and when it does no more."""
        self._loader = loader
        self._stepping = stepping
        self.dataset = loader.whole
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return -(-len(self._loader.rank_part) // self._loader.batch_size)

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in self._loader.batches_of(self._loader.rank_part):
                self._stepping(True)
                yield batch
                self._stepping(False)
        finally:
            self._stepping(False)
