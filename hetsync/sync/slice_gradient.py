"""A slice's gradients, as backward leaves them in `.grad` in synchronous mode: whoever looks at one gets the whole one.

Between backward and step a script may do with gradients what it likes: clip them, print their norm, set their values.
On several ranks they are a part, until they have been summed. To sum them when backward ends would need as many sums as
there are backward calls, the same on all ranks. So what lies in `.grad` is a tensor of this class, and the first torch
function that is called with it (`__torch_function__`, which torch calls for subclasses) makes the gradients of its step
whole before it runs on them. Autograd itself adds to them without such a call, so a slice may have several backward
calls; and where nobody looks, sums are made when the step begins, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetsync.errors import UserError

UNSCALED = (
    "a GradScaler that was not prepared has unscaled gradients, but with sync.delay_bound 0 all ranks have to skip"
    " the same steps: give the GradScaler to job.prepare"
)
# What a tensor is, whatever it holds.
_PROPERTIES = (
    "_version device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_mkldnn is_nested is_quantized is_sparse"
    " is_sparse_csr is_xla is_mps layout ndim requires_grad shape"
)
_METHODS = (
    "__len__ dim element_size get_device is_complex is_contiguous is_floating_point nelement numel requires_grad_ size"
    " stride"
)
_TELLS_NO_VALUE = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    ]
)


class SliceGradient(torch.Tensor):
    """Attributes:
    plain: The slice's gradient, and the whole one as soon as there is that.
    look: Makes it whole, where a step on it is due.
    """

    plain: torch.Tensor
    look: Callable[[], None]

    @classmethod
    def of(cls, gradient: torch.Tensor, look: Callable[[], None]) -> SliceGradient:
        """Of the same memory."""
        gradient = plain_of(gradient)  # one that another job has left, which ended before its step
        made = gradient.as_subclass(cls)
        made.plain, made.look = gradient, look
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, named = list(args), dict(kwargs or {})
        if func not in _TELLS_NO_VALUE:
            if getattr(func, "__name__", "") == "_amp_foreach_non_finite_check_and_unscale_":
                raise UserError(UNSCALED)
            for gradient in _found_in([*given, *named.values()]):
                gradient.look()
        return func(*map(_plain, given), **{name: _plain(value) for name, value in named.items()})


def plain_of(gradient: torch.Tensor) -> torch.Tensor:
    """Without a look."""
    return gradient.plain if isinstance(gradient, SliceGradient) else gradient


def _found_in(things: Sequence[Any]) -> list[SliceGradient]:
    found: list[SliceGradient] = []
    for thing in things:
        if isinstance(thing, SliceGradient):
            found.append(thing)
        elif isinstance(thing, list | tuple):
            found += _found_in(thing)
    return found


def _plain(thing: Any) -> Any:
    if isinstance(thing, list):
        return [_plain(each) for each in thing]
    if isinstance(thing, tuple) and not hasattr(thing, "_fields"):
        return tuple(_plain(each) for each in thing)
    return plain_of(thing)
