"""What each block of a model costs on this device: measured on real batches, kept in a file."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hetsync.balance.device import settle
from hetsync.balance.gpu import gpu_name
from hetsync.data.random_state import untouched
from hetsync.errors import UserError, complain
from hetsync.files import DiskError, write_atomically
from hetsync.plan.blocks import Cut, state_of
from hetsync.plan.calls import Scored, anew, observed_call, stand_in
from hetsync.plan.graph import BlockCost
from hetsync.plan.parts import RETURNED, Pass, detached, gradients_of, split
from hetsync.sync.sparse import dense_parts

FORMAT = 3
LEAST_ROUNDS = 3

Clock = Callable[[], float]
Seconds = list[float]  # round by round
Line = tuple[float, float]  # what is fixed, and a sample's part


@dataclass(frozen=True)
class Measured:
    """What is measured.

    Attributes:
        model: In training mode, on its device; left as it was.
        cut: Its blocks.
        loss: Of (model, batch).
        optimizer: Of the model's weights.
        batches: Two batches, by their samples.
    """

    model: nn.Module
    cut: Cut
    loss: Scored
    optimizer: torch.optim.Optimizer
    batches: Mapping[int, Any]

    def __post_init__(self) -> None:
        if len(self.batches) != 2:
            raise ValueError(f"a line goes through two sizes of batch, not through {sorted(self.batches)}")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def block_costs(
    what: Measured, path: Path, budget_seconds: float = 10.0, clock: Clock = time.perf_counter
) -> tuple[BlockCost, ...]:
    """Costs by block: those in the file, if they are of this model, such batches and such a device, and were measured
    for no less time; else measured and written there.

    UserError where the file holds something else, or cannot be read. That it cannot be written is said, and no more.
    """
    key = _key(what)
    costs = _read(path, key, budget_seconds, len(what.cut.graph.blocks))
    if costs is None:
        costs = measure(what, budget_seconds, clock)
        content = {"format": FORMAT, "key": key, "budget_seconds": budget_seconds}
        content["costs"] = [asdict(cost) for cost in costs]
        try:
            write_atomically(path, json.dumps(content, indent=1) + "\n", "let XDG_CACHE_HOME name another folder")
        except DiskError as error:
            complain(f"{error}; until then blocks are measured each time")
    return costs


def measure(what: Measured, budget_seconds: float = 10.0, clock: Clock = time.perf_counter) -> tuple[BlockCost, ...]:
    """Seconds and bytes of each block: of its passes as a line through two sizes of batch, and of its update.

    A block runs on what those before it hand over, and backward on the gradients of those behind. The whole model with
    its loss is measured in turn with its blocks, and their seconds are scaled to add up to its; so are those of the
    optimizer's update. Memory that several blocks save for backward is the first one's, and what the loss saves the
    last's.
    """
    with untouched(what.model):
        runs = {samples: _Run(what, batch, clock) for samples, batch in sorted(what.batches.items())}
        for run in runs.values():
            run.warm_up()
        updates = _Updates(what, clock)
        started, rounds = clock(), 0
        while rounds < LEAST_ROUNDS or clock() - started < budget_seconds:
            for run in runs.values():
                run.round()
            updates.round()
            rounds += 1
    sizes = list(runs)
    forward, backward = (
        [_line(sizes, values) for values in zip(*(run.scaled(kind) for run in runs.values()), strict=True)]
        for kind in (0, 1)
    )
    largest, updating = runs[sizes[1]], updates.scaled()
    return tuple(
        BlockCost(
            forward_seconds=forward[number][1],
            backward_seconds=backward[number][1],
            fixed_forward_seconds=forward[number][0],
            fixed_backward_seconds=backward[number][0],
            output_bytes=math.ceil(largest.output_bytes[number] / sizes[1]),
            saved_bytes=math.ceil(largest.saved_bytes[number] / sizes[1]),
            weight_bytes=block.weight_bytes,
            received_bytes=math.ceil(largest.received_bytes[number] / sizes[1]),
            loss_bytes=math.ceil(largest.loss_bytes[number] / sizes[1]),
            update_seconds=updating[number],
            padding=_power(sizes, [run.saved_bytes[number] for run in runs.values()]),
            padded_samples=sizes[1],
        )
        for number, block in enumerate(what.cut.graph.blocks)
    )


class _Run:
    """One batch through the whole model, and block by block. Seconds are pairs: forward, backward."""

    def __init__(self, what: Measured, batch: Any, clock: Clock) -> None:
        self._what, self._batch, self._clock = what, batch, clock
        blocks = range(len(what.cut.graph.blocks))
        traced = what.cut.traced
        self._parts = [] if traced is None else split(what.model, traced, blocks)
        self._call = observed_call(what.model, what.loss, batch)
        self._whole: tuple[Seconds, Seconds] = ([], [])
        self._blocks: list[tuple[Seconds, Seconds]] = [([], []) for _ in blocks]
        self.output_bytes, self.saved_bytes = [0 for _ in blocks], [0 for _ in blocks]
        self.received_bytes, self.loss_bytes = [0 for _ in blocks], [0 for _ in blocks]

    def warm_up(self) -> None:
        """A round whose bytes count, and not its seconds."""
        self._run_whole()
        with storages_saved(self._what.model) as saved:
            if self._parts:
                self._run_blocks(saved)
            else:
                self._run_whole()
                self.saved_bytes = [sum(bytes_of(saved).values())]
        for forward, backward in (self._whole, *self._blocks):
            forward.clear()
            backward.clear()

    def round(self) -> None:
        self._run_whole()
        if self._parts:
            self._run_blocks()

    def scaled(self, kind: int) -> list[float]:
        """By block, its part of the whole model's seconds."""
        whole = median(self._whole[kind])
        if not self._parts:
            return [whole]
        return _scaled([median(seconds[kind]) for seconds in self._blocks], whole)

    def _run_whole(self) -> None:
        forward, backward = self._whole
        batch = anew(self._batch)
        with self._timed(forward):
            loss = self._what.loss(self._what.model, batch)
        with self._timed(backward):
            loss.backward()

    def _run_blocks(self, saved: list[torch.UntypedStorage] | None = None) -> None:
        values: dict[str, Any] = {}
        passes: list[Pass] = []
        for number, part in enumerate(self._parts):
            before = len(saved or ())
            read = {name: values[name] for names in part.reads.values() for name in names}
            with self._timed(self._blocks[number][0]):
                passes.append(Pass(part, self._call, read))
            values.update(passes[-1].outputs)
            if saved is not None:
                own, earlier = bytes_of(saved[before:]), bytes_of(saved[:before])
                self.saved_bytes[number] = sum(own[address] for address in own.keys() - earlier.keys())
                self.received_bytes[number] = sum(own[address] for address in own.keys() & earlier.keys())
                self.output_bytes[number] = _bytes(list(passes[-1].outputs.values())[:-1])
        returned, before = detached(values[RETURNED]), len(saved or ())
        loss = self._what.loss(stand_in(self._what.model, lambda *_, **__: returned), anew(self._batch))
        if saved is not None:
            own, earlier = bytes_of(saved[before:]), bytes_of(saved[:before])
            self.loss_bytes[-1] = sum(own[address] for address in own.keys() - earlier.keys())
            self.saved_bytes[-1] += self.loss_bytes[-1]
        loss.backward()
        passes[-1].add_gradients(RETURNED, gradients_of(returned))
        for number in reversed(range(len(passes))):
            with self._timed(self._blocks[number][1]):
                passes[number].backward()
            for source, names in self._parts[number].reads.items():
                for name in names:
                    passes[source].add_gradients(name, passes[number].gradients(name))

    def _timed(self, seconds: Seconds) -> AbstractContextManager[None]:
        return _timed(seconds, self._what.device, self._clock)


