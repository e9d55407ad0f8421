"""From a recipe to what is planned: its model in blocks, what they cost, and what a step of it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetsync.config.faults import FaultConfig
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.errors import UserError
from hetsync.files import user_cache
from hetsync.plan.blocks import Cut, cut
from hetsync.plan.calls import observed_call, weight_used
from hetsync.plan.costs import Measured, block_costs
from hetsync.plan.evaluate import Training
from hetsync.plan.graph import Block, BlockCost
from hetsync.plan.plan_file import ModelIdentity, weights_digest
from hetsync.plane.base import Messages, decided_by_first
from hetsync.plane.local import LocalMessages
from hetsync.profiling.device import state_buffers
from hetsync.profiling.measure import batch_of
from hetsync.sync.optimizers import build_optimizer

MEASURED_SAMPLES = (4, 16)  # fewest and most of the larger of the two batches that blocks are measured on


@dataclass(frozen=True)
class PlannableModel:
    """A recipe's model, with all that plans need of it.

    Attributes:
        identity: What plan files call it.
        cut: Its blocks.
        costs: By block, measured on this machine.
        training: What a step is.
        refused: Why jobs by plans that cut the model, or have micro-batches, cannot train it; None where they can.
        weight_in_loss: Name of a weight that the loss computes with besides calling the model, or of a tensor that
            forward leaves on it: no job can cut it then. None where there is none.
    """

    identity: ModelIdentity
    cut: Cut
    costs: tuple[BlockCost, ...]
    training: Training
    refused: str | None = None
    weight_in_loss: str | None = None


def plannable_model(
    config: Config, built: Data, model: torch.nn.Module, ranks: int, messages: Messages | None = None
) -> PlannableModel:
    """The recipe's model in blocks, with their costs: those in the user's cache, or measured now.

    With `messages` it is collective, and costs are rank 0's. UserError where the recipe sets shares in a way that plans
    do not know, where there is one sample to train on, and where the loss calls the model twice, or never.
    """
    check_shares(config)
    model.train()
    device = next(model.parameters()).device
    least, most = MEASURED_SAMPLES
    large = min(max(least, config.data.batch_size // ranks), most, len(built.train))  # type: ignore[arg-type]
    if large == 1:
        raise UserError(
            f"data {config.data.name} has one sample to train on, but blocks are measured on batches of two sizes: give"
            " more samples"
        )
    batches = {samples: batch_of(built, samples, device) for samples in (max(1, large // 2), large)}
    traced = cut(model, observed_call(model, built.loss, batches[large]))
    weight_in_loss = weight_used(model, built.loss, batches[large])
    digest = weights_of(model)
    optimizer = build_optimizer(config.optimizer, model)
    measured = Measured(model, traced, built.loss, optimizer, batches)
    path, seconds = _costs_file(config, digest), config.run.profile_seconds
    costs = decided_by_first(messages or LocalMessages(), lambda: block_costs(measured, path, seconds))
    training = Training(config.data.batch_size, config.sync, state_buffers(optimizer))
    return PlannableModel(
        ModelIdentity(config.model.name, digest), traced, costs, training, weight_refused(model), weight_in_loss
    )


def blocks_of(built: Data, model: torch.nn.Module) -> tuple[Block, ...]:
    """The recipe's model in blocks, which nobody measures."""
    model.train()
    batch = batch_of(built, min(2, len(built.train)), next(model.parameters()).device)  # type: ignore[arg-type]
    return cut(model, observed_call(model, built.loss, batch)).graph.blocks


def weights_of(model: torch.nn.Module) -> str:
    """`weights_digest` of a model."""
    return weights_digest((name, tensor.shape) for name, tensor in model.state_dict().items())


def check_shares(config: Config) -> None:
    """UserError for shares of the recipe's own."""
    for key, value in (("shares", config.sync.shares), ("pins", config.sync.pins)):
        if value not in ("speed", {}):
            raise UserError(f"sync.{key} is {value}, but a plan has shares of its own: leave sync.{key} out")


def check_cut_settings(config: Config) -> None:
    """UserError for what jobs by a plan that cuts the model cannot do."""
    sync = config.sync
    refused = {
        "sync.accumulation": (sync.first_accumulation != 1, "raise micro_batches in the plan"),
        "sync.wire": (sync.first_wire != "float32", "give float32"),
        "sync.fragments": (sync.fragments not in ("auto", 1), "leave it out"),
        "sync.outer.name": (sync.outer.name != "identity", "give identity"),
        "control.name": (config.control.name != "fixed", "give fixed"),
        "ema.decay": (config.ema.decay is not None, "give null"),
        "run.precision": (config.run.precision != "float32", "give float32"),
        "run.compile": (config.run.compile, "give false"),
        "fault.tolerate": (config.fault.tolerate is True, "give auto"),
        "fault.least_ranks": (config.fault.least_ranks is not None, "leave it out"),
        "fault.replace": (config.fault.replace, "give false, and resume with more ranks"),
        "fault.slow": (config.fault.slow != "wait", "give wait"),
        "fault.not_finite": (config.fault.not_finite != "stop", "give stop"),
        "fault.silent_seconds": (
            config.fault.silent_seconds not in (None, FaultConfig().silent_seconds),
            "leave it out; run.timeout_seconds ends a job that waits for a silent rank",
        ),
        "fault.inject": (bool(config.fault.inject), "leave it out"),
    }
    for key, (wanted, remedy) in refused.items():
        if wanted:
            value: Any = config
            for name in key.split("."):
                value = getattr(value, name)
            raise UserError(f"{key} is {value}, which jobs by a plan that cuts the model do not know: {remedy}")


def weight_refused(model: torch.nn.Module) -> str | None:
    """What jobs by a plan that cuts the model, or has micro-batches, do not know of a weight; None where there is none
    such: their sums are of real values, and of all of a weight."""
    found = [f"{name} is complex" for name, weight in model.named_parameters() if weight.is_complex()]
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            found.append(f"{path}.weight has sparse gradients".removeprefix("."))
    if not found:
        return None
    return (
        f"{found[0]}, which jobs by a plan that cuts the model, or has micro-batches, do not know: train without a plan"
    )


def _costs_file(config: Config, digest: str) -> Path:
    """One for each model with its options, and its data: recipes that differ in these shall not take turns in one."""
    name = "".join(character if character.isalnum() else "-" for character in config.model.name)
    told = repr((digest, config.model.options, config.data.name, config.data.options))
    return user_cache("plan") / f"{name[:60]}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"
