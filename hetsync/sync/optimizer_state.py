"""Optimizer state is local between drains; at a drain every rank adopts the average over samples.

So a resume, which finds one state on disk, equals going on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Key = tuple[int, str, tuple[int, ...]]  # parameter's place, name in the state, shape


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _keys(optimizer: torch.optim.Optimizer) -> list[Key]:
    keys = []
    for place, parameter in enumerate(_parameters(optimizer)):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                keys.append((place, name, tuple(value.shape)))
    return keys


def _tensor(optimizer: torch.optim.Optimizer, key: Key) -> torch.Tensor:
    """The state's tensor; made on a rank that has not stepped yet and so has none."""
    place, name, shape = key
    parameter = _parameters(optimizer)[place]
    state = optimizer.state[parameter]
    if name not in state:
        # Optimizers keep their step counts on the CPU.
        device = parameter.device if shape else torch.device("cpu")
        state[name] = torch.zeros(shape, device=device, dtype=torch.float32)
    tensor: torch.Tensor = state[name]
    return tensor


@torch.no_grad()
def average_optimizer_state(
    optimizer: torch.optim.Optimizer,
    samples: int,
    gather: Callable[[Any], list[Any]],
    allreduce: Callable[[torch.Tensor], None],
) -> None:
    """Collective. `samples` were used by this rank since the last drain; a rank that has no state counts for 0."""
    keys = _keys(optimizer)
    told: list[tuple[list[Key], int]] = gather((keys, samples if keys else 0))
    union = sorted({key for theirs, _ in told for key in theirs})
    total = sum(count for _, count in told)
    if not union or not total:
        return
    weight = (samples if keys else 0) / total
    tensors = [_tensor(optimizer, key) for key in union]
    flat = torch.cat([tensor.detach().float().flatten().cpu() for tensor in tensors]).mul_(weight)
    allreduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
