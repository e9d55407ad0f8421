"""What a trained model is worth on data that it was not trained on: metrics beside those of naive predictors, and its
predictions. Each rank takes a part of every round, as large as it has been fast."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from hetsync.data.evaluation import EVALUATION_BATCH, check_evaluation, evaluating, metrics_of, numbers, test_batches
from hetsync.data.random_state import set_aside
from hetsync.errors import UserError
from hetsync.plane.base import Plane, decided_by_first, made_by_all
from hetsync.profiling.measure import autocast, find_place, limit_threads, take_device
from hetsync.sync.sparse import is_sparse
from hetsync.train import best, checkpoint
from hetsync.train.rows_file import RowsFile

Weights = Literal["best", "newest"]

FIRST_PART = 16  # samples of each rank in the first round, by which speeds are measured
MODEL = "model"  # its name beside the naive predictors'
SPEED_UNITS = 1e6  # shares are whole numbers


@dataclass(frozen=True)
class Tested:
    """What RUN/test.json holds. `metrics`: of the model first, and of naive predictors, by their names."""

    part: Part
    samples: int
    weights: Weights
    samples_applied: int
    metrics: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Trained:
    """Weights of a run, by name, after so many samples."""

    weights: Weights
    samples_applied: int
    tensors: Mapping[str, torch.Tensor]


def look_at(
    plane: Plane, config: Config, folder: Path, part: Part, wanted: Weights | None, rows: RowsFile | None
) -> Tested:
    """Collective: metrics of the run's model on a part of its recipe's data, and a row for each prediction where a file
    is given. The run folder is read on rank 0 alone. `wanted`: by default the best weights, where the run has kept any.

    UserError: the run has no such weights, they do not fit the recipe, or the data have no such part.
    """
    place = find_place(plane)
    limit_threads(place, emulated=False)
    device = take_device(config.run.device, place)
    plane.settle(device)
    trained = decided_by_first(plane, lambda: trained_weights(folder, wanted, config.ema.decay is not None))
    source = made_by_all(plane, lambda: data.on_part(data.build(config.data.name, config.data.options), part))
    if rows is not None and source.predicted is None:
        raise UserError(f"data.name is {config.data.name}, which says nothing of predictions: use hetsync test")
    model = models.build_for(source, config.model.name, config.model.options)
    restore(trained, model, folder)
    judged = {MODEL: model.to(device), **{name: each.to(device) for name, each in source.baselines.items()}}
    check_evaluation(model, source)
    sums = Rounds(plane, source, device, config.run.precision).of(judged, rows)
    samples = len(source.test)  # type: ignore[arg-type]
    told = plane.gather_objects(sums)
    metrics = {name: metrics_of(source, [each[name] for each in told], samples) for name in judged}
    return Tested(part, samples, trained.weights, trained.samples_applied, metrics)


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
    """The test data from first to last, each round cut among the ranks."""

    def __init__(self, plane: Plane, source: Data, device: torch.device, precision: str) -> None:
        self._plane, self._data, self._device, self._precision = plane, source, device, precision
        self._place = plane.members.index(plane.rank)
        self._speeds = [1] * plane.size

    def of(self, judged: Mapping[str, nn.Module], rows: RowsFile | None) -> dict[str, dict[str, float]]:
        """Collective: this rank's sums of the metrics of each model. `rows` gets predictions of the first, on rank
        0."""
        sums: dict[str, dict[str, float]] = {name: {} for name in judged}
        samples, first = len(self._data.test), 0  # type: ignore[arg-type]
        while first < samples:
            width = min(samples - first, self._plane.size * (EVALUATION_BATCH if first else FIRST_PART))
            parts = apportion(width, dict(enumerate(self._speeds)))
            begin = first + sum(parts[place] for place in range(self._place))
            began = time.monotonic()
            for name, model in judged.items():
                self._add(sums[name], model, begin, begin + parts[self._place])
            mine = self._rows(judged[MODEL], begin, begin + parts[self._place]) if rows is not None else []
            told = self._plane.gather_objects((time.monotonic() - began, mine))
            self._speeds = [
                max(1, int(SPEED_UNITS * parts[place] / max(seconds, 1e-6))) if parts[place] else self._speeds[place]
                for place, (seconds, _) in enumerate(told)
            ]
            if rows is not None and self._plane.leads:
                for columns in (columns for _, found in told for columns in found):
                    rows.write(columns)
            first += width
        return sums

    @torch.no_grad()
    def _add(self, sums: dict[str, float], model: nn.Module, begin: int, end: int) -> None:
        with evaluating(model), set_aside(self._device, seed=0):
            for batch in test_batches(self._data, begin, end, self._device, EVALUATION_BATCH):
                with autocast(self._precision, self._device):
                    found = self._data.metrics(model, batch)
                for name, value in numbers("data.metrics", found).items():
                    sums[name] = sums.get(name, 0.0) + value

    @torch.no_grad()
    def _rows(self, model: nn.Module, begin: int, end: int) -> list[dict[str, np.ndarray]]:
        found, rows = [], self._data.predicted
        assert rows is not None
        with evaluating(model), set_aside(self._device, seed=0):
            for batch in test_batches(self._data, begin, end, self._device, EVALUATION_BATCH):
                with autocast(self._precision, self._device):
                    columns = rows(model, batch)
                samples = range(begin, min(end, begin + EVALUATION_BATCH))
                found.append(checked_rows(columns, samples))
                begin = samples.stop
        return found


def checked_rows(columns: Any, samples: Sequence[int]) -> dict[str, np.ndarray]:
    """With the number of each row's sample. UserError where they are no such columns."""
    if not isinstance(columns, Mapping) or not columns or "sample" in columns:
        raise UserError(
            f"predictions are {type(columns).__name__}: return a dictionary of columns, without one named sample"
        )
    arrays = {
        str(name): value.detach().float().cpu().numpy() if _is_half(value) else np.asarray(_on_cpu(value))
        for name, value in columns.items()
    }
    shapes = {array.shape for array in arrays.values()}
    length = len(next(iter(arrays.values()))) if all(map(len, shapes)) else -1
    if len(shapes) != 1 or len(next(iter(shapes))) != 1 or length % len(samples):
        told = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise UserError(
            f"predictions are columns of shapes {told} for {len(samples)} samples: return columns of one length,"
            " with as many rows of each sample as of another"
        )
    return {"sample": np.repeat(np.array(samples), length // len(samples)), **arrays}


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def as_json(tested: Tested) -> str:
    return json.dumps(asdict(tested), indent=1)
