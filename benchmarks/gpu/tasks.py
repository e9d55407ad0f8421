"""What gpu.py trains: ResNet-50, a stack of GPT blocks and ResNet-18, on synthetic data; small ones for processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hetsync.models.resnet import resnet18, resnet50


@dataclass(frozen=True)
class Task:
    """`batch` samples of a slice of all ranks together; `learns` where the data have something to be learned.

    `most_steps` bounds a training whose sums take much longer than its computation.
    """

    batch: int
    model: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    learns: bool = False
    most_steps: int = 1000

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean over the batch, and over the positions of a sequence."""
        inputs, labels = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


class Block(nn.Module):
    """A GPT-2 block (Radford et al. 2019): norm, causal attention, norm, four times as wide a layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.wide_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.wide_norm(x))


class Gpt(nn.Module):
    """Tokens (N, L) to scores of the next (N, L, vocabulary); 124 M weights as it stands."""

    def __init__(
        self, vocabulary: int = 50304, length: int = 512, width: int = 768, heads: int = 12, blocks: int = 12
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.places(places)))
        return functional.linear(x, self.tokens.weight)


def images(samples: int, pixels: int, classes: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Pictures of a class are alike, under noise: a few hundred steps learn them."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(classes, 3, pixels, pixels, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    noise = torch.randn(samples, 3, pixels, pixels, generator=generator)
    return TensorDataset((0.3 * prototypes[labels] + noise).to(dtype), labels)


def sentences(samples: int, length: int, vocabulary: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (samples, length + 1), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


TASKS = {
    # In half the bytes: a rank's loader gathers a batch by one thread.
    "resnet50": Task(256, resnet50, lambda: images(512, 224, 1000, torch.bfloat16), sgd),
    "gpt": Task(128, Gpt, lambda: sentences(2048, 512, 50304), adamw, most_steps=12),
    "cifar10_resnet18-like": Task(512, lambda: resnet18(10, "cifar"), lambda: images(10240, 32, 10), sgd, True),
}
# Emulated speeds of 60 to 30 divide batches, and batches epochs.
SMALL_TASKS = {
    "resnet50": Task(30, lambda: resnet50(4, "cifar", 4), lambda: images(60, 16, 4), sgd),
    "gpt": Task(30, lambda: Gpt(64, 8, 16, 2, 2), lambda: sentences(60, 8, 64), adamw),
    "cifar10_resnet18-like": Task(30, lambda: resnet18(4, "cifar", 4), lambda: images(240, 16, 4), sgd, True),
}
