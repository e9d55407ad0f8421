"""An optimizer's steps: their rates, clipping, and who may make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hetsync.errors import UserError
from hetsync.sync.group_state import GroupState
from hetsync.sync.messages import STANDS_MORE, Task
from hetsync.sync.optimizers import ADAPTIVE, copied_second_moments, scale_second_moments
from hetsync.sync.rates import Rates, rates_of, set_rates


def _settings_of_a_batch(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of an adaptive optimizer's group that are others for slices: what is added to the root of the second
    moment, and the weight decay, where it is scaled with the learning rate and decoupled from the gradient."""
    if not isinstance(optimizer, ADAPTIVE):
        return {}
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    names = ("eps", "weight_decay") if decoupled else ("eps",)
    return {name: group[name] for name in names if name in group}


def require_finite(total: float, rank: int, task: Task) -> None:
    """Raise UserError unless a total over what a rank is about to give for this task is finite.

    Here the rank is known. In a round's sum it would be everybody's, and in the weights.
    """
    if not math.isfinite(total):
        delayed = task.synchronous_round is None
        raise UserError(
            f"the gradient became {total} on rank {rank} after {task.position} samples: lower"
            f" optimizer.learning_rate or look at the data{STANDS_MORE if delayed else ''}"
        )


@dataclass(frozen=True)
class LocalSteps:
    """How far a rank steps on a slice of its own, and how far that moves the anchor when it is merged.

    In delayed mode one rank of R steps on n samples, where one process would step on a batch of B. Its learning rate
    is multiplied by `rate`, and the progress is merged with `lift` times the weight n / B. The product of the two is
    what a sample does to the anchor. It is 1; for adaptive optimizers, which divide by the root of the gradient's
    second moment, it is `noise` = √(B / n) (square-root scaling rule, Malladi et al. 2022).

    What is free is how far local weights go before the others' steps are in them. Steps that are meant for B samples
    are too long on a few, most of all with momentum:

    - Adaptive optimizers step at the rate that is set, and merging makes up for the rest.
    - Others take full steps on the even share B / R and above, so that equal ranks do as in local SGD. Below it steps
      are shorter by the root of n over the even share.

    Where not all of several optimizers are adaptive, all are lifted as those that are not.
    """

    batch_size: int
    ranks: int
    adaptive: bool

    @classmethod
    def of(cls, optimizers: Iterable[torch.optim.Optimizer], batch_size: int, ranks: int) -> LocalSteps:
        return cls(batch_size, ranks, all(isinstance(each, ADAPTIVE) for each in optimizers))

    def noise(self, task: Task) -> float:
        """Norm of a slice's gradient over that of the batch's, where noise rules it."""
        if task.synchronous_round is not None:
            return 1.0
        return math.sqrt(self.batch_size * len(task.slices) / task.samples)

    def lift(self, task: Task) -> float:
        """Of the progress of the task's steps, when it is merged."""
        noise = self.noise(task)
        return noise if self.adaptive else max(1.0, noise / math.sqrt(self.ranks))

    def rate(self, task: Task, adaptive: bool) -> float:
        """Of a step of an optimizer, which is `adaptive` or not."""
        return (self.noise(task) if adaptive else 1.0) / self.lift(task)


