"""Recurrent layers that run one after the other, each a module of its own, over padded or packed sequences.

Packed sequences travel between layers as the elements that they hold, and apart from them their `Packing`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

Packing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # sizes of the steps, and the order of samples, both ways
State = tuple[torch.Tensor, torch.Tensor]  # h and c of a layer, (1, B, H)


class Pack(nn.Module):
    """(B, T, ...) and lengths (B,) to their (elements, ...), ordered by steps, and the packing."""

    def forward(self, padded: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, Packing]:
        elements, *packing = pack_padded_sequence(padded, lengths_B.cpu(), batch_first=True, enforce_sorted=False)
        return elements, tuple(packing)


class Unpack(nn.Module):
    """(elements, ...) to (B, `steps`, ...), padded with zeros."""

    def forward(self, elements: torch.Tensor, packing: Packing, steps: int) -> torch.Tensor:
        packed = PackedSequence(elements, *packing)
        return pad_packed_sequence(packed, batch_first=True, total_length=steps)[0]


class RecurrentLayer(nn.LSTM):
    """An LSTM of one layer over (B, T, inputs) or the elements of packed sequences, with dropout on what comes in.

    Args:
        inputs: Width of what comes in.
        outputs: Width of what goes out; those of both directions, if there are two.
        dropout: On what comes in.
        bidirectional: Whether it reads in both directions.
        residual: Whether it adds to its output what came in.
    """

    def __init__(
        self, inputs: int, outputs: int, dropout: float = 0.0, bidirectional: bool = False, residual: bool = False
    ) -> None:
        hidden = outputs // 2 if bidirectional else outputs
        super().__init__(inputs, hidden, batch_first=True, bidirectional=bidirectional)
        self.dropped = nn.Dropout(dropout)
        self.residual = residual

    def forward(
        self, sequences: torch.Tensor, packing: Packing | None = None, state: State | None = None
    ) -> tuple[torch.Tensor, State]:
        """Outputs in the form of `sequences`, and the last state; it starts from `state`, or zero."""
        dropped = self.dropped(sequences)
        if packing is None:
            outputs, (h, c) = super().forward(dropped, state)
        else:
            (outputs, *_), (h, c) = super().forward(PackedSequence(dropped, *packing), state)
        return outputs + dropped if self.residual else outputs, (_join_directions(h), _join_directions(c))


def _join_directions(state_DBH: torch.Tensor) -> torch.Tensor:
    """(directions, B, H) to (1, B, directions·H)."""
    return state_DBH.transpose(0, 1).flatten(1)[None]
