"""A recipe's optimizer."""

from __future__ import annotations

import torch

from hetsync.config import OptimizerConfig, call_with_options, import_object
from hetsync.errors import UserError

BUILT_IN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


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
