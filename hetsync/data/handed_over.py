"""A `DataLoader` that a script hands over: what it says of the data, the batch and the workers is taken over; the order
of samples is the ledger's."""

from __future__ import annotations

import math
import multiprocessing
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from hetsync.data.ledger import total_samples
from hetsync.data.loader import Source
from hetsync.data.stream import Stream, is_stream
from hetsync.data.workers import RUN_ANEW, WORKER, Collate
from hetsync.errors import USER_ERROR, UserError

OF_A_LOADER = {  # a DataLoader's own attributes, which make its batches
    *("dataset", "shuffle", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator"),
    *("num_workers", "worker_init_fn", "multiprocessing_context", "persistent_workers", "prefetch_factor"),
    *("pin_memory", "pin_memory_device", "timeout"),
}


def _check_dataset(dataset: Any) -> None:
    """UserError unless its samples can be addressed."""
    kind = type(dataset).__name__
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"dataset is a {kind}: give a map-style data set, which has a length and is indexed, so that each sample"
            " can be used once an epoch, whichever rank takes it"
        )
    if not len(dataset):
        raise UserError("dataset has no samples: the data set is empty")


def shuffles(loader: DataLoader[Any]) -> bool:
    """Does it draw an order of its own? UserError for an order that HetSync's cannot stand for."""
    _check_class(loader)
    if is_stream(loader.dataset):
        raise UserError(
            f"the DataLoader's data set is a {type(loader.dataset).__name__}, which has no end that all ranks know: as"
            " training data give it to job.loader with samples=N; test data have a length and are indexed"
        )
    if loader.batch_size is None or not _iterates_as(loader.batch_sampler, BatchSampler):
        raise UserError(
            f"the DataLoader batches by a {type(loader.batch_sampler).__name__}: give its data set and a batch_size to"
            " job.loader, with costs= where samples differ in length"
        )
    sampler: Any = loader.sampler
    if _iterates_as(sampler, RandomSampler) or _iterates_as(sampler, WeightedRandomSampler):
        weighted, samples = isinstance(sampler, WeightedRandomSampler), len(loader.dataset)  # type: ignore[arg-type]
        if sampler.num_samples != samples or (weighted and not sampler.replacement):
            how = "with" if sampler.replacement else "without"
            raise UserError(
                f"the DataLoader's {type(sampler).__name__} draws {sampler.num_samples} of {samples} samples {how}"
                " replacement, but HetSync draws as many as there are in an epoch, each once or by weights with"
                " replacement: give the data set itself to job.loader, with weights= where they differ"
            )
        return True
    if _iterates_as(sampler, SequentialSampler):
        return False
    remedies = {
        "DistributedSampler": "leave it out, and give shuffle=True",
        "SubsetRandomSampler": "give a torch.utils.data.Subset and shuffle=True",
    }
    remedy = remedies.get(
        type(sampler).__name__,
        "give a data set that holds what is to be drawn, and shuffle=True, or give job.loader weights=",
    )
    raise UserError(
        f"the DataLoader has a {type(sampler).__name__}, but the order of samples is HetSync's, one pass an epoch over"
        f" all ranks: {remedy}"
    )


def _weights_of(loader: DataLoader[Any]) -> Any:
    """By which it draws with replacement; None where it takes each sample once."""
    sampler = loader.sampler
    if isinstance(sampler, WeightedRandomSampler):
        return sampler.weights
    with_replacement = isinstance(sampler, RandomSampler) and sampler.replacement
    return torch.ones(len(loader.dataset)) if with_replacement else None  # type: ignore[arg-type]


def _checked_weights(weights: Any, samples: int) -> torch.Tensor | None:
    """UserError where samples cannot be drawn by them."""
    if weights is None:
        return None
    try:
        found = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"weights is a {type(weights).__name__} that does not hold plain numbers: give a tensor, array or list with"
            " one for each sample"
        ) from None
    if found.shape != (samples,):
        raise UserError(
            f"weights has the shape {tuple(found.shape)}, but there are {samples} training samples: give one for each,"
            " such as weights_of_classes[labels]"
        )
    wrong = ~(found.isfinite() & (found >= 0))
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise UserError(f"weights has {found[place]:g} for sample {place}: give finite numbers, 0 or more")
    if not 0 < (total := found.sum()) < math.inf:
        raise UserError(f"weights add up to {total:g}: give one that is above 0, and a sum that is finite")
    return found


