"""Everything that draws at random in a process (PyTorch, NumPy's global generator, Python's `random`), and what else a
trial of a model must leave as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


def seed_all(seed: int) -> None:
    """Begin anew at a seed of 0 or more."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def set_aside(*devices: torch.device, seed: int | None = None) -> Iterator[None]:
    """Inside, chance begins at `seed`, where one is given; afterwards it goes on as if nothing had been drawn."""
    kept, kept_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            if seed is not None:
                seed_all(seed)
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo what a trial of a model does to it: gradients, buffers (batch-norm statistics) and the random state.

    Without it a profiled run would train differently from one that is not.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        with set_aside(*{parameter.device for parameter, _ in gradients}):
            yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient
