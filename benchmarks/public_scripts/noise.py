"""Noise that a script draws for a batch, as a function of each sample: then it is the same however a batch is cut."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
from torch import nn


def noise_of(samples: torch.Tensor, *shape: int) -> torch.Tensor:
    """Normal numbers, in this shape for each sample."""
    return torch.stack([torch.empty(shape).normal_(generator=generator_of(sample)) for sample in samples])


def generator_of(sample: torch.Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(sample.detach().cpu().numpy().tobytes()))


def of_a_vae() -> None:
    """forward(x) calls reparameterize, which calls randn_like."""

    def drawn(like: torch.Tensor, **named: Any) -> torch.Tensor:
        return noise_of(sys._getframe(2).f_locals["x"], *like.shape[1:])

    torch.randn_like = drawn  # type: ignore[assignment]


def of_a_gan() -> None:
    """The loop draws it for as many fakes as `real_cpu` has images. Batch norm goes by each sample, too."""
    randn = torch.randn

    def drawn(*shape: Any, **named: Any) -> torch.Tensor:
        images = sys._getframe(1).f_globals.get("real_cpu")
        return randn(*shape, **named) if images is None else noise_of(images, *shape[1:])

    def normed(self: nn.BatchNorm2d, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.group_norm(values, 1, self.weight, self.bias)

    torch.randn = drawn  # type: ignore[assignment]
    nn.BatchNorm2d.forward = normed  # type: ignore[method-assign]


def of_a_diffusion() -> None:
    """The loop draws noise and a time for each of its `clean_images`."""
    randn, randint = torch.randn, torch.randint

    def drawn(*shape: Any, **named: Any) -> torch.Tensor:
        images = sys._getframe(1).f_locals.get("clean_images")
        return randn(*shape, **named) if images is None else noise_of(images, *shape[0][1:])

    def chosen(low: int, high: int, size: Any, **named: Any) -> torch.Tensor:
        images = sys._getframe(1).f_locals.get("clean_images")
        if images is None:
            return randint(low, high, size, **named)
        return torch.cat([randint(low, high, (1,), generator=generator_of(image)) for image in images])

    torch.randn, torch.randint = drawn, chosen  # type: ignore[assignment]
