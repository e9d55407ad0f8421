"""Scores on the test data: sums over a range of it, the metrics of all, and a first look before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hetsync.data import Data
from hetsync.data.random_state import set_aside, untouched
from hetsync.data.transfer import to_device
from hetsync.data.workers import fetch
from hetsync.errors import UserError

EVALUATION_BATCH = 256
FIRST_LOOK = 16  # samples
DEEPEST = 8  # levels of a batch that are compared
TAKEN = ("kind", "at", "samples_applied", "train_seconds")  # by the record of an evaluation


@torch.no_grad()
def evaluate_range(model: torch.nn.Module, data: Data, first: int, stop: int) -> dict[str, float]:
    """Sums of the metrics over test samples [first, stop). What draws at random inside draws alike each time."""
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    with evaluating(model), set_aside(device, seed=0):
        for batch, _ in test_batches(data, first, stop, device, EVALUATION_BATCH):
            add_sums(sums, data.metrics(model, batch))
    return sums


def test_batches(data: Data, first: int, stop: int, device: torch.device, size: int) -> Iterator[tuple[Any, range]]:
    """Of test samples [first, stop), so many at once; and which they are."""
    for start in range(first, stop, size):
        samples = range(start, min(stop, start + size))
        yield to_device(_fetch_test(data, list(samples)), device), samples


def add_sums(sums: dict[str, float], metrics: Any) -> None:
    """Add what `data.metrics` has returned."""
    for name, value in numbers("data.metrics", metrics).items():
        sums[name] = sums.get(name, 0.0) + value


def metrics_of(data: Data, parts: Sequence[Mapping[str, float]], samples: int) -> dict[str, float]:
    """What `data.report` makes of the sums over parts of the test data, of `samples` in all."""
    names = sorted({name for part in parts for name in part})
    totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    metrics = numbers("data.report", data.report({**totals, "samples": samples}))
    for name in TAKEN:
        if name in metrics:
            raise UserError(f"data.report gives a metric named {name}, which records use for their own: rename it")
    return metrics


def check_evaluation(model: torch.nn.Module, data: Data) -> dict[str, float]:
    """Evaluate one small batch: what would fail at the end of training fails before it. Leaves no trace. Returns its
    metrics; none where there are no test samples.

    UserError: metrics that are no numbers, or test samples that are drawn at random.
    """
    count = min(FIRST_LOOK, len(data.evaluated))  # type: ignore[arg-type]
    if not count:
        return {}
    with untouched(model):
        with set_aside(next(model.parameters()).device, seed=0):
            first, second = (_fetch_test(data, list(range(count))) for _ in range(2))
        if not alike(first, second):
            raise UserError(
                "the test samples differ each time that they are fetched, so evaluations would, too:"
                " give hetsync.data.Data a test_collate, or a test set, without random transforms"
            )
        return metrics_of(data, [evaluate_range(model, data, 0, count)], count)


def _fetch_test(data: Data, indices: list[int]) -> Any:
    return fetch(data.evaluated, indices, data.test_collate or data.collate)


def numbers(where: str, values: Any) -> dict[str, float]:
    """Metrics as plain numbers; they may come as tensors or arrays of one number each.

    UserError: they are something else; `where` says who gave them.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{where} returned {type(values).__name__}: return a dictionary of names and numbers")
    found = {}
    for name, value in values.items():
        try:
            plain = value.item() if hasattr(value, "item") else value
            if isinstance(plain, str | bytes):
                raise TypeError
            found[str(name)] = float(plain)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise UserError(
                f"{where} gave {name} as {type(value).__name__}{shape}: give a number, or a tensor of one number"
            ) from error
    return found


@contextmanager
def evaluating(*models: torch.nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each module is in its own mode again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def alike(one: Any, other: Any, depth: int = 0) -> bool:
    """Are two batches the same? Where it cannot tell, it takes them to be."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensors(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, str | bytes | int | float | complex):
        return one == other or one != one
    if depth == DEEPEST:
        return True
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(alike(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    return alike(vars(one), vars(other), depth + 1) if hasattr(one, "__dict__") else True


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided or one.shape != other.shape or one.dtype != other.dtype:
        return one.shape == other.shape and one.dtype == other.dtype
    if one.is_floating_point():
        one, other = one.nan_to_num(), other.nan_to_num()
    return torch.equal(one, other)
