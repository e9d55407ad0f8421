"""Checkpoints: one folder each, complete or absent, weights in safetensors, everything checked when it is read.

checkpoints/samples-000000024000/
    model.safetensors       weights and buffers
    frozen.safetensors      where there are weights that are not trained: these; one file of all of a job's checkpoints
    optimizer.safetensors   the optimizer's tensors, averaged over ranks, and the outer optimizer's
    state.json              where the run stands, the optimizer's plain values, and the digests of all files

Format 1 was without digests, format 2 had frozen weights beside the others; both are still read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hetsync.config.schema import WireFormat
from hetsync.errors import UserError, complain
from hetsync.files import DiskError, flush_to_disk, sha256_of
from hetsync.plane.base import Plane, decided_by_first
from hetsync.sync.digests import Digests
from hetsync.sync.layout import laid_out_like
from hetsync.sync.messages import Settings
from hetsync.sync.optimizer_state import state_by_place
from hetsync.train import state_tree
from hetsync.train.frozen_file import FrozenFile, frozen_weights
from hetsync.train.rest import not_finite
from hetsync.train.tensor_files import paired, parted, restored, storable

FORMAT = 3
WITH_ALL_WEIGHTS = 2  # in one file
WITHOUT_DIGESTS = 1
NEWER = "which a newer version of HetSync has written: go on with that one, or in another run folder"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FROZEN = "frozen.safetensors"
PREFIX = "samples-"
PARTIAL = ".partial-"  # being built, or being removed


class UnsoundError(UserError):
    """A checkpoint that is not what was saved; the sentence names it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands at rest. `shares` are those of `ranks` ranks; settings as in `sync`."""

    samples_applied: int
    version: int
    ranks: int
    shares: tuple[int, ...]
    delay_bound: int
    quorum: float
    accumulation: int
    fragments: int = 1
    grace: int = 0
    wire: WireFormat = "float32"
    train_seconds: float

    @property
    def settings(self) -> Settings:
        return Settings(**{key.name: getattr(self, key.name) for key in fields(Settings)})


@dataclass(frozen=True)
class Loaded:
    path: Path
    progress: Progress
    model: dict[str, torch.Tensor]
    optimizer: dict[int, dict[str, Any]]
    optimizer_kind: str
    outer: torch.Tensor | None
    state: Mapping[str, Any] = field(default_factory=dict)


def save(
    folder: Path,
    progress: Progress,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: torch.Tensor | None,
    keep: int,
    state: Mapping[str, Any] | None = None,
    agree: Callable[[], None] = lambda: None,
    frozen: FrozenFile | None = None,
) -> Path:
    """Write a checkpoint of a job at rest, from one rank; then remove all but the newest `keep`. `state`: what else
    there is to go on from, nested dictionaries and lists of tensors and plain values. `agree` is called before it
    becomes one: where it raises, there is none. `frozen`: of the job's checkpoints before.

    A sound one that is there already, of as many samples, stays: replacing it could not be done in one step.

    Raises:
        DiskError: It cannot be written.
        UserError: Weights or optimizer state are not finite; the good checkpoints stay.
    """
    target = folder / f"{PREFIX}{progress.samples_applied:012d}"
    tensors, plain = _flatten_optimizers(optimizers)
    trees, more = state_tree.flatten({"optimizer": plain, "state": state or {}})
    tensors |= more
    if outer is not None:
        tensors["outer"] = outer
    frozen, untrained = frozen or FrozenFile(Digests()), frozen_weights(model)
    looked_at = untrained if frozen.look(untrained) else {}
    if (culprit := not_finite(model, tensors, looked_at)) is not None:
        raise UserError(_refusal(culprit, folder, progress))
    if target in complete(folder) and _is_sound(target):
        return target
    building = folder / f"{PARTIAL}{target.name}"
    try:
        _remove_partial(folder)  # what a crash left
        building.mkdir(parents=True)
        weights = {name: tensor for name, tensor in model.state_dict().items() if name not in untrained}
        files = {MODEL: weights, OPTIMIZER: tensors, **({FROZEN: untrained} if untrained else {})}
        digests = _write_tensors(building, files, frozen)
        books = {"progress": asdict(progress), "optimizer_kind": kind_of(optimizers), **trees}
        pairs, parts = ({name: of(content) for name, content in files.items()} for of in (paired, parted))
        _write_state(building, {**books, "pairs": pairs, "parts": parts, "digests": digests})
        for file in building.iterdir():
            flush_to_disk(file)
        flush_to_disk(building)
        agree()
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)
        flush_to_disk(folder)
        if untrained:
            frozen.keep(target / FROZEN, digests[FROZEN])
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise DiskError(
            f"cannot write the checkpoint {target}: {error}; free space or choose another run folder"
        ) from error
    for old in complete(folder)[:-keep]:
        if old != target:  # damaged ones may be newer
            with contextlib.suppress(OSError):
                old.rename(folder / f"{PARTIAL}{old.name}")
    _remove_partial(folder)
    return target


def _write_tensors(folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]], frozen: FrozenFile) -> dict[str, str]:
    """Digests of the files."""
    digests = {}
    for name, content in files.items():
        linked = frozen.link(folder / name) if name == FROZEN else None
        if linked is None:
            save_file(storable(content), folder / name)
        digests[name] = linked or sha256_of(folder / name)
    return digests


def _write_state(folder: Path, books: Mapping[str, Any]) -> None:
    """Last, since it holds the digests of the other files."""
    state = {"format": FORMAT, **books}
    (folder / STATE).write_text(json.dumps({**state, "sha256": _digest_of(state)}, indent=1))


def _refusal(culprit: str, folder: Path, progress: Progress) -> str:
    good = complete(folder)
    last = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint before"
    return (
        f"{culprit} is not finite any more after {progress.samples_applied} samples, which is not saved; {last}:"
        " lower optimizer.learning_rate or look at the data"
    )


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / STATE).is_file())


def load_newest(run: Path) -> Loaded:
    """The newest sound checkpoint of a run folder; says which newer ones are damaged. UserError: there is none."""
    found = _found(run)
    faults = []
    for path in reversed(found):
        try:
            loaded = load(path)
        except UnsoundError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            complain(f"checkpoint {fault}; going on from {path.name}")
        return loaded
    raise UserError(f"{run}: no checkpoint there can be used ({'; '.join(faults)}); start afresh")


def load_agreed(run: Path, plane: Plane) -> Loaded:
    """Collective: the newest checkpoint that rank 0 finds sound, on every rank."""
    path = decided_by_first(plane, lambda: load_newest(run).path)
    return load(path)


def verify(run: Path) -> list[tuple[str, bool, str]]:
    """(name, sound, what there is to say) of every checkpoint of a run folder, oldest first."""
    return [(path.name, *_verdict(path)) for path in _found(run)]


def _verdict(path: Path) -> tuple[bool, str]:
    try:
        load(path)
        version = json.loads((path / STATE).read_text())["format"]
    except UserError as error:
        return False, str(error).removeprefix(f"{path.name} ")
    return True, "is as it was saved" if version != WITHOUT_DIGESTS else "can be read, but was saved without digests"


def _is_sound(path: Path) -> bool:
    return _verdict(path)[0]


def _found(run: Path) -> list[Path]:
    found = complete(run / "checkpoints")
    if not found:
        raise UserError(f"{run}: there is no complete checkpoint in {run / 'checkpoints'}; start afresh")
    return found


def load(path: Path) -> Loaded:
    """One checkpoint. Nothing is unpickled.

    Raises:
        UnsoundError: It is damaged.
        UserError: It is of a newer version of this program, so that older ones are not gone back to.
    """
    state = _read_state(path)
    try:
        progress = _checked_progress(path, state["progress"])
        files = _files_of(state)
        pairs, parts = (state.get(key, {}) for key in ("pairs", "parts"))  # which older ones do not tell of
        model, tensors, frozen = (
            restored(load_file(path / name), pairs.get(name, ()), parts.get(name, {})) if name in files else {}
            for name in (MODEL, OPTIMIZER, FROZEN)
        )
        outer = tensors.pop("outer", None)
        tree = state_tree.unflatten(state.get("state", {}), tensors)
        plain = state_tree.unflatten(state["optimizer"], tensors)
        optimizer = _unflatten_optimizer(tensors, plain)
        return Loaded(path, progress, {**frozen, **model}, optimizer, state["optimizer_kind"], outer, tree)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise UnsoundError(f"{path.name} cannot be read ({error})") from error


def _read_state(path: Path) -> dict[str, Any]:
    """The books, after a look at all digests."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
        version = state["format"]
        if isinstance(version, int) and version > FORMAT:
            raise UserError(f"{path.name} has format {version}, {NEWER}")
        if version not in (WITHOUT_DIGESTS, WITH_ALL_WEIGHTS, FORMAT):
            raise UnsoundError(f"{path.name} has format {version}, and this version of HetSync reads {FORMAT}")
        if version != WITHOUT_DIGESTS:
            mine, digests = state.pop("sha256"), state["digests"]
            changed = [STATE] if mine != _digest_of(state) else []
            files = () if changed else _files_of(state)
            changed += [name for name in files if sha256_of(path / name) != digests[name]]
            if changed:
                raise UnsoundError(f"{path.name} is damaged: {' and '.join(changed)} changed since it was saved")
        return state
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsoundError(f"{path.name} cannot be read ({STATE}: {type(error).__name__} {error})") from error


