"""Data sets of the field, the ledger of samples, and the loader that feeds a rank its slices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from hetsync.config.imports import call_with_options, import_object
from hetsync.data.catalogue import CATALOGUE
from hetsync.data.metrics import classification, cross_entropy, means
from hetsync.data.rows import labelled
from hetsync.errors import UserError

Part = Literal["test", "validation", "train"]


@dataclass(frozen=True)
class Data:
    """What a recipe's `data.name` makes: data sets, and what a batch of them means.

    Args:
        train: Samples to train on; any map-style data set.
        test: Samples to evaluate on; where there is a validation part, those that nobody looks at while training.
        loss: (model, batch) to the mean over the batch's samples of a loss that depends on no other sample.
        metrics: (model, batch) to sums over the batch's samples.
        report: Sums over the whole test set, with its number of `samples`, to the metrics; means by default.
        collate: Training samples to a batch; PyTorch's default_collate where None.
        test_collate: Test samples to a batch; None takes `collate`, which then must not draw at random (transform
            training samples in `train` or give both). A job whose test batches differ from one time to the next is
            refused at its start.
        validation: Samples to evaluate on while training; None takes `test`.
        rows: (model, batch) to what `hetsync predict` writes: columns of equal length by name, as many rows of each
            sample as of another, one sample after the other. None takes those of classes, where metrics are.
        baselines: Other predictors by name, which `hetsync test` compares the model with: they take its batches, and
            return what it returns.
        costs: Work that each training sample takes (points, tokens), where they differ.
        model_options: Arguments for any model that takes them, unless the recipe gives them (classes, vocabulary). A
            run keeps those that it began with.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor] = cross_entropy
    metrics: Callable[[torch.nn.Module, Any], dict[str, float]] = classification
    report: Callable[[dict[str, float]], dict[str, float]] = means
    collate: Callable[[list[Any]], Any] | None = None
    test_collate: Callable[[list[Any]], Any] | None = None
    validation: Dataset[Any] | None = None
    rows: Callable[[torch.nn.Module, Any], Mapping[str, Any]] | None = None
    baselines: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    costs: Sequence[float] | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def evaluated(self) -> Dataset[Any]:
        """Samples that evaluations look at while training."""
        return self.test if self.validation is None else self.validation

    @property
    def prediction_rows(self) -> Callable[[torch.nn.Module, Any], Mapping[str, Any]] | None:
        """`rows`, or those of classes where metrics are; None where nothing is known."""
        return labelled if self.rows is None and self.metrics is classification else self.rows


def build(name: str, options: Mapping[str, Any], facts: Mapping[str, Any] = MappingProxyType({})) -> Data:
    """The data of a recipe: a built-in name or an import path. `facts`: what they told of themselves as a run began.
    These hold in place of what they tell now, also as their own options where they have such."""
    if name not in CATALOGUE and ":" not in name:
        known = ", ".join(sorted(CATALOGUE))
        raise UserError(f"data.name is {name}: use one of {known}, or package.module:name for your own")
    make = CATALOGUE[name].make if name in CATALOGUE else name
    try:
        function = import_object("data.name", make)
        own = set(inspect.signature(function).parameters) if facts else set()
        told = {key: value for key, value in facts.items() if key in own and options.get(key) is None}
        data = call_with_options("data", function, {**options, **told}, Data)
    except OSError as error:
        raise UserError(f"data.name is {name}, which cannot be read: {error}; check data.options") from error
    if not isinstance(data, Data):
        raise UserError(f"data.name is {name}, which returned {type(data).__name__}: return a hetsync.data.Data")
    if not len(data.train):  # type: ignore[arg-type]
        raise UserError(f"data.name is {name}, whose training set is empty")
    _check_counts(facts, data.model_options)
    return replace(data, model_options={**data.model_options, **facts}) if facts else data


def _check_counts(began_with: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UserError where there are more or fewer (sensors, classes, words) than a model has room for."""
    for key, count in began_with.items():
        if isinstance(count, int) and now.get(key) != count:
            raise UserError(f"the data has {key} {now.get(key)}, and had {count} as the run began: give it those data")


def on_part(source: Data, part: Part) -> Data:
    """The same with that part as its test data. UserError where it has none."""
    parts = {"test": source.test, "validation": source.validation, "train": source.train}
    there = [name for name, samples in parts.items() if samples is not None and len(samples)]  # type: ignore[arg-type]
    if part not in there:
        raise UserError(f"--part is {part}, which the data does not have: give {' or '.join(there)}")
    collate = source.collate or source.test_collate if part == "train" else source.test_collate
    return replace(source, test=parts[part], validation=None, test_collate=collate)  # type: ignore[arg-type]


def check_batch_size(data: Data, batch_size: int) -> None:
    """UserError where a slice would hold samples twice: nobody means that, and memory may not hold it."""
    samples = len(data.train)  # type: ignore[arg-type]
    if batch_size > samples:
        raise UserError(f"data.batch_size is {batch_size}, but the training set has {samples} samples: lower it")
