"""The tensors of a model that a job began with, against those that the model has now.

Ranks synchronise the tensors that were there when the job began. Modules may put others in their place:

    self.mean = 0.9 * self.mean + 0.1 * x.mean()      a buffer assigned anew
    weight.data = ...                                 other memory behind a weight or a buffer
    backbone.requires_grad_(True)                     a weight unfrozen
    optimizer.add_param_group(...)                    weights that nobody knew

What is left unnoticed would train on each rank for itself. So after each step buffers and weights are put back
where they were, with their new values, and the rest is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hetsync.errors import UserError
from hetsync.sync.buffers import Holder, Unruled, buffers_of, saved_buffers
from hetsync.sync.sparse import dense_parts, equal


@contextmanager
def all_trained(weights: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """In the block they all require a gradient, those too that a script has frozen for now: its loop may unfreeze them
    at any batch, so ranks share them."""
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


class ModelTensors:
    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], alone: bool = False
    ) -> None:
        """`alone`: no other rank has to hold the same. UserError where an optimizer has weights that the model has
        not."""
        self._model = model
        self._optimizers = optimizers
        self._names = list(_names(model))
        self._weights = dict(model.named_parameters())
        self._frozen = [(name, weight) for name, weight in self._weights.items() if not weight.requires_grad]
        self._buffers = list(_buffers(model))
        dense = [(name, buffer) for _, _, name, buffer in self._buffers if buffer.layout is torch.strided]
        tensors = [*(("weight", *each) for each in self._weights.items()), *(("buffer", *each) for each in dense)]
        self._storage = [(what, name, tensor, tensor.detach()) for what, name, tensor in tensors]
        self._addresses = self._addresses_now()
        summed = {} if alone else buffers_of(model, "mean", "sum")
        self._unshared = _versions(self._frozen)
        self._infinite = _versions((name, buffer) for name, buffer in summed.items() if _not_finite(buffer))
        self._unruled = Unruled(torch.nn.Module() if alone else model)
        self._known = {id(weight) for weight in self._weights.values()}
        self._groups = 0
        self._check_groups()

    def restore(self) -> None:
        """After each step, before anything is synchronised. UserError where that cannot be done."""
        if self._addresses_now() != self._addresses:
            self._restore_memory()
        for holder, key, name, tensor in self._buffers:
            if (now := holder.get(key)) is not tensor:
                self._restore_buffer(holder, key, name, tensor, now)
        for name, weight in self._frozen:
            if weight.requires_grad:
                raise UserError(
                    f"weight {name} was unfrozen in the loop, and ranks do not share it yet: unfreeze between epochs,"
                    " where all ranks are at rest, or let it require a gradient when training starts"
                )
        for name, tensor, version in self._unshared:
            if tensor._version != version:
                raise UserError(
                    f"{name} was changed while training runs, and ranks do not share weights that require no gradient:"
                    f" make it a buffer (register_buffer) and say job.prepare(model, buffers={{{name!r}: 'mean'}});"
                    " or, as an average of weights, a module beside the prepared model that the loop updates after its"
                    " step, and that job.keep_average is given"
                )
        for name, buffer, version in self._infinite:
            if buffer._version != version:
                raise UserError(
                    f"{name} was changed while training runs, and had infinities, which have no mean or sum: the"
                    f" least of what ranks write is job.prepare(model, buffers={{{name!r}: 'min'}}), the greatest 'max'"
                )
        self._unruled.check()
        if self._count_groups() != self._groups:
            self._check_groups()

    def begin(self) -> None:
        """Training goes on after a rest: what the script has done there to what ranks do not share holds."""
        self._unshared = _versions((name, tensor) for name, tensor, _ in self._unshared)
        self._infinite = _versions((name, buffer) for name, buffer, _ in self._infinite)
        self._unruled.begin()

    def check(self) -> None:
        """As `restore`; and the model has the same weights and buffers as ever. UserError where it has not."""
        self.restore()
        if (names := list(_names(self._model))) != self._names:
            odd = sorted(set(names) ^ set(self._names))
            raise UserError(
                f"the model's tensors are others than when training began ({', '.join(odd[:3]) or 'another order'}):"
                " build the whole model first (where forward makes weights, call it on a batch before the optimizer is"
                " made), and change the values of its tensors only"
            )
        for name, weight in self._model.named_parameters():
            if weight is not self._weights[name]:
                raise UserError(f"weight {name} is another one than when training began: change its values in place")

    @property
    def layout(self) -> list[tuple[str, bool]]:
        """What is trained and what is not, as it is to be on every rank."""
        trained = [(name, weight.requires_grad) for name, weight in self._model.named_parameters()]
        return [*trained, *((name, False) for _, _, name, _ in _buffers(self._model))]

    @property
    def frozen(self) -> set[int]:
        """Weights that ranks do not share, by id."""
        return {id(weight) for _, weight in self._frozen}

    @property
    def shared(self) -> list[torch.nn.Parameter]:
        frozen = self.frozen
        return [weight for weight in self._weights.values() if id(weight) not in frozen]

    def is_current(self) -> bool:
        """At rest: are these still the tensors of the model, in the same roles?"""
        weights = dict(self._model.named_parameters())
        same_weights = list(weights) == list(self._weights) and all(
            weight is self._weights[name] for name, weight in weights.items()
        )
        buffers = [(name, id(buffer)) for _, _, name, buffer in _buffers(self._model)]
        return (
            same_weights
            and not any(weight.requires_grad for _, weight in self._frozen)  # others may be frozen, and stay shared
            and buffers == [(name, id(buffer)) for _, _, name, buffer in self._buffers]
            and self._addresses_now() == self._addresses
            and self._count_groups() == self._groups
        )

    def _addresses_now(self) -> list[int]:
        return [tensor.data_ptr() for _, _, tensor, _ in self._storage]

    def _count_groups(self) -> int:
        count = 0
        for optimizer in self._optimizers:
            count += len(optimizer.param_groups)
        return count

    @torch.no_grad()
    def _restore_memory(self) -> None:
        for what, name, tensor, own in self._storage:
            if tensor.data_ptr() != own.data_ptr():
                _require_alike(what, name, own, tensor)
                own.copy_(tensor.detach())
                tensor.data = own

    @torch.no_grad()
    def _restore_buffer(
        self, holder: Holder, key: str, name: str, tensor: torch.Tensor, now: torch.Tensor | None
    ) -> None:
        if now is None:
            raise UserError(f"buffer {name} is gone while training runs: keep it, and change its values only")
        _require_alike("buffer", name, tensor, now)
        if not equal(tensor, now):  # a write is a change to whoever looks
            tensor.copy_(now.detach())
        holder[key] = tensor

    def _check_groups(self) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        strangers = sum(id(weight) not in self._known for group in groups for weight in group["params"])
        if strangers:
            raise UserError(
                f"the optimizer has {strangers} weights that the model has not, which ranks would not share: make them"
                " part of the model (a torch.nn.ModuleList holds several models)"
            )
        self._groups = len(groups)


def _names(model: torch.nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters())
    yield from (name for _, _, name, _ in _buffers(model))


def _buffers(model: torch.nn.Module) -> Iterator[tuple[Holder, str, str, torch.Tensor]]:
    yield from ((module._buffers, key, name, buffer) for module, key, name, buffer in saved_buffers(model))


def _versions(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor, int]]:
    return [(name, tensor, tensor._version) for name, tensor in tensors]


def _not_finite(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and not all(bool(part.isfinite().all()) for part in dense_parts(buffer))


def _require_alike(what: str, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        raise UserError(
            f"{what} {name} has become {new.dtype} of shape {tuple(new.shape)} on {new.device} while training runs,"
            f" and was {old.dtype} of shape {tuple(old.shape)} on {old.device}: keep all three"
        )