class _Updates:
    """The optimizer's, once there are gradients: of all weights, of those of each block, and of none. Where it does not
    step on some of them alone, a block's part is that of its weights' bytes."""

    def __init__(self, what: Measured, clock: Clock) -> None:
        self._what, self._clock = what, clock
        tensors = state_of(what.model)
        self._weights = [weight for weight in tensors.values() if weight.requires_grad]
        blocks = what.cut.graph.blocks
        self._blocks = [{tensors[name] for name in block.parameters} for block in blocks]
        self._bytes = [block.weight_bytes for block in blocks]
        self._whole: Seconds = []
        self._none: Seconds = []
        self._seconds: list[Seconds] = [[] for _ in self._blocks]
        self._step(set(self._weights), [])  # the first one makes the optimizer's state
        self._by_block = self._steps_on_some()

    def _steps_on_some(self) -> bool:
        try:
            for held in (*self._blocks, set[torch.Tensor]()):
                self._step(held, [])
        except Exception:  # one that is not torch's may raise anything
            return False
        return True

    def round(self) -> None:
        self._step(set(self._weights), self._whole)
        if not self._by_block:
            return
        for held, seconds in zip(self._blocks, self._seconds, strict=True):
            self._step(held, seconds)
        self._step(set(), self._none)  # with what the blocks' have warmed up, too

    def scaled(self) -> list[float]:
        """By block, its part of the whole update. Single ones take microseconds, to which a busy machine only adds."""
        if not self._by_block:
            return _scaled(self._bytes, median(self._whole))
        none = min(self._none)
        blocks = [max(0.0, min(seconds) - none) for seconds in self._seconds]
        return _scaled(blocks, median(self._whole))

    def _step(self, held: set[torch.Tensor], seconds: Seconds) -> None:
        """Of the weights that are held: an optimizer leaves alone what has no gradient."""
        kept = {weight: weight.detach().clone() for weight in self._weights if weight in held}
        gradients = {weight: weight.grad for weight in self._weights}
        for weight in gradients.keys() - kept.keys():
            weight.grad = None
        try:
            with _timed(seconds, self._what.device, self._clock):
                self._what.optimizer.step()
        finally:
            for weight, gradient in gradients.items():
                weight.grad = gradient
            for weight, value in kept.items():
                weight.data.copy_(value)


