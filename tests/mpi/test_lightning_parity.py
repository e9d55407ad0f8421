"""Lightning's trainer on ranks comes to what plain PyTorch comes to in one process, for what its users write."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hetsync.data.loader import EpochOrder
from hetsync.plane.base import Plane

pytest.importorskip("lightning")

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torchmetrics.classification import MulticlassAccuracy

from hetsync.neighbours.lightning import HetSyncStrategy

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]

SAMPLES, BATCH, EPOCHS, SEED = 96, 12, 3, 5
STEPS = EPOCHS * SAMPLES // BATCH
TESTED = 50


class Images(Dataset[Any]):
    """Three noisy patterns."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(3, (samples,), generator=generator)
        patterns = torch.randn(3, 1, 8, 8, generator=generator)
        self.images = patterns[self.labels] + torch.randn(samples, 1, 8, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Images()
        return (data[index] for index in range(SAMPLES))


def convnet() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
    )


class Learner(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.tested = MulticlassAccuracy(3, average="micro")

    def loss(self, batch: Any, net: nn.Module | None = None) -> torch.Tensor:
        images, labels = batch
        return cross_entropy((net or self.net)(images), labels)

    def training_step(self, batch: Any) -> Any:
        images, labels = batch
        scores = self.net(images)
        loss = cross_entropy(scores, labels)
        self.accuracy(scores, labels)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch: Any) -> None:
        scores, labels = self.net(batch[0]), batch[1]
        self.tested(scores, labels)
        self.log("tested", self.tested)
        self.log("error", cross_entropy(scores, labels), sync_dist=True, batch_size=len(labels))

    def test_step(self, batch: Any) -> None:
        self.validation_step(batch)

    def predict_step(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.net(batch[0]).argmax(1)
        return found

    def configure_optimizers(self) -> Any:
        return by_step(torch.optim.SGD([each for each in self.net.parameters() if each.requires_grad], 0.05, 0.9))


def by_step(optimizer: torch.optim.Optimizer) -> Any:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(plane: Plane, module: LightningModule, bound: int = 0, data: Any = None, **options: Any) -> Trainer:
    trainer = trained_by(plane, bound, **options)
    trainer.fit(module, datamodule=Data()) if data is None else trainer.fit(module, data, Data().val_dataloader())
    return trainer


def trained_by(plane: Plane, bound: int = 0, **options: Any) -> Trainer:
    """A quiet trainer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"max_epochs": EPOCHS, "enable_checkpointing": False, "accelerator": "cpu", **quiet}
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return Trainer(strategy=HetSyncStrategy(plane=plane, delay_bound=bound), **(usual | options))


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(), batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(TESTED), batch_size=16)

    test_dataloader = predict_dataloader = val_dataloader


# Plain PyTorch.


def batches(batch: int = BATCH, epoch: int = SAMPLES) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """With the number of the epoch, in the strategy's order of samples."""
    data, order = Images(), EpochOrder(SAMPLES, SEED)  # the script's seed is the strategy's
    for number in range(EPOCHS):
        for start in range(number * epoch, (number + 1) * epoch, batch):
            chosen = order.indices([(start, min(start + batch, (number + 1) * epoch))])
            yield number, (data.images[chosen], data.labels[chosen])


def plain(
    learner: Learner,
    batch: int = BATCH,
    epoch: int = SAMPLES,
    steps: int = STEPS,
    clip: float | None = None,
    precision: torch.dtype | None = None,
    after: Callable[[Learner], None] = lambda learner: None,
) -> None:
    made = learner.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for step, (_, each) in enumerate(batches(batch, epoch)):
        if step == steps:
            break
        optimizer.zero_grad()
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = learner.loss(each)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(learner.net.parameters(), clip)
        optimizer.step()
        scheduler.step()
        after(learner)


# What users write.


class Groups(Learner):
    def configure_optimizers(self) -> Any:
        first = {"params": self.net[0].parameters(), "lr": 1e-3}
        return by_step(torch.optim.AdamW([first, {"params": self.net[3:].parameters(), "lr": 1e-2}]))


class Frozen(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class Clipping(Learner):
    """Clips by itself, and reads the norms before and at the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[tuple[float, float]] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        before = float(grad_norm(self.net, 2)["grad_2.0_norm_total"])
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        self.norms.append((before, float(grad_norm(self.net, 2)["grad_2.0_norm_total"])))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, 2))


class Pair(Learner):
    """Two networks, each with an optimizer and a scheduler that the module steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = convnet()

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        for net, optimizer, scheduler in zip((self.net, self.other), optimizers, schedulers, strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, net))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            scheduler.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.net.parameters(), 0.05, 0.9), torch.optim.Adam(self.other.parameters(), 0.01)]
        return made, [torch.optim.lr_scheduler.StepLR(each, 5, 0.5) for each in made]


