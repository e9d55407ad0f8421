"""Scores on the test data, each rank on its part: while training goes on, or at rest."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from hetsync.balance.shares import apportion
from hetsync.data.evaluation import TAKEN, evaluating, numbers
from hetsync.data.handed_over import collate_of
from hetsync.data.random_state import set_aside
from hetsync.data.transfer import to_device
from hetsync.data.workers import fetch
from hetsync.errors import UserError
from hetsync.sync.milestones import Evaluation
from hetsync.telemetry import Telemetry

Combine = Callable[[list[Any]], Any]


class Part(NamedTuple):
    """What a rank has found on so many samples."""

    found: Any
    samples: int


class RankParts:
    """Which part of the test data this rank evaluates: as large as its share, or equal ones."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.shares: Sequence[int] = [1] * ranks

    def of(self, samples: int) -> range:
        parts = apportion(samples, dict(enumerate(self.shares)))
        first = sum(parts[lower] for lower in range(self.rank))
        return range(first, first + parts[self.rank])


class EvaluationLoader:
    """In place of a `DataLoader` of test data: batches of this rank's part, on its device."""

    def __init__(self, loader: DataLoader[Any], parts: RankParts, device: torch.device) -> None:
        self.whole = loader.dataset
        self.batch_size = loader.batch_size or 1
        self.seen = 0  # samples, in all
        self._collate = collate_of(loader)
        self._parts = parts
        self._device = device

    @property
    def part(self) -> range:
        return self._parts.of(len(self.whole))  # type: ignore[arg-type]

    @property
    def dataset(self) -> Dataset[Any]:
        """This rank's part: scripts divide by its length."""
        return Subset(self.whole, self.part)

    def __len__(self) -> int:
        return -(-len(self.part) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        part = self.part
        for start in range(part.start, part.stop, self.batch_size):
            indices = list(range(start, min(part.stop, start + self.batch_size)))
            batch = to_device(fetch(self.whole, indices, self._collate), self._device)
            self.seen += len(indices)
            yield batch


class Evaluations:
    """A job's evaluations. `metrics` are the newest: rank 0's while training goes on, on all ranks at rest."""

    def __init__(
        self,
        *,
        parts: RankParts,
        model: torch.nn.Module,
        loaders: Sequence[EvaluationLoader],
        averages: Sequence[torch.nn.Module] = (),
        equal: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Parts are as large as shares are, or `equal`. `before` is called before each."""
        self._equal = equal
        self._before = before
        self.metrics: dict[str, float] = {}
        self._parts = parts
        self._model = torch.nn.ModuleList([model, *averages])  # whatever an evaluation may look at
        self._loaders = loaders
        self._function: Callable[[], Any] = lambda: None
        self._combine: Combine | None = None
        self._done: deque[tuple[int, float, dict[str, float]]] = deque()

    def use(self, function: Callable[[], Any], combine: Combine | None) -> None:
        """What to do where the terms want an evaluation."""
        self._function, self._combine = function, combine

    def score(self, shares: Sequence[int]) -> Part:
        return self.part_of(self._function, shares)

    def part_of(self, function: Callable[[], Any], shares: Sequence[int]) -> Part:
        """What the function finds on this rank's part: in evaluation mode, without gradients, drawing alike each
        time."""
        self._before()
        self._parts.shares = [min(1, share) for share in shares] if self._equal else shares
        if self._loaders and not any(len(loader) for loader in self._loaders):
            return Part(None, 0)
        before = sum(loader.seen for loader in self._loaders)
        devices = {parameter.device for parameter in self._model.parameters()}
        with evaluating(self._model), torch.no_grad(), set_aside(*devices, seed=0):
            found = self._found(function, before)
        return Part(on_cpu(found), sum(loader.seen for loader in self._loaders) - before)

    def _found(self, function: Callable[[], Any], before: int) -> Any:
        try:
            return function()
        except ZeroDivisionError:
            if self._loaders and sum(loader.seen for loader in self._loaders) == before:
                return None  # a mean over a part that has no samples
            raise

    def report(self, evaluation: Evaluation, train_seconds: float) -> None:
        """From the communication thread: `take` has it for the main thread."""
        metrics = named(combined(evaluation.parts, self._combine))
        self.metrics = metrics
        self._done.append((evaluation.samples_applied, train_seconds, metrics))

    def take(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Samples applied, seconds of training, and metrics, of those reported since the last call."""
        while self._done:
            yield self._done.popleft()


def check_callable(who: str, function: Any, *arguments: Any) -> None:
    """UserError for what cannot be called with the arguments, as far as its signature is known."""
    if not callable(function):
        raise UserError(f"{who} got a {type(function).__name__}: give a function")
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may supply arguments
    except (TypeError, ValueError):  # some of C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        given = ", ".join(type(each).__name__ for each in arguments)
        raise UserError(
            f"{who} got {name}{signature}, which is called with ({given}) here ({error}): wrap it in a lambda"
        ) from None


def on_cpu(value: Any) -> Any:
    """The value, which other ranks get: they may have no such device."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, torch.nn.Module):  # a metric
        return value.to("cpu")
    if isinstance(value, Mapping):
        return {key: on_cpu(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [on_cpu(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def by_rank(members: Sequence[int], parts: Sequence[Part]) -> list[Part]:
    """Parts of these, in the order of the ranks' numbers, as data is cut: members are in that in which they came."""
    return [part for _, part in sorted(zip(members, parts, strict=True), key=lambda each: each[0])]


def combined(parts: Sequence[Part], combine: Combine | None) -> Any:
    """The result of all ranks: what `combine` makes of the parts, or their mean weighted by samples."""
    found = [part for part in parts if part.samples or part.found is not None]
    if combine is not None:
        return combine([part.found for part in found])
    if not found:
        raise UserError(
            "the evaluation found nothing on any rank: return a number, or a dictionary of names and numbers"
        )
    looked = [part for part in found if part.samples]
    if not looked:  # no prepared loader was asked: each rank has looked at all
        looked = [Part(part.found, 1) for part in found]
    return _mean([part.found for part in looked], [part.samples for part in looked])


def _mean(values: Sequence[Any], weights: Sequence[int]) -> Any:
    first = values[0]
    if hasattr(first, "merge_state") and hasattr(first, "compute"):  # torchmetrics
        for other in values[1:]:
            first.merge_state(other)
        return first.compute()
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values], weights) for key in first}
    shapes = [_shape(value) for value in values]
    rows = isinstance(first, torch.Tensor | np.ndarray) and [shape[:1] for shape in shapes] == [(n,) for n in weights]
    if len(set(shapes)) > 1 or (rows and len(values) > 1 and max(weights) > 1):
        raise UserError(
            f"the evaluation returned values of shapes {', '.join(map(str, shapes))} on ranks that looked at"
            f" {', '.join(map(str, weights))} samples, and rows of samples have no mean over ranks: give job.evaluate a"
            " combine, such as combine=torch.cat for tensors"
        )
    if isinstance(first, list | tuple):
        means = [_mean(parts, weights) for parts in zip(*values, strict=True)]
        return type(first)(*means) if hasattr(first, "_fields") else type(first)(means)
    if not isinstance(first, int | float | torch.Tensor | np.ndarray | np.generic):
        raise UserError(
            f"the evaluation returned a {type(first).__name__}: return numbers, tensors or arrays (or lists and"
            " dictionaries of them, or metrics of torchmetrics), or give job.evaluate a function combine"
        )
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list | tuple) else ()


def named(result: Any) -> dict[str, float]:
    """The numbers of a result, for the records: those of a dictionary by name, one number as `metric`, those of a list
    as `metric_0` and so on."""
    if isinstance(result, list | tuple):
        names = getattr(result, "_fields", [f"metric_{place}" for place in range(len(result))])
        result = dict(zip(names, result, strict=True))
    named_values = result if isinstance(result, Mapping) else {"metric": result}
    plain = {name: value for name, value in named_values.items() if _is_number(value)}
    for name in TAKEN:
        if name in plain:
            raise UserError(f"an evaluation gives a metric named {name}, which records use for their own: rename it")
    return numbers("the evaluation", plain)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1
    return isinstance(value, int | float | np.number)


def record(telemetry: Telemetry, applied: int, seconds: float, metrics: Mapping[str, float]) -> str:
    """A line of telemetry, and a sentence for the screen."""
    seconds = round(seconds, 6)
    telemetry.record("evaluation", samples_applied=applied, train_seconds=seconds, **metrics)
    found = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    return f"evaluated after {applied:,} samples, {seconds:.1f} s of training: {found}"
