"""What a trained model is worth on data that it was not trained on: metrics beside those of naive predictors, and its
predictions. Each rank takes a part of every round, as large as it has been fast."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hetsync import data, models
from hetsync.balance.shares import apportion
from hetsync.config.schema import Config
from hetsync.data import Data, Part
from hetsync.data.evaluation import (
    EVALUATION_BATCH,
    add_sums,
    check_evaluation,
    evaluating,
    metrics_of,
    test_batches,
)
from hetsync.data.random_state import set_aside
from hetsync.errors import UserError, brief
from hetsync.plane.base import Plane, decided_by_first, made_by_all
from hetsync.profiling.measure import autocast, find_place, limit_threads, take_device
from hetsync.sync.sparse import is_sparse
from hetsync.train import best, checkpoint, data_facts
from hetsync.train.rows_file import RowsFile

Weights = Literal["best", "newest"]
Columns = dict[str, np.ndarray]  # of predictions, by name

FIRST_PART = 16  # samples of each rank in the first round, by which speeds are measured
MODEL = "model"  # its name beside the naive predictors'
SPEED_UNITS = 1e6  # shares are whole numbers


@dataclass(frozen=True)
class RunMetrics:
    """What RUN/test.json holds.

    Attributes:
        part: Of the data.
        samples: That it has.
        weights: Of the run.
        samples_applied: That these had been trained on.
        rows: Of predictions that were written; None where none were asked for.
        metrics: Of the model first, and of naive predictors, by their names.
    """

    part: Part
    samples: int
    weights: Weights
    samples_applied: int
    rows: int | None
    metrics: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Trained:
    """Weights of a run, by name, after so many samples."""

    weights: Weights
    samples_applied: int
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Request:
    """What is asked of a run.

    Attributes:
        part: Of the data.
        weights: Of the run; None takes the best, where it has kept any.
        predicts: Are predictions written?
    """

    part: Part
    weights: Weights | None
    predicts: bool


def evaluate_run(plane: Plane, config: Config, folder: Path, request: Request, file: RowsFile | None) -> RunMetrics:
    """Collective: metrics of the run's model, and its predictions, for the `file` of rank 0, which alone reads weights.

    UserError: the run has no such weights, they do not fit the recipe, or the data has no such part.
    """
    place = find_place(plane)
    limit_threads(place, emulated=False)
    device = take_device(config.run.device, place)
    plane.settle(device)
    trained = decided_by_first(plane, lambda: trained_weights(folder, request.weights, config.ema.decay is not None))
    facts = decided_by_first(plane, lambda: data_facts.kept(folder))
    source = made_by_all(plane, lambda: data.build(config.data.name, config.data.options, facts))
    source = data.on_part(source, request.part)
    if request.predicts and source.prediction_rows is None:
        raise UserError(f"data.name is {config.data.name}, which says nothing of predictions: use hetsync test")
    if MODEL in source.baselines:
        raise UserError(f"data.baselines has one named {MODEL}, as the trained model is called: name it otherwise")
    model = models.build_for(source, config.model.name, config.model.options)
    restore(trained, model, folder)
    evaluated = {MODEL: model, **source.baselines}
    for each in evaluated.values():
        each.to(device)
    check_evaluation(model, source)
    rounds = Rounds(plane, source, device, config.run.precision, evaluated)
    if request.predicts:
        with closing(RowsOfAll(plane, file)) as rows:
            sums = rounds.run(rows)
    else:
        sums = rounds.run(None)
    samples = len(source.test)  # type: ignore[arg-type]
    everyones = plane.gather_objects(sums)
    metrics = {name: metrics_of(source, [each[name] for each in everyones], samples) for name in evaluated}
    rows_written = None if file is None else file.rows
    return RunMetrics(request.part, samples, trained.weights, trained.samples_applied, rows_written, metrics)


def trained_weights(folder: Path, wanted: Weights | None, averaged: bool) -> Trained:
    """`averaged`: the newest are those of the run's average. UserError where there are none, or they are damaged."""
    kept = folder / best.FOLDER
    if wanted == "best" and not (kept / best.MODEL).is_file():
        raise UserError(f"{folder} has kept no best weights: use --weights newest, or train with run.keep_best.metric")
    if wanted != "newest" and (kept / best.MODEL).is_file():
        try:
            samples = int(json.loads((kept / best.BOOKS).read_text())["samples_applied"])
            return Trained("best", samples, load_file(kept / best.MODEL))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"{kept} cannot be read ({error}): use --weights newest") from error
    loaded = checkpoint.load_newest(folder)
    averages = loaded.state.get("averages") or []
    tensors = loaded.model
    if averaged and averages:
        tensors = {name.removeprefix("module."): value for name, value in averages[0].items() if name != "n_averaged"}
    return Trained("newest", loaded.progress.samples_applied, tensors)


