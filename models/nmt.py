"""Translation by LSTMs with attention: Luong, Pham and Manning (2015), deepened as Google's system (Wu et al. 2016).

From Luong et al.: the decoder starts from the encoder's last states; global attention with the general score, over
the top layer. From Wu et al.: the first encoder layer reads in both directions; layers from the third on add their
input to their output. Attention is not fed back into the decoder, so a known target runs through a layer at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from hetsync.data.sets.vocabulary import BEGIN_ID, END_ID, PAD_ID
from hetsync.errors import UserError
from hetsync.models.recurrent import Pack, Packing, RecurrentLayer, State, Unpack

FIRST_RESIDUAL = 2  # the third layer
INIT_RANGE = 0.1  # Luong et al., section 4.1


class Memory(NamedTuple):
    """An encoded source: what the decoder attends to, and where there are words."""

    values_BSH: torch.Tensor
    keys_BSH: torch.Tensor
    present_BS: torch.Tensor


class NMT(nn.Module):
    """Encoder and decoder of `layers` LSTMs each.

    Args:
        source_vocabulary: Source words, <pad> first.
        target_vocabulary: Target words, which begin with <pad>, <unk>, <bos>, <eos>.
        layers: LSTM layers of the encoder, and of the decoder.
        hidden: Units a layer, and width of the embeddings; those of a bidirectional layer share them.
        dropout: On the input of every layer and on what the scores are made of.
        bidirectional: Whether the encoder's first layer is.
    """

    def __init__(
        self,
        source_vocabulary: int = 8000,
        target_vocabulary: int = 8000,
        layers: int = 2,
        hidden: int = 512,
        dropout: float = 0.2,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        if layers < 1 or hidden < 1 or (bidirectional and hidden % 2):
            raise UserError(
                f"model.options has layers {layers} and hidden {hidden}: give 1 or more, and an even hidden"
            )
        if not 0 <= dropout < 1:
            raise UserError(f"model.options.dropout is {dropout}: it is a probability below 1")
        self.source_embedding = nn.Embedding(source_vocabulary, hidden)
        self.target_embedding = nn.Embedding(target_vocabulary, hidden)
        self.pack, self.unpack = Pack(), Unpack()
        self.encoder = Stack(layers, hidden, dropout, bidirectional)
        self.decoder = Stack(layers, hidden, dropout)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(hidden, target_vocabulary)
        for weight in self.parameters():
            nn.init.uniform_(weight, -INIT_RANGE, INIT_RANGE)

    def forward(self, source_BS: torch.Tensor, lengths_B: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        """Scores (B, T, target_vocabulary) of the word after each target word; a target begins with <bos>.

        What follows a source's length never matters.
        """
        memory, states = self._encode(source_BS, lengths_B)
        return self._decode(target_BT, states, memory)[0]

    @torch.no_grad()
    def translate(self, source_BS: torch.Tensor, lengths_B: torch.Tensor, longest: int) -> torch.Tensor:
        """The likeliest word after word, (B, at most `longest`); after <eos>, <pad>."""
        memory, states = self._encode(source_BS, lengths_B)
        last_B1 = torch.full_like(source_BS[:, :1], BEGIN_ID)
        ended_B1 = torch.zeros_like(last_B1, dtype=torch.bool)
        words: list[torch.Tensor] = []
        while len(words) < longest and not ended_B1.all():
            scores_B1V, states = self._decode(last_B1, states, memory)
            last_B1 = scores_B1V.argmax(2).masked_fill(ended_B1, PAD_ID)
            ended_B1 |= last_B1 == END_ID
            words.append(last_B1)
        return torch.cat(words, 1)

    def _encode(self, source_BS: torch.Tensor, lengths_B: torch.Tensor) -> tuple[Memory, list[State]]:
        words, packing = self.pack(source_BS, lengths_B)
        outputs, states = self.encoder(self.source_embedding(words), packing)
        values_BSH = self.unpack(outputs, packing, source_BS.shape[1])
        positions_S = torch.arange(source_BS.shape[1], device=source_BS.device)
        return Memory(values_BSH, self.key(values_BSH), positions_S < lengths_B[:, None]), states

    def _decode(self, target_BT: torch.Tensor, states: list[State], memory: Memory) -> tuple[torch.Tensor, list[State]]:
        outputs_BTH, states = self.decoder(self.target_embedding(target_BT), states=states)
        match_BTS = outputs_BTH @ memory.keys_BSH.transpose(1, 2)
        weights_BTS = match_BTS.masked_fill(~memory.present_BS[:, None], -torch.inf).softmax(2)
        attended_BTH = torch.tanh(self.combine(torch.cat([weights_BTS @ memory.values_BSH, outputs_BTH], 2)))
        return self.scores(self.dropout(attended_BTH)), states


class Stack(nn.Module):
    """LSTM layers of one width, over padded (B, T, H) or the elements of packed sequences."""

    def __init__(self, layers: int, hidden: int, dropout: float, bidirectional_first: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            RecurrentLayer(hidden, hidden, dropout, residual=number >= FIRST_RESIDUAL) for number in range(layers)
        )
        if bidirectional_first:
            self.layers[0] = RecurrentLayer(hidden, hidden, dropout, bidirectional=True)

    def forward(
        self, sequences: torch.Tensor, packing: Packing | None = None, states: list[State] | None = None
    ) -> tuple[torch.Tensor, list[State]]:
        """Outputs of the last layer, and every layer's last state; layers start from `states` or zero."""
        ends = []
        for number, layer in enumerate(self.layers):
            sequences, end = layer(sequences, packing, None if states is None else states[number])
            ends.append(end)
        return sequences, ends
