"""From positions of the sample stream to batches, loaded ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from hetsync.data.ledger import Span
from hetsync.data.workers import Collate, Fetcher, FetchProcesses, FetchThread
from hetsync.sync.messages import Piece


class EpochOrder:
    """The seeded permutation of every epoch; the same on all ranks and at every world size.

    Where samples differ in cost, neighbours are chosen so that any run of n samples costs about n times the
    mean, and slices cut anywhere are balanced: within blocks of the shuffled epoch, the sample at stream
    position p is the one whose cost has the rank of frac(p·φ), φ the golden ratio, the sequence of lowest
    discrepancy (Kuipers and Niederreiter 1974, section 2.3).

    Args:
        samples: Samples of an epoch.
        seed: Of the permutations.
        costs: Of every sample, or None where they are alike.
    """

    BLOCK = 512

    def __init__(self, samples: int, seed: int, costs: Sequence[float] | None = None) -> None:
        self._samples = samples
        self._seed = seed
        self._costs = None if costs is None else torch.as_tensor(costs, dtype=torch.float64)
        self._permutations: dict[int, torch.Tensor] = {}

    def indices(self, spans: Iterable[Span]) -> list[int]:
        """Indices into the data set at some positions of the stream."""
        out: list[int] = []
        for start, stop in spans:
            while start < stop:
                epoch, offset = divmod(start, self._samples)
                count = min(stop - start, self._samples - offset)
                out += self._permutation(epoch)[offset : offset + count].tolist()
                start += count
        return out

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
            shuffled = torch.randperm(self._samples, generator=generator)
            self._permutations = {e: p for e, p in self._permutations.items() if e >= epoch - 1}
            self._permutations[epoch] = shuffled if self._costs is None else self._balanced(shuffled, epoch)
        return self._permutations[epoch]

    def _balanced(self, shuffled: torch.Tensor, epoch: int) -> torch.Tensor:
        assert self._costs is not None
        golden = (5**0.5 - 1) / 2
        first = epoch * self._samples
        blocks = []
        for start in range(0, self._samples, self.BLOCK):
            block = shuffled[start : start + self.BLOCK]
            by_cost = block[self._costs[block].argsort(stable=True)]
            positions = torch.arange(first + start, first + start + len(block), dtype=torch.float64)
            blocks.append(by_cost[(positions * golden % 1).argsort().argsort()])
        return torch.cat(blocks)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


@dataclass(frozen=True)
class Source:
    """Where a job's training samples come from.

    Args:
        dataset: A map-style data set, the same on every rank.
        collate: Samples to a batch; PyTorch's default_collate where None.
        costs: Work that each sample takes, where they differ.
        workers: Processes of each rank that load its samples; 0 loads on a thread.
    """

    dataset: Dataset[Any]
    collate: Collate | None = None
    costs: Sequence[float] | None = None
    workers: int = 0


class Loader:
    """A rank's slices. Loads a piece as soon as the rank is given it, which is one piece ahead of its use."""

    def __init__(self, source: Source, seed: int, device: torch.device) -> None:
        dataset, collate = source.dataset, source.collate
        self._order = EpochOrder(len(dataset), seed, source.costs)  # type: ignore[arg-type]
        self._device = device
        self._fetcher: Fetcher = (
            FetchProcesses(dataset, collate, source.workers) if source.workers else FetchThread(dataset, collate)
        )
        self._loading: dict[int, list[Future[Any]]] = {}

    def prefetch(self, piece: Piece) -> None:
        self._loading[piece.number] = [self._fetcher.submit(self._order.indices(spans)) for spans in piece.slices]

    def slices(self, piece: Piece) -> Iterable[Any]:
        """The piece's batches on the rank's device; an error of the data set is raised here."""
        for loading in self._loading.pop(piece.number):
            yield to_device(loading.result(), self._device)

    def close(self) -> None:
        self._fetcher.close()
