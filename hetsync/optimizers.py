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


class LearningRate:
    """The schedule over samples handed out; and the square-root rule for local steps of adaptive optimizers.

    These divide by the root of the gradient's second moment. Where noise rules it, that of a slice of n samples is
    B / n times the batch's, and a local step comes out too short by √(B / n), which is made up for (Malladi et al.
    2022): drift and noise of the anchor are then the batch's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, total_samples: int, batch_size: int
    ) -> None:
        """The optimizer's present learning rates are those for a batch of `batch_size` before the schedule."""
        self._optimizer = optimizer
        self._schedule = schedule
        self._total_samples = total_samples
        self._batch_size = batch_size
        self._base_rates = [group["lr"] for group in optimizer.param_groups]

    def set(self, piece: Piece) -> None:
        """For the steps of this piece."""
        factor = self._schedule.factor(piece.position, self._total_samples)
        if piece.synchronous_round is None and isinstance(self._optimizer, ADAPTIVE):
            factor *= math.sqrt(self._batch_size / (piece.share or piece.samples))
        for group, rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
