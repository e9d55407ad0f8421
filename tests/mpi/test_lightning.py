"""Lightning's trainer on a HetSync job."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import NET_SEED, Blobs, Net

from hetsync.data.loader import EpochOrder
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.plane.local import LocalPlane

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torchmetrics.classification import MulticlassAccuracy

from hetsync.neighbours.lightning import HetSyncStrategy

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

BATCH, SAMPLES, EPOCHS = 24, 192, 3
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Module(LightningModule):
    """Tells which samples it has been given, and what each validation has found."""

    def __init__(self, schedule: Callable[[Any], Any] = lambda optimizer: optimizer) -> None:
        super().__init__()
        self.net = Net()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.schedule = schedule
        self.used: list[int] = []
        self.found: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        points, labels, numbers = batch
        self.used += numbers.tolist()
        return nn.functional.cross_entropy(self.net(points), labels)

    def validation_step(self, batch: Any) -> None:
        points, labels, _ = batch
        scores = self.net(points)
        self.accuracy(scores, labels)
        self.log("metric", self.accuracy)
        right = (scores.argmax(1) == labels).float().mean()
        self.log("mean", right, sync_dist=True, batch_size=len(labels))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.found.append(self.accuracy.compute().item())

    def configure_optimizers(self) -> Any:
        return self.schedule(torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Blobs(SAMPLES), batch_size=BATCH, shuffle=True), DataLoader(Blobs(100), batch_size=32)


def fit(plane: Plane, module: LightningModule, bound: int = 0, epochs: int = EPOCHS, **options: Any) -> Trainer:
    settings = {"delay_bound": bound} | options.pop("settings", {})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = HetSyncStrategy(plane=plane, **settings)
        kept = options.pop("enable_checkpointing", False)
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", max_epochs=epochs, enable_checkpointing=kept, **quiet, **options
        )
        trainer.fit(module, *loaders())
    return trainer


def by_steps(optimizer: torch.optim.Optimizer) -> Any:
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5), "interval": "step"},
    }


def by_epochs(optimizer: torch.optim.Optimizer) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def plain(net: nn.Module, every: int, clip: float | None) -> None:
    """One process and nothing but PyTorch; the learning rate is halved every so many steps."""
    data, order = Blobs(SAMPLES), EpochOrder(SAMPLES, NET_SEED)  # the script's seed is the strategy's
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)
    for start in range(0, EPOCHS * SAMPLES, BATCH):
        numbers = order.indices([(start, start + BATCH)])
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data.points[numbers]), data.labels[numbers]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("schedule", "every"), [(by_steps, 5), (by_epochs, SAMPLES // BATCH)])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_synchronous_training_is_that_of_one_process(
    plane: Plane, schedule: Callable[[Any], Any], every: int, clip: float | None
) -> None:
    module, net = Module(schedule), Net()
    fit(plane, module, 0, gradient_clip_val=clip)
    plain(net, every, clip)
    for mine, other in zip(module.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@BOUNDS
def test_each_sample_once_an_epoch_and_all_validate_the_same(plane: Plane, bound: int) -> None:
    module = Module(by_epochs)
    trainer = fit(plane, module, bound)
    used = Counter(number for numbers in plane.gather_objects(module.used) for number in numbers)
    assert used == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    data = Blobs(100)
    whole = (module.net(data.points).argmax(1) == data.labels).float().mean().item()
    assert len(module.found) == EPOCHS
    for found in (module.found[-1], trainer.callback_metrics["metric"], trainer.callback_metrics["mean"]):
        assert plane.gather_objects(float(found)) == pytest.approx([whole] * plane.size)
    assert whole > 0.6
    assert trainer.global_step == EPOCHS * SAMPLES // BATCH
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.05 / 2**EPOCHS)  # type: ignore[union-attr]


def by_metric(optimizer: torch.optim.Optimizer) -> Any:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=2.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mean"}}


@BOUNDS
def test_stops_early_with_the_best_kept(plane: Plane, bound: int, folder: Path) -> None:
    best = ModelCheckpoint(folder / "best", monitor="mean", mode="max")
    stop = EarlyStopping("mean", mode="max", patience=2, min_delta=2.0)
    module = Module(by_metric)
    trainer = fit(plane, module, bound, 8, callbacks=[best, stop], enable_checkpointing=True)
    assert trainer.current_epoch == 3
    assert len(module.found) == 3
    assert module.optimizers().param_groups[0]["lr"] < 0.05  # type: ignore[union-attr]
    plane.barrier()
    assert Path(best.best_model_path).exists()
    found = trainer.validate(module, loaders()[1], verbose=False)
    assert found[0]["mean"] == pytest.approx(module.found[-1])


def test_goes_on_with_a_run(plane: Plane, folder: Path) -> None:
    settings = {"run": folder / "run", "resume": "auto"}
    whole, first, second = Module(), Module(), Module()
    fit(plane, whole)
    fit(plane, first, epochs=2, settings=settings)
    trainer = fit(plane, second, epochs=EPOCHS, settings=settings)
    assert trainer.current_epoch == EPOCHS
    assert len(second.found) == 2  # what follows the epoch that the run stood at is done again
    for mine, other in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


class Logs(Module):
    def training_step(self, batch: Any) -> torch.Tensor:
        loss = super().training_step(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


@pytest.mark.ranks(1)
def test_a_metric_of_training_is_missing_at_the_end_that_a_run_goes_on_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"run": folder / "run", "resume": "auto"}
    fit(LocalPlane(), Logs(), epochs=2, settings=settings, callbacks=[EarlyStopping("loss")])
    with pytest.raises(SystemExit):
        fit(LocalPlane(), Logs(), epochs=3, settings=settings, callbacks=[EarlyStopping("loss")])
    assert "EarlyStopping monitors loss, and the run goes on from the end of an epoch" in capsys.readouterr().err


@pytest.mark.parametrize("limits", [{"accumulate_grad_batches": 2}, {"val_check_interval": 2}])
def test_a_limited_run_goes_on(plane: Plane, folder: Path, limits: dict[str, Any]) -> None:
    """From within an epoch, and within an interval."""
    settings = {"run": folder / "run", "resume": "auto"}
    whole, first, second = Module(by_steps), Module(by_steps), Module(by_steps)
    fit(plane, whole, epochs=-1, max_steps=10, **limits)
    fit(plane, first, epochs=-1, max_steps=3, settings=settings, **limits)
    trainer = fit(plane, second, epochs=-1, max_steps=10, settings=settings, **limits)
    assert trainer.global_step == 10
    assert len(whole.found) == len(first.found) + len(second.found)
    for mine, other in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


class Manual(Module):
    """Two optimizers, of two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = Net()

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        points, labels, numbers = batch
        self.used += numbers.tolist()
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(net(points), labels))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (self.net, self.other)]


