"""The best weights of a run so far: RUN/best/model.safetensors, and best.json, which says by what. When to stop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from hetsync.errors import Trouble, UserError, brief
from hetsync.files import DiskError, write_atomically
from hetsync.sync.sparse import is_sparse
from hetsync.train.tensor_files import storable

Mode = Literal["max", "min"]
FOLDER, MODEL, BOOKS = "best", "model.safetensors", "best.json"


def comparable(who: str, value: Any) -> float:
    """UserError for what cannot be compared."""
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if math.isnan(found):
        raise UserError(f"{who} got {brief(value)}: give one number that can be compared")
    return found


def is_better(value: float, best: float | None, mode: Mode) -> bool:
    """Than the best so far? What is not finite never is."""
    if not math.isfinite(value) or best is None:
        return math.isfinite(value)
    return value > best if mode == "max" else value < best


class Best:
    """Every rank has one; rank 0 writes."""

    def __init__(self, run: Path) -> None:
        """Goes on from what the run folder holds. UserError where that cannot be read."""
        self._folder = run / FOLDER
        self._unwritable = Trouble()
        self._value: float | None = None
        books = self._folder / BOOKS
        if books.is_file():
            try:
                self._value = float(json.loads(books.read_text())["value"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(f"{books} cannot be read ({error}): remove {self._folder}") from error

    def improves(self, value: float, mode: Mode) -> bool:
        """Is it better than the best so far, and so the best now? What is not finite never is."""
        if mode not in ("max", "min"):
            raise UserError(f"job.keep_best got mode {mode!r}: use max or min")
        if not is_better(value, self._value, mode):
            return False
        self._value = value
        return True

    def keep(self, value: float, mode: Mode, samples: int, model: torch.nn.Module) -> None:
        """Write the weights, without sparse buffers, which never change. A disk that is full is told of, and training
        goes on."""
        kept = {name: tensor for name, tensor in model.state_dict().items() if not is_sparse(tensor)}
        books: dict[str, Any] = {"value": value, "mode": mode, "samples_applied": samples}
        try:
            write_atomically(self._folder / MODEL, save(storable(kept)))
            write_atomically(self._folder / BOOKS, json.dumps(books, indent=1))
        except DiskError as error:
            self._unwritable.tell(f"{error}; training goes on")


class Patience:
    """How many evaluations in a row have not been better than the best before; goes on in a resumed run."""

    def __init__(self, metric: str | None, mode: Mode, evaluations: int) -> None:
        """`evaluations`: after so many it is at its end."""
        self._metric = metric
        self._mode: Mode = mode
        self._evaluations = evaluations
        self._best: float | None = None
        self._without = 0  # evaluations since the best

    def ends_with(self, value: float) -> bool:
        better = is_better(value, self._best, self._mode)
        self._best, self._without = (value, 0) if better else (self._best, self._without + 1)
        return self._without >= self._evaluations

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "mode": self._mode, "best": self._best, "without": self._without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Another metric than before begins anew."""
        if (state["metric"], state["mode"]) == (self._metric, self._mode):
            self._best, self._without = state["best"], state["without"]
