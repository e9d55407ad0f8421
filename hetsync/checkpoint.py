"""Checkpoints: one folder each, complete or absent, weights in safetensors.

checkpoints/samples-000000024000/
    model.safetensors       weights and buffers
    optimizer.safetensors   the optimizer's tensors, averaged over ranks, and the outer optimizer's
    state.json              where the run stands, and the optimizer's plain values
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hetsync.disk import sync_folder
from hetsync.errors import UserError

FORMAT = 1
PREFIX = "samples-"
PARTIAL = ".partial-"  # being built, or being removed


@dataclass(frozen=True)
class Progress:
    """Where a run stands at rest. `shares` are those of `ranks` ranks; settings as in `sync`."""

    samples_applied: int
    version: int
    ranks: int
    shares: tuple[int, ...]
    delay_bound: int
    quorum: float
    accumulation: int
    train_seconds: float


@dataclass(frozen=True)
class Loaded:
    progress: Progress
    model: dict[str, torch.Tensor]
    optimizer: dict[int, dict[str, Any]]
    optimizer_kind: str
    outer: torch.Tensor | None


def save(
    folder: Path,
    progress: Progress,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: torch.Tensor | None,
    keep: int,
) -> Path:
    """Write a checkpoint of a job at rest, from one rank; then remove all but the newest `keep`.

    One that is there already, of as many samples, stays: replacing it could not be done in one step.
    """
    target = folder / f"{PREFIX}{progress.samples_applied:012d}"
    if target in complete(folder):
        return target
    building = folder / f"{PARTIAL}{target.name}"
    tensors, plain = _flatten_optimizer(optimizer)
    if outer is not None:
        tensors["outer"] = outer
    try:
        _remove_partial(folder)  # what a crash left
        building.mkdir(parents=True)
        save_file(_on_cpu(model.state_dict()), building / "model.safetensors")
        save_file(_on_cpu(tensors), building / "optimizer.safetensors")
        kind = type(optimizer).__name__
        state = {
            "format": FORMAT,
            "progress": asdict(progress),
            "optimizer_kind": kind,
            "optimizer": plain,
        }
        (building / "state.json").write_text(json.dumps(state, indent=1))
        for file in building.iterdir():
            _flush(file)
        sync_folder(building)
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)
        sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise UserError(f"cannot write the checkpoint {target}: {error}; free space or change run.dir") from error
    for old in complete(folder)[:-keep]:
        with contextlib.suppress(OSError):
            old.rename(folder / f"{PARTIAL}{old.name}")
    _remove_partial(folder)
    return target


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / "state.json").is_file())


def load_newest(run: Path) -> Loaded:
    """The newest complete checkpoint of a run folder. Nothing is unpickled."""
    found = complete(run / "checkpoints")
    if not found:
        raise UserError(f"--resume {run}: there is no complete checkpoint in {run / 'checkpoints'}; start afresh")
    path = found[-1]
    try:
        state = json.loads((path / "state.json").read_text())
        if state["format"] != FORMAT:
            raise UserError(f"--resume {run}: {path.name} has format {state['format']}, this version reads {FORMAT}")
        model = load_file(path / "model.safetensors")
        tensors = load_file(path / "optimizer.safetensors")
        progress = Progress(**{**state["progress"], "shares": tuple(state["progress"]["shares"])})
        kind, plain = state["optimizer_kind"], state["optimizer"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"--resume {run}: checkpoint {path.name} cannot be read ({error}); remove its folder to use the one before"
        ) from error
    outer = tensors.pop("outer", None)
    return Loaded(progress, model, _unflatten_optimizer(tensors, plain), kind, outer)


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that share no memory, as safetensors wants them."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State tensors by `INDEX.NAME`; what is no tensor goes to JSON. Parameter groups come from the recipe."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            (tensors if isinstance(value, torch.Tensor) else plain)[f"{index}.{name}"] = value
    return tensors, plain


def _unflatten_optimizer(tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *plain.items()]:
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    return state


def restore(loaded: Loaded, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's weights and optimizer state in place."""
    try:
        model.load_state_dict(loaded.model)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"the checkpoint does not fit the recipe's model ({first}): resume with its own recipe"
        ) from error
    kind = type(optimizer).__name__
    if kind != loaded.optimizer_kind:
        raise UserError(
            f"the checkpoint does not fit the recipe's optimizer (it is of {loaded.optimizer_kind}, not {kind}):"
            " resume with its own recipe"
        )
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": loaded.optimizer, "param_groups": groups})


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
