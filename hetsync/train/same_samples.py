"""Do all ranks find the same samples at the same places? Data sets of one length differ where each host lists a folder
in an order of its own, or has a folder of its own: ranks would train on some samples twice, on others never, and on
each other's test samples."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from hetsync.data.random_state import set_aside
from hetsync.data.stream import Stream
from hetsync.data.workers import Collate
from hetsync.errors import UserError, brief
from hetsync.plane.base import Plane
from hetsync.train.evaluation import EvaluationLoader
from hetsync.train.prepared import TrainingLoader

SAMPLES = 8  # of a data set
SECONDS = 0.5  # to read them in; the first is read in any case
READS, MORE_READS = 2, 20  # of each sample; of one that differs
VALUES, SHOWN = 128, 3  # of a tensor
PARTS, DEPTH = 64, 5  # of a sample
GOLDEN = (5**0.5 - 1) / 2

# Decoders and instruction sets differ by host: mean difference over spread, and over size.
OF_SPREAD, OF_SIZE = 0.02, 1e-5


@dataclass(frozen=True)
class Numbers:
    """Some values of a tensor, as a sample's part; `exact`: they are no measured quantities."""

    shape: tuple[int, ...]
    exact: bool
    values: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, array: Any) -> Numbers:
        flat = array.reshape(-1)
        some = flat[np.linspace(0, max(0, len(flat) - 1), min(VALUES, len(flat))).astype(np.int64)]
        wide = some.view(some.real.dtype) if np.iscomplexobj(some) else some
        exact = array.dtype.kind in "iub" and array.dtype != np.uint8
        return cls(tuple(array.shape), exact, np.nan_to_num(wide.astype(np.float64)))

    def is_like(self, other: Any) -> bool:
        if not isinstance(other, Numbers) or (self.shape, self.exact) != (other.shape, other.exact):
            return False
        if self.exact or not len(self.values):
            return np.array_equal(self.values, other.values)
        spread = max(self.values.std(), other.values.std())
        size = max(np.abs(self.values).mean(), np.abs(other.values).mean())
        return bool(np.abs(self.values - other.values).mean() <= OF_SPREAD * spread + OF_SIZE * size)

    def __str__(self) -> str:
        more = ", ..." if self.values.size > SHOWN else ""
        return ", ".join(f"{value:.4g}" for value in self.values[:SHOWN]) + more


Part = Numbers | str
Sample = Mapping[str, Part]  # by what leads to a part


def parts_of(value: Any, path: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Part]]:
    """What can be compared between processes."""
    within: list[tuple[str, Any]]
    match value:
        case torch.Tensor():
            yield path, _of_tensor(value)
            return
        case bool() | int() | float() | np.generic() | np.ndarray():
            yield path, _of_array(np.asarray(value))
            return
        case str():
            yield path, PurePath(value).name if "/" in value else value  # hosts mount folders where they like
            return
        case bytes() | bytearray():
            yield path, hashlib.sha256(value).hexdigest()
            return
        case Mapping():
            within = [(f"{path}[{key!r}]", each) for key, each in value.items()]
        case list() | tuple():
            within = [(f"{path}[{place}]", each) for place, each in enumerate(value)]
        case _ if hasattr(value, "__array_interface__"):  # an image
            yield path, _of_array(np.asarray(value))
            return
        case _:
            public = {name: each for name, each in getattr(value, "__dict__", {}).items() if name[0] != "_"}
            within = [(f"{path}.{name}", each) for name, each in public.items()]
    yield path, f"{type(value).__name__} of {len(within)}"
    for name, each in within if depth else ():
        yield from parts_of(each, name, depth - 1)


def _of_tensor(tensor: torch.Tensor) -> Part:
    try:
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().coalesce().values()
        flat = dense.reshape(-1)
        some = flat[torch.linspace(0, max(0, len(flat) - 1), min(VALUES, len(flat))).long()]
        numbers = Numbers.of((some.float() if some.dtype == torch.bfloat16 else some).cpu().numpy())
    except (RuntimeError, TypeError):  # of a kind that has no plain values
        return f"{tensor.layout}, {tensor.dtype} of shape {tuple(tensor.shape)}"
    return Numbers(tuple(tensor.shape), numbers.exact, numbers.values)


def _of_array(array: Any) -> Part:
    if array.dtype.kind in "biufc":
        return Numbers.of(array)
    return f"{array.shape} {array.reshape(-1)[:VALUES].tolist()}"


