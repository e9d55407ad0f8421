"""From positions of the sample stream to batches, loaded ahead."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import Dataset, TensorDataset

from hetsync.data.ledger import Span, length
from hetsync.data.transfer import transfer_to
from hetsync.data.workers import Collate, Fetcher, FetchProcesses, FetchThread, fetch, indexed_at_once
from hetsync.errors import UserError
from hetsync.threads import HelperThread, LivedSeconds

T = TypeVar("T")

# Up to so many bytes a batch of tensors is copied where it is used: sooner than another thread would be awake, whose
# Python would take turns with the model's.
COPIED_AT_ONCE = 2**18
LOOK_SECONDS = 0.5  # from one look at how long a batch has been waited for to the next


class EpochOrder:
    """The seeded order of every epoch, a permutation or draws by weights; the same on all ranks, however many.

    Where samples differ in cost, neighbours are chosen so that any run of n samples costs about n times the
    mean, and slices cut anywhere are balanced: within blocks of the shuffled epoch, the sample at stream
    position p is the one whose cost has the rank of frac(p·φ), φ the golden ratio, the sequence of lowest
    discrepancy (Kuipers and Niederreiter 1974, section 2.3).

    Args:
        samples: Samples of an epoch.
        seed: Of the orders.
        costs: Of every sample, or None where they are alike.
        shuffle: False takes samples in their own order.
        used: Samples of an epoch that are used, another choice each; None uses all.
        weights: Of every sample, by which an epoch draws as many with replacement; None takes each once.
    """

    BLOCK = 512

    def __init__(
        self,
        samples: int,
        seed: int,
        costs: Sequence[float] | None = None,
        shuffle: bool = True,
        used: int | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        self._all = samples
        self._samples = used or samples
        self._shuffle = shuffle
        self._in_own_order = not shuffle and costs is None  # that of a long stream would not fit in memory
        self._seed = seed
        self._costs = None if costs is None else torch.as_tensor(costs, dtype=torch.float64)
        self._up_to: torch.Tensor | None = None  # each sample, the fraction of all weights; the last has 1
        if weights is not None:
            sums = weights.cumsum(0)
            self._up_to = sums / sums[-1]
        self._orders: dict[int, torch.Tensor] = {}

    def indices(self, spans: Iterable[Span]) -> list[int]:
        """Indices into the data set at some positions of the stream."""
        out: list[int] = []
        for start, stop in spans:
            while start < stop:
                epoch, offset = divmod(start, self._samples)
                count = min(stop - start, self._samples - offset)
                if self._in_own_order:
                    out += range(offset, offset + count)
                else:
                    out += self._order(epoch)[offset : offset + count].tolist()
                start += count
        return out

    def knows(self, spans: Iterable[Span]) -> bool:
        """Do their indices take no time? The order of a large epoch takes a second."""
        if self._in_own_order:
            return True
        known = self._orders
        for start, stop in spans:
            if (stop - 1) // self._samples not in known or start // self._samples not in known:
                return False
        return True

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            drawn = self._drawn(torch.Generator().manual_seed(((self._seed << 20) + epoch) % 2**64))
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = drawn if self._costs is None else self._balanced(drawn, epoch)
        return self._orders[epoch]

    def _drawn(self, generator: torch.Generator) -> torch.Tensor:
        if self._up_to is not None:  # torch.multinomial takes no more than 2**24 weights
            uniform = torch.rand(self._all, dtype=torch.float64, generator=generator)
            return torch.searchsorted(self._up_to, uniform, right=True)
        return torch.randperm(self._all, generator=generator) if self._shuffle else torch.arange(self._all)

    def _balanced(self, drawn: torch.Tensor, epoch: int) -> torch.Tensor:
        assert self._costs is not None
        golden = (5**0.5 - 1) / 2
        first = epoch * self._samples
        blocks = []
        for start in range(0, self._all, self.BLOCK):
            block = drawn[start : start + self.BLOCK]
            by_cost = block[self._costs[block].argsort(stable=True)]
            positions = torch.arange(first + start, first + start + len(block), dtype=torch.float64)
            blocks.append(by_cost[(positions * golden % 1).argsort().argsort()])
        return torch.cat(blocks)


@dataclass(frozen=True)
class Source:
    """Where a job's training samples come from.

    Args:
        dataset: A map-style data set, the same on every rank.
        collate: Samples to a batch; PyTorch's default_collate where None.
        costs: Work that each sample takes, where they differ.
        workers: Processes of each rank that load its samples; 0 loads on a thread. What a process draws from the
            generators of torch, NumPy and random comes of the run's seed and the batch's place in the stream, so
            augmentation repeats in a resumed run. A thread shares them with the model: there it need not.
        shuffle: False takes samples in the data set's own order.
        used: Samples of an epoch that are used; None uses all.
        weights: An epoch draws by them as many samples as there are, with replacement; None uses each once.
    """

    dataset: Dataset[Any]
    collate: Collate | None = None
    costs: Sequence[float] | None = None
    workers: int = 0
    shuffle: bool = True
    used: int | None = None
    weights: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """UserError where there is not a cost for each sample."""
        if self.costs is not None and len(self.costs) != len(self.dataset):  # type: ignore[arg-type]
            raise UserError(
                f"there are {len(self.costs)} costs, but {len(self.dataset)} training samples:"  # type: ignore[arg-type]
                " give one for each"
            )

    @property
    def epoch_samples(self) -> int:
        return self.used or len(self.dataset)  # type: ignore[arg-type]

    def order(self, seed: int) -> dict[str, int | bool | str | None]:
        """What tells which sample stands at which position of the stream. It holds none of the data."""
        return {
            "epoch_samples": self.epoch_samples,
            "samples": len(self.dataset),  # type: ignore[arg-type]
            "shuffle": self.shuffle,
            "seed": seed if self.shuffle else None,
            "costs": digest(self.costs),
            "weights": digest(self.weights),
        }


def digest(figures: Sequence[float] | torch.Tensor | None) -> str | None:
    """Of one for each sample."""
    if figures is None:
        return None
    return hashlib.sha256(torch.as_tensor(figures, dtype=torch.float64).numpy().tobytes()).hexdigest()


class SlicedWork(Protocol):
    """What a rank is given to compute: its number, and each slice's spans of the sample stream."""

    @property
    def number(self) -> int: ...

    @property
    def slices(self) -> Sequence[Sequence[Span]]: ...


