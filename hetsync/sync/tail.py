"""What a round sums in float32 beside its weights or gradients: a few counts, and the changes of float buffers.

A buffer (batch-norm statistics) travels from the round on in which some rank has changed it. Until then ranks tell only
whether they have, so that constants (positions, scales) never travel. A round that brings such news sums once more,
just the buffers that it is about: no round ends with buffers that differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetsync.sync.reals import count_reals


def shared_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The float buffers that ranks hold alike: of the state_dict, and finite. Sums would turn infinities (an attention
    mask's) into nan, and what is not saved is a rank's own."""
    return [buffer for buffer in saved_floats(model) if buffer.isfinite().all()]


def saved_floats(model: torch.nn.Module) -> list[torch.Tensor]:
    """The float buffers of the state_dict."""
    saved = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]


def trained_values(model: torch.nn.Module) -> int:
    """Float32 values of the weights that are trained."""
    return sum(count_reals(weight) for weight in model.parameters() if weight.requires_grad)


def travelling_values(model: torch.nn.Module) -> int:
    """Float32 values that a round sums at most: weights that are trained, and shared buffers."""
    return trained_values(model) + sum(buffer.numel() for buffer in shared_buffers(model))


class Tail:
    """Communication thread: sum `flat` over all ranks, then `unpack`, and again while that says so."""

    def __init__(self, counts: int, changes: Sequence[torch.Tensor], device: torch.device) -> None:
        """`changes`, one float32 tensor a buffer: what this rank adds to it, and after `unpack` what all do."""
        # This rank's, and after `unpack` their sums.
        self.counts = torch.zeros(counts, dtype=torch.float32, device=device)
        self.flat = self.counts
        self.changes = list(changes)  # of the round to come, and while it is under way
        self.travel: list[int] = []  # buffers that some rank has changed before
        self._carried: list[int] = []  # those in `flat`
        self._asked: list[int] = []  # those that `flat` asks about
        self._lies_behind = False  # counts are where they are summed with all else

    def pack(self) -> None:
        """Put `counts` and `changes` into `flat`."""
        self._lies_behind = False  # whatever a void round has left
        self._asked = [index for index in range(len(self.changes)) if index not in self.travel]
        news = [self.changes[index].any().float().view(1) for index in self._asked]
        self._carry(torch.cat([self.counts, *news]), self.travel)

    def lie_behind(self, memory: torch.Tensor) -> bool:
        """In place of `pack`, where `changes` are the last values of this memory but for room for the counts: put these
        behind, so that what is summed is all in one piece. False where some buffers do not travel."""
        if len(self.travel) < len(self.changes):
            return False
        self._room(memory).copy_(self.counts)
        self.flat = self.counts[:0]
        self._lies_behind = True
        return True

    def take_from(self, memory: torch.Tensor) -> None:
        """In place of `unpack`, if they lie there."""
        if self._lies_behind:
            self.counts.copy_(self._room(memory))

    def _room(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[memory.numel() - self.counts.numel() :]

    def _carry(self, head: torch.Tensor, buffers: Sequence[int]) -> None:
        self._carried = list(buffers)
        self.flat = torch.cat([head, *(self.changes[index].flatten() for index in buffers)])

    def unpack(self) -> bool:
        """Take the sums out of `flat`. True if it now holds more to be summed: buffers that have changed for once."""
        sizes = [self.changes[index].numel() for index in self._carried]
        head, *sums = self.flat.split([self.flat.numel() - sum(sizes), *sizes])
        for index, total in zip(self._carried, sums, strict=True):
            self.changes[index].copy_(total.view_as(self.changes[index]))
        if not head.numel():
            return False
        counts, news = head.split([self.counts.numel(), len(self._asked)])
        self.counts.copy_(counts)
        first = [index for index, changed in zip(self._asked, news.tolist(), strict=True) if changed]
        self.travel = sorted([*self.travel, *first])
        self._carry(head[:0], first)
        return bool(first)