class Steps:
    """An optimizer's steps: schedule, clipping, and what makes local steps on slices add up to the batch's.

    Where noise rules it, the gradient of a slice of n samples has √(B / n) times the norm of the batch's of B samples.

    - Learning rates are multiplied as `LocalSteps` says.
    - Clipping would cut slices to the norm that is meant for the batch: their bound is √(B / n) times as high.
    - The second moments of adaptive optimizers are B / n times those of the batch. They forget slowly (Adam's in 1,000
      steps), so they are multiplied where a job goes on with delay or without it, and where slices are smaller or
      larger than before. At rests they are the batch's, on all ranks, which have shares of their own: so they can be
      averaged, and gone on with by others. So they are in a state that is saved meanwhile.
    - Their eps is added to the root of that, and is √(B / n) times the batch's.
    - Decoupled weight decay (AdamW) multiplies weights by 1 − learning rate · decay, whatever the gradients: it is
      divided by `noise`, by which rate and lift multiply it. Decay inside the gradient (L2) is divided by the root of
      the second moment with it, and needs nothing.

    Drift and noise of the anchor are then the batch's. Between `start` and the next rest, nobody else may set the
    optimizer's learning rates or other settings: that would be lost, or a rank's own, and so is a UserError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Rates,
        local: LocalSteps,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        """`rates` and `max_grad_norm` are those for a whole batch; `before` and `after` are called with each
        of the optimizer's steps, whoever makes it."""
        self.optimizer = optimizer
        self.rates = rates
        self._max_grad_norm = max_grad_norm
        self._local = local
        self._noise = 1.0  # of the gradients that steps are made on, over the batch's; at rest 1
        self._adaptive = isinstance(optimizer, ADAPTIVE)
        self._in_force = rates_of(optimizer)
        self.scheduled = list(self._in_force)  # learning rates of the task, as they are for a batch
        self._settings = [_settings_of_a_batch(optimizer, group) for group in optimizer.param_groups]
        self.groups = GroupState(optimizer)

        self._before, self._after = before, after
        self._depth = 0  # of steps that call those of their base class
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._as_of_a_batch),
            optimizer.register_load_state_dict_pre_hook(self._refuse_state),
        ]

    def _before_step(self, _: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if any(given is not None for given in (*arguments[1:], named.get("closure"))):
            raise UserError("the optimizer's step was given a closure, which ranks cannot share: call it without one")
        self._check_rates()
        self._before()

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.groups.note_step()
            self._after()

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def start(self) -> None:
        """Training goes on after a rest: what the optimizer's owner has set holds."""
        found = rates_of(self.optimizer)
        for rate in found[len(self._in_force) :]:
            self.rates.adopt(rate)
        if found != self._in_force:
            self.rates.rebase(found)
        self._in_force = found
        self._settings = [_settings_of_a_batch(self.optimizer, group) for group in self.optimizer.param_groups]
        self.groups.settle()

    def begin_task(self, task: Task) -> None:
        """The steps from now on are this task's."""
        self._check_rates()
        factor = self._local.rate(task, self._adaptive)
        self.scheduled = self.rates.at(task.position)
        self._in_force = set_rates(self.optimizer, [rate * factor for rate in self.scheduled])
        self._set_noise(self._local.noise(task))

    def _set_noise(self, noise: float) -> None:
        """Settings and second moments are those for gradients with so many times the batch's."""
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            for name, value in settings.items():
                group[name] = value / noise if name == "weight_decay" else value * noise
        self.groups.settle()
        factor, self._noise = (noise / self._noise) ** 2, noise
        if self._adaptive and factor != 1.0:
            scale_second_moments(self.optimizer.state.values(), factor)

    def _as_of_a_batch(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """A state that is saved between two rests, as it would be at one."""
        if self._noise == 1.0:
            return saved
        for group, rate, settings in zip(saved["param_groups"], self.scheduled, self._settings, strict=False):
            held = group["lr"]
            group.update(settings, lr=torch.full_like(held, rate) if isinstance(held, torch.Tensor) else rate)
        state = {place: copied_second_moments(values) for place, values in saved["state"].items()}
        scale_second_moments(state.values(), self._noise**-2)
        return {**saved, "state": state}

    def _refuse_state(self, *_: Any) -> None:
        if self._noise != 1.0:
            raise UserError(
                "the optimizer's state was loaded in the loop, which with delay each rank would do for itself: load it"
                " between epochs, or train with delay_bound=0"
            )

    def _check_rates(self) -> None:
        """Nobody has set others, nor another setting; new groups are adopted."""
        groups, found = self.optimizer.param_groups, rates_of(self.optimizer)
        for group, rate in zip(groups[len(self._in_force) :], found[len(self._in_force) :], strict=True):
            self.rates.adopt(rate)
            self._in_force.append(rate)
            self._settings.append(_settings_of_a_batch(self.optimizer, group))
        if found != self._in_force:
            self._refuse_rates(found)
        self.groups.check()

    def _refuse_rates(self, found: Sequence[float]) -> NoReturn:
        raise UserError(
            f"the optimizer's learning rate was changed in the loop, from {self._in_force} to {found}, which would be"
            " lost: give job.schedule the factor of the rate after so many samples, step the scheduler that job.prepare"
            " returned, or set the rate between epochs"
        )

    def clip(self, weights: Iterable[torch.Tensor], max_norm: float, **options: Any) -> torch.Tensor:
        """To the norm that is meant for a batch; returns what it was."""
        return torch.nn.utils.clip_grad_norm_(weights, max_norm * self._noise, **options)

    @property
    def greatest_norm(self) -> float | None:
        """Of this task's gradients, over which they are clipped."""
        return None if self._max_grad_norm is None else self._max_grad_norm * self._noise

    def step(self) -> None:
        """One step along the gradients that are there."""
        if self._max_grad_norm is not None:
            self.clip(self.weights, self._max_grad_norm)
        self.optimizer.step()

    def clear(self) -> None:
        """Gradients are gone, once all have stepped: another optimizer may step the same weights."""
        self.optimizer.zero_grad(set_to_none=True)

    def show_owner(self, position: int) -> None:
        """Between tasks: the optimizer's rates, settings and second moments are a batch's, as its owner knows them."""
        self._in_force = set_rates(self.optimizer, self.rates.owners(position))
        self._set_noise(1.0)

    def close(self, position: int) -> None:
        """The optimizer is its owner's again, after training up to `position`; rates set at the last rest hold."""
        found = rates_of(self.optimizer)
        if found != self._in_force:
            self.rates.rebase(found)
        self.show_owner(position)
        for hook in self._hooks:
            hook.remove()
