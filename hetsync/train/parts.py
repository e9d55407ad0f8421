"""All that a job prepares: what ranks share, what each steps, and what else a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from hetsync.errors import UserError
from hetsync.sync.constraints import Constraints, Projection
from hetsync.sync.group_state import RATE, alike, beside, kept, put, put_beside, settings_of
from hetsync.sync.rates import Rates, ScheduleRates, SchedulerRates, set_rates
from hetsync.train.prepared import PreparedScaler, PreparedScheduler

Factor = Callable[[int], float]
MISSING = object()


def constant(position: int) -> float:
    return 1.0


def add(things: list[Any], thing: Any) -> None:
    if any(thing is known for known in things):
        raise UserError(f"job.prepare got the same {type(thing).__name__} twice: prepare each thing once")
    things.append(thing)


@contextmanager
def fitting() -> Iterator[None]:
    """UserError where the block finds a checkpoint's state to be of something else."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(
            f"the checkpoint's state does not fit what was prepared and registered ({error}): resume with the script"
            " it is of"
        ) from error


def as_plain(option: Any) -> Any:
    """A learning rate may be a tensor."""
    return option.item() if isinstance(option, torch.Tensor) else option


def same_device(one: torch.device, other: torch.device) -> bool:
    """A device without an index is the current one."""
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)