def _iterates_as(thing: Any, kind: type[Any]) -> bool:
    """Is it of this kind, and a subclass only in how it is made? Another `__iter__` would never be called."""
    return isinstance(thing, kind) and type(thing).__iter__ is kind.__iter__


def _check_class(loader: DataLoader[Any]) -> None:
    for name in ("__iter__", "_get_iterator"):  # libraries have the second, which the first calls
        if getattr(type(loader), name) is not getattr(DataLoader, name):
            raise UserError(
                f"the DataLoader is a {type(loader).__name__} with an {name} of its own, which HetSync does not call,"
                " as ranks load batches by themselves: do that work in the data set, in the collate function or in the"
                " loop, and give a plain DataLoader"
            )


def check_test_loader(loader: DataLoader[Any]) -> None:
    """UserError where an evaluation cannot do as it says."""
    shuffles(loader)  # or its order is one that HetSync's cannot stand for
    if _weights_of(loader) is not None:
        raise UserError(
            f"the DataLoader of test data has a {type(loader.sampler).__name__} that draws with replacement, but"
            " HetSync evaluates each sample once: leave it out"
        )
    if loader.drop_last:
        raise UserError(
            "the DataLoader of test data has drop_last=True, but HetSync evaluates all samples: leave it out (training"
            " data that are not shuffled go to job.loader)"
        )


def source_of(
    data: Any,
    batch_size: int | None,
    collate: Collate | None,
    workers: int | None,
    costs: Sequence[float] | None,
    samples: int | None = None,
    weights: Any = None,
) -> tuple[Source, int]:
    """Where training samples come from, and B, from a data set or from a loader. Arguments go before what a loader has.
    `samples`: of an iterable data set, how many to read."""
    if workers is not None and (not isinstance(workers, int) or workers < 0):
        raise UserError(f"job.loader got {workers} workers: give a whole number, 0 or more")
    if is_stream(data.dataset if isinstance(data, DataLoader) else data):
        return _stream_source(data, batch_size, collate, workers, {"costs": costs, "weights": weights}, samples)
    if not isinstance(data, DataLoader):
        _check_dataset(data)
        if batch_size is None:
            raise UserError("job.loader needs a batch_size, in samples of all ranks together")
        _check_batch(batch_size, len(data))
        drawn = _checked_weights(weights, len(data))
        return Source(data, collate, costs, workers or 0, weights=drawn), batch_size
    shuffle = shuffles(data)
    _check_dataset(data.dataset)
    samples = len(data.dataset)  # type: ignore[arg-type]
    batch_size = data.batch_size if batch_size is None else batch_size
    assert batch_size is not None
    _check_batch(batch_size, samples)
    _check_options(data)
    drawn = _checked_weights(_weights_of(data) if weights is None else weights, samples)
    return (
        Source(
            data.dataset,
            collate_of(data) if collate is None else collate,
            costs,
            data.num_workers if workers is None else workers,
            shuffle or drawn is not None,
            samples // batch_size * batch_size if data.drop_last else None,
            drawn,
        ),
        batch_size,
    )


def told_samples(samples: Any, epochs: Any, epoch_samples: int) -> int | None:
    """Samples to train on, as `job.loader` was told; None where it was not. UserError for what cannot be."""
    if samples is not None and epochs is not None:
        raise UserError("job.loader got epochs and samples: give one of them")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise UserError(f"job.loader got samples {samples}: give a whole number, 1 or more")
    if epochs is not None and (not isinstance(epochs, int | float) or not 0 < epochs < math.inf):
        raise UserError(f"job.loader got epochs {epochs}: give a number above 0")
    return None if samples is None and epochs is None else total_samples(samples, epochs or 0.0, epoch_samples)


