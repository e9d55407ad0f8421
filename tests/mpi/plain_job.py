"""A script on nothing but PyTorch in place of a job, and loops run by both: what the tests of loops share."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from training import BATCH, SAMPLES, SEED, Blobs, Net, local_tensors, loss_on_all, plain_batches, unequal_shares

import hetsync
from hetsync.plane.base import Plane
from hetsync.profiling.measure import PRECISIONS
from hetsync.sync.digests import weights_sha256

EPOCHS = 3

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class PlainJob:
    """What `Job` offers to a script, on one device and without HetSync: batches in the same order."""

    rank, size, finished = 0, 1, False

    def __init__(self, batch: int = BATCH, precision: str = "float32") -> None:
        torch.manual_seed(SEED)
        self.batch = batch
        self.dtype = PRECISIONS[precision]
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.dtype is torch.float16)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.epoch = 0

    def prepare(self, *things: Any, **of_ranks: Any) -> Any:
        self.optimizers += [each for each in things if isinstance(each, torch.optim.Optimizer)]
        found = [PlainBatches(self, each.dataset, each) if isinstance(each, DataLoader) else each for each in things]
        return found[0] if len(found) == 1 else tuple(found)

    def loader(self, data: Any) -> PlainBatches:
        return PlainBatches(self, data, DataLoader(data))

    def register(self, name: str, state: Any) -> None:
        pass

    def keep_average(self, *averages: Any) -> None:
        pass

    def epochs(self, count: int) -> Iterator[int]:
        for self.epoch in range(count):
            yield self.epoch

    def autocast(self) -> Any:
        return contextlib.nullcontext() if self.dtype is None else torch.autocast("cpu", self.dtype)

    def backward(self, loss: torch.Tensor, reduction: str = "mean", weight: Any = None) -> None:
        self.scaler.scale(loss).backward()

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> torch.Tensor:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, *things: Any) -> None:
        named = [each for each in things if isinstance(each, torch.optim.Optimizer)] or self.optimizers
        for optimizer in named:
            self.scaler.step(optimizer)
            self.scaler.update()
        for optimizer in named:
            optimizer.zero_grad()
        for scheduler in things:
            if isinstance(scheduler, LRScheduler):
                scheduler.step()

    def evaluate(self, function: Callable[[], dict[str, tuple[float, int]]]) -> dict[str, float]:
        return {name: total / count for name, (total, count) in function().items()}


class PlainBatches:
    """Those of the job's epoch, each time anew."""

    def __init__(self, job: PlainJob, dataset: Any, loader: DataLoader[Any]) -> None:
        self._job = job
        self._dataset = dataset
        self._collate = loader.collate_fn

    def __len__(self) -> int:
        return -(-len(self._dataset) // self._job.batch)

    def __iter__(self) -> Iterator[Any]:
        samples, epoch = len(self._dataset), self._job.epoch
        for indices in plain_batches(samples, self._job.batch, epoch * samples, (epoch + 1) * samples):
            yield self._collate([self._dataset[index] for index in indices])


@dataclass
class Loop:
    """One rank's loop, and what its body sees.

    Args:
        job: A `Job`, or a `PlainJob` in its place.
        number: Of the batch within its epoch.
        batches: That an epoch has, by the loader's length.
        scaler: One of the loop's own, as the job has returned it.
    """

    job: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any = None
    number: int = 0
    batches: int = 0
    used: list[int] = field(default_factory=list)  # samples, by their index
    losses: list[float] = field(default_factory=list)  # on all of the data, at each rest


Body = Callable[[Loop, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table of what works in a loop.

    Args:
        body: What the loop does with a batch, in a job and in plain PyTorch alike.
        model: Makes the model.
        optimizer: Makes its optimizer.
        wrap: What the loop calls in the model's place, such as a compiled one.
        scaler: Does the loop have a GradScaler of its own?
        precision: Of the job.
        accumulation: Slices of a task (K).
        tolerance: At D = 0, of each tensor's largest value.
        falls_to: At D = 4, the last loss over the first at most.
        settings: Others, of `hetsync.join`.
        points: What becomes of the inputs, to measure the loss on all of the data.
    """

    body: Body
    model: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9
    )
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    scaler: bool = False
    precision: str = "float32"
    accumulation: int = 1
    tolerance: float = 1e-5
    falls_to: float = 0.6
    settings: dict[str, Any] = field(default_factory=dict)


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)


def in_a_job(
    plane: Plane, row: Row, bound: int, data: Blobs | None = None, epochs: int = EPOCHS, **settings: Any
) -> Loop:
    """Collective: the loop of a script, all epochs."""
    data = data or Blobs()
    with hetsync.join(
        plane=plane,
        progress=False,
        seed=SEED,
        precision=row.precision,
        delay_bound=bound,
        accumulation=row.accumulation,
        rebalance=False,
        pins=unequal_shares(plane.size),
        timeout_seconds=30.0,
        **{**row.settings, **settings},
    ) as job:
        model = row.model()
        optimizer = row.optimizer(model)
        loop = Loop(job, row.wrap(model), optimizer)
        job.prepare(loop.model, optimizer)
        if row.scaler:
            loop.scaler = job.prepare(make_scaler())
        loader = job.loader(data, BATCH)
        loop.batches = len(loader)
        loop.losses.append(loss_on_all(model, data, loss_in_float32))
        for _ in job.epochs(epochs):
            for loop.number, (points, labels, indices) in enumerate(loader):
                loop.used += indices.tolist()
                row.body(loop, points, labels)
            assert_alike(plane, model)
            loop.losses.append(loss_on_all(model, data, loss_in_float32))
    return loop


def in_one_process(row: Row, data: Blobs | None = None) -> Loop:
    """The same loop with PyTorch alone, on batches of K·B samples in the same order."""
    job = PlainJob(BATCH * row.accumulation, row.precision)
    model = row.model()
    optimizer = row.optimizer(model)
    loop = Loop(job, row.wrap(model), optimizer)
    job.prepare(loop.model, optimizer)
    loop.scaler = make_scaler() if row.scaler else None
    loader = job.loader(data or Blobs())
    loop.batches = len(loader)
    for _ in job.epochs(EPOCHS):
        for loop.number, (points, labels, _) in enumerate(loader):
            row.body(loop, points, labels)
    return loop


def loss_in_float32(model: nn.Module, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(copy.deepcopy(model).float()(points.float()), labels)


def inner(model: nn.Module) -> nn.Module:
    found = getattr(model, "_orig_mod", model)
    assert isinstance(found, nn.Module)
    return found


def assert_alike(plane: Plane, model: nn.Module) -> None:
    """Collective: to the bit."""
    assert len(set(plane.gather_objects(weights_sha256(local_tensors(model))))) == 1, "ranks differ at rest"


def assert_used_once_an_epoch(plane: Plane, loop: Loop, samples: int = SAMPLES) -> None:
    """Collective."""
    used = Counter(index for theirs in plane.gather_objects(loop.used) for index in theirs)
    assert used == Counter(dict.fromkeys(range(samples), EPOCHS))


def assert_equal(plane: Plane, mine: Loop, theirs: Loop, tolerance: float) -> None:
    """Collective: weights, relative to the largest of each tensor."""
    pairs = zip(local_tensors(inner(mine.model)), local_tensors(inner(theirs.model)), strict=True)
    off = [float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs]
    assert max(plane.gather_objects(max(off))) < tolerance, off


def assert_learned(loop: Loop, falls_to: float) -> None:
    assert loop.losses[-1] < falls_to * loop.losses[0], loop.losses
