"""The LSTM language model of Zaremba, Sutskever and Vinyals, "Recurrent neural network regularization" (2014)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hetsync.errors import UserError


@dataclass(frozen=True)
class Size:
    """Units a layer, dropout on what is not recurrent, and half the range that weights start in (uniformly)."""

    hidden: int
    dropout: float
    init_range: float


SIZES = {"small": Size(200, 0.0, 0.1), "medium": Size(650, 0.5, 0.05), "large": Size(1500, 0.65, 0.04)}


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers of the same width, scores of the next word; dropout before and after each layer.

    Args:
        vocabulary: Words.
        size: Width, dropout and first weights.
        layers: LSTM layers.
        tied: The embedding's weights are those of the scores as well (Press and Wolf 2017).
    """

    def __init__(self, vocabulary: int, size: Size, layers: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.hidden)
        self.dropout = nn.Dropout(size.dropout)
        self.lstm = nn.ModuleList(WarmedLSTM(size.hidden, size.hidden, batch_first=True) for _ in range(layers))
        self.predicted = Predicted()
        # Held under one name only when tied: neither a checkpoint nor a gradient has it twice.
        self.output_weight = None if tied else nn.Parameter(torch.empty(vocabulary, size.hidden))
        self.output_bias = nn.Parameter(torch.empty(vocabulary))
        for weight in self.parameters():
            nn.init.uniform_(weight, -size.init_range, size.init_range)

    def forward(self, tokens_BT: torch.Tensor, predictions: int | None = None) -> torch.Tensor:
        """Scores of the word after each of the last `predictions` tokens (all by default).

        (B, T) to (B, predictions, vocabulary). The tokens before those only warm the state up: no gradient flows
        through them, as none does between the windows of the paper's truncated back-propagation.
        """
        hidden_BTH = self.embedding(tokens_BT)
        for layer in self.lstm:
            hidden_BTH = layer(self.dropout(hidden_BTH), predictions)
        weight = self.embedding.weight if self.output_weight is None else self.output_weight
        return functional.linear(self.dropout(self.predicted(hidden_BTH, predictions)), weight, self.output_bias)


class WarmedLSTM(nn.LSTM):
    """(B, T, H) to (B, T, H); steps before the last `predictions` warm the state up, without gradient."""

    def forward(self, inputs_BTH: torch.Tensor, predictions: int | None = None) -> torch.Tensor:
        warming = _warming(inputs_BTH, predictions)
        if not warming:
            return super().forward(inputs_BTH)[0]
        with torch.no_grad():
            warm_BTH, state = super().forward(inputs_BTH[:, :warming])
        outputs_BTH, _ = super().forward(inputs_BTH[:, warming:], state)
        return torch.cat([warm_BTH, outputs_BTH], 1)


class Predicted(nn.Module):
    """(B, T, H) to its last `predictions` steps."""

    def forward(self, hidden_BTH: torch.Tensor, predictions: int | None = None) -> torch.Tensor:
        return hidden_BTH[:, _warming(hidden_BTH, predictions) :]


def _warming(sequence_BTH: torch.Tensor, predictions: int | None) -> int:
    return 0 if predictions is None else sequence_BTH.shape[1] - predictions


def ptb_lstm(
    size: str = "small",
    vocabulary: int = 10000,
    hidden: int | None = None,
    layers: int = 2,
    dropout: float | None = None,
    tied: bool = False,
) -> LSTMLanguageModel:
    """The paper's models of 4.65 M, 19.8 M and 66.0 M parameters at 10,000 words.

    Args:
        size: small, medium or large: 200, 650 or 1,500 units, dropout 0, 0.5 or 0.65.
        vocabulary: Words.
        hidden: Units a layer, instead of the size's.
        layers: LSTM layers.
        dropout: Instead of the size's.
        tied: Share the embedding's weights with the scores.
    """
    if size not in SIZES:
        raise UserError(f"model.options.size is {size}: use one of {', '.join(SIZES)}")
    chosen = SIZES[size]
    hidden = chosen.hidden if hidden is None else hidden
    dropout = chosen.dropout if dropout is None else dropout
    if min(hidden, layers, vocabulary) < 1:
        raise UserError(f"model.options has hidden {hidden}, layers {layers}, vocabulary {vocabulary}: give 1 or more")
    if not 0 <= dropout < 1:
        raise UserError(f"model.options.dropout is {dropout}: it is a probability below 1")
    return LSTMLanguageModel(vocabulary, Size(hidden, dropout, chosen.init_range), layers, tied)
