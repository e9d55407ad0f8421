"""A rank alone: its gradients are whole, its weights are the anchor, and nothing travels.

The same calls as `gradients.Gradients` and `deltas.Deltas`, whose copies and sums would take a fifth of a step of some
milliseconds and more.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from hetsync.config.schema import WireFormat
from hetsync.doubles import doubled
from hetsync.errors import UserError
from hetsync.plane.base import Residual, Sums
from hetsync.sync.constraints import NO_CONSTRAINTS, Constraints
from hetsync.sync.deltas import Snapshot, Stepped
from hetsync.sync.gradients import AGAIN, Bucket, Stage, stage_places
from hetsync.sync.loop_report import STEPS, LoopReport
from hetsync.sync.messages import StartRound
from hetsync.sync.model_tensors import all_trained
from hetsync.sync.reals import as_of, reals, summed_in
from hetsync.sync.slice_gradient import Arrivals
from hetsync.sync.tail import Tail, shared_buffers
from hetsync.sync.units import TaskUnits

CHECKED_TASKS = 16  # the first, and one in so many: weights that are not finite stay so
WATCHED_SLICES = 8  # a loop that puts gradients of its own where it must not does so from the beginning


class FiniteCheck:
    """To read all gradients or weights takes some percent of a step of some milliseconds, so it is done now and then;
    at the last rest weights are looked at again."""

    def __init__(self) -> None:
        self._tasks = 0

    def due(self) -> bool:
        """Asked once a task."""
        self._tasks += 1
        return self._tasks <= CHECKED_TASKS or self._tasks % CHECKED_TASKS == 0


def total_of(tensors: Iterable[torch.Tensor]) -> float:
    """A sum over all: finite where they are."""
    sums = [doubled(reals(tensor.detach()).sum(dtype=summed_in([tensor]))) for tensor in tensors]
    return float(torch.stack(sums).sum()) if sums else 0.0


class LoneGradients:
    skipped = made_up = clips_unknown = looks_differ = False  # nobody makes a step in the place of others

    def __init__(
        self,
        model: torch.nn.Module,
        wake: Callable[[], None],
        groups: Sequence[Sequence[torch.nn.Parameter]] = (),
        skips: bool = False,
    ) -> None:
        """Arguments as those of `Gradients`."""
        self.look: Callable[[int], None] = lambda stage: None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        place = stage_places(groups)
        count = max(1, len(groups))
        self._parameters = [[p for p in trained if place.get(p, count - 1) == number] for number in range(count)]
        self.buckets: list[Bucket] = []
        self.stages = [Stage([], 0, Tail(0, [], next(model.parameters()).device)) for _ in range(count)]
        self.samples = 0  # of the task that was flushed last
        self._trained = trained
        self._finite = FiniteCheck()
        self._skips = skips
        self._buffers = shared_buffers(model) if skips else []
        self._kept = [buffer.clone() for buffer in self._buffers]  # before the task
        self._wake = wake
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}  # over a task's slices, weighted by units
        self._released: deque[tuple[int, bool]] = (
            deque()
        )  # stages that were flushed, and not fetched yet: samples, spoiled
        self._fetched = 0, False  # the stage that was fetched last
        self.spoiled = False  # is the task?
        self._flushed = self._collected = 0  # stages
        self._taken: set[int] = set()
        self._held: set[int] = set()
        self._units = TaskUnits()
        self._stepped: set[int] = set()  # stages that are stepped on without the loop
        self._stage_of = {p: number for number, stage in enumerate(self._parameters) for p in stage}
        self._last_slice = self._single = False
        self._arrivals = Arrivals()
        self._checked = False  # the task's gradients
        self._slices_left = WATCHED_SLICES
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def _watch(self) -> None:
        def arrive(parameter: torch.Tensor) -> None:
            assert isinstance(parameter, torch.nn.Parameter)
            if parameter.grad is None:  # what autograd calls an undefined one
                return
            stage = self._stage_of[parameter]
            if stage < self._collected or stage in self._taken:
                if stage in self._held and not self._is_whole:
                    raise UserError(AGAIN)
                return
            self._units.arrived(stage)
            self._arrivals.add(parameter, partial(self.look, stage))

        with all_trained(self._trained):
            self._hooks = [parameter.register_post_accumulate_grad_hook(arrive) for parameter in self._trained]

    @property
    def tail(self) -> Tail:
        return self.stages[-1].tail

    def adopt_buffers(self) -> None:
        """They are this rank's own."""

    def open_task(self) -> None:
        self._collected = self._flushed = 0
        self._single = True  # so far
        self.spoiled = False
        self._units.clear()
        self._stepped.clear()
        self._checked = self._skips or self._finite.due()
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        if self._slices_left and not self._hooks:
            self._watch()

    def open_slice(self, samples: int, last: bool) -> None:
        self._units.open_slice(samples)
        self._last_slice = last
        self._held.clear()
        if not self._is_whole and not self._hooks:  # slices of several count by units
            self._watch()
        if self._hooks:
            self._arrivals = Arrivals(self._trained)

    @property
    def _is_whole(self) -> bool:
        """Is the slice that is out the whole task?"""
        return self._single and self._last_slice

    def tell_units(self, units: float | None, loss: torch.Tensor | None, is_sum: bool = False) -> None:
        """A slice that is the whole task is weighed against no other: losses may be means over whatever they are."""
        self._units.tell(None if self._is_whole else units, loss, is_sum)

    @property
    def arrived(self) -> bool:
        return self._arrivals.any if self._hooks else any(weight.grad is not None for weight in self._trained)

    def fill(self, idle: bool) -> None:
        """What has come is all that there is."""

    def hold(self, number: int, held: bool) -> None:
        (self._held.add if held else self._held.discard)(number)

    def is_stepped(self, number: int) -> bool:
        return number in self._stepped

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._arrivals.give_back()

    def take(self, number: int) -> None:
        """Raises UserError where others were put there since backward, as they must not be on several ranks."""
        if number in self._taken or number < self._collected:
            return
        if self._hooks:
            self._arrivals.take(self._parameters[number], sums=False)
        self._taken.add(number)
        if not self._is_whole:
            self._put_aside(number)
        self._units.take(number)

    @torch.no_grad()
    def _put_aside(self, number: int) -> None:
        for parameter in self._parameters[number]:
            if parameter.grad is not None:
                addend = reals(parameter.grad).to(summed_in([parameter])) * self._units.of_slice(number)
                before = self._sums.get(parameter)
                self._sums[parameter] = addend if before is None else before.add_(addend)
                parameter.grad = None

    def close_slice(self) -> None:
        for number in range(len(self.stages)):
            self.take(number)
        self._taken.clear()
        self._single = self._last_slice
        if self._hooks:
            self._arrivals = Arrivals()
            self._slices_left = max(0, self._slices_left - 1)
            if not self._slices_left and self._last_slice:
                self.close()

    def flush(self, samples: int, number: int | None = None, scaled: bool = False, report: LoopReport = STEPS) -> float:
        """Returns something finite where all gradients up to this stage are."""
        self.samples = samples
        total = 0.0
        for place in range(self._flushed, len(self.stages) if number is None else number + 1):
            if self._checked and not scaled:
                mine = (self._sums.get(p, p.grad) for p in self._parameters[place])
                total += total_of(gradient for gradient in mine if gradient is not None)
                if not math.isfinite(total):
                    if not self._skips:
                        break
                    self.spoiled = True
            self._flushed += 1
            if report.makes_up and self._units.has_any(place):
                self._stepped.add(place)
            self._released.append((samples, self.spoiled))
            self._wake()
        return total

    def collect(self, number: int | None = None) -> int:
        for place in range(self._collected, len(self.stages) if number is None else number + 1):
            if self.spoiled:
                self._drop()
            elif self._sums:
                self._take_mean(place)
            self._collected += 1
        return self.samples

    def _drop(self) -> None:
        self._sums.clear()
        for parameter in self._trained:
            parameter.grad = None
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)

    @torch.no_grad()
    def _take_mean(self, place: int) -> None:
        divisor = self.samples if self._units.sums else self._units.counted(place) or self._units.given(place)
        for parameter in self._parameters[place]:
            if (total := self._sums.pop(parameter, None)) is not None:
                parameter.grad = as_of(total.div_(divisor), parameter)
                self._arrivals.make_whole(parameter)

    @property
    def has_released(self) -> bool:
        return self._flushed > 0

    def is_collected(self, number: int) -> bool:
        return number < self._collected

    def discard(self) -> None:
        self._sums.clear()
        self._taken.clear()
        self._units.clear()
        for parameter in (parameter for stage in self._parameters for parameter in stage):
            parameter.grad = None
        self._arrivals = Arrivals()

    @property
    def summed_samples(self) -> int:
        return self._fetched[0]

    @property
    def sum_is_spoiled(self) -> bool:
        return self._fetched[1]

    def released(self) -> bool:
        if not self._released:
            return False
        self._fetched = self._released.popleft()
        return True

    def pack(self, index: int, wire: WireFormat) -> torch.Tensor:
        raise AssertionError("a rank alone has no buckets")