def _files_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The files of tensors."""
    return (MODEL, OPTIMIZER, FROZEN) if FROZEN in state.get("digests", {}) else (MODEL, OPTIMIZER)


def _digest_of(state: Mapping[str, Any]) -> str:
    """Of the books' content, not of their bytes, so that they can hold it themselves."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _checked_progress(path: Path, values: Mapping[str, Any]) -> Progress:
    """ValueError where a value is none that a run can have."""
    if unknown := values.keys() - {key.name for key in fields(Progress)}:
        raise UserError(f"{path.name} tells of {', '.join(sorted(unknown))}, {NEWER}")
    progress = Progress(**{**values, "shares": tuple(values["shares"])})
    for key, least in (
        ("samples_applied", 0),
        ("version", 0),
        ("ranks", 1),
        ("delay_bound", 0),
        ("accumulation", 1),
        ("fragments", 1),
        ("grace", 0),
    ):
        if not _is_count(getattr(progress, key), least):
            raise ValueError(f"{key} is {getattr(progress, key)}")
    if progress.wire not in get_args(WireFormat):
        raise ValueError(f"wire is {progress.wire}")
    shares = progress.shares
    if len(shares) != progress.ranks or not all(_is_count(share) for share in shares) or not sum(shares):
        raise ValueError(f"shares are {list(shares)} of {progress.ranks} ranks")
    for key, most in (("quorum", 1.0), ("train_seconds", math.inf)):
        value = getattr(progress, key)
        if not isinstance(value, int | float) or not 0 <= value <= most or (key == "quorum" and not value):
            raise ValueError(f"{key} is {value}")
    if path.name != f"{PREFIX}{progress.samples_applied:012d}":
        raise ValueError(f"it is of {progress.samples_applied} samples")
    return progress


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def kind_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    return "+".join(type(optimizer).__name__ for optimizer in optimizers)


