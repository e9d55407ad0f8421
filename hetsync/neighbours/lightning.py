"""Lightning's trainer on a HetSync job:

    trainer = Trainer(strategy=HetSyncStrategy(delay_bound=4), max_epochs=10)
    trainer.fit(module, train_loader, test_loader)

Started by `torchrun --nproc-per-node N my_script.py` or by `mpirun -np N python my_script.py`. The trainer's loop is
each rank's own: how many batches a rank computes is found while it computes them. So each epoch ends where the job's
does, with all ranks at rest; there the trainer validates, steps schedulers by epoch, stops early and saves. What a step
asks of all ranks they cannot answer: a value that it logs is the rank's own, anything else is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hetsync.api import join, opened
from hetsync.errors import UserError, complain, early_mistakes
from hetsync.extras import require
from hetsync.neighbours.at_rest import AtRest, RankPart
from hetsync.plane.ending import opening
from hetsync.train.evaluation import EvaluationLoader
from hetsync.train.job import Job
from hetsync.train.prepared import TrainingLoader

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    from torchmetrics import Metric
except ImportError:
    with early_mistakes():
        require("lightning", "HetSyncStrategy")
    raise

ENDLESS = 2**40  # batches, or steps: more than there are
OWN_VALUES = (
    "self.log(..., sync_dist=True) was called in a step, where ranks have batches of their own: the value of a step is"
    " this rank's, that of an epoch (on_epoch=True) is of all ranks"
)


class HetSyncStrategy(AtRest, Strategy):
    """Trains a LightningModule on all ranks of a launcher's.

    The training `DataLoader`'s batch size is of all ranks together. With `run`, HetSync's checkpoints are kept there,
    and `resume="auto"` goes on from them, on any number of ranks.
    """

    def __init__(self, **settings: Any) -> None:
        """Collective. `settings`: those of `hetsync.join`, such as delay_bound=0, run="runs/mine", resume="auto"."""
        super().__init__()
        with opening():
            if "precision" in settings:
                raise UserError("HetSyncStrategy got precision: give it to the Trainer")
            plane = settings.pop("plane", None) or opened("auto", settings)
        # The plane outlives the job: the trainer may test after it.
        self.job = cast(Job, join(plane=plane, **({"progress": False} | settings)))
        self.take_ranks()
        rank_zero_only.rank = self.job.rank  # type: ignore[attr-defined, unused-ignore]
        self.is_distributed = True  # or the trainer would take a rank's value for that of all
        self._loader: TrainingLoader | None = None
        self._course = Course(0, 0)
        self._max_steps = -1  # of the trainer
        self._epochs: Iterator[int] = iter(())
        self._epoch: int | None = None  # that is trained, or was last
        self._loss: Any = None  # of the newest training step
        self._told_of_own_values = False
        self._ended = False

    # Before training.

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    def setup_environment(self) -> None:
        super().setup_environment()
        self._trainer._accelerator_connector.use_distributed_sampler = False  # the order of samples is HetSync's

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def _scaler(self) -> Any:
        """Of losses in float16, or None."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def handles_gradient_accumulation(self) -> bool:
        return bool(self._trainer.accumulate_grad_batches > 1)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Collective: prepare all that is trained."""
        if self._ended:
            raise UserError("this HetSyncStrategy has trained already: make another, with a Trainer of its own")
        check(trainer, self._module, synchronous=self.job.config.sync.delay_bound == 0)
        if self.handles_gradient_accumulation:
            if (told := self.job.config.sync.accumulation) not in (1, trainer.accumulate_grad_batches):
                raise UserError(
                    f"HetSyncStrategy got accumulation {told}, and the Trainer accumulate_grad_batches"
                    f" {trainer.accumulate_grad_batches}: give one of them"
                )
            self.job.accumulate(trainer.accumulate_grad_batches)
        trainer.fit_loop.setup_data()
        if self._loader is None:
            raise UserError("the module has no training_step or no training data: HetSyncStrategy trains with both")
        super().setup_optimizers(trainer)
        trainer.fit_loop.max_batches, trainer.val_check_batch = float("inf"), ENDLESS
        self._max_steps = trainer.max_steps
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = self._course.epochs, -1
        self.job.prepare(self._module, *self.optimizers)
        for config in self.lr_scheduler_configs:
            config.scheduler = self.job.prepare(config.scheduler)
        if self._scaler is not None:
            self.precision_plugin.scaler = self.job.prepare(self._scaler)  # type: ignore[attr-defined]
        for callback in self._trainer.callbacks:
            if type(callback).state_dict is not Callback.state_dict:
                self.job.register(f"callback {callback.state_key}", callback)
            for average in (each for each in vars(callback).values() if isinstance(each, AveragedModel)):
                self.job.prepare(average)
        if self._course.total is None:
            self._epochs = self.job.epochs(self._course.epochs)
        else:
            self._epochs = self.job.intervals(self._course.samples // self._course.intervals)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        setattr(self.precision_plugin, "clip_grad_by_norm", self._clip)  # noqa: B010 (a method, of this one only)
        for metric in self._module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = lambda: self.world_size > 1
                metric.dist_sync_fn = lambda value, group=None: self.meet("a metric's compute", value)

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._trainer.training:
            self._course = course_of(self._trainer, dataloader)
            self._loader = self.job.loader(dataloader, samples=self._course.told)
            return RankBatches(self._loader, self._batches)
        if isinstance(dataloader.batch_sampler, _IndexBatchSamplerWrapper):  # the trainer's own, for predictions
            made = {name: getattr(dataloader, name) for name in ("collate_fn", "num_workers", "pin_memory")}
            dataloader = DataLoader(dataloader.dataset, vars(dataloader.batch_sampler)["batch_size"], **made)
        return IndexedPart(self.test_loader(dataloader))

    # Training.

    def on_train_start(self) -> None:
        """Collective: the trainer begins with the epoch that the run stands at."""
        self._turn()
        progress = self._trainer.fit_loop.epoch_progress.current
        progress.processed = progress.completed = self._course.epochs if self._epoch is None else self._epoch
        self._count_steps()

    def _turn(self) -> None:
        """To the next interval, of this epoch or the next."""
        number = next(self._epochs, None)
        self._epoch = None if number is None else number // self._course.intervals

    def _count_steps(self) -> None:
        """As a loop on one device would by now, by the samples of the whole job: names of checkpoints tell it, warm-ups
        and averages go by it."""
        loop, every = self._trainer.fit_loop.epoch_loop, self._trainer.accumulate_grad_batches
        epochs, batches = divmod(self.job.step_count, self._course.batches)
        steps = epochs * -(-self._course.batches // every) + batches // every
        loop._batches_that_stepped = steps
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
        loop.manual_optimization.optim_step_progress.total.completed = steps * len(self.optimizers)

    def _batches(self) -> Iterator[Any]:
        """This rank's, of one epoch; then what the trainer does at an epoch's end, with all ranks at rest."""
        assert self._loader is not None
        self._check_no_batch_is_out()
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        trainer.fit_loop._data_fetcher.length = ENDLESS  # the rank's own is not known
        if trainer.current_epoch != self._epoch:
            self._turn()
        came = False
        while True:
            least, loop.min_steps = loop.min_steps, ENDLESS  # a stop that is asked for meanwhile comes at the rest
            for batch in self._loader:
                self._count_steps()
                came = self.in_step = True
                yield batch
                self.in_step = False
            loop.min_steps = least
            self._count_steps()
            loop.batch_progress.is_last_batch = self._is_whole
            self._end_interval(loop)
            trainer.should_stop = self.reduce_boolean_decision(trainer.should_stop, all=False)
            stops = trainer.should_stop and trainer.fit_loop._can_stop_early
            if stops or self._is_whole or self.job.samples == self._course.total:
                break
            self._turn()
        if not self.reduce_boolean_decision(came, all=False):
            check_monitors(trainer)

    @property
    def _is_whole(self) -> bool:
        """The epoch, at rest."""
        return self.job.step_count % self._course.batches == 0

    def _end_interval(self, loop: Any) -> None:
        """What max_steps cut off is none."""
        course, trainer = self._course, self._trainer
        if self._is_whole:
            if course.batches % trainer.accumulate_grad_batches:
                loop._update_learning_rates("step", update_plateau_schedulers=False)
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self.job.step_count % (course.batches // course.intervals) == 0 and loop._should_check_val_epoch():
            first = trainer._logger_connector._first_loop_iter
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first

    def _check_no_batch_is_out(self) -> None:
        if self.in_step:
            raise UserError(
                "an epoch was left before its end (on_train_batch_start returned -1?), which ends a rank's work for"
                " good: give Trainer(limit_train_batches=N) for shorter epochs"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().training_step(*args, **kwargs)
        if found is None and self._module.automatic_optimization:  # the batch counts nothing
            found = torch.zeros((), device=self.root_device)
        self._loss = found.get("loss") if isinstance(found, Mapping) else found  # which the trainer divides
        return found

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """By `job.backward`, with its options, unless the module has a backward of its own."""
        module, plugin = self._module, self.precision_plugin
        loss = self._loss if module.automatic_optimization else closure_loss
        if (args or type(module).backward is not LightningModule.backward) and loss.requires_grad:
            self.job.record_loss(loss if self._scaler is None else loss.nan_to_num(0.0, 0.0, 0.0))
            return super().backward(loss, optimizer, *args, **kwargs)
        Precision.pre_backward(plugin, loss, module)  # the hooks, without a factor
        self.job.backward(loss, **kwargs)
        return plugin.post_backward(loss, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Gradients first, so that hooks and clipping see those of the step: of all ranks at delay bound 0."""
        found = closure()
        if self.job.collect(optimizer):
            if self._scaler is not None:
                self._scaler.unscale_(optimizer)
            self.precision_plugin._after_closure(self._module, optimizer)
            if self._scaler is None:
                optimizer.step(**kwargs)
            else:
                self._scaler.step(optimizer)
            if self.handles_gradient_accumulation:
                optimizer.zero_grad()  # the trainer does so after several batches, and the next may make a step, too
        return found

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        self.job.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], clip_val)

    # Evaluation.

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().predict_step(*args, **kwargs)

    # The end.

    def on_train_end(self) -> None:
        """Collective, at rest; earlier than after the last epoch where the trainer stops early."""
        self._check_no_batch_is_out()
        if next(self._epochs, None) is not None:
            self.job.stop()
        self._ended = True
        self.job.close()
        self._trainer.fit_loop.epoch_loop.max_steps = self._max_steps

    def on_exception(self, exception: BaseException) -> None:
        """The job ends on all ranks; after a signal it has saved."""
        self._ended = True
        self.job.__exit__(type(exception), exception, exception.__traceback__)

    # What ranks say to each other: before training, and at rest.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Of all ranks' values; in a step this rank's own."""
        if not self.in_step:
            return self.reduced(tensor, reduce_op)
        if self.is_global_zero and self.world_size > 1 and not self._told_of_own_values:
            complain(OWN_VALUES)
        self._told_of_own_values = True
        return tensor

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._trainer.state.fn == TrainerFn.FITTING:
            raise UserError(
                "Trainer.fit got a ckpt_path, which does not tell which samples are used: go on with"
                ' HetSyncStrategy(run=..., resume="auto"), or load the weights into the module before'
            )
        return super().load_checkpoint(checkpoint_path, weights_only)