class Reader:
    """Samples of a data set as this rank has them. It reads a copy: what a data set opens or counts as it is read is
    not yet there when workers get the data set itself."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset = _copied(dataset)
        self._collate = collate
        self._samples = len(dataset)

    def first(self) -> dict[int, list[Sample]]:
        """Some samples of all over the data set, as many as there is time for."""
        found: dict[int, list[Sample]] = {}
        started = time.monotonic()
        for place in range(min(SAMPLES, self._samples)):
            index = self._samples - 1 if place == 0 else int(place * GOLDEN % 1 * self._samples)
            found[index] = self.versions(index, READS)
            if time.monotonic() - started > SECONDS:
                break
        return found

    def versions(self, index: int, reads: int) -> list[Sample]:
        """What it gives for one sample again and again: the same, unless it draws from a generator of its own."""
        found: list[Sample] = []
        started = time.monotonic()
        while len(found) < reads and (len(found) < READS or time.monotonic() - started < SECONDS):
            with set_aside(seed=0):
                found.append(self._read(index))
        return found

    def _read(self, index: int) -> Sample:
        try:
            sample = self._dataset[index]
        except Exception as error:
            return {"": f"not to be read ({type(error).__name__})"}
        found = dict(_some(parts_of(sample)))
        if self._collate is not None:  # it may do the reading
            try:
                found.update(_some(parts_of(self._collate([sample]), "collated")))
            except Exception as error:  # perhaps for want of a second sample
                found["collated"] = type(error).__name__
        return found


def _some(parts: Iterator[tuple[str, Part]]) -> Iterator[tuple[str, Part]]:
    return (part for part, _ in zip(parts, range(PARTS), strict=False))


def _copied(dataset: Any) -> Any:
    """With the data sets that are within it, but not their content."""
    try:
        made = copy.copy(dataset)
        for name, value in list(vars(made).items()):
            if isinstance(value, Dataset) or (isinstance(dataset, Stream) and name == "data"):
                setattr(made, name, _copied(value))
            elif isinstance(value, list) and all(isinstance(each, Dataset) for each in value):
                setattr(made, name, [_copied(each) for each in value])
    except (TypeError, AttributeError):  # it cannot be copied, or has no attributes
        return dataset
    return made


class Difference(NamedTuple):
    """Of the sample at a place of some data; `part` leads to what differs within it."""

    data: str
    place: int
    part: str
    here: str
    there: str


def difference(data: str, place: int, here: Sequence[Sample], there: Sequence[Sample]) -> Difference | None:
    """What is never alike, as often as it was read."""
    for part in {**there[0], **here[0]}:
        mine, theirs = ([each.get(part, "missing") for each in versions] for versions in (here, there))
        if not any(_is_like(one, other) for one in mine for other in theirs) and _steady(mine) and _steady(theirs):
            return Difference(data, place, part, str(mine[0]), str(theirs[0]))
    return None


def _is_like(one: Part, other: Part) -> bool:
    return one.is_like(other) if isinstance(one, Numbers) else one == other


def _steady(parts: Sequence[Part]) -> bool:
    return all(_is_like(parts[0], other) for other in parts[1:])


def require_same_samples(
    plane: Plane, hosts: Sequence[str], loader: TrainingLoader, tests: Sequence[EvaluationLoader]
) -> None:
    """Collective. UserError that names a sample that differs between ranks, which are on these hosts.

    Random numbers are seeded alike for it. What a data set draws from a generator of its own shows in that it gives
    other values again, and is left out; a sample that differs is read more often before that is said.
    """
    if plane.size == 1:
        return
    readers = {f"sample of test data {n}": Reader(test.whole, test.collate) for n, test in enumerate(tests)}
    source = loader.source
    if not isinstance(source.dataset, Stream) or not source.dataset.is_walked:
        readers = {"sample of the training data": Reader(source.dataset, source.collate), **readers}
    mine = {data: reader.first() for data, reader in readers.items()}
    theirs = plane.broadcast_object(mine)
    compared = (
        difference(data, index, versions, theirs[data][index])
        for data, samples in mine.items()
        for index, versions in samples.items()
        if index in theirs[data]
    )
    suspect = _first(plane.gather_objects(_first(compared)))
    if suspect is None:
        return
    more = readers[suspect.data].versions(suspect.place, MORE_READS)
    verdicts = plane.gather_objects(difference(suspect.data, suspect.place, more, plane.broadcast_object(more)))
    for rank, verdict in zip(plane.members, verdicts, strict=True):
        if verdict is not None:
            _refuse(verdict, rank, hosts)


def _first(differences: Iterable[Difference | None]) -> Difference | None:
    return next((each for each in differences if each is not None), None)


def _refuse(found: Difference, rank: int, hosts: Sequence[str]) -> None:
    part = f"{found.part} of " if found.part else ""
    sample = found.data.replace("sample", f"sample {found.place}")
    raise UserError(
        f"{part}{sample} is {brief(found.here)} on rank {rank} ({hosts[rank]}), and another, {brief(found.there)}, on"
        f" rank 0 ({hosts[0]}): give all ranks the same data in the same order, by sorted() where files are"
        " listed or a set is gone through, and by one folder that all hosts share, or equal copies of it"
    )
