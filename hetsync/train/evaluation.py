"""Scores on the test data, each rank on its part: while training goes on, or at rest."""

from __future__ import annotations

import copy
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from hetsync.balance.shares import apportion
from hetsync.data.evaluation import TAKEN, evaluating, numbers
from hetsync.data.handed_over import InPlaceOfLoader, collate_of
from hetsync.data.random_state import set_aside
from hetsync.data.transfer import to_device
from hetsync.data.workers import fetch
from hetsync.errors import UserError, brief
from hetsync.plane import codec
from hetsync.sync.milestones import Evaluation
from hetsync.telemetry import Telemetry

Combine = Callable[[list[Any]], Any]

WHAT_TO_RETURN = (
    "return a pair (sum, count) of two numbers, such as (correct, len(labels)) added up over batches, a metric of"
    " hetsync.metrics or torchmetrics, or a dictionary of these; or give job.evaluate a combine, such as torch.cat of"
    " rows"
)


class RankParts:
    """Which part of the test data this rank evaluates: about as large as its share, or about as large as the others'.
    Parts are never all of one size: a count that is the same on all ranks is then seen not to be of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.shares: Sequence[int] = [1] * ranks

    def of(self, samples: int) -> range:
        parts = apportion(samples, dict(enumerate(self.shares)))
        having = [rank for rank, part in parts.items() if part]
        if len(having) > 1 and {parts[rank] for rank in having} == {parts[having[0]]} != {1}:
            parts[having[0]] += 1
            parts[having[-1]] -= 1
        first = sum(parts[lower] for lower in range(self.rank))
        return range(first, first + parts[self.rank])


class EvaluationLoader(InPlaceOfLoader):
    """In place of a `DataLoader` of test data: batches on this rank's device, of its part where all ranks evaluate
    together (`cut`), and of all the data elsewhere, so that what a rank finds there is the whole."""

    def __init__(self, loader: DataLoader[Any], parts: RankParts, device: torch.device) -> None:
        self.whole = loader.dataset
        self.batch_size = loader.batch_size or 1
        self.collate_fn, self.num_workers = loader.collate_fn, loader.num_workers
        self.pin_memory, self.drop_last = loader.pin_memory, False
        self.collate = collate_of(loader)
        self._parts = parts
        self._cut = False
        self._device = device

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Within, it has this rank's part only."""
        self._cut = True
        try:
            yield
        finally:
            self._cut = False

    @property
    def part(self) -> range:
        return self.rank_part if self._cut else range(len(self.whole))  # type: ignore[arg-type]

    @property
    def rank_part(self) -> range:
        return self._parts.of(len(self.whole))  # type: ignore[arg-type]

    @property
    def dataset(self) -> Dataset[Any]:
        """The samples of its batches: scripts ask for its length."""
        return Subset(self.whole, self.part) if self._cut else self.whole

    @property
    def shuffle(self) -> bool:
        return False

    def __len__(self) -> int:
        return -(-len(self.part) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self.batches_of(self.part)

    def batches_of(self, part: range) -> Iterator[Any]:
        for start in range(part.start, part.stop, self.batch_size):
            indices = list(range(start, min(part.stop, start + self.batch_size)))
            yield to_device(fetch(self.whole, indices, self.collate), self._device)


class Evaluations:
    """A job's evaluations. `metrics` are the newest: rank 0's while training goes on, on all ranks at rest. `model` has
    all that was prepared."""

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
        self.model = torch.nn.ModuleList([model, *averages])  # whatever an evaluation may look at
        self._loaders = loaders
        self._function: Callable[[], Any] = lambda: None
        self._combine: Combine | None = None
        self._done: deque[tuple[int, float, dict[str, float]]] = deque()
        self._names: codec.Names = codec.NOTHING  # of classes in what this rank has found last

    def use(self, function: Callable[[], Any], combine: Combine | None) -> None:
        """What to do where the terms want an evaluation."""
        self._function, self._combine = function, combine

    def score(self, shares: Sequence[int]) -> bytes | None:
        return self.part_of(self._function, shares)

    def part_of(self, function: Callable[[], Any], shares: Sequence[int]) -> bytes | None:
        """What the function finds on this rank's part, for `result_of` of any rank; None where that has no sample. In
        evaluation mode, without gradients, drawing alike each time."""
        self._before()
        self._parts.shares = [min(1, share) for share in shares] if self._equal else shares
        devices = {parameter.device for parameter in self.model.parameters()}
        with ExitStack() as held:
            for loader in self._loaders:
                held.enter_context(loader.cut())
            if self._loaders and not any(len(loader) for loader in self._loaders):
                return None
            held.enter_context(evaluating(self.model))
            held.enter_context(torch.no_grad())
            held.enter_context(set_aside(*devices, seed=0))
            found = function()
            sizes = [(len(loader.part), len(loader.whole)) for loader in self._loaders]  # type: ignore[arg-type]
        part, self._names = codec.dumps_own((sizes, on_cpu(found)))
        return part

    def result_of(self, parts: Sequence[bytes | None], combine: Combine | None) -> Any:
        """Of all ranks, which are in order. UserError where these have not found what becomes one."""
        told = [codec.loads(part, self._names) for part in parts if part is not None]
        found = [each for _, each in told]
        if combine is None:
            require_own_counts([sizes for sizes, _ in told], found)
        return combined(found, combine)

    def agreed_result(
        self,
        parts: Sequence[bytes | None],
        combine: Combine | None,
        mine: bytes | None,
        exchange: Callable[[Any], Sequence[Any]],
    ) -> list[Any]:
        """Collective: `result_of`, once; none where who could tell has died meanwhile. A rank that has found nothing
        takes another's, as it knows no classes of what they have found."""
        knows = mine is not None or not any(parts)
        results = [self.result_of(parts, combine)] if knows else []
        if any(parts) and not all(parts):
            return [result for told in exchange(results) for result in told][:1]
        return results

    def report(self, evaluation: Evaluation, train_seconds: float) -> None:
        """From the communication thread: `take` has it for the main thread."""
        metrics = named(self.result_of(evaluation.parts, self._combine))
        self.metrics = metrics
        self._done.append((evaluation.samples_applied, train_seconds, metrics))

    def take(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Samples applied, seconds of training, and metrics, of those reported since the last call."""
        while self._done:
            yield self._done.popleft()


def check_callable(who: str, function: Any, *arguments: Any, **named: Any) -> None:
    """UserError for what cannot be called with the arguments, as far as its signature is known."""
    if not callable(function):
        raise UserError(f"{who} got a {type(function).__name__}: give a function")
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may supply arguments
    except (TypeError, ValueError):  # some of C have none
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        kinds = [type(each).__name__ for each in arguments]
        given = ", ".join([*kinds, *(f"{key}={type(each).__name__}" for key, each in named.items())])
        raise UserError(
            f"{who} got {name}{signature}, which is called with ({given}) here ({error}): wrap it in a lambda"
        ) from None


def on_cpu(value: Any) -> Any:
    """The value, which other ranks get: they may have no such device."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, torch.nn.Module) or _is_metric(value):
        copied = copy.deepcopy(value)  # the script goes on with its own
        return copied.to("cpu") if _has_verb(copied, "to") else copied
    if isinstance(value, Mapping):
        return {key: on_cpu(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [on_cpu(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def by_rank(members: Sequence[int], found: Sequence[Any]) -> list[Any]:
    """What these have found, in the order of the ranks' numbers, as data is cut: members are in that in which they
    came."""
    return [part for _, part in sorted(zip(members, found, strict=True), key=lambda each: each[0])]


def require_own_counts(sizes: Sequence[Sequence[tuple[int, int]]], found: Sequence[Any]) -> None:
    """UserError where all ranks have counted a whole set of test data, of which each has seen a part. `sizes`: of each
    rank's parts, and of the sets."""
    wholes = {whole for each in zip(*sizes, strict=True) for part, whole in each if len({part for part, _ in each}) > 1}
    counts = [dict(_counts_in("its result", each)) for each in found if each is not None]
    for name, count in counts[0].items() if len(counts) > 1 else ():
        if count in wholes and all(each.get(name) == count for each in counts):
            raise UserError(
                f"the evaluation returned {count} as the count of {name} on each rank, which is that of all of the test"
                " data: each has a part of it, so count what the function has seen, such as len(labels) added up over"
                " batches, or len(loader.dataset) of the prepared loader"
            )


def _counts_in(name: str, found: Any) -> Iterator[tuple[str, int]]:
    """Whole ones, with their names."""
    if _is_pair(found):
        if _is_whole(found[1]):
            yield name, int(found[1])
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from _counts_in(str(key), value)
    elif isinstance(found, tuple):
        for place, value in enumerate(found):
            yield from _counts_in(f"{name}[{place}]", value)


def combined(found: Sequence[Any], combine: Combine | None) -> Any:
    """The result of all ranks: what `combine` makes of what they have found, or what its sums and counts, and its
    metrics, come to. None is what a function has found that returns nothing."""
    found = [each for each in found if each is not None]
    if combine is not None:
        return combine(found)
    if not found:
        raise UserError(f"the evaluation found nothing on any rank: {WHAT_TO_RETURN}")
    for total, count in filter(_is_pair, found):
        _check_nameless(total, count)
    return _result("its result", found)


def _check_nameless(total: Any, count: Any) -> None:
    """UserError where a pair without a name may be a mean and some count, such as a loss and the correct ones, which
    would pass for a sum and its count."""
    if not float(total).is_integer() and _is_whole(count):
        raise UserError(
            f"the evaluation returned {brief((total, count))}, which without a name may be a mean beside a count: give"
            ' a sum a name, as in return {"loss": (total, samples)}, and a loss and an accuracy one each'
        )


def _result(name: str, found: Sequence[Any]) -> Any:
    """Of what ranks have found under this name."""
    for is_one, result_of in KINDS:
        if all(map(is_one, found)):
            return result_of(name, found)
    odd = next((each for each in found if not any(is_one(each) for is_one, _ in KINDS)), found[0])
    raise UserError(
        f"the evaluation returned {brief(odd)} as {name}, without its count, and ranks whose parts of the test data"
        f" differ have no mean of such: {WHAT_TO_RETURN}"
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (_is_metric(value) and _has_verb(value, "keys"))


def _of_mappings(_: str, found: Sequence[Any]) -> dict[Any, Any]:
    keys = dict.fromkeys(key for each in found for key in each.keys())  # noqa: SIM118 (a collection of metrics)
    return {key: _result(str(key), [each[key] for each in found if key in each.keys()]) for key in keys}  # noqa: SIM118


def _is_metric(value: Any) -> bool:
    """One of `hetsync.metrics`, or of torchmetrics."""
    return _has_verb(value, "compute")


def _has_verb(value: Any, verb: str) -> bool:
    return callable(getattr(value, verb, None))


def _of_metrics(_: str, found: Sequence[Any]) -> Any:
    merged, *others = found
    for other in others:
        merged.merge_state(other)
    merged.sync_on_compute = False  # torchmetrics would add up over a process group of the script's once more
    return merged.compute()


def _is_pair(value: Any) -> bool:
    """A sum and a count. What has several values may have one for each sample, such as predictions and labels."""
    return type(value) is tuple and len(value) == 2 and _is_number(value[0]) and _is_one(value[1])


def _is_number(value: Any) -> bool:
    """A real one, or a tensor or array of one; True is none."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return _is_one(value) and np.asarray(value).dtype.kind in "iuf"


def _is_one(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | np.ndarray | np.number | np.bool_) and np.size(value) == 1


def _of_pairs(name: str, pairs: Sequence[tuple[Any, Any]]) -> float:
    for _, count in pairs:
        if not _is_whole(count):
            raise UserError(
                f"the evaluation returned {brief(count)} as the count of {name}, which is no whole number, such as"
                f" int(mask.sum()): {WHAT_TO_RETURN}"
            )
    columns = zip(*pairs, strict=True)
    total, count = (sum(each.item() if hasattr(each, "item") else each for each in column) for column in columns)
    return total / count if count else math.nan


def _is_row(value: Any) -> bool:
    """A tuple has the same places on all ranks, and so have metrics; any other list may have one for each sample."""
    return isinstance(value, tuple) or (isinstance(value, list) and bool(value) and all(map(_is_metric, value)))


def _of_rows(name: str, found: Sequence[Any]) -> Any:
    """Values place by place."""
    kind = type(found[0])
    lengths = sorted({len(each) for each in found})
    if len(lengths) > 1:
        raise UserError(
            f"the evaluation returned {', '.join(map(str, lengths))} values as {name} on the ranks, which have no mean:"
            f" {WHAT_TO_RETURN}"
        )
    results = [_result(name, values) for values in zip(*found, strict=True)]
    return kind(*results) if hasattr(kind, "_fields") else kind(results)


def _is_whole(count: Any) -> bool:
    if isinstance(count, torch.Tensor):
        return not (count.is_floating_point() or count.is_complex() or count.dtype == torch.bool)
    return np.asarray(count).dtype.kind in "iu"


KINDS: Sequence[tuple[Callable[[Any], bool], Callable[[str, Sequence[Any]], Any]]] = (
    (_is_mapping, _of_mappings),
    (_is_metric, _of_metrics),
    (_is_pair, _of_pairs),
    (_is_row, _of_rows),
)


def named(result: Any) -> dict[str, float]:
    """The numbers of a result, for the records: those of a dictionary by name, one number as `metric`, those of a list
    as `metric_0` and so on."""
    if isinstance(result, list | tuple):
        names = getattr(result, "_fields", [f"metric_{place}" for place in range(len(result))])
        result = dict(zip(names, result, strict=True))
    named_values = result if isinstance(result, Mapping) else {"metric": result}
    plain = {name: value for name, value in named_values.items() if _is_one(value)}
    for name in TAKEN:
        if name in plain:
            raise UserError(f"an evaluation gives a metric named {name}, which records use for their own: rename it")
    return numbers("the evaluation", plain)


def record(telemetry: Telemetry, applied: int, seconds: float, metrics: Mapping[str, float]) -> str:
    """A line of telemetry, and a sentence for the screen."""
    seconds = round(seconds, 6)
    telemetry.record("evaluation", samples_applied=applied, train_seconds=seconds, **metrics)
    found = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    return f"evaluated after {applied:,} samples, {seconds:.1f} s of training: {found}"
