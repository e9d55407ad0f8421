"""State that a loop carries from one batch into the next: it belongs to the sequences of the batch before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.rnn import RNNBase, RNNCellBase
from torch.utils.hooks import RemovableHandle

from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError

WATCHED_BATCHES = 3  # of this rank: what is carried is carried into the second


def keeps_columns(sync: SyncConfig, ranks: int) -> bool:
    """Is each batch cut at the same places, so that a rank's samples follow those that it had before?"""
    fixed = not sync.rebalance or sync.shares != "speed"
    return ranks == 1 or (sync.delay_bound == 0 and sync.first_accumulation == 1 and fixed)


class CarriedState:
    """Looks at what models and their recurrent layers are given in a job's first batches: is it what they returned in
    an earlier one? Tensors that share memory are the same, detached or not."""

    def __init__(self, models: Iterable[torch.nn.Module], ranks: int) -> None:
        self._ranks = ranks
        self._batches = 0
        self._returned: dict[torch.nn.Module, tuple[int, list[weakref.ref[Any]]]] = {}  # in which batch
        self._handles: list[RemovableHandle] = []
        for module in _watched(models):
            self._handles += [
                module.register_forward_pre_hook(self._check, with_kwargs=True),
                module.register_forward_hook(self._remember, with_kwargs=True),
            ]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model that is watched is not."""
        return CarriedState, ((), self._ranks)

    def begin_batch(self) -> None:
        self._batches += 1
        if self._batches > WATCHED_BATCHES:
            self.close()

    def close(self) -> None:
        """Models are as they were."""
        while self._handles:
            self._handles.pop().remove()
        self._returned.clear()

    def _check(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        number, returned = self._returned.get(module, (self._batches, []))
        if number == self._batches or not module.training:
            return
        before = [storage for ref in returned if (storage := ref()) is not None]
        if any(storage is known for storage in _storages((args, kwargs)) for known in before):
            raise UserError(
                f"the loop gives the {type(module).__name__} state that it returned in an earlier batch, but on"
                f" {self._ranks} ranks the next batch holds other sequences: begin each batch with new state, or keep"
                " each rank at its place of every batch, by sync.delay_bound 0, sync.accumulation 1 and sync.rebalance"
                " false"
            )

    def _remember(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._batches and module.training:
            given = list(_storages((args, kwargs)))  # such as a graph, which it may hand on
            found = [storage for storage in _storages(output) if not any(storage is one for one in given)]
            self._returned[module] = self._batches, [weakref.ref(storage) for storage in found]


def _watched(models: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Not what is compiled, into which hooks would be, too."""
    for model in models:
        if not any(map(_is_compiled, model.modules())):
            layers = {module for module in model.modules() if isinstance(module, RNNBase | RNNCellBase)}
            yield from {model, *layers}


def _is_compiled(module: torch.nn.Module) -> bool:
    called_compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return called_compiled or isinstance(module, torch.jit.ScriptModule)


def _storages(value: Any) -> Iterator[Any]:
    """Of the tensors in tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            yield value.untyped_storage()
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _storages(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _storages(one)