class Parts:
    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self.averages: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.scheduler_samples: int | None = None  # of a step in the loop, where it is told
        self.scaler: PreparedScaler | None = None
        self.registered: dict[str, Any] = {}
        self.rates: list[Rates] = []
        self.factors: dict[int, Factor] = {}  # by optimizer
        self.constrained: list[tuple[torch.nn.Module, Projection]] = []
        self.shared: list[torch.nn.Parameter] = []  # weights, in a run that is gone on with

    def register(self, name: str, state: Any) -> None:
        if not callable(getattr(state, "state_dict", None)) or not callable(getattr(state, "load_state_dict", None)):
            raise UserError(
                f"job.register got a {type(state).__name__} as {name}: it needs state_dict and load_state_dict"
            )
        if name in self.registered:
            raise UserError(f"job.register was called twice for {name}: give each thing a name of its own")
        self.registered[name] = state

    def schedule(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        self.factors[self.number_of(optimizer)] = factor

    def factor(self, number: int) -> Factor:
        """Of an optimizer's learning rates; 1 where something else rules them."""
        return self.factors.get(number, constant)

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return number
        raise UserError("the job was given an optimizer that was not prepared: give it to job.prepare before the loop")

    def check(self, device: torch.device) -> None:
        """UserError unless there is something to train, on the rank's `device`."""
        if not self.models:
            raise UserError("the job has no model: give one to job.prepare before the loop")
        if not self.optimizers:
            raise UserError("the job has no optimizer: give one to job.prepare before the loop")
        for value in (value for model in self.models for value in model.state_dict().values()):
            if not isinstance(value, torch.Tensor):
                raise UserError(
                    f"a model's state holds a {type(value).__name__} (get_extra_state), which ranks do not share: keep"
                    " it in an object of its own, for job.register"
                )
        if not any(weight.requires_grad for model in self.models for weight in model.parameters()):
            raise UserError("model has no weights to train: give one whose parameters require a gradient")
        trained = {id(weight) for model in self.models for weight in model.parameters()}
        if any(
            id(tensor) in trained for average in self.averages for tensor in average.state_dict(keep_vars=True).values()
        ):
            raise UserError(
                "an average holds a trained model's own weights, and not a copy: give job.keep_average what the loop"
                " averages them into (copy.deepcopy(model))"
            )
        devices = {weight.device for model in self.models for weight in model.parameters()}
        if any(not same_device(device, own) for own in devices):
            raise UserError(
                f"the models' weights are on {', '.join(sorted(map(str, devices)))}, and job.device is {device}: put"
                " all there by .to(job.device), or give hetsync.join another device"
            )

    @property
    def constraints(self) -> Constraints:
        """UserError where they are on anything but the models."""
        known = {id(weight) for weight in self.model.parameters()}
        for module, _ in self.constrained:
            strangers = [name for name, weight in module.named_parameters() if id(weight) not in known]
            if strangers:
                raise UserError(
                    f"job.constrain got a {type(module).__name__} whose {strangers[0]} is a weight of no prepared"
                    " model: prepare its model"
                )
        return Constraints(self.constrained)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The models as one, once all are there."""
        return self.models[0] if len(self.models) == 1 else torch.nn.ModuleList(self.models)

    @cached_property
    def _as_prepared(self) -> list[list[dict[str, Any]]]:
        """Optimizers' groups, before a checkpoint is taken over."""
        return [[kept(settings_of(group)) for group in optimizer.param_groups] for optimizer in self.optimizers]

    def make_rates(self, batch_size: int, epoch_samples: int | None) -> None:
        """What rules each optimizer's learning rates: its schedulers, a function of samples, or its owner."""
        assert len(self._as_prepared) == len(self.optimizers)  # they are known from now on
        for number, optimizer in enumerate(self.optimizers):
            mine = [each for each in self.schedulers if each.scheduler.optimizer is optimizer]
            if mine and number in self.factors:
                raise UserError("an optimizer has a scheduler and job.schedule: take one of them")
            if mine:
                schedulers = [each.scheduler for each in mine]
                rates = SchedulerRates(optimizer, schedulers, batch_size, epoch_samples, self.scheduler_samples)
                for each in mine:
                    each.rates = rates
                self.rates.append(rates)
            else:
                self.rates.append(ScheduleRates(optimizer, self.factor(number)))

    def begin_loop(self, position: int) -> None:
        """A loop over batches begins, at so many samples."""
        for rates in self.rates:
            rates.begin_loop(position)

    def end_loop(self, slices: int) -> None:
        """It has ended after so many, and training goes on."""
        for rates in self.rates:
            rates.end_loop(slices)

    def state(self, frozen: Container[int]) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and optimizers; of rank 0, at rest. `frozen`: the ids of weights that
        ranks do not share."""
        return {
            "frozen": [place for place, weight in enumerate(self._weights) if id(weight) in frozen],
            "frozen_since": [
                place
                for place, weight in enumerate(self._weights)
                if not weight.requires_grad and id(weight) not in frozen
            ],
            "groups": [self._groups(number) for number in range(len(self.optimizers))],
            "beside": [beside(optimizer) for optimizer in self.optimizers],
            "schedulers": [rates.state_dict() if isinstance(rates, SchedulerRates) else None for rates in self.rates],
            "averages": [average.state_dict() for average in self.averages],
            "scaler": self.scaler.scaler.state_dict() if self.scaler is not None else None,
            "registered": {name: mine.state_dict() for name, mine in self.registered.items()},
        }

    @property
    def _weights(self) -> list[torch.nn.Parameter]:
        return list(torch.nn.ModuleList(self.models).parameters())

    def _weights_of(self, optimizer: torch.optim.Optimizer) -> list[list[int]]:
        """By their places among all, in each group."""
        places = {weight: place for place, weight in enumerate(self._weights)}
        return [[places[weight] for weight in group["params"]] for group in optimizer.param_groups]

    def _groups(self, number: int) -> list[dict[str, Any]]:
        """Of an optimizer: the weights, the rate, and what else is not as it was prepared. The rest is the script's of
        whoever goes on."""
        optimizer, prepared = self.optimizers[number], self._as_prepared[number]
        found = []
        for place, (group, weights) in enumerate(zip(optimizer.param_groups, self._weights_of(optimizer), strict=True)):
            before = prepared[place] if place < len(prepared) else None  # the script has added it on its way
            options: dict[str, Any] = {
                name: kept(value)
                for name, value in settings_of(group).items()
                if before is None or not alike(kept(value), before.get(name, MISSING))
            }
            options[RATE] = as_plain(group[RATE])
            found.append({"weights": weights, "options": options})
        return found

    def restore_roles(self, state: Mapping[str, Any]) -> None:
        """What is trained by whom, before weights and optimizers' state come back: the script sets that on its way, in
        epochs that are not run again."""
        assert len(self._as_prepared) == len(self.optimizers)  # without the groups that are added now
        with fitting():
            weights, frozen = self._weights, set(state["frozen"])
            for place, weight in enumerate(weights):
                weight.requires_grad_(place not in frozen)
            self.shared = [weight for place, weight in enumerate(weights) if place not in frozen]
            for optimizer, groups in zip(self.optimizers, state["groups"], strict=True):
                for group in groups[len(optimizer.param_groups) :]:
                    added = [weights[place] for place in group["weights"]]
                    optimizer.add_param_group({"params": added, **group["options"]})
                if self._weights_of(optimizer) != [each["weights"] for each in groups]:
                    raise ValueError("an optimizer has other groups of weights")

    def freeze_again(self, state: Mapping[str, Any]) -> None:
        """What the script had frozen since ranks began to share it."""
        with fitting():
            weights = self._weights
            for place in state.get("frozen_since", ()):  # older checkpoints say nothing
                weights[place].requires_grad_(False)

    def restore(self, state: Mapping[str, Any], position: int) -> None:
        """As after so many samples. UserError where the state is not of parts like these."""
        with fitting():
            self._restore_groups(state)
            self._restore_rates(state, position)
            for average, kept in zip(self.averages, state["averages"], strict=True):
                average.load_state_dict(kept)
            if self.scaler is not None and state["scaler"]:
                self.scaler.scaler.load_state_dict(dict(state["scaler"]))
            for name, mine in self.registered.items():
                mine.load_state_dict(state["registered"][name])

    def _restore_groups(self, state: Mapping[str, Any]) -> None:
        """What they held beside rates."""
        for number, optimizer in enumerate(self.optimizers):
            for group, saved in zip(optimizer.param_groups, state["groups"][number], strict=True):
                for name, value in saved["options"].items():
                    if name != RATE:
                        put(group, name, value, optimizer)
            put_beside(optimizer, state.get("beside", [{}] * len(self.optimizers))[number])  # older ones have none

    def _restore_rates(self, state: Mapping[str, Any], position: int) -> None:
        for number, (optimizer, rates) in enumerate(zip(self.optimizers, self.rates, strict=True)):
            if number in self.factors:  # those of today's recipe
                continue
            rates.rebase(set_rates(optimizer, [saved["options"][RATE] for saved in state["groups"][number]]))
            if isinstance(rates, SchedulerRates) and state["schedulers"][number] is not None:
                rates.load_state_dict(state["schedulers"][number], position)
