"""A slice's gradients, as backward leaves them in `.grad` in synchronous mode: whoever looks at one gets the whole one.

Between backward and step a script may do with gradients what it likes: clip them, print their norm, set their values.
On several ranks they are a part, until they have been summed. To sum them when backward ends would need as many sums as
there are backward calls, the same on all ranks. So what lies in `.grad` is a tensor of this class, and the first torch
function that is called with it (`__torch_function__`, which torch calls for subclasses) makes the gradients of its step
whole before it runs on them. Autograd itself adds to them without such a call, so a slice may have several backward
calls; and where nobody looks, sums are made when the step begins, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hetsync.errors import UserError

UNSCALED = (
    "a GradScaler that was not prepared has unscaled gradients, but with sync.delay_bound 0 all ranks have to skip"
    " the same steps: give the GradScaler to job.prepare"
)
BY_HAND = (
    "gradients were written by hand (weight.grad = ..., as gradient surgery does) before step, but with"
    " sync.delay_bound 0 they are averaged over ranks only then, which is wrong unless they are linear in each rank's"
    " gradient: take a delay bound of 1 or more, or give those that are by torch.autograd.backward(weights, gradients)"
)
DROPPED = (
    "gradients were set to none after backward and before their step, but with sync.delay_bound 0 ranks are yet to sum"
    " them: leave a batch out before its backward, by job.backward(loss, weight=0)"
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
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # a look waits for other ranks: it is no part of a graph
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


class Arrivals:
    """The gradients of one slice, as backward has left them: how many, and whether a script has put others there.

    Parameters are known by their `id`: a tensor's own hash is a call in Python, of which a step would make thousands.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter] = ()) -> None:
        """`parameters` may hold gradients of slices before."""
        self._before = {id(p): (p.grad, p.grad._version) for p in parameters if p.grad is not None}
        self.several = False  # for one parameter
        self.any = False
        self._seen: set[int] = set()
        self._given: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}  # to the loop
        self._versions: dict[int, int] = {}  # of what backward has left
        self._empty: set[int] = set()  # whose gradient holds nothing, and is only there to be looked at

    def add(self, parameter: torch.nn.Parameter, look: Callable[[], None]) -> bool:
        """Is this the parameter's first? Whoever calls a torch function with what is in `.grad` from now on calls
        `look` before."""
        grad, me = parameter.grad, id(parameter)
        assert grad is not None
        first = me not in self._seen
        self.several |= not first
        self.any = True
        self._seen.add(me)
        self._empty.discard(me)
        self._versions[me] = grad._version
        if grad.layout is not torch.strided:
            self._given[me] = parameter, grad
        elif me not in self._given or grad is not self._given[me][1]:
            parameter.grad = given = SliceGradient.of(grad, look)
            self._given[me] = parameter, given
        return first

    def has_any_of(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        return not self._seen.isdisjoint(map(id, parameters))

    def fill(self, parameters: Iterable[torch.nn.Parameter], look: Callable[[], None]) -> None:
        """Those that have got no gradient here may have one from other ranks: whoever looks finds that, too."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = given = SliceGradient.of(torch.zeros_like(parameter), look)
                self._given[id(parameter)] = parameter, given
                self._empty.add(id(parameter))

    @torch.no_grad()
    def take(self, parameters: Iterable[torch.nn.Parameter], sums: bool = True) -> None:
        """They are whole, as far as this slice goes; what comes for them now is no matter of it. `sums`: of ranks come
        in their place.

        Raises UserError where what these hold is not what backward has left.
        """
        for parameter in parameters:
            grad, me = parameter.grad, id(parameter)
            if me in self._seen:
                self._seen.discard(me)
                if grad is None:
                    raise UserError(DROPPED)
                # By another name of the same memory, of which nobody is told; sparse ones have no subclass, either.
                unseen = (sums or grad.layout is not torch.strided) and grad._version != self._versions[me]
                if unseen or grad is not self._given[me][1]:
                    raise UserError(BY_HAND)
                parameter.grad = plain_of(grad)
            elif me in self._empty and grad is self._given[me][1]:
                parameter.grad = None
            elif grad is not None:
                before, version = self._before.get(me, (None, 0))
                if (before is not grad or version != grad._version) and bool(grad.count_nonzero()):
                    raise UserError(BY_HAND)

    def shown(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What the loop has been given for a gradient that this rank has none of."""
        me = id(parameter)
        return plain_of(self._given[me][1]) if me in self._empty else None

    def give_back(self) -> None:
        """What is in `.grad` is what it was before it was given to the loop: nobody makes it whole any more."""
        for me, (parameter, given) in self._given.items():
            if parameter.grad is given:
                parameter.grad = None if me in self._empty else plain_of(given)

    def make_whole(self, parameter: torch.nn.Parameter) -> None:
        """What is in `.grad` is what the loop's own names for it mean, too."""
        _, given = self._given.pop(id(parameter), (None, None))
        if parameter.grad is not None and isinstance(given, SliceGradient):
            given.plain = parameter.grad