class Loader:
    """A rank's slices. Loads a task as soon as the rank is given it, which is one task ahead of its use (a rank alone:
    up to fifteen short ones). Its first batch goes to the device at once, the others one slice ahead. But nothing of a
    script's next loop is loaded before that begins: the script may change the data set first.

    A batch may take `timeout_seconds`.
    """

    def __init__(self, source: Source, seed: int, device: torch.device, timeout_seconds: float = 600.0) -> None:
        dataset, collate = source.dataset, source.collate
        self._samples = len(dataset)  # type: ignore[arg-type]
        self._order = EpochOrder(self._samples, seed, source.costs, source.shuffle, source.used, source.weights)
        self._seed = seed
        self._transfer = transfer_to(device)
        self._timeout_seconds = timeout_seconds
        self._fetcher: Fetcher = (
            FetchProcesses(dataset, collate, source.workers) if source.workers else FetchThread(dataset, collate)
        )
        self._dataset, self._collate = dataset, collate
        self._at_once = _samples_at_once(source, device)
        self._thread = HelperThread("hetsync-order")
        self._loading: dict[int, Future[deque[Future[Any]]]] = {}
        self._lock = threading.Lock()
        self._until = math.inf  # place in the stream where the script's loop ends
        self._later: dict[int, SlicedWork] = {}  # tasks beyond it

    def begin_loop(self, until: float) -> None:
        """The script loops over batches up to this place in the stream, with the data set as it is now."""
        if (samples := len(self._dataset)) != self._samples:  # type: ignore[arg-type]
            raise UserError(
                f"the data set has {samples} samples now, and had {self._samples} when the job began: keep its length,"
                " by which epochs are counted"
            )
        self._awaited(self._thread.submit(self._fetcher.renew))
        with self._lock:
            self._until = until
            for task in self._later.values():
                self._load(task)
            self._later.clear()

    def prefetch(self, task: SlicedWork) -> None:
        """Returns at once: the order of a large epoch takes a second, and the pipe of a worker may be full."""
        with self._lock:
            if any(start >= self._until for spans in task.slices for start, _ in spans):
                self._later[task.number] = task
                self._thread.submit(self._order.indices, task.slices[0])  # an epoch's order is known by then
            else:
                self._load(task)

    def _load(self, task: SlicedWork) -> None:
        for spans in task.slices:
            if length(spans) > self._at_once or not self._order.knows(spans):
                loading = self._thread.submit(self._submit, task)
                if not loading.cancelled():
                    self._loading[task.number] = loading
                return

    def indices(self, spans: Iterable[Span]) -> list[int]:
        """Into the data set, at some positions of the stream."""
        return self._order.indices(spans)

    def drop(self, task: SlicedWork) -> None:
        """The task will not be computed: what is not being loaded yet never is."""
        with self._lock:
            self._later.pop(task.number, None)
        self._let_go(task.number)

    def stop(self) -> None:
        """No more tasks will be computed."""
        self._thread.drop()
        with self._lock:
            self._later.clear()
        for number in list(self._loading):
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        loading = self._loading.pop(number, None)
        if loading is not None and not loading.cancel():
            loading.add_done_callback(_cancel_batches)

    def _submit(self, task: SlicedWork) -> deque[Future[Any]]:
        """Of each batch, in order; the first is on its way to the device."""
        coming = deque(self._fetcher.submit(self._order.indices(spans), self._seed_of(spans)) for spans in task.slices)
        self._send_first(coming)
        return coming

    def _send_first(self, coming: deque[Future[Any]]) -> None:
        if coming:
            coming[0] = self._transfer.begin(coming[0])

    def _seed_of(self, spans: Iterable[Span]) -> int:
        """Of the batch at these positions of the stream: the same after a resume."""
        return hash((self._seed, *spans)) & (2**63 - 1)

    def slices(self, task: SlicedWork) -> Iterator[Any]:
        """The task's batches on the rank's device; an error of the data set is raised here."""
        if (loading := self._loading.pop(task.number, None)) is None:
            for spans in task.slices:
                yield fetch(self._dataset, self._order.indices(spans), self._collate)
            return
        coming = self._awaited(loading)
        while coming:
            arriving = coming.popleft()
            self._send_first(coming)
            yield self._transfer.complete(self._awaited(arriving))

    def _awaited(self, loading: Future[T]) -> T:
        lived = LivedSeconds()
        while not loading.done():
            if lived.look() >= self._timeout_seconds:
                raise UserError(
                    f"a batch has not been loaded within {self._timeout_seconds:.0f} s: look at the storage, or raise"
                    " run.timeout_seconds"
                )
            wait([loading], LOOK_SECONDS)
        return loading.result()

    def close(self) -> None:
        self._thread.drop()
        self._fetcher.close()  # at a worker's full pipe the thread may wait
        self._thread.close()
        self._transfer.close()


def _cancel_batches(loading: Future[deque[Future[Any]]]) -> None:
    """Of a task, once its batches have been asked for."""
    if not loading.cancelled() and loading.exception() is None:
        for batch in loading.result():
            batch.cancel()


def _samples_at_once(source: Source, device: torch.device) -> int:
    """Samples of a batch that is copied where it is used."""
    dataset = source.dataset
    if device.type != "cpu" or source.workers or not isinstance(dataset, TensorDataset):
        return 0
    if not indexed_at_once(dataset, source.collate):
        return 0
    return COPIED_AT_ONCE // max(1, sum(tensor[:1].nbytes for tensor in dataset.tensors))
