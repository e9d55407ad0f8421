"""At rest in delayed mode all who hold a tensor come to the same optimizer state and counters, as their weights have.

Replicas may be cut at different places, so each segment is averaged over its own holders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from hetsync.plane.base import Channels
from hetsync.replica.segments import Segments, sum_over
from hetsync.sync.buffers import Change, Rule, merged
from hetsync.sync.optimizer_state import average_optimizer_state

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class HeldState:
    """Of an optimizer, what belongs to some of its weights: as much of one as averages need."""

    param_groups: list[dict[str, Any]]
    state: Any

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, cls([{"params": weights}], optimizer.state))


def average_over_holders(
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    segments: Segments,
    samples: int,
    rank: int,
    gather: Gather,
    channels: Channels,
) -> None:
    """Collective among all ranks. `weights` that are trained, by name; `samples` that this rank's replica has used
    since the last drain; 0 where another rank speaks for its stage."""
    for holders, names in sorted(segments.items()):
        if rank not in holders:
            gather(None)
            continue

        def among(value: Any, holders: tuple[int, ...] = holders) -> list[Any]:
            told = gather(value)
            return [told[holder] for holder in holders]

        def add_up(flat: torch.Tensor, holders: tuple[int, ...] = holders) -> None:
            flat.copy_(sum_over(holders, flat, rank, channels))

        own = HeldState.of(optimizer, [weights[name] for name in names if name in weights])
        average_optimizer_state(own, samples, among, add_up)


class Counters:
    """Buffers that no round sums (whole numbers, rows): at a rest all holders take over what each one's rule makes of
    their changes, as jobs without a plan do."""

    def __init__(self, held: Mapping[str, torch.Tensor], rules: Mapping[str, Rule]) -> None:
        """When all holders have the same. `rules`: of each such buffer of the model, by name."""
        self._rules = rules
        self._counters = {name: tensor for name, tensor in held.items() if name in rules}
        self._before = {name: tensor.clone() for name, tensor in self._counters.items()}

    def share(self, gather: Gather, samples: int) -> None:
        """Collective among all ranks, of which this one has computed so many since the last rest."""
        changed = {
            name: Change(now.cpu(), samples)
            for name, now in self._counters.items()
            if not torch.equal(now, self._before[name])
        }
        everyones = gather(changed)
        for name, counter in self._counters.items():
            told = [theirs[name] for theirs in everyones if name in theirs]
            if told:
                counter.copy_(merged(self._rules[name], self._before[name].cpu(), told))
            self._before[name] = counter.clone()
