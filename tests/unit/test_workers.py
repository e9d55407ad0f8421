"""Worker processes deliver what a thread delivers, errors included, and end with their rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hetsync.data.ledger import split
from hetsync.data.loader import EpochOrder, Loader, Source
from hetsync.data.workers import Fetcher, FetchProcesses, FetchThread
from hetsync.errors import UserError
from hetsync.sync.messages import Piece

SECONDS = 60


class Squares(Dataset[Any]):
    """Item 13 cannot be read; item 17 ends the process."""

    def __init__(self, fatal: bool = False) -> None:
        self.fatal = fatal

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 13:
            raise OSError("the disk is gone")
        if index == 17 and self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index, index**2]), os.getpid()


@pytest.fixture(params=["thread", "processes"])
def fetcher(request: pytest.FixtureRequest) -> Any:
    made: Fetcher = FetchThread(Squares(), None) if request.param == "thread" else FetchProcesses(Squares(), None, 2)
    yield made
    made.close()


def test_batches_are_those_asked_for(fetcher: Fetcher) -> None:
    asked = [[3, 1], [2], [19, 0, 5], [4, 4]]
    futures = [fetcher.submit(indices) for indices in asked]
    for indices, future in zip(asked, futures, strict=True):
        numbers, _ = future.result(SECONDS)
        assert numbers.tolist() == [[i, i**2] for i in indices]


def test_what_cannot_be_read_is_said_and_the_rest_goes_on(fetcher: Fetcher) -> None:
    bad, good = fetcher.submit([12, 13]), fetcher.submit([12])
    with pytest.raises(UserError, match="the disk is gone"):
        bad.result(SECONDS)
    assert good.result(SECONDS)[0].tolist() == [[12, 144]]


def test_processes_are_others_and_share_the_work() -> None:
    fetcher = FetchProcesses(Squares(), None, 2)
    pids = {int(fetcher.submit([0]).result(SECONDS)[1]) for _ in range(4)}
    fetcher.close()
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_worker_that_dies_is_told_of() -> None:
    fetcher = FetchProcesses(Squares(fatal=True), None, 1)
    with pytest.raises(UserError, match=r"data worker.*data\.workers"):
        fetcher.submit([17]).result(SECONDS)
    with pytest.raises(UserError, match="data worker"):
        fetcher.submit([1]).result(SECONDS)
    fetcher.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_slices_of_a_piece_in_order(workers: int) -> None:
    source = Source(torch.utils.data.TensorDataset(torch.arange(40)), workers=workers)
    loader = Loader(source, 5, torch.device("cpu"))
    piece = Piece(0, split(((30, 50),), 20, 3), delay_bound=4, position=30, not_before=0)
    loader.prefetch(piece)
    seen = [index for (numbers,) in loader.slices(piece) for index in numbers.tolist()]
    loader.close()
    assert seen == EpochOrder(40, 5).indices([(30, 50)])
