"""What becomes of a buffer that ranks change, each on its own samples: its module tells, or the script.

    mean   of what ranks have made of it, by samples (batch norm's statistics)
    sum    what each rank has added to it adds up (counts)
    rows   what a rank has written holds (a memory bank); of two that have written the same, the lower rank's
    min    the least of what ranks have written, and
    max    the greatest (ranges)

A module tells by an attribute, `buffer_rules = {"counts": "sum"}`, which `job.prepare` sets, too. Batch norm and its
kin, spectral norm, and flags need no word. A buffer without a rule stays as it was: one that changes is refused.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from hetsync.doubles import doubled
from hetsync.errors import UserError
from hetsync.sync.reals import reals

Rule = Literal["mean", "sum", "rows", "min", "max"]
Holder = dict[str, torch.Tensor | None]  # a module's buffers, or its parameters, by name

SAID = "buffer_rules"
WRITTEN: tuple[Rule, ...] = ("rows", "min", "max")  # that go by what ranks have written, infinities too
STATISTICS: Mapping[str, Rule] = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "rows"}
PLACES = 1 << 24  # float32 knows each whole number up to it


def saved_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Module, key, name and tensor of those that a checkpoint holds, each once; others are a module's own business."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield module, key, f"{path}.{key}".lstrip("."), buffer


def rule_of(module: nn.Module, key: str) -> Rule | None:
    """Of a module's buffer."""
    said: Mapping[str, Rule] = getattr(module, SAID, {})
    buffer = module._buffers[key]
    assert buffer is not None
    if buffer.layout is not torch.strided:
        return None
    if key in said:
        return said[key]
    if module._buffers.keys() >= {"running_mean", "running_var"} and key in STATISTICS:
        return STATISTICS[key]
    if _is_singular_vector(module, key):
        return "mean"
    return "rows" if buffer.dtype is torch.bool else None


def _is_singular_vector(module: nn.Module, key: str) -> bool:
    """Spectral norm's, which it makes of the weight and of its last one, and scales to a length of 1."""
    if isinstance(module, _SpectralNorm):
        return key in ("_u", "_v")
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    return any(key in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks)


def buffers_of(model: nn.Module, *rules: Rule) -> dict[str, torch.Tensor]:
    """The buffers that follow one of these rules, by name."""
    return {name: buffer for module, key, name, buffer in saved_buffers(model) if rule_of(module, key) in rules}


def say(model: nn.Module, said: Mapping[str, Rule], where: str) -> set[str]:
    """What becomes of the buffers whose names fit these patterns. Returns the patterns that fit any. UserError for what
    is no rule."""
    for pattern, rule in said.items():
        if rule not in get_args(Rule):
            raise UserError(f"{where} got {rule!r} for {pattern}: use mean, sum, rows, min or max")
    used = set()
    for module, key, name, buffer in saved_buffers(model):
        for pattern, rule in said.items():
            if fnmatch.fnmatchcase(name, pattern):
                if buffer.is_complex() and rule in ("min", "max"):
                    raise UserError(
                        f"{where} got {rule!r} for {name}, whose numbers are complex: use mean, sum or rows"
                    )
                used.add(pattern)
                module.__dict__[SAID] = {**getattr(module, SAID, {}), key: rule}
    return used


@dataclass(frozen=True)
class Change:
    """What a rank has made of a buffer since all had the same, on so many samples."""

    now: torch.Tensor
    samples: int


