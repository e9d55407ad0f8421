"""Lightning's trainer on a HetSync job:

    trainer = Trainer(strategy=HetSyncStrategy(delay_bound=4), max_epochs=10)
    trainer.fit(module, train_loader, test_loader)

Started by `torchrun --nproc-per-node N my_script.py` or by `mpirun -np N python my_script.py`. The trainer's loop is
each rank's own: how many batches a rank computes is found while it computes them. So each epoch ends where the job's
does, with all ranks at rest; there the trainer validates, steps schedulers by epoch, stops early and saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.optim import Optimizer

from hetsync.api import join, opened
from hetsync.errors import UserError, early_mistakes
from hetsync.extras import require
from hetsync.plane.ending import opening
from hetsync.train.evaluation import EvaluationLoader
from hetsync.train.job import Job
from hetsync.train.prepared import TrainingLoader

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    from torchmetrics import Metric
except ImportError:
    with early_mistakes():
        require("lightning", "HetSyncStrategy")
    raise

REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda values: values.sum(0) / len(values),
    "avg": lambda values: values.sum(0) / len(values),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}
ENDLESS = 2**40  # batches: with a length the trainer fetches none ahead, and this one it never reaches


class HetSyncStrategy(Strategy):
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
        self.global_rank, self.local_rank, self.world_size = self.job.rank, self.job.local_rank, self.job.size
        self.node_rank = 0
        self.is_distributed = True  # or the trainer would take a rank's value for that of all
        rank_zero_only.rank = self.job.rank  # type: ignore[attr-defined, unused-ignore]
        self._loader: TrainingLoader | None = None
        self._epochs: Iterator[int] = iter(())
        self._ended = False

    # Before training.

    @property
    def root_device(self) -> torch.device:
        return self.job.device

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_main

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

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Collective: prepare all that is trained."""
        if self._ended:
            raise UserError("this HetSyncStrategy has trained already: make another, with a Trainer of its own")
        check(trainer, synchronous=self.job.config.sync.delay_bound == 0)
        trainer.fit_loop.setup_data()
        if self._loader is None:
            raise UserError("the module has no training_step or no training data: HetSyncStrategy trains with both")
        trainer.fit_loop.max_batches = len(self._loader)  # where configure_optimizers asks for it
        super().setup_optimizers(trainer)
        trainer.fit_loop.max_batches = trainer.val_check_batch = float("inf")
        self.job.prepare(self._module, *self.optimizers)
        for config in self.lr_scheduler_configs:
            config.scheduler = self.job.prepare(config.scheduler)
        for callback in self._trainer.callbacks:
            self.job.register(f"callback {callback.state_key}", callback)
        self._epochs = self.job.epochs(int(trainer.max_epochs or 0))

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        setattr(self.precision_plugin, "clip_grad_by_norm", self._clip)  # noqa: B010 (a method, of this one only)
        for metric in self._module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = lambda: self.world_size > 1
                metric.dist_sync_fn = lambda value, group=None: self.job.gather(value)

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.lightning_module is not None and not self._trainer.training:
            samples = len(dataloader.dataset)
            if samples < self.world_size:
                raise UserError(
                    f"a data set to evaluate has {samples} samples for {self.world_size} ranks: give each one at least"
                )
            return RankPart(self.job.test_loader(dataloader))
        self._loader = self.job.loader(dataloader)
        return RankBatches(self._batches)

    # Training.

    def on_train_start(self) -> None:
        """Collective: the trainer begins with the epoch that the run stands at."""
        first = next(self._epochs, None)
        progress = self._trainer.fit_loop.epoch_progress.current
        progress.processed = progress.completed = self._trainer.max_epochs if first is None else first
        self._count_steps(progress.processed)

    def _count_steps(self, epochs: int) -> None:
        """At rest all ranks count alike, and as a loop on one device: names of checkpoints tell it."""
        assert self._loader is not None
        loop, steps = self._trainer.fit_loop.epoch_loop, epochs * len(self._loader)
        loop._batches_that_stepped = steps
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
        loop.manual_optimization.optim_step_progress.total.completed = steps * len(self.optimizers)

    def _batches(self) -> Iterator[Any]:
        """This rank's, of one epoch; then what the trainer does at an epoch's end, with all ranks at rest."""
        assert self._loader is not None
        if self._trainer.current_epoch != self.job.epoch:
            next(self._epochs)
        yield from self._loader
        loop = self._trainer.fit_loop.epoch_loop
        self._count_steps(self._trainer.current_epoch + 1)
        loop.batch_progress.is_last_batch = True
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if loop._should_check_val_epoch():
            self._trainer.validating = True
            loop.val_loop.run()
            self._trainer.training = True

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        self.job.record_loss(closure_loss)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Gradients first, so that hooks and clipping see those of the step: of all ranks at delay bound 0."""
        found = closure()
        if self.job.collect(optimizer):
            self.precision_plugin._after_closure(self._module, optimizer)
            optimizer.step(**kwargs)
        return found

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        self.job.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], clip_val)

    # The end.

    def on_train_end(self) -> None:
        """Collective, at rest; earlier than after the last epoch where the trainer stops early."""
        if next(self._epochs, None) is not None:
            self.job.stop()
        self._ended = True
        self.job.close()

    def on_exception(self, exception: BaseException) -> None:
        """The job ends on all ranks; after a signal it has saved."""
        self._ended = True
        self.job.__exit__(type(exception), exception, exception.__traceback__)

    # What ranks say to each other: before training, and at rest.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        found = [torch.as_tensor(value, device=self.root_device) for value in self.job.gather(tensor)]
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in REDUCTIONS:
            raise UserError(f"reduce_fx is {reduce_op}: HetSyncStrategy has {', '.join(REDUCTIONS)}")
        return REDUCTIONS[name](torch.stack(found))

    def barrier(self, name: str | None = None) -> None:
        self.job.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.job.gather(obj if self.global_rank == src else None)[src]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if sync_grads:
            raise UserError("all_gather was called with sync_grads: HetSyncStrategy carries no gradients through it")
        return torch.stack([value.to(self.root_device) for value in self.job.gather(tensor)])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = self.job.gather(bool(decision))
        return min(decisions) if all else max(decisions)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._trainer.state.fn == TrainerFn.FITTING:
            raise UserError(
                "Trainer.fit got a ckpt_path, which does not tell which samples are used: go on with"
                ' HetSyncStrategy(run=..., resume="auto"), or load the weights into the module before'
            )
        return super().load_checkpoint(checkpoint_path, weights_only)


class RankPart:
    """In place of a `DataLoader` to evaluate on, over which the trainer loops by itself: this rank's part."""

    def __init__(self, loader: EvaluationLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return -(-len(self._loader.rank_part) // self._loader.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.batches_of(self._loader.rank_part)


class RankBatches:
    """In place of the training `DataLoader`."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


def check(trainer: Any, synchronous: bool) -> None:
    """UserError for settings that count batches of one rank, or that HetSync has in its own way."""
    if trainer.max_epochs is None or trainer.max_epochs < 1:
        raise UserError(f"Trainer(max_epochs={trainer.max_epochs}): give the number of epochs, 1 or more")
    refused: Mapping[str, tuple[Any, Any, str]] = {
        "max_steps": (trainer.max_steps, -1, "give max_epochs"),
        "limit_train_batches": (trainer.limit_train_batches, 1.0, "give a smaller data set (torch.utils.data.Subset)"),
        "overfit_batches": (trainer.overfit_batches, 0.0, "give a smaller data set (torch.utils.data.Subset)"),
        "val_check_interval": (trainer.val_check_interval, 1.0, "validate after epochs (check_val_every_n_epoch)"),
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "give HetSyncStrategy(accumulation=K)"),
        "reload_dataloaders_every_n_epochs": (trainer.reload_dataloaders_every_n_epochs, 0, "keep one data set"),
    }
    for name, (found, wanted, remedy) in refused.items():
        if found != wanted:
            raise UserError(f"Trainer({name}={found}) counts batches, which ranks do not share: {remedy}")
    if trainer.check_val_every_n_epoch is None:
        raise UserError("Trainer(check_val_every_n_epoch=None) validates between epochs: give a number of epochs")
    if trainer.precision.startswith("16"):
        raise UserError(f"Trainer(precision={trainer.precision!r}) scales the loss: take bf16-mixed")
    if not synchronous and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise UserError("Trainer(gradient_clip_algorithm='value') needs HetSyncStrategy(delay_bound=0): clip by norm")
