"""Iterable data sets: their samples by number, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from hetsync.data.handed_over import shuffles, source_of
from hetsync.data.loader import EpochOrder
from hetsync.data.stream import Stream
from hetsync.errors import UserError


class Numbers(IterableDataset[int]):
    """0, 1, 2, ...; counts how often it was opened."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.opened = 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        return iter(range(self.samples))


class Addressed(Numbers):
    def read(self, start: int, stop: int) -> list[int]:
        return list(range(start, min(stop, self.samples)))


def test_a_reader_keeps_what_it_is_asked_for() -> None:
    data = Numbers(100)
    stream = Stream(data, 100)
    assert stream.__getitems__([3, 4, 10, 11]) == [3, 4, 10, 11]
    assert stream.__getitems__([40]) == [40]
    assert data.opened == 1


def test_an_earlier_place_opens_the_data_anew() -> None:
    data = Numbers(100)
    stream = Stream(data, 100)
    assert stream.__getitems__([50, 51, 7, 8, 60]) == [50, 51, 7, 8, 60]
    assert data.opened == 2


def test_what_can_be_addressed_is_never_iterated() -> None:
    data = Addressed(100)
    assert Stream(data, 100).__getitems__([90, 91, 3]) == [90, 91, 3]
    assert data.opened == 0


def test_workers_read_for_themselves() -> None:
    stream = Stream(Numbers(10), 10)
    stream.__getitems__([5])
    assert pickle.loads(pickle.dumps(stream)).__getitems__([0, 1]) == [0, 1]


@pytest.mark.parametrize("data", [Numbers(70), Addressed(70)], ids=["iterated", "addressed"])
@pytest.mark.parametrize("indices", [[60, 61, 69, 70], [80, 81], [68, 69, 70, 71]])
def test_an_early_end_says_how_many_there_were(data: Any, indices: list[int]) -> None:
    found = "at most 80" if isinstance(data, Addressed) and indices[0] == 80 else "70"
    with pytest.raises(UserError, match=f"the training data has {found} samples, but 100 are to be read"):
        Stream(data, 100).__getitems__(indices)


def test_its_own_order_takes_no_memory() -> None:
    order = EpochOrder(10**15, seed=0, shuffle=False)
    assert order.indices([(10**15 - 2, 10**15 + 1)]) == [10**15 - 2, 10**15 - 1, 0]


def test_a_loader_of_a_stream_is_understood() -> None:
    loader = DataLoader(Numbers(100), batch_size=8, num_workers=2, drop_last=True)
    source, batch_size = source_of(loader, None, None, None, None, 99)
    assert (batch_size, source.workers, source.shuffle, source.epoch_samples) == (8, 2, False, 96)


class Sized(Numbers):
    def __len__(self) -> int:
        return self.samples


def test_a_length_need_not_be_told() -> None:
    assert source_of(Sized(64), 8, None, None, None)[0].epoch_samples == 64


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no length": ({"samples": None}, "has no length: give job.loader samples=N"),
    "no samples": ({"samples": 0}, "samples is 0: give a whole number"),
    "costs": ({"costs": [1.0]}, "leave costs out"),
    "weights": ({"weights": [1.0]}, "got weights with a Numbers, .* leave weights out"),
    "no batch": ({"batch_size": None}, "needs a batch_size"),
    "large batch": ({"batch_size": 500}, "batch_size is 500, but the data set has 100 samples"),
    "iterator": ({"data": iter(range(5))}, "can be read only once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    changes, sentence = REFUSED[case]
    arguments = {"data": Numbers(100), "batch_size": 8, "samples": 100} | changes
    with pytest.raises(UserError, match=sentence):
        source_of(collate=None, workers=None, **({"costs": None} | arguments))


def test_prepare_says_where_a_stream_goes() -> None:
    with pytest.raises(UserError, match=r"give it to job\.loader with samples=N"):
        shuffles(DataLoader(Numbers(100), batch_size=8))
