"""A transformer language model as people train it today: a decoder of pre-norm blocks over learnt positions."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from hetsync.errors import UserError
from hetsync.models.limits import require, require_count
from hetsync.models.ptb_lstm import Predicted

STANDARD_DEVIATION = 0.02  # of first weights (Radford et al. 2019)


class TransformerLM(nn.Module):
    """Scores of the next word, for each word by those before it; GPT-2's architecture (Radford et al. 2019).

    With 10,000 words it has 5.8 M weights, with a width of 512 17.9 M.

    Args:
        vocabulary: Words.
        width: Of the tokens; a multiple of `heads`.
        layers: Blocks.
        heads: Of the attention.
        dropout: On embeddings, attention, and what blocks add.
        longest: Tokens of a text that has positions.
        tied: Share the embedding's weights with the scores (Press and Wolf 2017); a plan that cuts the model into
            stages wants False.
    """

    def __init__(
        self,
        vocabulary: int = 10_000,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
        longest: int = 256,
        tied: bool = True,
    ) -> None:
        super().__init__()
        for option, count in (("vocabulary", vocabulary), ("layers", layers), ("heads", heads), ("longest", longest)):
            require_count(option, count)
        require("dropout", dropout, 0, 1)
        if width < 1 or width % heads:
            raise UserError(f"model.options.width is {width}: it must be a multiple of heads, {heads}")
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = Positions(longest, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.predicted = Predicted()
        # Held under one name only when tied: neither a checkpoint nor a gradient has it twice.
        self.output_weight = None if tied else nn.Parameter(torch.empty(vocabulary, width))
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # What is added up over the blocks keeps the size of one.
                added = 2 * layers if name.endswith(("project.weight", "down.weight")) else 1
                nn.init.normal_(weight, std=STANDARD_DEVIATION / math.sqrt(added))

    def forward(self, tokens_BT: torch.Tensor, predictions: int | None = None) -> torch.Tensor:
        """(B, T) to (B, predictions, vocabulary): of the word after each of the last `predictions` tokens (all by
        default)."""
        hidden_BTC = self.dropout(self.embedding(tokens_BT) + self.position(tokens_BT))
        for block in self.blocks:
            hidden_BTC = block(hidden_BTC)
        weight = self.embedding.weight if self.output_weight is None else self.output_weight
        return functional.linear(self.norm(self.predicted(hidden_BTC, predictions)), weight)


class Positions(nn.Embedding):
    """Vectors of the places of tokens: (B, T) to (T, C)."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        length = tokens_BT.shape[1]
        if length > self.num_embeddings:
            raise UserError(
                f"model.options.longest is {self.num_embeddings}, and a text has {length} tokens: raise it, or lower"
                " data.options.window or context"
            )
        return super().forward(torch.arange(length, device=tokens_BT.device))


class Block(nn.Module):
    """Attention to what came before, then a layer of four times the width; each reads a norm and is added."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_of_attention, self.norm_of_layer = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        hidden_BTC = hidden_BTC + self.dropout(self.project(self._attended(self.norm_of_attention(hidden_BTC))))
        inner_BTC: torch.Tensor = self.down(functional.gelu(self.up(self.norm_of_layer(hidden_BTC))))
        return hidden_BTC + self.dropout(inner_BTC)

    def _attended(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            part_BTC.unflatten(2, (self.heads, -1)).transpose(1, 2) for part_BTC in self.attend(hidden_BTC).chunk(3, 2)
        )
        dropout = self.dropout.p if self.training else 0.0
        found_BHTD = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        return found_BHTD.transpose(1, 2).flatten(2)
