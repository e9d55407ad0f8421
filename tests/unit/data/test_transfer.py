"""Batches come to a GPU beside its computation, in the order that streams need; a fake GPU notes what is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, TensorDataset

from hetsync.data import loader as loading
from hetsync.data.loader import Loader, Source
from hetsync.data.transfer import PinnedTransfer, Transfer, to_device, transfer_to

CPU = torch.device("cpu")
Log = list[tuple[Any, ...]]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class FakeStream:
    name: str
    log: Log

    def record_event(self) -> str:
        self.log.append(("record", self.name))
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(("wait", self.name, event))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What is asked of CUDA, in order."""
    log: Log = []

    @contextlib.contextmanager
    def within(stream: FakeStream) -> Iterator[None]:
        log.append(("enter", stream.name))
        yield
        log.append(("leave", stream.name))

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        log.append(("pin", tensor.numel()))
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copies", log))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("compute", log))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(("used on", stream.name)))
    return log


def loaded(batch: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(batch)
    return future


def test_a_batch_is_pinned_copied_on_a_stream_of_its_own_and_waited_for_by_the_computation(log: Log) -> None:
    transfer = PinnedTransfer(CPU)
    batch = {"pair": Pair(torch.ones(2), [torch.ones(3)]), "name": "x"}
    arriving = transfer.begin(loaded(batch)).result(10)
    assert log == [("enter", "copies"), ("pin", 2), ("pin", 3), ("record", "copies"), ("leave", "copies")]
    log.clear()
    arrived = transfer.complete(arriving)
    assert log == [("wait", "compute", "event of copies"), ("used on", "compute"), ("used on", "compute")]
    assert type(arrived["pair"]) is Pair
    assert arrived["name"] == "x"
    assert torch.equal(arrived["pair"].second[0], torch.ones(3))
    transfer.close()


def packed() -> PackedSequence:
    return pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)


def test_of_packed_sequences_the_batch_sizes_stay_on_the_host() -> None:
    moved = to_device({"words": packed()}, torch.device("meta"))["words"]
    assert type(moved) is PackedSequence
    assert {tensor.device.type for tensor in (moved.data, moved.sorted_indices, moved.unsorted_indices)} == {"meta"}
    assert moved.batch_sizes.tolist() == [2, 2, 1]


def test_packed_sequences_are_pinned_and_waited_for(log: Log) -> None:
    transfer = PinnedTransfer(CPU)
    arriving = transfer.begin(loaded(packed())).result(10)
    assert log == [("enter", "copies"), ("pin", 5), ("pin", 2), ("pin", 2), ("record", "copies"), ("leave", "copies")]
    log.clear()
    arrived = transfer.complete(arriving)
    assert log == [("wait", "compute", "event of copies"), *[("used on", "compute")] * 3]
    assert arrived.batch_sizes.tolist() == [2, 2, 1]
    transfer.close()


def test_an_error_of_the_data_set_passes_through(log: Log) -> None:
    transfer, failed = PinnedTransfer(CPU), Future[Any]()
    failed.set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        transfer.begin(failed).result(10)
    transfer.close()


def test_on_a_processor_nothing_is_copied_and_no_thread_is_started() -> None:
    transfer, future = transfer_to(CPU), loaded([torch.ones(2)])
    assert type(transfer) is Transfer
    assert transfer.begin(future) is future
    (tensor,) = future.result()
    assert transfer.complete([tensor])[0] is tensor


@dataclass(frozen=True)
class Work:
    number: int
    slices: tuple[tuple[tuple[int, int], ...], ...]


class Noted(Transfer):
    """Notes when copies begin, by the first sample of the batch."""

    def __init__(self, log: Log) -> None:
        super().__init__(CPU)
        self.log = log

    def begin(self, loading: Future[Any]) -> Future[Any]:
        self.log.append(("begin", int(loading.result(10)[0][0])))
        return loading


def test_copies_begin_one_slice_ahead_and_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Log = []
    monkeypatch.setattr(loading, "transfer_to", lambda device: Noted(log))
    monkeypatch.setattr(loading, "COPIED_AT_ONCE", 0)
    loader = Loader(Source(TensorDataset(torch.arange(8)), shuffle=False), 0, CPU)
    loader.prefetch(Work(0, (((0, 2),), ((2, 4),), ((4, 6),))))
    loader.prefetch(Work(1, (((6, 8),),)))
    loader._thread.submit(lambda: None).result(10)  # behind both
    assert log == [("begin", 0), ("begin", 6)]
    log.clear()
    for (batch,) in loader.slices(Work(0, ())):
        log.append(("compute", int(batch[0])))
    assert log == [("begin", 2), ("compute", 0), ("begin", 4), ("compute", 2), ("compute", 4)]
    loader.close()


class Endless(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


def test_a_loader_that_is_closed_leaves_nobody_waiting_for_its_batches() -> None:
    """A thread that waited for one would keep the process from ending."""
    loader = Loader(Source(Endless(), workers=1), 0, CPU)
    future = loader._fetcher._futures[-1] = Future[Any]()  # type: ignore[attr-defined]
    loader.close()
    assert future.cancelled()
