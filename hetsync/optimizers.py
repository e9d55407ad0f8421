"""A recipe's optimizer, and the learning rate of its steps."""

from __future__ import annotations

import math

import torch

from hetsync.config import OptimizerConfig, ScheduleConfig, call_with_options, import_object
from hetsync.errors import UserError
from hetsync.sync.messages import Piece

BUILT_IN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)


def build_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all of the model's weights."""
    if config.name not in BUILT_IN and ":" not in config.name:
        known = ", ".join(BUILT_IN)
        raise UserError(f"optimizer.name is {config.name}: use one of {known}, or package.module:name for your own")
    kind = BUILT_IN.get(config.name) or import_object("optimizer.name", config.name)
    options = {"lr": config.learning_rate, "weight_decay": config.weight_decay, **config.options}
    if kind is torch.optim.SGD:
        options["momentum"] = config.momentum
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = call_with_options("optimizer", kind, {"params": weights, **options})
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer.name is {config.name}, which returned {type(optimizer).__name__}")
    return optimizer


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Weight of the past in a step: SGD's momentum, or the first beta of Adam and its kin."""
    group = optimizer.param_groups[0]
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


class Steps:
    """An optimizer's steps: schedule, clipping, and what makes local steps on slices add up to the batch's.

    Where noise rules it, the gradient of a slice of n samples has √(B / n) times the norm of the batch's of B samples.

    - Adaptive optimizers divide by the root of its second moment: a local step comes out too short by √(B / n), which
      is made up for in the learning rate (square-root scaling rule, Malladi et al. 2022).
    - Clipping would cut slices to the norm that is meant for the batch: their bound is √(B / n) times as high.

    Drift and noise of the anchor are then the batch's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: ScheduleConfig,
        max_grad_norm: float | None,
        total_samples: int,
        batch_size: int,
    ) -> None:
        """The optimizer's present learning rates and `max_grad_norm` are those for a batch of `batch_size`."""
        self._optimizer = optimizer
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._total_samples = total_samples
        self._batch_size = batch_size
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        self._noise = 1.0

    def begin(self, piece: Piece) -> None:
        """The steps from now on are this piece's."""
        local = piece.synchronous_round is None
        self._noise = math.sqrt(self._batch_size / (piece.share or piece.samples)) if local else 1.0
        factor = self._schedule.factor(piece.position, self._total_samples)
        if isinstance(self._optimizer, ADAPTIVE):
            factor *= self._noise
        for group, rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor

    def take(self) -> None:
        """One step along the gradients that are there, which are then gone."""
        if self._max_grad_norm is not None:
            weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
            torch.nn.utils.clip_grad_norm_(weights, self._max_grad_norm * self._noise)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