def _scaled(seconds: Sequence[float], whole: float) -> list[float]:
    """To add up to those of the whole."""
    return [whole * each / max(sum(seconds), 1e-12) for each in seconds]


@contextmanager
def _timed(seconds: Seconds, device: torch.device, clock: Clock) -> Iterator[None]:
    started = clock()
    yield
    settle(device)
    seconds.append(clock() - started)


@contextmanager
def storages_saved(model: nn.Module) -> Iterator[list[torch.UntypedStorage]]:
    """Fills the list with what autograd saves inside, as often as it does; without the model's weights and buffers."""
    saved: list[torch.UntypedStorage] = []
    own = (part for tensor in (*model.parameters(), *model.buffers()) for part in dense_parts(tensor))
    held = {part.untyped_storage().data_ptr() for part in own}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        for storage in map(torch.Tensor.untyped_storage, dense_parts(tensor)):
            if storage.data_ptr() not in held:
                saved.append(storage)  # which keeps it: an address stays one storage's
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def bytes_of(storages: Sequence[torch.UntypedStorage]) -> dict[int, int]:
    """By address, so that each counts once."""
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _bytes(values: Any) -> int:
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Through two points, with neither part below zero."""
    (small, large), (low, high) = sizes, seconds
    per_sample = max(0.0, (high - low) / (large - small))
    fixed = high - large * per_sample
    return (fixed, per_sample) if fixed >= 0 else (0.0, high / large)


def _power(sizes: Sequence[int], saved_bytes: Sequence[int]) -> float:
    """Of the samples, with which a sample's bytes grow: above 0 where it is padded to the longest of a batch."""
    small, large = (bytes_ / samples for samples, bytes_ in zip(sizes, saved_bytes, strict=True))
    return max(0.0, math.log(large / small) / math.log(sizes[1] / sizes[0])) if small else 0.0


def _key(what: Measured) -> str:
    """Digest of all that the costs depend on, as far as it can be seen: what code from outside of the model's classes
    and the loss does cannot."""
    device = what.device
    return hashlib.sha256(
        json.dumps(
            [
                [asdict(block) for block in what.cut.graph.blocks],
                [[edge.source, edge.target] for edge in what.cut.graph.edges],
                {samples: _shapes(batch) for samples, batch in what.batches.items()},
                _told_model(what),
                getattr(what.loss, "__qualname__", type(what.loss).__name__),
                _source(what.loss),
                _updates_by(what.optimizer),
                gpu_name(device) if device.type == "cuda" else platform.machine(),
                platform.node(),
                [each.name for each in fields(BlockCost)],
                torch.get_num_threads(),
                torch.__version__,
            ]
        ).encode()
    ).hexdigest()


def _told_model(what: Measured) -> list[object]:
    """Its modules with their options, what is trained, what its forward does, and the code of classes not torch's."""
    model, traced = what.model, what.cut.traced
    classes = {base for module in model.modules() for base in type(module).__mro__}
    own = [each for each in classes if each.__module__.partition(".")[0] not in ("torch", "builtins")]
    own.sort(key=lambda each: (each.__module__, each.__qualname__))
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    texts = [repr(model), str(traced.graph) if traced else ""]
    return [*(re.sub(r" at 0x[0-9a-f]+", "", text) for text in texts), frozen, *map(_source, own)]


def _source(code: Any) -> str | None:
    """None where there is no text of it, as of what was typed at a prompt, or none that can be read just now."""
    try:
        return inspect.getsource(code)
    except Exception:  # it parses the file, which may be half edited
        return None


def _updates_by(optimizer: torch.optim.Optimizer) -> list[str]:
    """What an update computes: not with which rates."""
    return [type(optimizer).__name__, *sorted(name for name, value in optimizer.defaults.items() if value)]


def _shapes(batch: Any) -> list[str]:
    return [str((value.dtype, tuple(value.shape))) for value in tree_leaves(batch) if isinstance(value, torch.Tensor)]


def _read(path: Path, key: str, budget_seconds: float, blocks: int) -> tuple[BlockCost, ...] | None:
    """None where there is no file, or one of another model or device, of a shorter look, or of an earlier format."""
    try:
        content = json.loads(path.read_text())
        if content["format"] > FORMAT:
            raise UserError(f"{path} is of a newer HetSync, as its format is {content['format']}: delete it")
        if content["format"] < FORMAT or content["key"] != key or content["budget_seconds"] < budget_seconds:
            return None
        costs = tuple(BlockCost(**cost) for cost in content["costs"])
        if len(costs) != blocks or any(not _is_amount(cost, each.name) for cost in costs for each in fields(cost)):
            raise ValueError("amounts")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"cannot read the costs of blocks in {path}: {error.strerror}; let XDG_CACHE_HOME name another folder"
        ) from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} holds no costs of blocks that can be read: delete it") from error
    return costs


def _is_amount(cost: BlockCost, name: str) -> bool:
    value = getattr(cost, name)
    types = int if name.endswith("bytes") else (int, float)
    return isinstance(value, types) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
