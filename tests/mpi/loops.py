"""The same script run on a job of all ranks, and in one process on nothing but PyTorch."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plain_job import PlainJob
from torch import nn
from torch.utils.data import DataLoader
from training import BATCH, SEED, Blobs, local_tensors, unequal_shares

import hetsync
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256
from hetsync.train import checkpoint

SAMPLES, EPOCHS = 200, 3  # the last batch of an epoch is smaller
BATCHES = -(-SAMPLES // BATCH)
BOUNDS = [0, 4]
EPOCH_AND_MORE = SAMPLES + 5 * BATCH
RESUMED_AT = [EPOCH_AND_MORE, 2 * SAMPLES]

Script = Callable[[Any, "Seen"], Any]


@dataclass
class Seen:
    """What a script has told of its own run."""

    indices: list[list[int]] = field(default_factory=lambda: [[] for _ in range(16)])  # by epoch
    digests: list[str] = field(default_factory=list)  # of what is the same at each rest
    rates: list[list[float]] = field(default_factory=list)  # after each epoch
    values: list[Any] = field(default_factory=list)  # whatever it wants

    def at_rest(self, *modules: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...] = ()) -> None:
        self.digests.append(weights_sha256(tensor for module in modules for tensor in local_tensors(module)))
        self.rates.append([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])


@dataclass
class Result:
    """`model`: all that was trained; `loss`: on all of the data, at the end."""

    model: nn.Module
    loss: float = 0.0
    first_loss: float = 1.0


def loader() -> DataLoader[Any]:
    return DataLoader(Blobs(SAMPLES), batch_size=BATCH, shuffle=True)


def on_ranks(plane: Plane, script: Script, bound: int, **settings: Any) -> tuple[Result, Seen]:
    seen = Seen()
    pins = unequal_shares(plane.size, BATCH)
    with hetsync.join(
        plane=plane, delay_bound=bound, pins=pins, rebalance=False, seed=SEED, progress=False, **settings
    ) as job:
        result = script(job, seen)
    return result, seen


def check(
    plane: Plane, script: Script, bound: int, epochs: int = EPOCHS, equal: bool = True, **settings: Any
) -> tuple[Result, Seen]:
    """Collective: at D = 0 what one process comes to (where `equal`), at D = 4 learned; learning rates at rest as in
    one process, samples once an epoch, ranks equal at rest."""
    result, seen = on_ranks(plane, script, bound, **settings)
    everyones = plane.gather_objects(seen)
    for epoch in range(epochs):
        used = Counter(index for theirs in everyones for index in theirs.indices[epoch])
        assert used == Counter(range(SAMPLES)), f"epoch {epoch}"
    assert seen.digests
    assert all(theirs.digests == seen.digests for theirs in everyones), "ranks differ at rest"
    assert all(theirs.rates == seen.rates for theirs in everyones), "learning rates differ at rest"
    told = Seen()
    plain = script(PlainJob(BATCH), told)
    for mine, theirs in zip(seen.rates, told.rates, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=0)
    if bound == 0 and equal:
        torch.testing.assert_close(result.model.state_dict(), plain.model.state_dict(), rtol=1e-5, atol=1e-5)
    assert result.loss < 0.6 * result.first_loss, "nothing learned"
    return result, seen


def check_resumed(
    plane: Plane, folder: Path, script: Script, bound: int, at: int, equal: bool = True, rates: bool = True
) -> tuple[tuple[Result, Seen], tuple[Result, Seen]]:
    """Collective: gone on with from so many samples, in the second epoch, a job comes to where it came without that;
    with `rates`, to a plain loop's learning rates. Returns the uninterrupted job's results, and the resumed one's."""
    whole = on_ranks(plane, script, bound, run=folder / "run", checkpoint_every=at)
    if plane.rank == 0:
        for path in checkpoint.complete(folder / "run" / "checkpoints"):
            if not path.name.endswith(f"{at:012d}"):
                shutil.rmtree(path)
    plane.barrier()
    resumed = on_ranks(plane, script, bound, run=folder / "run", resume=True)
    everyones = plane.gather_objects(resumed[1])
    assert all(theirs.digests == resumed[1].digests for theirs in everyones), "ranks differ at rest"
    used = Counter(index for theirs in everyones for epoch in theirs.indices for index in epoch)
    assert used.total() == EPOCHS * SAMPLES - at
    if rates:
        told = Seen()
        script(PlainJob(BATCH), told)
        for mine, theirs in zip(resumed[1].rates, told.rates[1:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=0)
    assert resumed[0].loss < 0.6 * whole[0].first_loss
    if bound == 0 and equal:
        assert_same_weights(whole[0], resumed[0])
    return whole, resumed


def assert_same_weights(one: Result, other: Result) -> None:
    """Bit for bit."""
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)


@contextlib.contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()
