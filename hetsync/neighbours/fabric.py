"""Lightning's Fabric on a HetSync job: a loop of your own, as with `hetsync.join`.

    fabric = Fabric(strategy=FabricStrategy(delay_bound=0))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader, test_loader = fabric.setup_dataloaders(loader, test_loader)

Each loop over the training data is an epoch, and ends with all ranks at rest; there, and before the first, ranks gather
and save. The job is the strategy's: `fabric.strategy.job`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.optim import Optimizer

from hetsync.api import join
from hetsync.data.handed_over import shuffles
from hetsync.errors import UserError, early_mistakes
from hetsync.extras import require
from hetsync.neighbours.at_rest import AtRest, RankPart
from hetsync.plane.ending import opening

try:
    import torchmetrics.metric
    from lightning.fabric.strategies import Strategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import pl_worker_init_function
except ImportError:
    with early_mistakes():
        require("lightning", "FabricStrategy")
    raise


class FabricStrategy(AtRest, Strategy):
    """The training `DataLoader`, one that shuffles, has the batch size of all ranks together; of test data each rank
    has its part."""

    def __init__(self, **settings: Any) -> None:
        """Collective. `settings`: those of `hetsync.join`, such as delay_bound=0, run="runs/mine", resume="auto"."""
        super().__init__()
        with opening():
            if "precision" in settings:
                raise UserError("FabricStrategy got precision: give it to Fabric")
        self.job = join(**({"progress": False} | settings))
        self.take_ranks()
        rank_zero_only.rank = self.job.rank  # type: ignore[attr-defined, unused-ignore]
        self._backward_sync_control = OnceAStep()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size > 1:  # metrics that are made from now on ask the job, and not torch.distributed
            setattr(torchmetrics.metric, "jit_distributed_available", lambda: True)  # noqa: B010
            setattr(torchmetrics.metric, "gather_all_tensors", self._gather_states)  # noqa: B010

    def _gather_states(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        return [each.to(self.root_device) for each in self.meet("a metric's compute", state)]

    # What is prepared.

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.job.prepare(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        scaler = getattr(self.precision, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):  # not prepared yet
            self.precision.scaler = self.job.prepare(scaler)  # type: ignore[attr-defined]
        self.job.prepare(optimizer)
        return optimizer

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Optimizer], Any]:
        self.setup_module(module)
        found = [self.setup_optimizer(optimizer) for optimizer in optimizers]
        return module, found, None if scheduler is None else self.job.prepare(scheduler)

    def process_dataloader(self, dataloader: Any) -> Any:
        if getattr(dataloader.worker_init_fn, "func", None) is pl_worker_init_function:  # seed_everything wants it
            dataloader.worker_init_fn = None  # ranks' workers are seeded already
        if shuffles(dataloader):
            return self.job.prepare(dataloader)
        return RankPart(self.test_loader(dataloader), self._step)

    def _step(self, within: bool) -> None:
        self.in_step = within

    # The loop.

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **options: Any) -> None:
        """`options`: those of `job.backward`, too."""
        self.job.backward(tensor, **options)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """None where accumulation makes no step due."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return self.job.clip_grad_norm_(weights, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)

    # What ranks say to each other: before training, and at rest.

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """In place, too."""
        found = self.reduced(tensor, reduce_op)
        return tensor.copy_(found) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else found


class OnceAStep(_BackwardSyncControl):
    """Sums are made once a step, whatever backward is called within."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()