def plain_pair(pair: Pair) -> None:
    optimizers, schedulers = pair.configure_optimizers()
    for _, each in batches():
        for net, optimizer, scheduler in zip((pair.net, pair.other), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            pair.loss(each, net).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            scheduler.step()


class AddsUp(Learner):
    """Gradients of two batches, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch) / 2)
        if number % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05, 0.9)


def plain_adding_up(learner: AddsUp) -> None:
    optimizer = learner.configure_optimizers()
    for _, each in batches(2 * BATCH):
        optimizer.zero_grad()
        learner.loss(each).backward()
        optimizer.step()


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class Head(Learner):
    """Without a scheduler, which would not know the group to come."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.net.parameters() if each.requires_grad], 0.05, 0.9)


def plain_unfreezing(learner: Head) -> None:
    learner.net[0].requires_grad_(False)
    optimizer = learner.configure_optimizers()
    for number, each in batches():
        if number == 1 and len(optimizer.param_groups) == 1:
            learner.net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(learner.net[0].parameters()), "lr": 0.01})
        optimizer.zero_grad()
        learner.loss(each).backward()
        optimizer.step()


def plain_average(learner: Learner) -> None:
    average = AveragedModel(learner.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain(learner, after=lambda learner: average.update_parameters(learner.net))
    learner.net.load_state_dict(average.module.state_dict())


class Skips(Learner):
    def training_step(self, batch: Any, number: int) -> Any:  # type: ignore[override]
        return None if number == 3 else super().training_step(batch)


def plain_skipping(learner: Learner) -> None:
    made = learner.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for number, (_, each) in enumerate(batches()):
        if number % (SAMPLES // BATCH) != 3:
            optimizer.zero_grad()
            learner.loss(each).backward()
            optimizer.step()
        scheduler.step()


class Branches(Learner):
    """A layer for some samples, of which a slice may have none, and a hook that clips what all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.branch = nn.Linear(64, 3)

    def loss(self, batch: Any, net: nn.Module | None = None) -> torch.Tensor:
        images, labels = batch
        scores = self.net(images)
        if (few := images[:, 0, 0, 0] > 2).any():
            scores = scores.index_add(0, few.nonzero()[:, 0], self.branch(images[few].flatten(1)))
        return cross_entropy(scores, labels)

    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)

    def configure_optimizers(self) -> Any:
        return by_step(torch.optim.SGD(self.parameters(), 0.05, 0.9))


def plain_branches(learner: Branches) -> None:
    made = learner.configure_optimizers()
    for _, each in batches():
        made["optimizer"].zero_grad()
        learner.loss(each).backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 0.3)
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()


class OwnBackward(Learner):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


def averaging() -> list[Any]:
    return [WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.9))]


def in_float16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5))


@dataclass(frozen=True)
class Case:
    """`plain` trains what `module` makes, in one process, for so many steps; `options` are the trainer's."""

    module: Callable[[], LightningModule] = Learner
    plain: Callable[[Any], None] = plain
    options: Callable[[], dict[str, Any]] = dict
    steps: int = STEPS
    tolerance: float = 1e-5
    data: Callable[[], Any] = field(default=lambda: None)


CASES = {
    "momentum, a scheduler by step": Case(),
    "AdamW, groups, clipping": Case(Groups, partial(plain, clip=0.3), lambda: {"gradient_clip_val": 0.3}),
    "frozen weights": Case(Frozen),
    "unfreezing": Case(Head, plain_unfreezing, lambda: {"callbacks": [Unfreezes()]}),
    "clipping after backward": Case(Branches, plain_branches),
    "a backward of its own": Case(OwnBackward),
    "clipping by hook": Case(Clipping, partial(plain, clip=0.3)),
    "two optimizers": Case(Pair, plain_pair, steps=2 * STEPS),
    "gradients added up": Case(AddsUp, plain_adding_up),
    "accumulation": Case(Learner, partial(plain, batch=3 * BATCH), lambda: {"accumulate_grad_batches": 3}, EPOCHS * 3),
    "an average of weights": Case(Learner, plain_average, lambda: {"callbacks": averaging()}),
    "None from a step": Case(Skips, plain_skipping),
    "bfloat16": Case(
        Learner, partial(plain, precision=torch.bfloat16), lambda: {"precision": "bf16-mixed"}, STEPS, 1e-2
    ),
    "float16": Case(
        *(Learner, partial(plain, precision=torch.half, clip=0.5)),
        *(lambda: {"plugins": [in_float16()], "gradient_clip_val": 0.5}, STEPS, 1e-2),
    ),
    "max_steps": Case(Learner, partial(plain, steps=19), lambda: {"max_epochs": -1, "max_steps": 19}, 19),
    "limit_train_batches": Case(
        Learner, partial(plain, epoch=3 * BATCH), lambda: {"limit_train_batches": 3}, EPOCHS * 3
    ),
    "val_check_interval": Case(options=lambda: {"val_check_interval": 0.25}),
    "fast_dev_run": Case(Learner, partial(plain, steps=1), lambda: {"fast_dev_run": True}, 1),
}


ON_FOUR = {"momentum, a scheduler by step", "two optimizers", "accumulation", "an average of weights", "max_steps"}
NAMES = [pytest.param(name, marks=pytest.mark.ranks(1, 2, *([4] * (name in ON_FOUR)))) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_plain_pytorch(plane: Plane, name: str) -> None:
    case = CASES[name]
    module, alone = case.module(), case.module()
    trainer = fit(plane, module, **case.options())
    case.plain(alone)
    torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=case.tolerance, atol=case.tolerance)
    assert trainer.global_step == case.steps


def test_norms_are_those_of_the_whole_batch(plane: Plane) -> None:
    module, norms = Clipping(), []
    fit(plane, module)
    plain(
        Learner(), clip=0.3, after=lambda learner: norms.append(float(grad_norm(learner.net, 2)["grad_2.0_norm_total"]))
    )
    torch.testing.assert_close([after for _, after in module.norms], norms, rtol=1e-4, atol=1e-4)
    assert any(before > 1.1 * after for before, after in module.norms)


def test_validates_tests_and_predicts(plane: Plane) -> None:
    module, alone, data = Learner(), Learner(), Data()
    trainer = trained_by(plane)
    before = trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    after = trainer.validate(module, datamodule=data, verbose=False)
    assert trainer.test(module, datamodule=data, verbose=False) == after
    assert before == [pytest.approx(scored(alone), rel=1e-4)]
    plain(alone)
    assert after == [pytest.approx(scored(alone), rel=1e-4)]
    writer = Writer()
    trainer.callbacks.append(writer)
    found: Any = trainer.predict(module, datamodule=data)
    told = plane.gather_objects((torch.cat(found).tolist(), writer.places))
    assert [each for mine, _ in told for each in mine] == module.net(Images(TESTED).images).argmax(1).tolist()
    assert [place for _, places in told for place in places] == list(range(TESTED))


def scored(learner: Learner) -> dict[str, float]:
    data = Images(TESTED)
    scores = learner.net(data.images)
    right = (scores.argmax(1) == data.labels).float().mean()
    return {"tested": right.item(), "error": cross_entropy(scores, data.labels).item()}


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.places: list[int] = []

    def write_on_batch_end(self, trainer: Any, module: Any, found: Any, indices: Any, *args: Any) -> None:
        self.places += indices


def test_callbacks_see_what_they_see_in_one_process(plane: Plane, folder: Path) -> None:
    best = ModelCheckpoint(folder / "kept", monitor="error", filename="{epoch}-{step}", save_last=True)
    twins = [LambdaCallback(), LambdaCallback()]  # of one name
    logged = CSVLogger(folder)
    callbacks = [best, EarlyStopping("error", patience=1), LearningRateMonitor("step"), *twins]
    module, alone = Learner(), Learner()
    trainer = fit(plane, module, callbacks=callbacks, logger=logged, enable_checkpointing=True, log_every_n_steps=1)
    rates, errors, after_epochs = [], [], []

    def after(learner: Learner) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        if len(rates) % (SAMPLES // BATCH) == 0:
            errors.append(scored(learner)["error"])
            after_epochs.append({name: each.clone() for name, each in learner.state_dict().items()})

    made = alone.configure_optimizers()
    optimizer = made["optimizer"]
    alone.configure_optimizers = lambda: made  # type: ignore[method-assign]
    plain(alone, after=after)
    worse = [number for number in range(1, EPOCHS) if errors[number] >= min(errors[:number])]
    ran = worse[0] + 1 if worse else EPOCHS
    assert trainer.current_epoch == ran
    place = min(range(ran), key=lambda number: errors[number])
    plane.barrier()
    assert Path(best.best_model_path).name == f"epoch={place}-step={(place + 1) * SAMPLES // BATCH}.ckpt"
    kept = torch.load(best.best_model_path, weights_only=False)["state_dict"]
    torch.testing.assert_close(kept, after_epochs[place], rtol=1e-5, atol=1e-5)
    if plane.rank == 0:
        rows = list(csv.DictReader((Path(logged.log_dir) / "metrics.csv").open()))
        shown = [float(row["lr-SGD"]) for row in rows if row["lr-SGD"]]
        assert shown == pytest.approx([0.05, *rates[: len(shown) - 1]])
        assert [int(row["step"]) for row in rows if row["lr-SGD"]] == list(range(len(shown)))
        told = [float(row["loss_epoch"]) for row in rows if row["loss_epoch"]]
        assert told == pytest.approx(mean_losses(ran), rel=1e-3)


def mean_losses(epochs: int) -> list[float]:
    """Of the training steps, each before it is made."""
    learner, losses = Learner(), [0.0] * EPOCHS
    made = learner.configure_optimizers()
    for number, each in batches():
        loss = learner.loss(each)
        losses[number] += loss.item() * BATCH / SAMPLES
        made["optimizer"].zero_grad()
        loss.backward()
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    return losses[:epochs]


def test_data_as_it_comes(plane: Plane) -> None:
    by_epochs, by_steps = Learner(), Learner()
    trainer = fit(plane, by_epochs, data=DataLoader(Stream(), BATCH), limit_train_batches=5)
    assert (trainer.global_step, trainer.current_epoch) == (15, EPOCHS)
    trainer = fit(plane, by_steps, data=DataLoader(Stream(), BATCH), max_epochs=-1, max_steps=7)
    assert (trainer.global_step, trainer.current_epoch) == (7, 1)


class Lengths(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def configure_optimizers(self) -> Any:
        self.told.append((self.trainer.num_training_batches, self.trainer.estimated_stepping_batches))
        return super().configure_optimizers()

    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        self.told.append((len(loader), len(loader.dataset)))


def test_lengths_are_those_of_one_device(plane: Plane) -> None:
    module = Lengths()
    fit(plane, module, accumulate_grad_batches=2)
    assert module.told == [(8, 12), *[(8, SAMPLES)] * EPOCHS]


class Noting(Learner):
    """After how many steps it validates, and what the loss is then."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, float]] = []

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.noted.append((self.trainer.global_step, float(self.trainer.callback_metrics["error"])))


@pytest.mark.parametrize("interval", [2, 0.25])
def test_validates_within_epochs(plane: Plane, interval: float) -> None:
    module, told = Noting(), []

    def after(learner: Learner) -> None:
        steps.append(None)
        if len(steps) % 2 == 0:
            told.append((len(steps), scored(learner)["error"]))

    steps: list[None] = []
    fit(plane, module, val_check_interval=interval)
    plain(Learner(), after=after)
    assert [step for step, _ in module.noted] == [step for step, _ in told] == list(range(2, STEPS + 1, 2))
    assert [error for _, error in module.noted] == pytest.approx([error for _, error in told], rel=1e-4)


@pytest.mark.parametrize("bound", [0, 4])
def test_stops_within_an_epoch_after_a_validation(plane: Plane, bound: int) -> None:
    stop = EarlyStopping("error", patience=1, min_delta=100.0)
    trainer = fit(plane, Learner(), bound, val_check_interval=2, callbacks=[stop])
    assert (trainer.global_step, trainer.current_epoch) == (4, 1)


class Stops(Learner):
    def training_step(self, batch: Any, number: int) -> Any:  # type: ignore[override]
        if self.global_rank == 0 and self.current_epoch == 1 and number == 3:
            self.trainer.should_stop = True
        return super().training_step(batch)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_stop_that_one_rank_asks_for_comes_at_the_epochs_end(plane: Plane, bound: int) -> None:
    trainer = fit(plane, Stops(), bound)
    assert (trainer.current_epoch, trainer.global_step) == (2, 2 * SAMPLES // BATCH)
    assert "error" in trainer.callback_metrics


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"max_steps": 19, "max_epochs": -1}])
def test_delayed_ranks_count_and_average_alike(plane: Plane, options: dict[str, Any]) -> None:
    module = Learner()
    trainer = fit(plane, module, 4, callbacks=averaging(), **options)
    assert trainer.global_step == {0: STEPS, 2: STEPS // 2}[options.get("accumulate_grad_batches", 0)] or 19
    weights = plane.gather_objects([each.tolist() for each in module.net.parameters()])
    assert all(each == weights[0] for each in weights)
    assert scored(module)["error"] < 1.1 * scored(Learner())["error"]
