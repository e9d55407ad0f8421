"""Batches come as the ledger has them, however they are loaded."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import TensorDataset

from hetsync.data import loader as loading
from hetsync.data.loader import COPIED_AT_ONCE, EpochOrder, Loader, Source


@dataclass
class Work:
    number: int
    slices: tuple[tuple[tuple[int, int], ...], ...]


class Watched(TensorDataset):
    """Says which thread has loaded."""

    threads: set[str]

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        return super().__getitem__(index)


def points(samples, width=2):
    return TensorDataset(torch.arange(samples * width).view(samples, width), torch.arange(samples))


@pytest.fixture
def threads_used(monkeypatch):
    """The threads that batches of tensors are taken in."""
    used, fetch = [], loading.fetch

    def watched(*arguments):
        used.append(threading.current_thread())
        return fetch(*arguments)

    monkeypatch.setattr(loading, "fetch", watched)
    monkeypatch.setattr("hetsync.data.workers.fetch", watched)
    return used


def batches(dataset, works):
    made = Loader(Source(dataset), 7, torch.device("cpu"))
    try:
        for work in works:
            made.prefetch(work)
        return [[tensor.tolist() for tensor in batch] for work in works for batch in made.slices(work)]
    finally:
        made.close()


def test_small_batches_of_tensors_are_taken_where_they_are_used(threads_used):
    works = [Work(0, (((0, 4),), ((4, 8),))), Work(1, (((8, 12), (14, 16)),))]
    made = Loader(Source(points(20)), 7, torch.device("cpu"))
    made.prefetch(works[0])
    list(made.slices(works[0]))  # now the epoch's order is known
    threads_used.clear()
    made.prefetch(works[1])
    list(made.slices(works[1]))
    made.close()
    assert threads_used == [threading.main_thread()]


def test_the_order_of_an_epoch_is_made_on_another_thread(threads_used):
    batches(points(20), [Work(0, (((0, 4),),)), Work(1, (((18, 22),),))])
    assert threading.main_thread() not in threads_used


def test_large_batches_are_taken_ahead(threads_used):
    width = COPIED_AT_ONCE // 8
    works = [Work(0, (((0, 2),),)), Work(1, (((2, 4),),))]
    batches(points(4, width), works)
    assert threading.main_thread() not in threads_used


def test_batches_are_the_same_either_way(monkeypatch):
    works = [Work(n, (((4 * n, 4 * n + 4),),)) for n in range(8)]
    at_once = batches(points(20), works)
    monkeypatch.setattr(loading, "COPIED_AT_ONCE", 0)
    assert at_once == batches(points(20), works)


def test_a_class_of_the_users_loads_in_its_own_way():
    dataset = Watched(torch.arange(20))
    dataset.threads = set()
    batches(dataset, [Work(0, (((0, 4),),)), Work(1, (((4, 8),),))])
    assert dataset.threads == {"hetsync-loader"}


def test_an_order_knows_the_epochs_that_it_has_made():
    order = EpochOrder(10, 0)
    assert not order.knows([(0, 4)])
    order.indices([(0, 4)])
    assert order.knows([(0, 10)])
    assert not order.knows([(8, 12)])


class Gated(TensorDataset):
    """Loads nothing before it is let, and keeps what it has loaded."""

    def __init__(self, samples):
        super().__init__(torch.arange(samples))
        self.gate, self.begun, self.loaded = threading.Event(), threading.Event(), []

    def __getitem__(self, index):
        self.begun.set()
        assert self.gate.wait(60)
        self.loaded.append(index)
        return super().__getitem__(index)


def test_of_a_dropped_task_nothing_is_loaded_any_more():
    dataset = Gated(20)
    made = Loader(Source(dataset, shuffle=False), 7, torch.device("cpu"))
    try:
        # One batch is being loaded, one waits for it; of the third task not even the order is made.
        for number in range(3):
            made.prefetch(Work(number, (((4 * number, 4 * number + 2),), ((4 * number + 2, 4 * number + 4),))))
        assert dataset.begun.wait(60)
        for number in (0, 2):
            made.drop(Work(number, ()))
        dataset.gate.set()
        assert [batch[0].tolist() for batch in made.slices(Work(1, (((4, 6),), ((6, 8),))))] == [[4, 5], [6, 7]]
    finally:
        made.close()
    assert dataset.loaded == [0, 1, 4, 5, 6, 7]


def test_a_loader_that_stops_lets_go_of_all_tasks_and_takes_no_more():
    dataset = Gated(20)
    made = Loader(Source(dataset, shuffle=False), 7, torch.device("cpu"))
    try:
        for number in range(3):
            made.prefetch(Work(number, (((4 * number, 4 * number + 4),),)))
        assert dataset.begun.wait(60)
        made.stop()
        made.prefetch(Work(3, (((12, 16),),)))
        dataset.gate.set()
    finally:
        made.close()
    assert dataset.loaded == [0, 1, 2, 3]  # it was being loaded


class Asked(torch.utils.data.Dataset):
    def __init__(self):
        self.indices = []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.indices.append(index)
        return index


def settle(loader):
    """What its threads have been given is done."""
    loader._thread.submit(lambda: None).result()
    loader._fetcher._thread.submit(lambda: None).result()


def test_what_comes_after_a_scripts_loop_is_loaded_when_the_next_begins():
    data, order = Asked(), EpochOrder(40, 7)
    made = Loader(Source(data), 7, torch.device("cpu"))
    made.begin_loop(20)
    for number, start in enumerate((16, 20, 24, 28)):
        made.prefetch(Work(number, (((start, start + 4),),)))
    made.prefetch(Work(4, ()))  # a rank without a sample of the round
    made.drop(Work(2, ()))
    settle(made)
    assert data.indices == order.indices([(16, 20)])
    made.begin_loop(40)
    settle(made)
    assert data.indices == order.indices([(16, 24), (28, 32)])
    assert [batch.tolist() for batch in made.slices(Work(3, ()))] == [order.indices([(28, 32)])]
    made.close()
