"""Copies of what is to be put back: where a rank's death voids a synchronous round between two of its steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch

from hetsync.sync.group_state import GroupState, kept, put, settings_of
from hetsync.sync.sparse import dense_parts


class Tensors:
    """Values of tensors, as they are now."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def are(self, now: Sequence[torch.Tensor]) -> bool:
        """Do these, which may be others in their places, have the same values?"""
        pairs = zip(now, self._kept, strict=False)
        return len(now) == len(self._kept) and all(_equal(tensor, value) for tensor, (_, value) in pairs)

    @torch.no_grad()
    def put_back(self) -> None:
        """What is the same is not written: `ModelTensors` takes that for a change of what ranks do not share."""
        for tensor, value in self._kept:
            if not _equal(tensor, value):
                tensor.copy_(value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(map(torch.equal, map(_bytes, dense_parts(one)), map(_bytes, dense_parts(other))))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Which are equal where values are nan, too."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class BeforeStep:
    """What an optimizer's step is about to change: its weights, their state, and what its groups hold."""

    def __init__(self, groups: GroupState) -> None:
        self._groups, self._optimizer = groups, groups.optimizer
        self._of_weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        self._weights = Tensors(self._of_weights)
        state = self._optimizer.state
        self._state = {weight: copy.deepcopy(state[weight]) for weight in self._of_weights if weight in state}
        self._settings = [kept(settings_of(group)) for group in self._optimizer.param_groups]

    def put_back(self) -> None:
        self._weights.put_back()
        for weight in self._of_weights:
            self._optimizer.state.pop(weight, None)
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for name in settings_of(group).keys() - settings.keys():
                del group[name]
            for name, value in settings.items():
                put(group, name, value, self._optimizer)
        self._groups.settle()
