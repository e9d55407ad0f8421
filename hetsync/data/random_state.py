"""Everything that draws at random in a process (PyTorch, NumPy's global generator, Python's `random`), and what else a
trial of a model must leave as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_DRAWN_SEED = torch.initial_seed()  # by PyTorch itself, at random, unless a script had set one by then
_LEAST_DRAWN = 2**32  # nearly all that it draws are above


def torch_seed() -> int | None:
    """What the script has given to `torch.manual_seed`, or None."""
    seed = torch.initial_seed()
    return None if seed == _DRAWN_SEED and seed >= _LEAST_DRAWN else seed


@dataclass(frozen=True)
class Chance:
    """What the script has made of chance before its job: what it has seeded goes on from where it stands, and the rest
    begins at that seed.

    Attributes:
        seed: By which the script has seeded PyTorch, or else NumPy; 0 where it has seeded neither. Python's `random`
            does not tell.
    """

    seed: int
    torch: torch.Tensor | None
    numpy: dict[str, Any] | None

    @classmethod
    def found(cls) -> Chance:
        """Of this process."""
        seed = torch_seed()
        by_script = np.random.mtrand.get_bit_generator().seed_seq is None  # else it was drawn
        numpy = np.random.get_state(legacy=False) if by_script else None
        of_numpy = 0 if numpy is None else int(numpy["state"]["key"][0])
        return cls(of_numpy if seed is None else seed, None if seed is None else torch.get_rng_state(), numpy)

    def take(self) -> None:
        """From now on this process draws as that one would have."""
        seed_all(self.seed)
        if self.torch is not None:
            torch.set_rng_state(self.torch)
        if self.numpy is not None:
            np.random.set_state(self.numpy)


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
