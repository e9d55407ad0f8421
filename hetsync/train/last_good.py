"""Checkpoints in the host's memory, that every rank keeps of rests before delayed training: where delay loses training,
all go back to one (`rollback.py`), though nothing may have been saved to disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetsync.errors import UserError
from hetsync.profiling.device import available_host_bytes
from hetsync.sync.optimizer_state import state_by_place
from hetsync.sync.sparse import dense_parts
from hetsync.train import state_tree
from hetsync.train.checkpoint import Loaded, Progress, kind_of
from hetsync.train.frozen_file import frozen_weights

COPIES = 3  # two that are kept, and one that is being made
MOST_OF_MEMORY = 0.5  # of what the host has left, by all of its ranks


class LastGood:
    """Two of them: the newest, which training may have been lost before, and the newest from when losses were good."""

    def __init__(self) -> None:
        self._copies: list[Loaded] = []

    @property
    def positions(self) -> list[int]:
        """Samples applied, from the oldest on."""
        return [each.progress.samples_applied for each in self._copies]

    def at(self, applied: int) -> Loaded:
        return next(each for each in self._copies if each.progress.samples_applied == applied)

    def keep(self, copy: Loaded | None, good: int) -> None:
        """Beside the newest of when losses were good: after `good` samples. None: there can be no more."""
        if copy is None:
            self._copies = []
            return
        before = [each for each in self._copies if each.progress.samples_applied < copy.progress.samples_applied]
        proven = [each for each in before if each.progress.samples_applied <= good]
        self._copies = [*(proven[-1:] or before[:1]), copy]


def to_go_back_to(positions: Sequence[int], good: int) -> int:
    """Of the samples applied that copies are of: the newest from when losses were good, after `good`; or the oldest."""
    return max((each for each in positions if each <= good), default=min(positions))


def copied(
    progress: Progress,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: torch.Tensor | None,
    state: Mapping[str, Any],
    ranks_here: int,
) -> Loaded | None:
    """At rest; as `checkpoint.save`. What is frozen is not copied. None for a state that no checkpoint could keep, and
    where memory is too short for three of them, of a host with so many ranks."""
    weights, frozen = model.state_dict(), frozen_weights(model)
    trained = {name: value for name, value in weights.items() if name not in frozen}
    tree = {"model": trained, "optimizer": state_by_place(optimizers), "outer": outer, "state": dict(state)}
    try:
        plain, tensors = state_tree.flatten(tree)
    except UserError:
        return None
    needed, free = sum(part.nbytes for each in tensors.values() for part in dense_parts(each)), available_host_bytes()
    if free is not None and COPIES * needed * ranks_here > MOST_OF_MEMORY * free:
        return None
    kept = state_tree.unflatten(plain, {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()})
    weights.update(kept["model"])
    return Loaded(Path(), progress, weights, kept["optimizer"], kind_of(optimizers), kept["outer"], kept["state"])