class Total(Manual):
    """A sum over the batch, as it would be in one process."""

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        points, labels, numbers = batch
        self.used += numbers.tolist()
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(points), labels, reduction="sum") / BATCH
            self.manual_backward(loss, reduction="sum")
            optimizer.step()


def test_a_sum_by_hand(plane: Plane) -> None:
    module, net = Total(), Net()
    fit(plane, module)
    plain(net, 10**6, None)
    torch.testing.assert_close(module.net.state_dict(), net.state_dict(), rtol=1e-5, atol=1e-6)


@BOUNDS
def test_manual_optimization(plane: Plane, bound: int) -> None:
    module, net = Manual(), Net()
    fit(plane, module, bound)
    plain(net, 10**6, None)
    for mine, other, alone in zip(module.net.parameters(), module.other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
        if bound == 0:
            torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


def test_bfloat16(plane: Plane) -> None:
    module = Module()
    fit(plane, module, 4, precision="bf16-mixed")
    assert module.found[-1] > 0.6


class Gathers(Module):
    def training_step(self, batch: Any) -> torch.Tensor:
        loss = super().training_step(batch)
        self.all_gather(loss.detach())
        return loss


class GathersTested(Module):
    def validation_step(self, batch: Any) -> None:
        self.all_gather(self.net(batch[0]))


class Leaves(Module):
    def on_train_batch_start(self, batch: Any, number: int) -> int | None:
        return -1 if number == 2 else None


class Normalised(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(batch_norm=True)


class Sums(Module):
    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


IN_A_STEP = "was asked of all ranks in a step"
REFUSED: dict[str, tuple[type[Module], dict[str, Any], str]] = {
    "no end": (Module, {"epochs": -1}, "Trainer(max_epochs=-1): give the number of epochs, 1 or more, or max_steps"),
    "no batch": (Module, {"limit_train_batches": 0.01}, "leaves none of 8 batches"),
    "interval": (Module, {"val_check_interval": 3}, "cuts an epoch of 8 batches into unequal intervals"),
    "time": (Module, {"val_check_interval": "00:00:10:00"}, "give batches, or a part of an epoch"),
    "value": (Module, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value", "bound": 4}, "clip by norm"),
    "float16": (Module, {"precision": "16-true"}, "take 16-mixed or bf16-mixed"),
    "end in time": (Module, {"max_time": "00:00:10:00"}, f"broadcast {IN_A_STEP}"),
    "changing": (Module, {"callbacks": [GradientAccumulationScheduler({0: 2})]}, "give one number"),
    "normalised": (Normalised, {"sync_batchnorm": True}, "Trainer(sync_batchnorm=True)"),
    "swa": (Normalised, {"callbacks": [StochasticWeightAveraging(0.01)]}, "take WeightAveraging"),
    "left": (Leaves, {}, "an epoch was left before its end"),
    "gathers": (Gathers, {}, f"all_gather {IN_A_STEP}"),
    "gathers, tested": (GathersTested, {}, f"all_gather {IN_A_STEP}"),
    "sum": (Sums, {}, "the loss is a sum over the batch's samples"),
    "twice": (Module, {"settings": {"accumulation": 2}, "accumulate_grad_batches": 3}, "give one of them"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, options, sentence = REFUSED[case]
    with pytest.raises(SystemExit) as ended:
        fit(LocalPlane(), make(), **options)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.ranks(2)
def test_what_a_step_logs_is_its_own_and_that_is_told(plane: Plane, capfd: pytest.CaptureFixture[str]) -> None:
    class Shares(Module):
        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            self.log("part", float(len(batch[0])), on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
            return loss

    trainer = fit(plane, Shares())
    assert trainer.callback_metrics["part_epoch"] == SAMPLES
    assert trainer.callback_metrics["part_step"] < BATCH
    assert ("the value of a step is this rank's" in capfd.readouterr().err) == (plane.rank == 0)


def of_unequal_shapes(strategy: HetSyncStrategy) -> Any:
    return strategy.all_gather(torch.zeros(2 + strategy.global_rank))


def in_unequal_order(strategy: HetSyncStrategy) -> Any:
    return strategy.barrier("end") if strategy.global_rank else strategy.broadcast(1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (of_unequal_shapes, "tensors of the shapes (2,), (3,)"),
        (in_unequal_order, "rank 1 came to barrier end while rank 0 came to broadcast"),
    ],
)
def test_what_ranks_cannot_answer_at_rest_is_one_sentence(
    plane: Plane, ask: Callable[[HetSyncStrategy], Any], sentence: str
) -> None:
    strategy = HetSyncStrategy(plane=plane, delay_bound=0)
    with pytest.raises(UserError) as mistake:
        ask(strategy)
    strategy.job.close()
    assert sentence in str(mistake.value)
