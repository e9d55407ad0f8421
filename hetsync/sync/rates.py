"""The learning rates of an optimizer over the sample stream."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hetsync.errors import UserError, brief
from hetsync.sync.group_state import shown


class Rates(ABC):
    """The learning rates of an optimizer's parameter groups over the sample stream, for batches of B samples."""

    @abstractmethod
    def at(self, position: int) -> list[float]:
        """At a stream position; these ascend."""

    @abstractmethod
    def adopt(self, rate: float) -> None:
        """The optimizer has got another group, of this learning rate."""

    @abstractmethod
    def owners(self, position: int) -> list[float]:
        """Those that the optimizer's owner finds when training has come to `position`."""

    @abstractmethod
    def rebase(self, rates: list[float]) -> None:
        """At rest the owner has set these in place of `owners`."""

    # What follows is for those that learn of a script's loop.

    def begin_loop(self, position: int) -> None:  # noqa: B027
        """A loop over batches begins, at so many samples."""

    def leave_void(self, slices: int, others_step: bool = False) -> None:  # noqa: B027
        """So many slices of the loop had no step, as a rank has died or the loop has skipped them (`others_step`: but
        those of other ranks may not have)."""

    def end_loop(self, slices: int) -> None:  # noqa: B027
        """That loop has ended after so many, and training goes on."""

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:  # noqa: B027
        """Collective, at rest: what one rank has learned of its loop all ranks know."""

    def settings(self) -> list[dict[str, str]]:
        """Of each scheduler, by name, as `shown`. At rest they are the same on all ranks."""
        return []


