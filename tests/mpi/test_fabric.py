"""Lightning's Fabric on a HetSync job: a loop as its users write it comes to plain PyTorch in one process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training import NET_SEED, Blobs, Net

from hetsync.data.loader import EpochOrder
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.plane.local import LocalPlane

pytest.importorskip("lightning")

import torchmetrics.metric
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torchmetrics.classification import MulticlassAccuracy

from hetsync.neighbours.fabric import FabricStrategy

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

BATCH, SAMPLES, EPOCHS, TESTED = 24, 192, 3, 50


@pytest.fixture(autouse=True)
def _metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a strategy sets for the rest of its process is taken back."""
    for name in ("jit_distributed_available", "gather_all_tensors"):
        monkeypatch.setattr(torchmetrics.metric, name, getattr(torchmetrics.metric, name))


class Plain:
    """What a loop calls of Fabric, on nothing but PyTorch; batches are in the job's order."""

    device, is_global_zero, world_size = torch.device("cpu"), True, 1

    def __init__(self, precision: torch.dtype | None = None) -> None:
        self.precision = precision
        self.epoch = -1

    def setup(self, module: nn.Module, *others: Any, scheduler: Any = None) -> Any:
        return (module, *others) if scheduler is None else (module, *others, scheduler)

    def setup_dataloaders(self, training: Any, testing: Any) -> Any:
        return self, testing

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        data, order = Blobs(SAMPLES), EpochOrder(SAMPLES, NET_SEED)  # the script's seed is the strategy's
        for start in range(self.epoch * SAMPLES, (self.epoch + 1) * SAMPLES, BATCH):
            chosen = order.indices([(start, start + BATCH)])
            yield data.points[chosen], data.labels[chosen], torch.tensor(chosen)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_gradients(self, module: Any, optimizer: Any, max_norm: float | None = None, clip_val: Any = None) -> Any:
        if clip_val is not None:
            return nn.utils.clip_grad_value_(module.parameters(), clip_val)
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm or 0.0)

    def no_backward_sync(self, module: Any, enabled: bool = True) -> Any:
        return torch.enable_grad()

    def autocast(self) -> Any:
        return torch.autocast("cpu", self.precision, enabled=self.precision is not None)

    def all_gather(self, value: Any) -> Any:
        return torch.as_tensor(value)


@dataclass(frozen=True)
class Case:
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    norm: float | None = None
    value: float | None = None
    every: int = 1  # batches a step
    precision: Any = None
    dtype: torch.dtype | None = None
    tolerance: float = 1e-5


def script(fabric: Any, case: Case, seen: list[Any]) -> nn.Module:
    net = Net()
    made = case.optimizer(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(made, 5, 0.5)
    model, optimizer, scheduler = fabric.setup(net, made, scheduler=schedule)
    training = DataLoader(Blobs(SAMPLES), BATCH, shuffle=True)
    loader, test_loader = fabric.setup_dataloaders(training, DataLoader(Blobs(TESTED), 16))
    accuracy = MulticlassAccuracy(3, average="micro").to(fabric.device)
    for _ in range(EPOCHS):
        model.train()
        for number, (points, labels, _) in enumerate(loader):
            due = (number + 1) % case.every == 0
            with fabric.no_backward_sync(model, enabled=not due):
                with fabric.autocast():
                    loss = cross_entropy(model(points), labels)
                fabric.backward(loss / case.every)
            if not due:
                continue
            if case.norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=case.norm)
            if case.value is not None:
                fabric.clip_gradients(model, optimizer, clip_val=case.value)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for points, labels, _ in test_loader:
                scores = model(points)
                total += cross_entropy(scores, labels, reduction="sum").item()
                accuracy(scores, labels)
        seen.append(((fabric.all_gather(total).sum() / len(test_loader.dataset)).item(), accuracy.compute().item()))
        accuracy.reset()
    return net


CASES = {
    "momentum": Case(lambda weights, lr: torch.optim.SGD(weights, lr, 0.9)),
    "AdamW, clipped": Case(torch.optim.AdamW, norm=0.1),
    "clipped by value": Case(value=0.01),
    "added up": Case(every=2),
    "bfloat16": Case(precision="bf16-mixed", dtype=torch.bfloat16, tolerance=1e-2),
    "float16": Case(
        precision=lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0)),
        dtype=torch.half,
        norm=0.1,
        tolerance=1e-2,
    ),
}


