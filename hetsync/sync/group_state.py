"""What an optimizer keeps beside the state of its weights: in its groups, and wherever else its `state_dict` looks.

A group holds settings (rates, decays), which its owner sets and all ranks share, and what the optimizer makes for
itself (counts, sums, an estimate of the rate). What a step changes is the optimizer's own; what else changes in a group
is a setting. So nobody needs to know names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hetsync.errors import UserError, brief

RATE = "lr"  # is followed by `rates.py`
Held = dict[str, Any]  # by "group PLACE NAME", "state NAME" or "more NAME"
Settings = dict[tuple[int, str], tuple[str, bool]]  # by a group's place and name: as `shown`; was it changed?


def check_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """UserError unless it is made as torch makes it, whatever else it may hold."""
    if not {"state", "param_groups"} <= optimizer.state_dict().keys():
        raise UserError(
            f"optimizer is a {type(optimizer).__name__}, whose state_dict has no state or no param_groups, which"
            " checkpoints and other ranks need: give the optimizer inside of it"
        )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def kept(value: Any) -> Any:
    """A copy on the CPU, of tensors, arrays and what holds them; anything else is itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: kept(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(kept, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def mark(value: Any) -> Any:
    """Equal marks: nobody has changed it. Cheap, since groups are looked at before and after each step."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, dict):
        return {key: mark(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return tuple(map(mark, value))
    return value.tobytes() if isinstance(value, np.ndarray) else value


def alike(one: Any, other: Any) -> bool:
    """Of what `kept` has made."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(part, other[key]) for key, part in one.items())
    if type(one) in (list, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def mean(values: Sequence[Any], samples: Sequence[int]) -> Any:
    """Weighted by samples, of what is a real number on all ranks, within lists and dictionaries, too. What has no mean
    (counts, modes) is that of the first rank, and so is what is equal."""
    first = values[0]
    if all(alike(first, value) for value in values):
        return first
    if isinstance(first, torch.Tensor) and (first.is_floating_point() or first.is_complex()):
        if all(isinstance(value, torch.Tensor) and value.shape == first.shape for value in values):
            wide = torch.complex128 if first.is_complex() else torch.float64
            weighted = [value.to(wide) * used for value, used in zip(values, samples, strict=True)]
            return (torch.stack(weighted).sum(0) / sum(samples)).to(first.dtype)
    elif all(isinstance(value, float) for value in values):
        return sum(value * used for value, used in zip(values, samples, strict=True)) / sum(samples)
    elif isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        return {key: mean([value[key] for value in values], samples) for key in first}
    elif type(first) in (list, tuple) and all(type(v) is type(first) and len(v) == len(first) for v in values):
        return type(first)(mean(parts, samples) for parts in zip(*values, strict=True))
    return first


def placed(value: Any, before: Any, weight: torch.Tensor) -> Any:
    """`value`, in the tensor that is there, since the optimizer may hold it elsewhere, too; else on the weights'
    device."""
    if isinstance(value, torch.Tensor):
        if not isinstance(before, torch.Tensor):
            return value.to(weight.device, copy=True)
        if before.shape != value.shape or before.dtype != value.dtype:
            return value.to(before.device, copy=True)
        return before.copy_(value)
    if isinstance(value, dict):
        there = before if isinstance(before, dict) else {}
        return {key: placed(part, there.get(key), weight) for key, part in value.items()}
    if type(value) in (list, tuple):
        same = type(before) is type(value) and len(before) == len(value)
        pairs = zip(value, before if same else [None] * len(value), strict=True)
        return type(value)(placed(part, there, weight) for part, there in pairs)
    return value


def shown(value: Any) -> str:
    """As ranks compare it, whatever lies where in their memory."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return repr(value.tolist())
    if isinstance(value, dict):
        return repr({str(key): shown(part) for key, part in value.items()})
    if type(value) in (list, tuple):
        return repr([shown(part) for part in value])
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


class GroupState:
    """Attributes:
    own: Of the groups, (place, name) of what steps have changed on some rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.own: set[tuple[int, str]] = set()
        self._first = [kept(settings_of(group)) for group in optimizer.param_groups]
        self.settle()

    # In the loop.

    def settle(self) -> None:
        """The groups are as they are to be: nobody but the optimizer's steps may change them from now on."""
        self._marks = [mark(settings_of(group)) for group in self.optimizer.param_groups]
        self._values = [dict(group) for group in self.optimizer.param_groups]  # for a sentence

    def _changes(self) -> Iterator[tuple[int, str]]:
        for place, (before, group) in enumerate(zip(self._marks, self.optimizer.param_groups, strict=False)):
            if (now := mark(settings_of(group))) != before:
                names = (name for name in {**before, **now} if before.get(name) != now.get(name))
                yield from ((place, name) for name in names if name != RATE)

    def check(self) -> None:
        """UserError where a setting has been changed."""
        for place, name in self._changes():
            before, now = (each[place].get(name) for each in (self._values, self.optimizer.param_groups))
            raise UserError(
                f"the optimizer's {name.replace('_', ' ')} was changed in the loop, from {brief(before)} to"
                f" {brief(now)}, which each rank would do for itself: set it between epochs, or by a scheduler that"
                " job.prepare knows (your own may be a class made from torch's LRScheduler)"
            )

    def note_step(self) -> None:
        """A step is over."""
        self.own.update(self._changes())
        self.settle()

    # At rest.

    def require_nothing_own(self) -> None:
        """UserError where steps have changed more than weights and their state, by a plan that cuts the model: each
        stage would have made its own of it."""
        names = sorted({name for _, name in self._changes()} | {key.split(" ", 1)[1] for key in beside(self.optimizer)})
        if names:
            raise UserError(
                f"the optimizer keeps {', '.join(names)} for all of its weights, of which a stage has some: take"
                " another one, or a plan of whole models"
            )

    def settings(self) -> Settings:
        """What is not the optimizer's own, and whether it is another than when the job began. (Rates are looked at by
        themselves.)"""
        found: Settings = {}
        for place, group in enumerate(self.optimizer.param_groups):
            before = self._first[place] if place < len(self._first) else {}
            for name, value in settings_of(group).items():
                if name != RATE and (place, name) not in self.own:
                    found[place, name] = shown(value), not alike(kept(value), before.get(name))
        return found

    def share_names(self, gather: Callable[[Any], list[Any]]) -> None:
        """Collective: a rank may not have stepped since it came."""
        self.own = set().union(*gather(self.own))

    def told(self) -> Held:
        """All that is the optimizer's own."""
        groups = self.optimizer.param_groups
        found = {f"group {place} {name}": kept(groups[place].get(name)) for place, name in sorted(self.own)}
        return found | beside(self.optimizer)

    def take(self, held: Mapping[str, Any]) -> None:
        """What `told` has told of another rank, or of several."""
        for key, value in held.items():
            where, _, rest = key.partition(" ")
            if where == "group":
                place, _, name = rest.partition(" ")
                put(self.optimizer.param_groups[int(place)], name, value, self.optimizer)
                self.own.add((int(place), name))
        put_beside(self.optimizer, held)
        self.settle()

    def values(self) -> dict[str, torch.Tensor]:
        """Of what is its own, for a digest and for a look at how far ranks differ."""
        return {f"{key}{path}": value for key, held in self.told().items() for path, value in _leaves(held)}


def require_same_settings(told: Mapping[int, Sequence[Settings]]) -> None:
    """By rank, of each optimizer. UserError where the owner has changed one that is not the same on all. (How steps are
    carried out may differ by device, and nobody changes that.)"""
    first, *others = told
    for number, settings in enumerate(told[first]):
        for rank in others:
            theirs = told[rank][number]
            for place, name in {**settings, **theirs}:
                mine, other = (each.get((place, name), ("missing", True)) for each in (settings, theirs))
                if mine[0] != other[0] and (mine[1] or other[1]):
                    raise UserError(
                        f"the optimizer's {name.replace('_', ' ')} is {brief(mine[0])} on rank {first} and"
                        f" {brief(other[0])} on rank {rank}: change it on all ranks alike"
                    )


def beside(optimizer: torch.optim.Optimizer) -> Held:
    """What its `state_dict` holds beside groups and the state of each weight."""
    state = optimizer.state_dict()
    found = {f"state {name}": kept(value) for name, value in state["state"].items() if not isinstance(name, int)}
    known = ("state", "param_groups")
    return found | {f"more {name}": kept(value) for name, value in state.items() if name not in known}


def put(there: Any, name: str, value: Any, optimizer: torch.optim.Optimizer) -> None:
    """Into a group, or the optimizer's state."""
    if name not in there or not alike(kept(there[name]), value):
        there[name] = placed(value, there.get(name), optimizer.param_groups[0]["params"][0])


def put_beside(optimizer: torch.optim.Optimizer, held: Mapping[str, Any]) -> None:
    """What `beside` has found."""
    for key, value in held.items():
        where, _, name = key.partition(" ")
        if where == "state":
            put(optimizer.state, name, value, optimizer)
    now = beside(optimizer)
    more = {key: value for key, value in held.items() if key.startswith("more ") and not alike(now.get(key), value)}
    if more:
        own = {key.removeprefix("more "): value for key, value in more.items()}
        optimizer.load_state_dict({**optimizer.state_dict(), **own})


def average_group_state(state: GroupState, samples: int, gather: Callable[[Any], list[Any]]) -> None:
    """Collective: each rank counts by the `samples` that it has used since the last rest."""
    state.share_names(gather)
    state.take(averaged(gather((state.told(), samples))))


def averaged(told: Sequence[tuple[Held, int]]) -> Held:
    stepped = [(held, used) for held, used in told if used]
    found: Held = {}
    for key in {key: None for held, _ in stepped for key in held}:
        values, weights = zip(*((held[key], used) for held, used in stepped if key in held), strict=True)
        found[key] = mean(values, weights)
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, float):
        yield path, torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}")
    elif type(value) in (list, tuple):
        for key, part in enumerate(value):
            yield from _leaves(part, f"{path}.{key}")
    else:
        yield path, torch.frombuffer(bytearray(shown(value).encode()), dtype=torch.uint8)