class ScheduleRates(Rates):
    """What the optimizer's rates were at first, times a factor of the samples applied."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float] = lambda position: 1.0) -> None:
        self._base = rates_of(optimizer)
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


@dataclass
class Cadence:
    """How a loop steps a scheduler: after each `every` batches, counted anew in each epoch.

    The loop tells it by its first call. Steps follow the samples of the job from then on, so calls that come at other
    times would not be heard: they are refused. Slices that a death has made void the loop may count or not.
    """

    every: int | None = None  # None: not in the loop
    first: int = 0  # batches of the stream before it
    done: int = 0  # steps
    calls: int = 0  # in this loop over batches
    void: int = 0  # slices before the one that is out, in this loop
    missed: bool = False  # a slice that other ranks may have stepped it in, before its first call here
    known: bool = False  # before this loop
    moved: bool = False  # a learning rate, by a step in this loop

    def begin_loop(self) -> None:
        self.calls, self.void, self.known, self.moved = 0, 0, self.every is not None, False

    def end_loop(self, slices: int) -> None:
        """Of so many. UserError where steps that the loop has made no more have changed a rate."""
        uncalled = self.every is not None and not self.calls and slices - self.void >= self.every
        if uncalled and self.known and self.moved:
            raise UserError(
                "a scheduler that the loop had stepped was stepped no more in a whole loop over batches, while its"
                " steps follow samples: step it in each epoch (one schedule after another is a SequentialLR), or"
                " always after the loop over batches"
            )

    def called(self, batches: int, slices: int) -> None:
        """In a loop over batches that began at so many of the stream, in its slice of this number."""
        self.calls += 1
        if self.every is None and self.missed:
            raise UserError(
                "a scheduler was stepped for the first time after a batch that this rank had skipped, where others may"
                " have stepped it: with sync.delay_bound 0 skip none of the first, but call job.backward(loss,"
                " weight=0), and step"
            )
        if self.every is None:
            self.every, self.first = slices - self.void, batches
        if not slices - self.void <= self.calls * self.every <= slices:
            raise UserError(
                f"a scheduler was stepped first after {self.every} batches of the loop, and for the {self.calls}. time"
                f" after {slices}: its steps follow samples, so step it after each batch, or after each n-th, counted"
                " anew in each epoch (and what is due after the last, once the loop over batches has ended)"
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


class SchedulerRates(Rates):
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
        epoch_samples: int | None = None,
        step_samples: int | None = None,
    ) -> None:
        """`epoch_samples`: of an epoch, where its last batch ends with it, as in a loop over a `DataLoader`.
        `step_samples`: those of a step, where they are told: schedulers that are stepped in the loop at all make one
        after so many samples each, however often they are called."""
        self._optimizer = optimizer
        self._schedulers = list(schedulers)
        self._told = step_samples is not None
        self._batch_size = step_samples or batch_size
        self._epoch_samples = epoch_samples
        self._epoch = None if epoch_samples is None else -(-epoch_samples // self._batch_size)  # batches
        self._cadences = [Cadence() for _ in schedulers]
        self._began = 0  # this loop over batches, in samples of the stream
        self._rates = rates_of(optimizer)

    def begin_loop(self, position: int) -> None:
        """A loop over batches begins."""
        self._began = position
        for cadence in self._cadences:
            cadence.begin_loop()

    def end_loop(self, slices: int) -> None:
        """That loop has ended after so many slices, and training goes on."""
        if not self._told:
            for cadence in self._cadences:
                cadence.end_loop(slices)

    def leave_void(self, slices: int, others_step: bool = False) -> None:
        for cadence in self._cadences:
            cadence.void += slices
            cadence.missed |= others_step and cadence.every is None

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
        cadence = self._cadences[self._schedulers.index(scheduler)]
        if not self._told:
            cadence.called(self._batches(self._began), slices)
        elif cadence.every is None:
            cadence.every, cadence.first = 1, self._batches(self._began)

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
                            before = rates_of(self._optimizer)
                            scheduler.step()
                            cadence.done += 1
                            cadence.moved |= rates_of(self._optimizer) != before
            self._rates = rates_of(self._optimizer)
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

    def settings(self) -> list[dict[str, str]]:
        return [scheduler_settings(scheduler) for scheduler in self._schedulers]

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
        return {
            "schedulers": states,
            "cadences": [{"every": each.every, "first": each.first, "done": each.done} for each in self._cadences],
            "batches": self._measures,
        }

    @property
    def _measures(self) -> list[int | None]:
        """Of what is counted."""
        return [self._batch_size, self._epoch_samples]

    def load_state_dict(self, state: Mapping[str, Any], position: int) -> None:
        """`position`: samples of the stream that the state is of."""
        for scheduler, mine in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(mine)
        for cadence, kept in zip(self._cadences, state["cadences"], strict=True):
            # Where all go back within a loop it goes on, and calls as before: what is known of it stays.
            cadence.done = kept["done"]
            if cadence.every is None:
                cadence.every, cadence.first = kept["every"], kept["first"]
            if state.get("batches", self._measures) != self._measures:  # it has counted others
                cadence.first, cadence.done = self._batches(position), 0


def check_scheduler(scheduler: LRScheduler, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """UserError unless it is of one of these."""
    if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
        raise UserError("scheduler belongs to another optimizer: make it for the one that is given beside it")


def scheduler_settings(scheduler: LRScheduler) -> dict[str, str]:
    """All that rules its steps, by name, as `shown`."""
    return {name: shown(value) for name, value in scheduler.state_dict().items()}


def require_same_schedulers(told: Mapping[int, Sequence[dict[str, str]]]) -> None:
    """By rank, of each scheduler. UserError where a script has set one on some ranks only."""
    first, *others = told
    for rank in others:
        for mine, theirs in zip(told[first], told[rank], strict=True):
            for name in {**mine, **theirs}:
                one, other = (each.get(name, "missing") for each in (mine, theirs))
                if one != other:
                    raise UserError(
                        f"a scheduler's {name} is {brief(one)} on rank {first} and {brief(other)} on rank {rank}: set"
                        " it, or step the scheduler, on all ranks alike"
                    )


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Of its groups. One may be a tensor, which scripts and schedulers change in place."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> list[float]:
    """Returns them as they are then, in a tensor's own precision. The tensor is a new one, since groups and optimizers
    may share what they were given."""
    for group, rate in zip(optimizer.param_groups, rates, strict=False):  # one may have come that nobody has looked at
        before = group["lr"]
        group["lr"] = torch.full_like(before, rate) if isinstance(before, torch.Tensor) else rate
    return rates_of(optimizer)[: len(rates)]