def merged(rule: Rule, before: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    """What all ranks take over at a rest; `changes` are by rank, of those that have changed it."""
    if rule in WRITTEN:
        return _merged_writes(rule, before, changes)
    if rule == "sum":
        return before + torch.stack([change.now - before for change in changes]).sum(0)
    whole = max(1, sum(change.samples for change in changes))
    mean = torch.stack([(change.now - before) * (change.samples / whole) for change in changes]).sum(0)
    return before + (mean if before.is_complex() else mean.round()).to(before.dtype)


def _merged_writes(rule: Rule, before: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    choose = {"min": torch.minimum, "max": torch.maximum}.get(rule)
    found, written = before.clone(), torch.zeros_like(before, dtype=torch.bool)
    for change in reversed(changes):
        mine = change.now != before
        now = change.now if choose is None else torch.where(written, choose(found, change.now), change.now)
        found, written = torch.where(mine, now, found), written | mine
    return found


def merged_at_rest(model: nn.Module) -> dict[str, tuple[torch.Tensor, Rule]]:
    """Those buffers, by name: what no round of delayed mode sums."""
    return {
        name: (buffer, rule)
        for module, key, name, buffer in saved_buffers(model)
        if (rule := rule_of(module, key)) is not None and (rule in WRITTEN or not buffer.is_floating_point())
    }


class Unruled:
    """Buffers without a rule, of which nobody knows what ranks' changes are to become."""

    def __init__(self, model: nn.Module) -> None:
        found = saved_buffers(model)
        self._buffers = [(name, buffer) for module, key, name, buffer in found if rule_of(module, key) is None]
        self.begin()

    def begin(self) -> None:
        """What is done to them before this holds."""
        self._versions = [buffer._version for _, buffer in self._buffers]

    def check(self) -> None:
        """UserError where one has changed since then."""
        known = zip(self._buffers, self._versions, strict=True)
        changed = [name for (name, buffer), version in known if buffer._version != version]
        if changed:
            raise UserError(
                f"{', '.join(changed)} changed while training runs, on each rank by its own samples: tell what becomes"
                f" of such buffers by job.prepare(model, buffers={{{changed[0]!r}: rule}}), or by a module's {SAID}:"
                " 'mean' (of statistics), 'sum' (of what each adds, as to counts), 'rows' (what each writes), 'min' or"
                " 'max' (of what each writes)"
            )


def _columns(places: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = doubled(values)
    places = places.to(values.device)
    high = values.to(dtype)
    low = (values - high).to(dtype).nan_to_num(0.0, 0.0, 0.0)  # of infinities
    return torch.stack([(places // PLACES).to(dtype), (places % PLACES).to(dtype), high, low])


def _read(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low, *parts = doubled(columns)
    return (high * PLACES + low).long(), torch.stack(parts).sum(0)


def _put(into: torch.Tensor, rule: Rule, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Ranks' values at places: the last one's hold, or the least or greatest of them."""
    if rule == "rows":
        for places, values in parts:
            into.put_(places.to(into.device), values.to(into))
    else:
        places, values = map(torch.cat, zip(*parts, strict=True))
        found = doubled(into).flatten().scatter_reduce(0, places, values, f"a{rule}", include_self=False)
        into.copy_(found.view_as(into))


class Writes:
    """Synchronous mode's float buffers that go by what is written, and `weights` that something but a step has written.
    A round tells every value that a rank has written, as four numbers: its place among all, in two parts, and itself,
    in two parts, which in float32 hold all of a float64 but its last digits."""

    PARTS = 4

    def __init__(self, model: nn.Module, weights: Sequence[nn.Parameter] = ()) -> None:
        """`weights`: all that ranks share."""
        self.weights: list[nn.Parameter] = []  # of these, what is to be told
        found = [(buffer, rule) for rule in WRITTEN for buffer in buffers_of(model, rule).values()]
        self._buffers = [buffer for buffer, _ in found if buffer.is_floating_point()]
        self._rules = [rule for buffer, rule in found if buffer.is_floating_point()]
        self._shared: list[torch.Tensor] = []
        self._all_weights = list(weights)
        self.adopt()

    @torch.no_grad()
    def adopt(self) -> None:
        """All ranks hold the same buffers now."""
        self._shared = [buffer.clone(memory_format=torch.contiguous_format) for buffer in self._buffers]

    @torch.no_grad()
    def find(self, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """This rank's since then: a column each."""
        found, first = [torch.zeros(self.PARTS, 0, dtype=dtype, device=device)], 0
        if not (self._buffers or self.weights):
            return found[0]
        for buffer, shared in zip(self._buffers, self._shared, strict=True):
            places = (buffer != shared).flatten().nonzero().flatten()
            found.append(_columns(places + first, buffer.flatten()[places], dtype))
            first += buffer.numel()
        told = set(self.weights)
        for weight in self._all_weights:
            values = reals(weight.detach()).flatten()
            if weight in told:
                found.append(_columns(torch.arange(first, first + len(values), device=values.device), values, dtype))
            first += len(values)
        return torch.cat([each.to(device) for each in found], dim=1)

    @torch.no_grad()
    def take(self, told: Sequence[torch.Tensor]) -> None:
        """What ranks have told, the lowest first, holds."""
        written = [(places, values) for places, values in map(_read, reversed(told)) if len(places)]
        first = 0
        weights = [reals(weight.detach()) for weight in self._all_weights] if written else []
        rules: list[Rule] = ["rows"] * len(weights)
        for shared, rule in zip([*self._shared, *weights], [*self._rules, *rules], strict=True):
            stop = first + shared.numel()
            mine = [(places - first, values, (places >= first) & (places < stop)) for places, values in written]
            parts = [(places[here], values[here]) for places, values, here in mine if here.any()]
            if parts:
                _put(shared, rule, parts)
            first = stop
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """What ranks hold alike, where they do not: a write is a change to whoever looks."""
        for buffer, shared in zip(self._buffers, self._shared, strict=True):
            if not torch.equal(buffer, shared):
                buffer.copy_(shared)