def restore(trained: Trained, model: nn.Module, folder: Path) -> None:
    """UserError where they are another model's."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if not is_sparse(tensor)}
    tensors = {name: tensor for name, tensor in trained.tensors.items() if not is_sparse(tensor)}
    if (misfit := checkpoint.misfit(tensors, wanted)) is not None:
        raise UserError(f"the {trained.weights} weights of {folder} do not fit the model ({misfit}): keep its recipe")
    model.load_state_dict(tensors, strict=False)


class Rounds:
    """The test data from first to last, each round cut among the ranks by their speeds in the one before."""

    def __init__(
        self, plane: Plane, source: Data, device: torch.device, precision: str, evaluated: Mapping[str, nn.Module]
    ) -> None:
        """`evaluated`: models by name, of which the first predicts."""
        self._plane, self._data, self._device, self._precision = plane, source, device, precision
        self._evaluated = evaluated
        self._speeds = [1] * plane.size

    def run(self, rows: RowsOfAll | None) -> dict[str, dict[str, float]]:
        """Collective: this rank's sums of the metrics, of each model. `rows` gets the predictions, where wanted."""
        sums: dict[str, dict[str, float]] = {name: {} for name in self._evaluated}
        samples, first = len(self._data.test), 0  # type: ignore[arg-type]
        while first < samples:
            width = min(samples - first, self._plane.size * (EVALUATION_BATCH if first else FIRST_PART))
            self._round(first, width, sums, rows)
            first += width
        return sums

    def _round(self, first: int, width: int, sums: dict[str, dict[str, float]], rows: RowsOfAll | None) -> None:
        rank = self._plane.rank
        parts = apportion(width, dict(enumerate(self._speeds)))
        begin = first + sum(parts[lower] for lower in range(rank))
        found: list[Columns] = []
        began = time.monotonic()
        with evaluating(*self._evaluated.values()), set_aside(self._device, seed=0):
            for batch, samples in test_batches(self._data, begin, begin + parts[rank], self._device, EVALUATION_BATCH):
                self._add(sums, batch)
                if rows is not None:
                    found.append(self._predict(batch, samples))
        seconds = self._plane.gather_objects(time.monotonic() - began)
        for each, part in parts.items():
            if part:
                self._speeds[each] = max(1, int(SPEED_UNITS * part / max(seconds[each], 1e-6)))
        if rows is not None:
            rows.add(found)

    @torch.no_grad()
    def _add(self, sums: dict[str, dict[str, float]], batch: Any) -> None:
        for name, model in self._evaluated.items():
            with autocast(self._precision, self._device):
                found = self._data.metrics(model, batch)
            add_sums(sums[name], found)

    @torch.no_grad()
    def _predict(self, batch: Any, samples: range) -> Columns:
        assert self._data.prediction_rows is not None
        with autocast(self._precision, self._device):
            columns = self._data.prediction_rows(self._evaluated[MODEL], batch)
        return checked_rows(columns, samples)


class RowsOfAll:
    """Rows of all ranks, in their order, to a file of rank 0."""

    def __init__(self, plane: Plane, file: RowsFile | None) -> None:
        """Collective."""
        self._plane, self._file = plane, file
        self._channels = plane.open_channels() if plane.size > 1 else None

    def add(self, mine: list[Columns]) -> None:
        """Collective: the next ones."""
        if self._file is None:
            assert self._channels is not None
            self._channels.flush()
            self._channels.send(mine, [], to=0)
            return
        for columns in mine:
            self._file.write(columns)
        for other in range(1, self._plane.size):
            assert self._channels is not None
            theirs, _ = self._channels.receive(other)
            for columns in theirs:
                self._file.write(columns)

    def close(self) -> None:
        """Collective: once all is written."""
        if self._channels is not None:
            self._channels.flush()
            self._channels.close()


def checked_rows(columns: Any, samples: Sequence[int]) -> Columns:
    """With the number of each row's sample. UserError where they are no such columns."""
    if not isinstance(columns, Mapping) or not columns:
        raise UserError(f"data.rows returned {brief(columns)}: return a dictionary of columns")
    if "sample" in columns:
        raise UserError("data.rows returned a column named sample, which has the number of each row's: rename it")
    arrays = {str(name): _as_array(value) for name, value in columns.items()}
    lengths = {len(array) if array.ndim == 1 else -1 for array in arrays.values()}
    if len(lengths) != 1 or -1 in lengths or lengths.pop() % len(samples):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise UserError(
            f"data.rows returned columns of shapes {shapes} for {len(samples)} samples: return columns of one length,"
            " with as many rows of each sample as of another"
        )
    each = len(next(iter(arrays.values()))) // len(samples)
    return {"sample": np.repeat(np.array(samples), each), **arrays}


def _as_array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    return np.asarray(value)
