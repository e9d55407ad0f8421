"""Everything that draws at random in a process (PyTorch, NumPy's global generator, Python's `random`), and what else a
trial of a model must leave as it was."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_DRAWN_SEED = torch.initial_seed()  # by PyTorch itself, at random, unless a script had set one by then
_LEAST_DRAWN = 2**32  # nearly all that it draws are above
NO_RANK = -1  # but all


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
    """Begin anew at a seed of 0 or more, on whatever device is used later, too."""
    torch.manual_seed(seed)
    _seed_others(seed)


def _seed_on(devices: Iterable[torch.device], seed: int) -> None:
    """On these devices besides the CPU only: of others `torch.manual_seed` keeps the stack of whoever calls it, which
    takes a millisecond or more."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)


class RankSeeds:
    """What a rank of a job draws: in its loop over batches its own, and between loops, where ranks rest and what they
    make of weights must be the same, what all draw. Both go by the samples applied so far, so that a resumed run draws
    as the uninterrupted one."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank
        self._at_rest: int | None = None  # seed of the newest rest

    def begin_loop(self, applied: int, by_script: int | None = None, alone: bool = False) -> None:
        """`by_script`: a seed that the script has set at the rest; a rank `alone` draws on from there."""
        if by_script is None or not alone:
            seed_all(_mixed(self._seed if by_script is None else by_script, self._rank, applied))

    def begin_rest(self, applied: int) -> None:
        self._at_rest = _mixed(self._seed, NO_RANK, applied)
        seed_all(self._at_rest)

    def by_script(self) -> int | None:
        """The seed that it has set at the rest."""
        seed = torch.initial_seed()
        return None if self._at_rest is None or seed == self._at_rest else seed


def _mixed(*numbers: int) -> int:
    return hash(numbers) & (2**63 - 1)


@contextmanager
def set_aside(*devices: torch.device, seed: int | None = None) -> Iterator[None]:
    """Inside, chance begins at `seed` on the CPU and these devices, where one is given; afterwards it goes on as if
    nothing had been drawn."""
    kept, kept_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]), _mps_aside(devices):
            if seed is not None:
                _seed_on(devices, seed)
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)


@contextmanager
def _mps_aside(devices: Sequence[torch.device]) -> Iterator[None]:
    if not any(device.type == "mps" for device in devices):
        yield
        return
    kept = torch.mps.get_rng_state()
    try:
        yield
    finally:
        torch.mps.set_rng_state(kept)


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