def _stream_source(
    data: Any,
    batch_size: int | None,
    collate: Collate | None,
    workers: int | None,
    figures: Mapping[str, Any],
    samples: int | None,
) -> tuple[Source, int]:
    drop_last = False
    if isinstance(data, DataLoader):
        _check_class(data)
        _check_options(data)
        batch_size = data.batch_size if batch_size is None else batch_size
        collate = collate_of(data) if collate is None else collate
        workers = data.num_workers if workers is None else workers
        data, drop_last = data.dataset, data.drop_last
    kind = type(data).__name__
    if samples is None and hasattr(data, "__len__"):
        samples = len(data)
    if samples is None:
        raise UserError(
            f"the training data is a {kind}, which has no length: give job.loader samples=N, those of an epoch"
        )
    if not isinstance(samples, int) or samples < 1:
        raise UserError(f"samples is {samples}: give a whole number of samples, 1 or more")
    for name in (name for name, given in figures.items() if given is not None):
        raise UserError(
            f"job.loader got {name} with a {kind}, whose samples come in an order of their own: leave {name} out"
        )
    if batch_size is None:
        raise UserError("job.loader needs a batch_size, in samples of all ranks together")
    _check_batch(batch_size, samples)
    used = samples // batch_size * batch_size if drop_last else None
    return Source(Stream(data, samples), collate, None, workers or 0, shuffle=False, used=used), batch_size


class InPlaceOfLoader(ABC):
    """What scripts ask of a `DataLoader` beside its batches, whose order and loading are HetSync's.

    Attributes: as the DataLoader's, or as `job.loader` was told. None of them can be set any more.
    """

    collate_fn: Collate
    num_workers: int
    pin_memory: bool
    drop_last: bool
    batch_size: int

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_A_LOADER and (name in self.__dict__ or name not in InPlaceOfLoader.__annotations__):
            raise UserError(
                f"a prepared loader's {name} was set, by which its batches are made already: give it to the DataLoader"
                " (or to job.loader) when that is made, or let the data set look at what changes"
            )
        super().__setattr__(name, value)

    @property
    @abstractmethod
    def dataset(self) -> Any: ...

    @property
    @abstractmethod
    def shuffle(self) -> bool: ...

    @property
    def sampler(self) -> Sampler[int]:
        return RandomSampler(self.dataset) if self.shuffle else SequentialSampler(self.dataset)

    @property
    def batch_sampler(self) -> BatchSampler:
        return BatchSampler(self.sampler, self.batch_size, self.drop_last)


def collate_of(loader: DataLoader[Any]) -> Collate | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn


def _check_batch(batch_size: int, samples: int) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: give a whole number of samples, 1 or more")
    if batch_size > samples:
        one = "split it, a graph into subgraphs or sampled neighbourhoods, or train it in one process without HetSync"
        remedy = one if samples == 1 else "lower it"
        raise UserError(f"batch_size is {batch_size}, but the data set has {samples} samples: {remedy}")


def _check_options(loader: DataLoader[Any]) -> None:
    if loader.generator is not None or getattr(loader.sampler, "generator", None) is not None:
        raise UserError(
            "the DataLoader has a generator, but the order of samples, and what workers draw, come of the job's seed:"
            " leave it out, and set the seed of hetsync.join"
        )
    if loader.timeout:
        raise UserError(
            "the DataLoader has a timeout, but HetSync waits for a batch as for all else: leave it out, and set the"
            " timeout_seconds of hetsync.join"
        )
    if loader.worker_init_fn is not None:
        raise UserError(
            "the DataLoader has a worker_init_fn, which HetSync's workers do not call: they are seeded already; do what"
            " else it does in the data set"
        )
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() == "fork":
        raise UserError(
            "the DataLoader's workers are to be forked, which may hang a process that runs MPI: leave"
            " multiprocessing_context out, and HetSync spawns them"
        )


def check_not_a_worker() -> None:
    """UserError in a process that was spawned and has come to the script's own lines; a data worker ends, and its rank
    says why."""
    runs_anew = getattr(sys.modules.get("__mp_main__"), "__name__", None) == "__mp_main__"  # as Python names it then
    if multiprocessing.parent_process() is None and not runs_anew:
        return
    if multiprocessing.current_process().name == WORKER:
        sys.exit(USER_ERROR)
    raise UserError(RUN_ANEW)