def _flatten_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State tensors by `INDEX.NAME`; what is no tensor goes to JSON. Parameter groups come from recipe or script."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for index, values in state_by_place(optimizers).items():
        for name, value in values.items():
            (tensors if isinstance(value, torch.Tensor) else plain)[f"{index}.{name}"] = value
    return tensors, plain


def _unflatten_optimizer(tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *plain.items()]:
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    return state


def check_model(loaded: Loaded, model: torch.nn.Module) -> None:
    """UserError where the checkpoint's weights are not those of such a model."""
    if (why := misfit(loaded.model, model.state_dict())) is not None:
        raise UserError(f"the checkpoint does not fit the model ({why}): resume with the recipe or script it is of")


def restore(loaded: Loaded, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Put a checkpoint's weights and optimizer state in place. UserError: they do not fit, and nothing is changed."""
    check_model(loaded, model)
    kind, states = kind_of(optimizers), [optimizer.state_dict() for optimizer in optimizers]
    sizes = [sum(len(group["params"]) for group in state["param_groups"]) for state in states]
    if kind != loaded.optimizer_kind or not loaded.optimizer.keys() <= set(range(sum(sizes))):
        raise UserError(
            f"the checkpoint does not fit the optimizer (it is of {loaded.optimizer_kind}, not {kind},"
            f" or not of {sum(sizes)} weights): resume with the recipe or script it is of"
        )
    model.load_state_dict(loaded.model)
    first = 0
    for optimizer, state, size in zip(optimizers, states, sizes, strict=True):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        mine = {
            place - first: _lying_as(weights[place - first], values)
            for place, values in loaded.optimizer.items()
            if 0 <= place - first < size
        }
        others = {name: value for name, value in state["state"].items() if not isinstance(name, int)}
        optimizer.load_state_dict({**state, "state": {**mine, **others}})
        first += size


def _lying_as(weight: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """A file knows of one order in memory only."""
    return {
        name: laid_out_like(value, weight) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def misfit(saved: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str | None:
    """The first difference between weights and those of a model."""
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in wanted or name not in saved:
            return f"{name} is {'not in the checkpoint' if name in wanted else 'in the checkpoint only'}"
        if saved[name].shape != wanted[name].shape:
            return f"{name} is of shape {tuple(saved[name].shape)}, not {tuple(wanted[name].shape)}"
        if saved[name].dtype != wanted[name].dtype:
            return f"{name} is {saved[name].dtype}, not {wanted[name].dtype}"
    return None
