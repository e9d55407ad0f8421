"""A recipe's optimizer, and the learning rate of its steps."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from hetsync.config.imports import call_with_options, import_object
from hetsync.config.schema import OptimizerConfig
from hetsync.errors import UserError
from hetsync.sync.messages import Task

BUILT_IN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)


def build_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all of the model's weights."""
    if config.name not in BUILT_IN and ":" not in config.name:
        known = ", ".join(BUILT_IN)
        raise UserError(f"optimizer.name is {config.name}: use one of {known}, or package.module:name for your own")
    kind = BUILT_IN.get(config.name) or import_object("optimizer.name", config.name)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"params": weights, "lr": config.learning_rate}
    if config.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
        settings["weight_decay"] = config.weight_decay
    if kind is torch.optim.SGD:
        settings["momentum"] = config.momentum
    optimizer = call_with_options("optimizer", kind, config.options, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer.name is {config.name}, which returned {type(optimizer).__name__}")
    check_needs_no_closure(optimizer, f"optimizer.name is {config.name}")
    return optimizer


def check_needs_no_closure(optimizer: torch.optim.Optimizer, what: str) -> None:
    """UserError unless the optimizer's step can be called with nothing."""
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)  # the instance's own may be a scheduler's wrapper
    except TypeError:
        raise UserError(f"{what}, whose step needs a closure, and HetSync has none: use another optimizer") from None


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Weight of the past in a step: SGD's momentum, or the first beta of Adam and its kin."""
    group = optimizer.param_groups[0]
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