class LoneDeltas:
    """The main thread polls between two tasks, and then all that is finished is in the round: w = u wherever w counts.

    Of all tasks but those of one whole slice the weights before it are kept: their progress is weighted by samples, as
    on several ranks, and a loop that is left may drop them half-way.
    """

    sums: Sums | None = None

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
        skips: bool = False,
        added: int = 0,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> None:
        """As those of `Deltas`; `skips`: tasks may be undone."""
        self._constraints = constraints
        self._averaged = len(weights) + len(buffers) - added  # tensors, before those whose increments add up
        self._weights = list(weights)
        self._local = [reals(tensor.detach()) for tensor in [*weights, *buffers]]
        self._before: list[torch.Tensor] | None = None  # the task that is computed
        self._batch = 0
        self._skips = skips
        self._finite = FiniteCheck()
        self.tail = Tail(0, [], self._local[0].device)
        self.residual = Residual()
        self.packed = (0, 0)

    @property
    def summed(self) -> Sequence[LoneDeltas]:
        return (self,)

    @property
    def buffer_bytes(self) -> int:
        """Memory beside the weights."""
        return sum(tensor.nbytes for tensor in self._before or ())

    @property
    def anchor(self) -> torch.Tensor:
        """Flat."""
        return torch.cat([tensor.flatten().to(summed_in(self._local)) for tensor in self._local])

    def snapshot(self, number: int) -> Snapshot:
        return Snapshot(number, time.monotonic(), None)

    def adopt(self) -> None:
        """They are the anchor."""

    holds_anchor = True  # whatever they are

    def adopt_weights(self) -> None:
        """They are the anchor."""

    def open_task(self, slices: int, samples: int, batch: int) -> None:
        whole = slices == 1 and samples == batch and not self._skips
        self._before = None if whole else [tensor.clone() for tensor in self._local]
        self._batch = batch

    @torch.no_grad()
    def finish(self, samples: int, steps: int, lift: float = 1.0, stepped: Stepped | None = None) -> float:
        worth, made = stepped or (samples, steps)
        if self._before is not None and worth != made * self._batch:
            for tensor, before in zip(self._local[: self._averaged], self._before, strict=False):
                tensor.copy_(before.lerp(tensor, lift * worth / (made * self._batch)))
            self._constraints.project()
        self._before = None
        return total_of(self._weights) if self._finite.due() else 0.0

    def undo(self) -> None:
        self.drop_task()

    def apply(self) -> bool:
        return True

    def packs_apart(self, start: StartRound) -> bool:
        return False  # there is one thread

    lands_apart = packs_apart

    def pack(self, start: StartRound, contribute: bool, batch: int, wire: WireFormat) -> list[torch.Tensor]:
        return [self.tail.flat]

    def apply_sum(self) -> None:
        """It is in the weights."""

    @contextmanager
    def showing(self, weights: torch.Tensor) -> Iterator[None]:
        raise AssertionError("a rank alone evaluates its own weights")

    @torch.no_grad()
    def drop_task(self) -> None:
        """At once: what comes next may be an evaluation."""
        if self._before is not None:
            torch._foreach_copy_(self._local, self._before)
            self._before = None

    def reset_to_anchor(self) -> None:
        """They are the anchor."""
