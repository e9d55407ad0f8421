"""Data sets of the field, the ledger of samples, and the loader that feeds a rank its slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from hetsync.config import call_with_options, import_object
from hetsync.errors import UserError

BUILT_IN = {"digits": "hetsync.data.digits:digits"}


def cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross-entropy of a classifier over (inputs, labels)."""
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def classification(model: torch.nn.Module, batch: Any) -> dict[str, float]:
    """Correct answers and loss of a classifier over (inputs, labels), each summed over the samples."""
    inputs, labels = batch
    scores = model(inputs)
    return {
        "accuracy": (scores.argmax(1) == labels).sum().item(),
        "loss": torch.nn.functional.cross_entropy(scores, labels, reduction="sum").item(),
    }


@dataclass(frozen=True)
class Data:
    """What a recipe's `data.name` makes: data sets, and what a batch of them means.

    Args:
        train: Samples to train on; any map-style data set.
        test: Samples to evaluate on.
        loss: (model, batch) to the mean loss over the batch's samples.
        metrics: (model, batch) to sums over the batch's samples; reported divided by the samples.
        collate: Samples to a batch; PyTorch's default_collate where None.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor] = cross_entropy
    metrics: Callable[[torch.nn.Module, Any], dict[str, float]] = classification
    collate: Callable[[list[Any]], Any] | None = None


def build(name: str, options: Mapping[str, Any]) -> Data:
    """The data of a recipe: a built-in name or an import path."""
    if name not in BUILT_IN and ":" not in name:
        known = ", ".join(sorted(BUILT_IN))
        raise UserError(f"data.name is {name}: use one of {known}, or package.module:name for your own")
    try:
        data = call_with_options("data", import_object("data.name", BUILT_IN.get(name, name)), options)
    except OSError as error:
        raise UserError(f"data.name is {name}, which cannot be read: {error}; check data.options") from error
    if not isinstance(data, Data):
        raise UserError(f"data.name is {name}, which returned {type(data).__name__}: return a hetsync.data.Data")
    if not len(data.train):  # type: ignore[arg-type]
        raise UserError(f"data.name is {name}, whose training set is empty")
    return data
