"""A recipe's optimizer, and what must be known of any."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hetsync.config.imports import call_with_options, import_object
from hetsync.config.schema import OptimizerConfig
from hetsync.errors import UserError

BUILT_IN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
BY_GRADIENT = (torch.optim.SGD, torch.optim.ASGD)  # steps are as long as that, or the mean of some
ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # of gradients, in the state of these


def build_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all of the model's weights."""
    if config.name not in BUILT_IN and ":" not in config.name:
        known = ", ".join(BUILT_IN)
        raise UserError(f"optimizer.name is {config.name}: use one of {known}, or package.module:name for your own")
    kind = BUILT_IN.get(config.name) or import_object("optimizer.name", config.name)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"params": weights, "lr": config.learning_rate}
    if config.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
        settings["weight_decay"] = config.weight_decay
    if kind is torch.optim.SGD:
        settings["momentum"] = config.momentum
    optimizer = call_with_options("optimizer", kind, config.options, torch.optim.Optimizer, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer.name is {config.name}, which returned {type(optimizer).__name__}: return an optimizer of torch"
        )
    check_needs_no_closure(optimizer, f"optimizer.name is {config.name}")
    return optimizer


def check_needs_no_closure(optimizer: torch.optim.Optimizer, what: str) -> None:
    """UserError unless the optimizer's step can be called with nothing."""
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)  # the instance's own may be a scheduler's wrapper
    except TypeError:
        raise UserError(
            f"{what}, whose step needs a closure, which ranks cannot share: take one without, such as SGD or AdamW, or"
            " train in one process without HetSync"
        ) from None


def loses_by_delay(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Is one of them Adam, its kin, or not known? Then delay must save more (`rounds_rule.py`)."""
    return not all(isinstance(optimizer, BY_GRADIENT) for optimizer in optimizers)


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Weight of the past in a step: SGD's momentum, or the first beta of Adam and its kin."""
    group = optimizer.param_groups[0]
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def copied_second_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of one weight: the same, with gradients' squares that may be written to."""
    own = {name for name in SECOND_MOMENTS if isinstance(state.get(name), torch.Tensor)}
    return {name: value.clone() if name in own else value for name, value in state.items()}


def scale_second_moments(states: Iterable[Mapping[str, Any]], factor: float) -> None:
    """Multiply what an adaptive optimizer keeps of its gradients' squares, of each weight, as if all their noise had
    been so many times as strong. RMSprop's, where they are centred, are noise and the square of the mean, which
    stays."""
    for state in states:
        for name in SECOND_MOMENTS:
            if isinstance(squares := state.get(name), torch.Tensor):
                squares.mul_(factor)
        if isinstance(mean := state.get("grad_avg"), torch.Tensor):
            state["square_avg"].addcmul_(mean, mean, value=1 - factor)
