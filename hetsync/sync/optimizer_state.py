"""Optimizer state is local between drains; at a drain every rank adopts the average over samples.

So a resume, which finds one state on disk, equals going on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hetsync.errors import UserError
from hetsync.sync.deltas import runs
from hetsync.sync.reals import reals, summed_in

Key = tuple[int, str, tuple[int, ...]]  # parameter's place, name in the state, shape
CHUNK_VALUES = 1 << 24  # that are summed at once: 64 MiB of float32 beside the state
NUMBERS = ("step", "mu_product", "eta", "mu")  # that torch's optimizers keep of a weight, whatever its type and shape


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _keys(optimizer: torch.optim.Optimizer) -> list[Key]:
    keys = []
    for place, parameter in enumerate(_parameters(optimizer)):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if _has_mean(value):
                keys.append((place, name, tuple(value.shape)))
    return keys


def _has_mean(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _tensor(optimizer: torch.optim.Optimizer, key: Key) -> torch.Tensor:
    """The state's tensor; made on a rank that has not stepped yet and so has none."""
    place, name, shape = key
    parameter = _parameters(optimizer)[place]
    state = optimizer.state[parameter]
    if name not in state:
        state[name] = _zeros(optimizer, parameter, name, shape)
    tensor: torch.Tensor = state[name]
    return tensor


def _zeros(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Of the type, on the device and in the memory format in which the optimizer itself would begin."""
    if name not in NUMBERS and shape == parameter.shape:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if shape:
        return torch.zeros(shape, device=parameter.device, dtype=parameter.dtype)
    group = next(each for each in optimizer.param_groups if any(parameter is mine for mine in each["params"]))
    fused = bool(group.get("fused"))
    beside = fused or group.get("capturable") or isinstance(optimizer, torch.optim.ASGD)  # the weight, else on the CPU
    double = torch.get_default_dtype() is torch.float64 and not fused
    return torch.zeros(
        (), device=parameter.device if beside else "cpu", dtype=torch.float64 if double else torch.float32
    )


def _others(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """What has no mean, by parameter's place and name."""
    found = {}
    for place, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if not _has_mean(value):
                found[place, name] = value.cpu() if isinstance(value, torch.Tensor) else value
    return found


def _adopt_others(optimizer: torch.optim.Optimizer, told: Sequence[Mapping[tuple[int, str], Any]]) -> None:
    """Counts, integer tensors and the like have no average: the lowest rank's that has them."""
    parameters = _parameters(optimizer)
    for place, name in {key: None for theirs in told for key in theirs}:
        value = next(theirs[place, name] for theirs in told if (place, name) in theirs)
        if isinstance(value, torch.Tensor):
            value = value.to(parameters[place].device)
        optimizer.state[parameters[place]][name] = value


def state_by_place(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, dict[str, Any]]:
    """What the optimizers hold, by the place of each weight among those of all of them."""
    found: dict[int, dict[str, Any]] = {}
    first = 0
    for optimizer in optimizers:
        state = optimizer.state_dict()
        found |= {first + place: values for place, values in state["state"].items() if isinstance(place, int)}
        first += sum(len(group["params"]) for group in state["param_groups"])
    return found


def set_state(optimizers: Sequence[torch.optim.Optimizer], place: int, name: str, value: torch.Tensor) -> None:
    """One tensor of what `state_by_place` has."""
    weights = [(optimizer, weight) for optimizer in optimizers for weight in _parameters(optimizer)]
    optimizer, weight = weights[place]
    before = optimizer.state[weight].get(name)
    if isinstance(before, torch.Tensor):
        before.copy_(value)
        return
    if before is not None:
        optimizer.state[weight][name] = type(before)(value.item())
        return
    if _has_mean(value):
        optimizer.state[weight][name] = _zeros(optimizer, weight, name, tuple(value.shape)).copy_(value)
    else:
        optimizer.state[weight][name] = value.clone() if value.ndim == 0 else value.to(weight.device)


class Told(NamedTuple):
    """Of a rank's optimizer: what it averages, on how many samples, what else it holds, its weights, and in what it is
    summed."""

    keys: Sequence[Key]
    samples: int
    others: dict[tuple[int, str], Any]
    weights: int
    dtype: torch.dtype


@torch.no_grad()
def average_optimizer_state(
    optimizer: torch.optim.Optimizer,
    samples: int,
    gather: Callable[[Any], list[Any]],
    allreduce: Callable[[torch.Tensor], None],
) -> None:
    """Collective. `samples` were used by this rank since the last drain; a rank that has no state counts for 0."""
    keys = _keys(optimizer)
    count = len(_parameters(optimizer))
    mine = Told(keys, samples if keys else 0, _others(optimizer), count, summed_in(_tensor(optimizer, k) for k in keys))
    told: list[Told] = gather(mine)
    if any(each.weights != count for each in told):
        raise UserError(
            f"ranks' optimizers have {[each.weights for each in told]} weights: add parameter groups between"
            " epochs, where all ranks are at rest, not after so many batches of one"
        )
    _adopt_others(optimizer, [each.others for each in told])
    union = sorted({key for each in told for key in each.keys})
    total = sum(each.samples for each in told)
    if not union or not total:
        return
    weight = mine.samples / total
    dtype = torch.float64 if any(each.dtype is torch.float64 for each in told) else torch.float32
    _average([_tensor(optimizer, key) for key in union], dtype, weight, allreduce)


@torch.no_grad()
def average_tensors(
    tensors: Sequence[torch.Tensor],
    samples: int,
    gather: Callable[[Any], list[Any]],
    allreduce: Callable[[torch.Tensor], None],
) -> None:
    """Collective: the ranks' mean, weighted by the samples that each has used since the last drain."""
    total = sum(gather(samples))
    if tensors and total:
        _average(tensors, summed_in(tensors), samples / total, allreduce)


def _average(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, weight: float, allreduce: Callable[[torch.Tensor], None]
) -> None:
    for chunk in runs([reals(tensor.detach()) for tensor in tensors if tensor.numel()], CHUNK_VALUES):
        flat = torch.cat([each.to(dtype).flatten().cpu() for each in chunk]).mul_(weight)
        allreduce(flat)
        for each, part in zip(chunk, flat.split([each.numel() for each in chunk]), strict=True):
            each.copy_(part.view_as(each))
