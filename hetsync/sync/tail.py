"""What a round sums, never rounded, beside its weights or gradients: a few counts, and the changes of float buffers.

A buffer (batch-norm statistics) travels from the round on in which some rank has changed it. Until then ranks tell only
whether they have. A round that brings such news sums once more, just the buffers that it is about: no round ends with
buffers that differ between ranks. So it does where ranks have written rows: each puts its own where others have zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetsync.sync.buffers import Rule, Writes, buffers_of, saved_buffers
from hetsync.sync.reals import count_reals, summed_in


def shared_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The float buffers that each round sums: those with a mean, then those that are `added_buffers`."""
    return [*_finite(model, "mean"), *added_buffers(model)]


def added_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Float buffers whose increments add up."""
    return _finite(model, "sum")


def _finite(model: torch.nn.Module, rule: Rule) -> list[torch.Tensor]:
    """Sums would turn infinities into nan."""
    found = buffers_of(model, rule).values()
    return [buffer for buffer in found if buffer.is_floating_point() and buffer.isfinite().all()]


def saved_floats(model: torch.nn.Module) -> list[torch.Tensor]:
    """The float buffers of the state_dict, but for sparse ones."""
    found = (buffer for _, _, _, buffer in saved_buffers(model))
    return [buffer for buffer in found if buffer.is_floating_point() and buffer.layout is torch.strided]


def trained_values(model: torch.nn.Module) -> int:
    """Values of the weights that are trained."""
    return sum(count_reals(weight) for weight in model.parameters() if weight.requires_grad)


def travelling_values(model: torch.nn.Module) -> int:
    """Values that a round sums at most: weights that are trained, and shared buffers."""
    return trained_values(model) + sum(buffer.numel() for buffer in shared_buffers(model))


def travelling_bytes(model: torch.nn.Module) -> int:
    """Of these values, where nothing is rounded."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return travelling_values(model) * summed_in([*weights, *shared_buffers(model)]).itemsize


class Tail:
    """Communication thread: sum `flat` over all ranks, then `unpack`, and again while that says so.

    Counts live in the host's memory, all else on the `device`. To read it there is to wait for all that is queued on it
    before: of what is summed the host needs `head`, which may be brought there while nobody waits.
    """

    def __init__(
        self,
        counts: int,
        changes: Sequence[torch.Tensor],
        device: torch.device,
        rank: int = 0,
        writers: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`changes`, one tensor of `dtype` a buffer: what this rank adds to it, and after `unpack` what all do. Of
        several `writers`, this `rank` among them, each tells the others its `writes`."""
        # This rank's, and after `unpack` their sums.
        self.counts = torch.zeros(counts, dtype=dtype)
        self.flat = torch.zeros(0, dtype=dtype, device=device)
        self.changes = list(changes)  # of the round to come, and while it is under way
        self.travel: list[int] = []  # buffers that some rank has changed before, in rounds that have landed
        self._news: list[int] = []  # of the round that is under way: which it has found to be changed
        self._carried: list[int] = []  # those in `flat`
        self._asked: list[int] = []  # those that `flat` asks about
        self._head_values = 0  # of `flat`
        self._behind: torch.Tensor | None = None  # where counts are summed with all else
        self._rank = rank
        self.writes = torch.zeros(Writes.PARTS, 0, dtype=dtype, device=device)  # of this rank
        self.told: Sequence[torch.Tensor] = ()  # after `unpack`, by rank: those of all
        self._written = [0] * writers  # by rank, columns in `flat`

    def pack(self) -> None:
        """Put `counts` and `changes` into `flat`."""
        self._behind, self._news = None, []  # whatever a void round has left
        self._asked = [index for index in range(len(self.changes)) if index not in self.travel]
        news = [self.changes[index].any().to(self.flat).view(1) for index in self._asked]
        columns = self.counts.new_zeros(len(self._written))
        columns[self._rank : self._rank + 1] = self.writes.shape[1]
        self._written = [0] * len(self._written)
        # From pageable memory: what is to travel has left it at once, and nobody waits for the device.
        known = [values.to(self.flat.device, non_blocking=True) for values in (self.counts, columns)]
        self._carry(torch.cat([known[0], *news, known[1]]), self.travel)

    def lie_behind(self, memory: torch.Tensor) -> bool:
        """In place of `pack`, where `changes` are the last values of this memory but for room for the counts: put these
        behind, so that what is summed is all in one piece. False where some buffers do not travel."""
        if len(self.travel) < len(self.changes):
            return False
        self._behind = memory[memory.numel() - self.counts.numel() :].copy_(self.counts, non_blocking=True)
        self.flat = self.flat[:0]
        return True

    @property
    def head(self) -> torch.Tensor:
        """Of the sums, once they are in: what `unpack` must know."""
        return self.flat[: self._head_values] if self._behind is None else self._behind

    def _carry(self, head: torch.Tensor, buffers: Sequence[int]) -> None:
        self._carried, self._head_values = list(buffers), head.numel()
        writes = [self.flat.new_zeros(Writes.PARTS * columns) for columns in self._written]
        if writes and self._written[self._rank]:
            writes[self._rank] = self.writes.flatten()
        self.flat = torch.cat([head, *(self.changes[index].flatten() for index in buffers), *writes])

    def unpack(self, head: torch.Tensor | None = None) -> bool:
        """Take the sums out of `flat`, of which the host has the `head`; None: it lies there. True if `flat` now holds
        more to be summed: buffers that have changed for once, and what ranks have written."""
        head = self.head if head is None else head
        if self._behind is not None:
            self.counts.copy_(head)
            return False
        sizes = [self.changes[index].numel() for index in self._carried]
        sizes += [Writes.PARTS * columns for columns in self._written]
        _, *sums = self.flat.split([self._head_values, *sizes])
        self.told = [total.view(Writes.PARTS, -1) for total in sums[len(self._carried) :]]
        for index, total in zip(self._carried, sums, strict=False):
            self.changes[index].copy_(total.view_as(self.changes[index]))
        if not self._head_values:
            return False
        counts, news, written = head.split([self.counts.numel(), len(self._asked), len(self._written)])
        self.counts.copy_(counts)
        self._news = [index for index, changed in zip(self._asked, news.tolist(), strict=True) if changed]
        self._written = list(map(int, written.tolist()))
        self._carry(self.flat[:0], self._news)
        return bool(self._news) or any(self._written)

    def land(self) -> None:
        """The round counts: what it has found to be changed travels from now on. Not before, or where a rank's death
        makes the round void, after some have unpacked it, these would sum other buffers than the rest."""
        self.travel = sorted([*self.travel, *self._news])
        self._news = []