class IndexedPart(RankPart):
    """Tells callbacks that write predictions which samples of the data set they are of."""

    def __init__(self, loader: EvaluationLoader) -> None:
        super().__init__(loader)
        self.batch_sampler = _IndexBatchSamplerWrapper(BatchSampler(loader.rank_part, loader.batch_size, False))

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _ in zip(super().__iter__(), self.batch_sampler, strict=True))


class RankBatches:
    """In place of the training `DataLoader`, as long as on one device."""

    def __init__(self, loader: TrainingLoader, batches: Callable[[], Iterator[Any]]) -> None:
        self._loader = loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._batches = batches

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


@dataclass(frozen=True)
class Course:
    """What a trainer's limits make of the training data.

    Args:
        batches, samples: Of an epoch; samples where limits or intervals tell them.
        intervals: Of an epoch, each of which ends with a validation.
        epochs: The last may be shorter.
        total: Samples in all, where limits tell them.
        told: Samples that `job.loader` is told: in all, or of an iterable data set those of an epoch.
    """

    batches: int
    epochs: int
    samples: int = 0
    intervals: int = 1
    total: int | None = None
    told: int | None = None


def course_of(trainer: Any, loader: Any) -> Course:
    """UserError for limits that leave nothing, and for validations that no rest can come to."""
    course, interval = limits_of(trainer, loader), trainer.val_check_interval
    if not course.batches or (isinstance(interval, float) and interval == 1.0):
        return course
    if isinstance(loader.dataset, IterableDataset):
        raise UserError(f"Trainer(val_check_interval={interval}) of an iterable data set: give limit_train_batches=N")
    every = interval if isinstance(interval, int) else int(course.batches * interval)
    samples = course.samples or course.batches * loader.batch_size
    short = not loader.drop_last and samples > len(loader.dataset)
    if not every or course.batches % every or every % trainer.accumulate_grad_batches or short:
        raise UserError(
            f"Trainer(val_check_interval={interval}) cuts an epoch of {course.batches} batches into unequal intervals:"
            " give a number of batches that divides them, DataLoader(drop_last=True) where the last is short, and a"
            " multiple of accumulate_grad_batches"
        )
    total = course.epochs * samples if course.total is None else course.total
    return replace(course, samples=samples, intervals=course.batches // every, total=total, told=total)


def limits_of(trainer: Any, loader: Any) -> Course:
    """UserError for limits that leave nothing."""
    epochs, steps, limit = trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches
    size, every = getattr(loader, "batch_size", None), trainer.accumulate_grad_batches
    if not size:
        return Course(0, epochs)  # job.loader says what is wrong with it
    if isinstance(loader.dataset, IterableDataset) and (isinstance(limit, int) or steps != -1):
        batches = limit if isinstance(limit, int) else steps * every
        epochs = epochs if isinstance(limit, int) else 1
        if steps not in (-1, epochs * -(-batches // every)):
            raise UserError(f"Trainer(max_steps={steps}) of an iterable data set: leave limit_train_batches out")
        return Course(batches, epochs, told=batches * size)
    whole = len(loader)
    batches = min(limit, whole) if isinstance(limit, int) else int(whole * limit)
    if not batches:
        raise UserError(f"Trainer(limit_train_batches={limit}) leaves none of {whole} batches: give more")
    if batches == whole and steps == -1:
        return Course(batches, epochs)
    samples = min(batches * size, len(loader.dataset))
    steps_of_epoch = -(-batches // every)
    if steps == -1:
        return Course(batches, epochs, samples, total=epochs * samples, told=epochs * samples)
    most = steps if epochs == -1 else min(steps, epochs * steps_of_epoch)
    full, more = divmod(most, steps_of_epoch)
    total = full * samples + more * every * size
    return Course(batches, full + bool(more), samples, total=total, told=total)


def check_monitors(trainer: Any) -> None:
    """Of an epoch whose end a run goes on from. UserError for what only training steps log."""
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor is not None and monitor not in trainer.callback_metrics:
            raise UserError(
                f"{type(callback).__name__} monitors {monitor}, and the run goes on from the end of an epoch, of which"
                " it has not kept what training logged: monitor what validation logs"
            )


def check(trainer: Any, module: Any, synchronous: bool) -> None:
    """UserError for settings that count batches of one rank, or that HetSync has in its own way."""
    if (trainer.max_epochs is None or trainer.max_epochs < 1) and trainer.max_steps < 1:
        raise UserError(f"Trainer(max_epochs={trainer.max_epochs}): give the number of epochs, 1 or more, or max_steps")
    refused: Mapping[str, tuple[Any, Any, str]] = {
        "overfit_batches": (trainer.overfit_batches, 0.0, "give limit_train_batches, or a torch.utils.data.Subset"),
        "val_check_interval": (trainer._val_check_time_interval, None, "give batches, or a part of an epoch"),
        "reload_dataloaders_every_n_epochs": (trainer.reload_dataloaders_every_n_epochs, 0, "keep one data set"),
    }
    for name, (found, wanted, remedy) in refused.items():
        if found != wanted:
            raise UserError(f"Trainer({name}={found}) counts batches, which ranks do not share: {remedy}")
    if trainer.check_val_every_n_epoch is None:
        raise UserError("Trainer(check_val_every_n_epoch=None) validates between epochs: give a number of epochs")
    if trainer.precision == "16-true":
        raise UserError("Trainer(precision='16-true') trains weights of float16: take 16-mixed or bf16-mixed")
    if trainer._accelerator_connector._layer_sync is not None:
        raise UserError("Trainer(sync_batchnorm=True): a rank normalises by its own batches, so leave it out")
    if not synchronous and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise UserError("Trainer(gradient_clip_algorithm='value') needs HetSyncStrategy(delay_bound=0): clip by norm")
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            raise UserError("GradientAccumulationScheduler changes how many batches make a step: give one number")
        if isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            raise UserError(
                "StochasticWeightAveraging takes an epoch more for batch norm's statistics: take WeightAveraging"
            )
