"""At rest all ranks hold the same: what has no mean is handed round, what has one is averaged, a hash is compared."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hetsync.plane.base import Plane
from hetsync.sync.agreement import AVERAGE, Agreement
from hetsync.sync.buffers import saved_buffers
from hetsync.sync.digests import Digests, digest_of, marks
from hetsync.sync.engine import Engine
from hetsync.sync.group_state import GroupState, average_group_state
from hetsync.sync.optimizer_state import average_optimizer_state, average_tensors
from hetsync.sync.sparse import dense_parts
from hetsync.sync.tail import saved_floats

HELD = "held"  # by optimizers, beside the state of weights


class CommonState:
    """One rank's part in it. Every method is collective, and `engine` is at rest; `given` and `take` are not."""

    def __init__(
        self,
        plane: Plane,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        averages: Sequence[torch.nn.Module],
        engine: Engine,
        groups: Sequence[GroupState] = (),
    ) -> None:
        """`groups`: of the optimizers."""
        self._plane = plane
        self._model = model
        self._optimizers = optimizers
        self._averages = averages
        self._engine = engine
        self._agreement = Agreement(plane, model, optimizers, averages, groups)
        self.digests = self._agreement.digests

    @torch.no_grad()
    def share_first_weights(
        self, gather: Callable[[Callable[[], Any]], list[Any]], share: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """All ranks take over the first rank's weights and buffers, and averages of them, as far as theirs are others:
        who has read a large base from a file of its own is not sent it. `gather` and `share` call what they are given
        on each rank, and return what all have made, or the first."""
        for module in (self._model, *self._averages):
            state = module.state_dict()
            told = gather(partial(self._digests_of, module, state))
            odd = [name for name in state if any(theirs.get(name) != told[0].get(name) for theirs in told)]
            if odd:
                given = share(partial(self._given_by_first, state, odd))
                module.load_state_dict({**state, **given})
        self._agreement.remember_counters()

    def _digests_of(self, module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
        trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
        return self.digests.of(state, [name for name in state if name not in trained])

    def _given_by_first(
        self, state: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> dict[str, torch.Tensor] | None:
        return {name: state[name].cpu() for name in names} if self._plane.leads else None

    def remember_counters(self) -> None:
        """Of a rank that joins: they are as all have them."""
        self._agreement.remember_counters()

    def given(self) -> dict[str, Any]:
        """In synchronous mode: all that steps have made, for a rank that is behind."""
        values = self._agreement.values(None)
        return {**{name: value.detach().cpu().clone() for name, value in values.items()}, HELD: self._agreement.held()}

    def take(self, given: Mapping[str, Any]) -> None:
        values = self._agreement.values(None)
        known = {name: value for name, value in given.items() if name in values or name.startswith("optimizer.")}
        self._agreement.adopt(values, known)
        self._agreement.take_held(given[HELD])

    def average(self, samples: int) -> None:
        """What ranks that stepped on their own keep for themselves: each counts by the samples that it has computed
        since the last rest."""
        gather, allreduce = self._plane.gather_objects, self._engine.allreduce
        for optimizer in self._optimizers:
            average_optimizer_state(optimizer, samples, gather, allreduce)
        for groups in self._agreement.groups:
            average_group_state(groups, samples, gather)
        for module in self._averages:
            self._average_module(module, samples)

    def even_averages_out(self, samples: int, loop_steps: int) -> None:
        """In synchronous mode: averages differ where they took in what was of a slice (batch norm's statistics before
        the step), and are then averaged as in delayed mode. Those of a rank whose loop has made fewer steps lack some,
        and do not count: it takes the others' over."""
        whole = loop_steps == max(self._plane.gather_objects(loop_steps))
        for number, module in enumerate(self._averages):
            state = {f"{AVERAGE}{number}.{name}": tensor for name, tensor in module.state_dict().items()}
            mine = digest_of(self.digests.of(state, state)) if whole else None
            if len(set(self._plane.gather_objects(mine)) - {None}) > 1:
                self._average_module(module, samples if whole else 0)

    def _average_module(self, module: torch.nn.Module, samples: int) -> None:
        gather, allreduce = self._plane.gather_objects, self._engine.allreduce
        average_tensors([*module.parameters(), *self._finite_buffers(module)], samples, gather, allreduce)

    def _finite_buffers(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Those that are finite on all ranks, or these would sum tensors of different lengths."""
        buffers = saved_floats(module)
        told = self._plane.gather_objects([bool(buffer.isfinite().all()) for buffer in buffers])
        return [buffer for buffer, *finite in zip(buffers, *told, strict=True) if all(finite)]

    def agree(self, velocity: torch.Tensor | None, version: int, loop_steps: int, samples: int) -> None:
        """Ranks hold the same now, or the job ends: what follows is saved, and begun from.

        `velocity` is the outer optimizer's. `loop_steps`: synchronous rounds since the last rest whose step this
        rank's loop has made; where one had no batch, or has been left, the rank takes over what others have made of
        the gradients. `samples`: those that this rank has computed since then. Raises AnchorMismatchError.
        """
        steps = self._plane.gather_objects(loop_steps)
        most, device = max(steps), next(self._model.parameters()).device
        self._agreement.share_counters(samples, of_averages=loop_steps == most)
        for groups in self._agreement.groups:
            groups.share_names(self._plane.gather_objects)
        values = self._agreement.values(velocity)
        if min(steps) != most:
            stepped = [place for place, count in enumerate(steps) if count == most]
            self._agreement.take_over(values, stepped, device, version)
            self._engine.adopt()
            if loop_steps < most:  # the gradients of those steps are no part of the next
                self._model.zero_grad(set_to_none=True)
        elif self._agreement.reach(values, device, version):
            self._engine.adopt()


class HeldAtRest:
    """Weights, and buffers that checkpoints hold, as all ranks have agreed on them at a rest, by marks that tell
    whether a script's lines there have changed any."""

    def __init__(self, model: torch.nn.Module, digests: Digests) -> None:
        self._model = model
        self._digests = digests
        self._marks = marks(list(self._tensors().values()))

    def _tensors(self) -> dict[str, torch.Tensor]:
        buffers = {name: buffer for *_, name, buffer in saved_buffers(self._model)}
        return {**dict(self._model.named_parameters()), **buffers}

    @torch.no_grad()
    def changed(self) -> bool:
        return marks(list(self._tensors().values())) != self._marks

    def sha256(self) -> str:
        tensors = self._tensors()
        return digest_of(self._digests.of(tensors, [name for name in tensors if not tensors[name].requires_grad]))


def not_finite(
    model: torch.nn.Module, optimizer: Mapping[str, torch.Tensor], looked_at: Container[str] = ()
) -> str | None:
    """The first tensor that may not be saved, nor be what training ends with. Buffers may hold infinities (masks), and
    so may optimizers (extremes). `looked_at`: names of weights that have not changed since they were found finite."""
    for name, parameter in model.named_parameters():
        if name not in looked_at and not torch.isfinite(parameter.detach()).all():
            return f"the weight {name}"
    for name, buffer in model.named_buffers():
        if any(torch.isnan(part).any() for part in dense_parts(buffer)):
            return f"the buffer {name}"
    for name, tensor in optimizer.items():
        if any(torch.isnan(part).any() for part in dense_parts(tensor)):
            return f"the optimizer's {name}"
    return None
