"""How a loss or a metric calls its model, and what stands in for the model there.

Losses and metrics have the form `(model, batch)`. Where the model is on several ranks, they get a stand-in whose
forward does something else; all else about it, its own methods among them, is the model's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hetsync.data.random_state import untouched
from hetsync.data.transfer import each_tensor
from hetsync.errors import UserError

Scored = Callable[[torch.nn.Module, Any], Any]  # a loss, or metrics: of a model and a batch
REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of modules that hold what is known by name


class _CalledError(Exception):
    """Leaves a loss where it calls the model."""


def stand_in(model: torch.nn.Module, forward: Callable[..., Any]) -> torch.nn.Module:
    """The model with another forward; weights and submodules are the same objects. For one call."""
    standing = copy.copy(model)
    standing.forward = _once(forward)
    return standing


def observed_call(model: torch.nn.Module, scored: Scored, batch: Any) -> inspect.BoundArguments:
    """The arguments with which `scored` calls the model on a batch, without computing what the model does.

    The batch stays as it is, since `scored` is run on it once more. Raises UserError where it never calls the model.
    """
    calls: list[inspect.BoundArguments] = []

    def observe(*args: Any, **kwargs: Any) -> NoReturn:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(bound)
        raise _CalledError

    try:
        scored(stand_in(model, observe), anew(batch))
    except _CalledError:
        return calls[0]
    name = getattr(scored, "__qualname__", repr(scored))
    raise UserError(f"{name} never calls the model it is given: on several ranks it must call model(...) once")


def anew(batch: Any) -> Any:
    """Its containers and tensors once more, so that what is changed in place is changed there only."""
    return each_tensor(batch, torch.Tensor.clone)


def weight_used(model: torch.nn.Module, scored: Scored, batch: Any) -> str | None:
    """Name of a weight that `scored` computes with itself, besides calling the model, or of another tensor that the
    model's forward leaves in it, but does not where it is in stages. None where there is none.

    It calls both on the batch, and leaves them as they were. UserError where the model is called twice, or never.
    """
    call, before = observed_call(model, scored, batch), _attributes(model)
    with untouched(model), torch.no_grad():
        returned = model(*call.args, **call.kwargs)
        names = {id(tensor): name for key, (name, tensor) in _attributes(model).items() if key not in before}
        names |= {id(parameter): name for name, parameter in model.named_parameters()}
        for given in tree_leaves(returned):  # which the model may remember, too
            names.pop(id(given), None)
        with _Watching(names) as watching:
            scored(stand_in(model, lambda *_, **__: returned), anew(batch))
    return watching.seen


def _attributes(model: torch.nn.Module) -> dict[tuple[int, int], tuple[str, torch.Tensor]]:
    """Tensors that its modules have besides weights, also in lists and the like, with the attribute's name; by what
    becomes another one where the tensor is replaced, or changed in place."""
    return {
        (id(tensor), tensor._version): (f"{path}.{name}".removeprefix("."), tensor)
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if name not in REGISTERED
        for tensor in tree_leaves(value)
        if isinstance(tensor, torch.Tensor)
    }


class _Watching(TorchFunctionMode):
    """Attributes:
    seen: Name of one of the tensors that has been computed with.
    """

    # What asks for no value of it.
    HARMLESS = tuple(getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "shape", "is_cuda", "ndim"))

    def __init__(self, names: Mapping[int, str]) -> None:
        """Of tensors, by their `id`."""
        super().__init__()
        self.seen: str | None = None
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.HARMLESS:
            used = (self._names.get(id(value)) for value in tree_leaves((args, kwargs)))
            self.seen = self.seen or next((name for name in used if name is not None), None)
        return func(*args, **(kwargs or {}))


def _once(forward: Callable[..., Any]) -> Callable[..., Any]:
    called = False

    def forward_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if called:
            raise UserError(
                "the loss calls the model twice: where a plan cuts the model, it must call model(...) once a batch"
            )
        called = True
        return forward(*args, **kwargs)

    return forward_once
