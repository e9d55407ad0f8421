"""Constraints that weights keep to: functions that project those of a module, after each step and at each merge.

What ranks merge need not keep to what each of them keeps to: progress is lifted (`steps.py`), adds up to what others
have done meanwhile, and a mean of orthogonal matrices is none. So the anchor is projected where it moves, once a round,
and that is part of what the round brings. If only local weights were, each rank would answer for itself to an anchor
out of bounds, and these answers would be merged and lifted in their turn: of eight ranks whose steps keep to a sphere
of radius 1 the anchor has had norms from 0.6 to 1.8.

The communication thread moves the anchor while the main thread computes on the module's own weights. So it projects a
twin: the same module with other memory behind its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hetsync.errors import UserError
from hetsync.sync.reals import count_reals, reals, summed_in

FAR = 1024.0  # from what is allowed: a function that projects such weights changes them

Projection = Callable[[Any], object]  # of a module, whose weights it changes in place


class Constraints:
    """Of one job; there may be none."""

    def __init__(self, given: Sequence[tuple[torch.nn.Module, Projection]] = ()) -> None:
        self._given = given

    def __bool__(self) -> bool:
        return bool(self._given)

    @torch.no_grad()
    def project(self) -> None:
        """The modules' own weights, in the main thread. They stay where they are in memory."""
        for module, function in self._given:
            places = [(weight, weight.detach()) for weight in module.parameters()]
            function(module)
            for weight, place in places:
                if weight.data_ptr() != place.data_ptr():  # it has been given other memory
                    place.copy_(weight)
                    weight.data = place

    @torch.no_grad()
    def check(self, model: torch.nn.Module) -> None:
        """UserError where a function changes anything of the `model`, which has all that ranks share, but weights of
        the module that it is given, or not always in the same way."""
        if not self:
            return
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        before, twins = [weight.clone() for weight in weights], self.twins(weights)
        once = torch.cat([reals(weight).flatten().to(summed_in(weights)) for weight in before])
        twice = once.clone()
        for weight in weights:
            weight.fill_(FAR)
        all_tensors = [*model.parameters(), *model.buffers()]
        versions = [tensor._version for tensor in all_tensors]
        try:
            twins.constrain(once)
            twins.constrain(twice)
            changed = [tensor._version for tensor in all_tensors] != versions
            changed |= not all(bool((weight == FAR).all()) for weight in weights)  # by .data
        finally:
            for weight, values in zip(weights, before, strict=True):
                weight.copy_(values)
        if changed:
            raise UserError(
                "the function of job.constrain has changed weights or buffers of the script's model, but ranks project"
                " a copy of it, too: change weights of the module that it is given, and nothing else"
            )
        if not torch.equal(once, twice):
            raise UserError(
                "the function of job.constrain has made other weights of the same ones when it was called again, and"
                " ranks would differ: let it go by the module alone, and draw nothing at random"
            )

    def twins(self, weights: Sequence[torch.Tensor]) -> Twins:
        return Twins(self._given, weights)


NO_CONSTRAINTS = Constraints()


class Twins:
    """Modules as those of the constraints, with memory of their own behind all weights. Buffers are the same tensors,
    and so are other attributes."""

    def __init__(self, given: Sequence[tuple[torch.nn.Module, Projection]], weights: Sequence[torch.Tensor]) -> None:
        """`weights`: those that ranks share, in their order."""
        self._twin_of: dict[torch.Tensor, torch.nn.Parameter] = {}
        known: dict[torch.nn.Module, torch.nn.Module] = {}
        self._given = [(self._make(module, known), function) for module, function in given]
        self._weights = list(weights)
        shared = set(weights)
        self._unshared = [(own, twin) for own, twin in self._twin_of.items() if own not in shared]

    def _make(self, module: torch.nn.Module, known: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
        if module not in known:
            twin = known[module] = object.__new__(type(module))
            twin.__dict__.update(module.__dict__)
            twin._buffers = dict(module._buffers)
            twin._parameters = {
                name: None if own is None else self._weight(own) for name, own in module._parameters.items()
            }
            twin._modules = {
                name: None if child is None else self._make(child, known) for name, child in module._modules.items()
            }
        return known[module]

    def _weight(self, own: torch.nn.Parameter) -> torch.nn.Parameter:
        if own not in self._twin_of:
            kind = torch.promote_types(own.dtype, torch.float32)  # as precise as the anchor
            self._twin_of[own] = torch.nn.Parameter(own.detach().to(kind, copy=True), own.requires_grad)
        return self._twin_of[own]

    @torch.no_grad()
    def project(self) -> None:
        """They themselves; what ranks do not share is as it is now."""
        for own, twin in self._unshared:
            twin.copy_(own)
        for module, function in self._given:
            function(module)

    @torch.no_grad()
    def constrain(self, values: torch.Tensor) -> None:
        """Flat real `values` of the shared weights, in place."""
        parts = zip(self._weights, values.split([count_reals(weight) for weight in self._weights]), strict=True)
        mine = [(part, self._twin_of[weight]) for weight, part in parts if weight in self._twin_of]
        for part, twin in mine:
            reals(twin).copy_(part.view(reals(twin).shape))
        self.project()
        for part, twin in mine:
            part.copy_(reals(twin).flatten())


class ChangesAfterSteps:
    """Does a loop change weights after its optimizers' steps, by itself? Looked for in the slices 1, 2, 4, 8, ..., as a
    constraint may be in force late."""

    def __init__(self) -> None:
        self._slices = 0
        self._stepped: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights, and what the newest step has left

    def begin_slice(self) -> None:
        self._slices += 1

    def end_slice(self) -> None:
        """From here on rounds may be taken over."""
        self._stepped = []

    def note_step(self, weights: Iterable[torch.Tensor]) -> None:
        if self._slices & (self._slices - 1) == 0:
            self._stepped = [(weight, weight.detach().clone()) for weight in weights]

    def found(self) -> bool:
        """Since the newest step, which is then forgotten."""
        stepped, self._stepped = self._stepped, []
        return not all(bool(((weight == values) | weight.isnan()).all()) for weight, values in stepped)