def launched(plane: Plane, case: Case | None = None, bound: int = 0, **settings: Any) -> Fabric:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    case = case or CASES["momentum"]
    named = {"precision": case.precision} if isinstance(case.precision, str) else {}
    plugins = {"plugins": [case.precision()]} if callable(case.precision) else {}
    strategy = FabricStrategy(plane=plane, delay_bound=bound, **settings)
    fabric = Fabric(strategy=strategy, accelerator="cpu", **named, **plugins)
    fabric.seed_everything(NET_SEED, verbose=False)
    fabric.launch()
    return fabric


@pytest.mark.parametrize("name", CASES)
def test_a_loop_comes_to_plain_pytorch(plane: Plane, name: str) -> None:
    case, seen, told = CASES[name], [], []
    fabric = launched(plane, case)
    found = script(fabric, case, seen)
    fabric.strategy.job.close()
    alone = script(Plain(case.dtype), case, told)
    torch.testing.assert_close(found.state_dict(), alone.state_dict(), rtol=case.tolerance, atol=case.tolerance)
    assert len(seen) == EPOCHS
    if case.dtype is None:
        assert seen == [pytest.approx(each, rel=1e-4) for each in told]


def test_delayed_it_learns(plane: Plane) -> None:
    seen: list[Any] = []
    fabric = launched(plane, bound=4)
    found = script(fabric, CASES["momentum"], seen)
    fabric.strategy.job.close()
    assert seen[-1][1] > 0.6
    weights = plane.gather_objects([each.tolist() for each in found.parameters()])
    assert all(each == weights[0] for each in weights)
    assert all(each == seen for each in plane.gather_objects(seen))


def test_what_ranks_say_to_each_other(plane: Plane, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fabric = launched(plane)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    mine = torch.tensor([float(fabric.global_rank), 1.0])
    shape = (plane.size, 2) if plane.size > 1 else (2,)
    assert fabric.all_gather(mine).shape == shape
    assert fabric.all_reduce(mine.clone(), reduce_op="sum").tolist() == [sum(range(plane.size)), plane.size]
    reduced = mine.clone()
    fabric.all_reduce(reduced)
    assert reduced.tolist() == [sum(range(plane.size)) / plane.size, 1.0]
    assert fabric.broadcast(fabric.global_rank, src=plane.size - 1) == plane.size - 1
    assert (fabric.world_size, fabric.is_global_zero) == (plane.size, plane.rank == 0)
    fabric.save(folder / "kept.ckpt", {"model": model, "optimizer": optimizer, "epoch": 3})
    with torch.no_grad():
        net.body[0].weight.zero_()
    left = fabric.load(folder / "kept.ckpt", {"model": model, "optimizer": optimizer})
    assert left == {"epoch": 3}
    assert net.body[0].weight.abs().sum() > 0
    fabric.barrier()
    fabric.print("once")
    fabric.strategy.job.close()
    assert capfd.readouterr().out.count("once") == (plane.rank == 0)


def shares_in_a_step(fabric: Fabric, model: Any, loader: Any, tested: Any) -> None:
    for points, labels, _ in loader:
        loss = cross_entropy(model(points), labels)
        fabric.backward(loss)
        fabric.all_reduce(loss.detach())


def shares_in_a_test_step(fabric: Fabric, model: Any, loader: Any, tested: Any) -> None:
    for points, labels, _ in tested:
        fabric.all_reduce(cross_entropy(model(points), labels).detach())


def calls_backward_itself(fabric: Fabric, model: Any, loader: Any, tested: Any) -> None:
    for points, labels, _ in loader:
        cross_entropy(model(points), labels).backward()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (shares_in_a_step, "a batch is out, and what was called needs all ranks at rest"),
        (shares_in_a_test_step, "reduce was asked of all ranks in a step"),
        (calls_backward_itself, "requires you to call `fabric.backward"),
    ],
)
def test_refused(loop: Callable[..., None], sentence: str) -> None:
    fabric = launched(LocalPlane())
    net = Net()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loaders = DataLoader(Blobs(SAMPLES), BATCH, shuffle=True), DataLoader(Blobs(TESTED), 16)
    with pytest.raises((UserError, RuntimeError)) as mistake:
        loop(fabric, model, *fabric.setup_dataloaders(*loaders))
    assert sentence in str(mistake.value)
    with pytest.raises(SystemExit):
        fabric.strategy.job.__exit__(UserError, UserError(sentence), None)