class Rates(Protocol):
    """The learning rates of an optimizer's parameter groups over the sample stream, for batches of B samples."""

    def at(self, position: int) -> list[float]:
        """At a stream position; these ascend."""

    def adopt(self, rate: float) -> None:
        """The optimizer has got another group, of this learning rate."""

    def owners(self, position: int) -> list[float]:
        """Those that the optimizer's owner finds when training has come to `position`."""

    def rebase(self, rates: list[float]) -> None:
        """At rest the owner has set these in place of `owners`."""

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Collective, at rest: what one rank has learned of its loop all ranks know."""


class ScheduleRates:
    """What the optimizer's rates were at first, times a factor of the samples applied."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float] = lambda position: 1.0) -> None:
        self._base = [group["lr"] for group in optimizer.param_groups]
        self._factor = factor

    def at(self, position: int) -> list[float]:
        factor = self._factor(position)
        return [rate * factor for rate in self._base]

    def adopt(self, rate: float) -> None:
        self._base.append(rate)

    def owners(self, position: int) -> list[float]:
        return list(self._base)

    def rebase(self, rates: list[float]) -> None:
        self._base = list(rates)

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Nothing is learned."""


@dataclass
class Cadence:
    """How a loop steps a scheduler: after each `every` batches, counted anew in each epoch.

    The loop tells it by its first call. Steps follow the samples of the job from then on, so calls that come at other
    times would not be heard: they are refused.
    """

    every: int | None = None  # None: not in the loop
    first: int = 0  # batches of the stream before it
    done: int = 0  # steps
    calls: int = 0  # in this loop over batches

    def called(self, batches: int, slices: int) -> None:
        """In a loop over batches that began at so many of the stream, in its slice of this number."""
        self.calls += 1
        if self.every is None:
            self.every, self.first = slices, batches
        if slices != self.calls * self.every:
            raise UserError(
                f"a scheduler was stepped first after {self.every} batches of the loop, and for the {self.calls}. time"
                f" after {slices}: its steps follow samples, so step it after each batch, or after each n-th, counted"
                " anew in each epoch"
            )

    def due(self, batches: int, epoch: int | None) -> int:
        """Steps, when so many batches of the stream are over; `epoch`: those of an epoch."""
        return max(0, self._steps(batches, epoch) - self._steps(self.first, epoch))

    def _steps(self, batches: int, epoch: int | None) -> int:
        if self.every is None:
            return 0
        if epoch is None:
            return batches // self.every
        epochs, within = divmod(batches, epoch)
        return epochs * (epoch // self.every) + within // self.every


class SchedulerRates:
    """Torch schedulers of one optimizer, as a loop steps them.

    A scheduler that is stepped in the loop over batches makes one step for each batch of B samples of the stream, on
    every rank alike (or for each n batches, where the loop steps it only after so many). So it takes the same course at
    any delay bound and number of ranks, and as in a loop on one device with batches of B. One that is stepped at rest
    makes the steps that it is told to, with a metric where it wants one.

    What schedulers know are rates of their own: those in force may be scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[LRScheduler],
        batch_size: int,
        every: int | None = None,
        epoch_samples: int | None = None,
    ) -> None:
        """`every`: batches a step, of all schedulers; None learns it from the loop. `epoch_samples`: of an epoch, where
        its last batch ends with it, as in a loop over a `DataLoader`."""
        self._optimizer = optimizer
        self._schedulers = list(schedulers)
        self._batch_size = batch_size
        self._epoch_samples = epoch_samples
        self._epoch = None if epoch_samples is None else -(-epoch_samples // batch_size)  # batches
        self._cadences = [Cadence(every) for _ in schedulers]
        self._began = 0  # this loop over batches, in samples of the stream
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def begin_loop(self, position: int) -> None:
        """A loop over batches begins."""
        self._began = position
        for cadence in self._cadences:
            cadence.calls = 0

    def _batches(self, position: int) -> int:
        """Of B samples, up to a position of the stream."""
        if self._epoch_samples is None or self._epoch is None:
            return position // self._batch_size
        epochs, within = divmod(position, self._epoch_samples)
        return epochs * self._epoch + within // self._batch_size

    def stepped_in_loop(self, scheduler: LRScheduler, slices: int) -> None:
        """The loop has called the scheduler's step in its slice of this number."""
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UserError(
                "a ReduceLROnPlateau was stepped within a slice, where ranks differ: step it with the result of"
                " job.evaluate, after the loop over an epoch's batches"
            )
        self._cadences[self._schedulers.index(scheduler)].called(self._batches(self._began), slices)

    def at(self, position: int) -> list[float]:
        batches = self._batches(position)
        due = [cadence.due(batches, self._epoch) - cadence.done for cadence in self._cadences]
        if any(steps > 0 for steps in due):
            set_rates(self._optimizer, self._rates)
            with warnings.catch_warnings():
                # Of steps before the optimizer's first: this rank's first task need not be the stream's.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                for turn in range(max(due)):
                    for scheduler, cadence, steps in zip(self._schedulers, self._cadences, due, strict=True):
                        if turn < steps:
                            scheduler.step()
                            cadence.done += 1
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
        return list(self._rates)

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Collective, at rest. A rank without a batch has not called what the others have."""
        told = gather([(cadence.every, cadence.first) for cadence in self._cadences])
        for number, cadence in enumerate(self._cadences):
            known = {theirs[number] for theirs in told if theirs[number][0] is not None}
            if len(known) > 1:
                raise UserError(
                    f"ranks step a scheduler each {', '.join(str(every) for every, _ in sorted(known))} batches: step"
                    " it alike on all ranks"
                )
            if known:
                cadence.every, cadence.first = known.pop()

    def adopt(self, rate: float) -> None:
        raise UserError(
            "the optimizer has got another parameter group, which its scheduler does not know: add it before the"
            " scheduler is made"
        )

    def owners(self, position: int) -> list[float]:
        return self.at(position)

    def rebase(self, rates: list[float]) -> None:
        self._rates = list(rates)

    def state_dict(self) -> dict[str, Any]:
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        return {"schedulers": states, "cadences": [asdict(cadence) for cadence in self._cadences]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scheduler, mine in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(mine)
        self._cadences = [Cadence(**mine) for mine in state["cadences"]]


def check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """UserError unless it can be stepped: a scheduler of one of these."""
    if not isinstance(scheduler, LRScheduler):
        raise UserError(f"scheduler is a {type(scheduler).__name__}: give one of torch.optim.lr_scheduler")
    if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
        raise UserError("scheduler belongs to another optimizer: make it for the one that is given beside it")


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=False):  # one may have come that nobody has looked at
        group["lr"] = rate


def _decoupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | None:
    """The weight decay of a group, where it is scaled with the learning rate and decoupled from the gradient."""
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return group["weight_decay"] if decoupled and isinstance(optimizer, ADAPTIVE) else None


class Steps:
    """An optimizer's steps: schedule, clipping, and what makes local steps on slices add up to the batch's.

    Where noise rules it, the gradient of a slice of n samples has √(B / n) times the norm of the batch's of B samples.

    - Adaptive optimizers divide by the root of its second moment: a local step comes out too short by √(B / n), which
      is made up for in the learning rate (square-root scaling rule, Malladi et al. 2022).
    - Clipping would cut slices to the norm that is meant for the batch: their bound is √(B / n) times as high.

    - Decoupled weight decay (AdamW) multiplies weights by 1 − learning rate · decay, whatever the gradients: it is
      divided by what the learning rate is multiplied by. Decay inside the gradient (L2) is divided by the root of
      the second moment with it, and needs nothing.

    Drift and noise of the anchor are then the batch's. Between `start` and the next rest, nobody else may set the
    optimizer's learning rates or decoupled decays: that would be lost, or count twice, and so is a UserError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Rates,
        max_grad_norm: float | None,
        batch_size: int,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`rates` and `max_grad_norm` are those for a batch of `batch_size`; `before` and `after` are called with each
        of the optimizer's steps, whoever makes it."""
        self.optimizer = optimizer
        self.rates = rates
        self._max_grad_norm = max_grad_norm
        self._batch_size = batch_size
        self._noise = 1.0
        self._in_force = [group["lr"] for group in optimizer.param_groups]
        self.scheduled = list(self._in_force)  # learning rates of the task, as they are for a batch
        self._decays = [_decoupled_decay(optimizer, group) for group in optimizer.param_groups]
        self._decays_in_force = list(self._decays)

        self._before, self._after = before, after
        self._depth = 0  # of steps that call those of their base class
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _before_step(self, _: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if len(arguments) > 1 or named.get("closure") is not None:
            raise UserError("the optimizer's step was given a closure, which ranks cannot share: call it without one")
        self._check_rates()
        self._before()

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._after()

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def start(self) -> None:
        """Training goes on after a rest: what the optimizer's owner has set holds."""
        groups = self.optimizer.param_groups
        found = [group["lr"] for group in groups]
        for rate in found[len(self._in_force) :]:
            self.rates.adopt(rate)
        if found != self._in_force:
            self.rates.rebase(found)
        self._in_force = found
        self._decays = [_decoupled_decay(self.optimizer, group) for group in groups]
        self._decays_in_force = list(self._decays)

    def begin_task(self, task: Task) -> None:
        """The steps from now on are this task's."""
        self._check_rates()
        local = task.synchronous_round is None
        self._noise = math.sqrt(self._batch_size / (task.share or task.samples)) if local else 1.0
        factor = self._noise if isinstance(self.optimizer, ADAPTIVE) else 1.0
        self.scheduled = self.rates.at(task.position)
        self._in_force = [rate * factor for rate in self.scheduled]
        set_rates(self.optimizer, self._in_force)
        self._set_decays(self._noise)

    def _set_decays(self, noise: float) -> None:
        self._decays_in_force = [None if decay is None else decay / noise for decay in self._decays]
        for group, decay in zip(self.optimizer.param_groups, self._decays_in_force, strict=False):
            if decay is not None:
                group["weight_decay"] = decay

    def _check_rates(self) -> None:
        """Nobody has set others; new groups are adopted."""
        found = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups[len(self._in_force) :]:
            self.rates.adopt(group["lr"])
            self._in_force.append(group["lr"])
            self._decays.append(_decoupled_decay(self.optimizer, group))
            self._decays_in_force.append(self._decays[-1])
        if found != self._in_force:
            raise UserError(
                f"the optimizer's learning rate was changed in the loop, from {self._in_force} to {found}, which would"
                " be lost: step the scheduler that job.prepare returned (or give it to hetsync.join(scheduler=...)), or"
                " set the rate between epochs"
            )
        decays = [_decoupled_decay(self.optimizer, group) for group in self.optimizer.param_groups]
        if decays != self._decays_in_force:
            raise UserError(
                f"the optimizer's weight decay was changed in the loop, from {self._decays_in_force} to {decays}, which"
                " would be lost: keep it as it was when the loop began, or set it between epochs"
            )

    def clip(self, weights: Iterable[torch.Tensor], max_norm: float, **options: Any) -> torch.Tensor:
        """To the norm that is meant for a batch; returns what it was."""
        return torch.nn.utils.clip_grad_norm_(weights, max_norm * self._noise, **options)

    def step(self) -> None:
        """One step along the gradients that are there, which are then gone."""
        if self._max_grad_norm is not None:
            self.clip(self.weights, self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def show_owner(self, position: int) -> None:
        """Between tasks: the optimizer's rates and decays are those for a batch, as its owner knows them."""
        self._in_force = self.rates.owners(position)
        set_rates(self.optimizer, self._in_force)
        self._set_decays(1.0)

    def close(self, position: int) -> None:
        """The optimizer is its owner's again, after training up to `position`; rates set at the last rest hold."""
        found = [group["lr"] for group in self.optimizer.param_groups]
        if found != self._in_force:
            self.rates.rebase(found)
        self.show_owner(position)
        for hook in self._hooks:
            hook.remove()
