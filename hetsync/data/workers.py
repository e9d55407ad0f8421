"""Where samples are loaded: a thread of the rank, or worker processes for data sets that keep Python busy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch.multiprocessing
from torch.utils.data import Dataset, TensorDataset, default_collate

from hetsync.errors import UserError
from hetsync.threads import single_threaded

Collate = Callable[[list[Any]], Any]


def fetch(dataset: Dataset[Any], indices: list[int], collate: Collate | None) -> Any:
    """One batch. Tensors are indexed at once; other data sets by `__getitems__` where they have it."""
    if isinstance(dataset, TensorDataset) and collate is None:
        return [tensor[indices] for tensor in dataset.tensors]
    getitems = getattr(dataset, "__getitems__", None)
    try:
        items = getitems(indices) if getitems else [dataset[index] for index in indices]
    except OSError as error:
        raise UserError(f"the data cannot be read: {error}; look at the files, or change data.options") from error
    return (collate or default_collate)(items)


class Fetcher(Protocol):
    """Loads batches in the background."""

    def submit(self, indices: list[int]) -> Future[Any]: ...

    def close(self) -> None: ...


class FetchThread:
    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._pool = ThreadPoolExecutor(1, "hetsync-loader", initializer=single_threaded())

    def submit(self, indices: list[int]) -> Future[Any]:
        return self._pool.submit(fetch, self._dataset, indices, self._collate)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class FetchProcesses:
    """Worker processes, each with a copy of the data set, served in turn.

    They are spawned, since a fork of a process that runs MPI and threads may hang. A worker ends when its pipe
    closes, so none outlives its rank, however that dies.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None, workers: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Any]] = {}
        self._tickets = 0
        self._closed = False
        self._failure: UserError | None = None
        self._workers, self._pipes = [], []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(dataset, collate, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        threading.Thread(target=self._collect, name="hetsync-loader", daemon=True).start()

    def submit(self, indices: list[int]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            ticket, self._tickets = self._tickets, self._tickets + 1
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._futures[ticket] = future
            try:
                self._pipes[ticket % len(self._pipes)].send((ticket, indices))
            except OSError:
                self._fail()
        return future

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for pipe in self._pipes:
                pipe.close()
        for worker in self._workers:
            worker.terminate()

    def _collect(self) -> None:
        """Answers to their futures, until a worker or the rank ends."""
        try:
            while True:
                for pipe in wait(self._pipes):
                    assert isinstance(pipe, Connection)
                    ticket, answer = pipe.recv()
                    with self._lock:
                        future = self._futures.pop(ticket, None)
                    if future is None:
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        except (EOFError, OSError):
            with self._lock:
                self._fail()

    def _fail(self) -> None:
        """Under the lock: a worker has ended."""
        if self._closed:
            return
        self._failure = UserError(
            "a data worker has ended, perhaps for want of memory: lower data.workers, or set it to 0 to see why"
        )
        while self._futures:
            self._futures.popitem()[1].set_exception(self._failure)


def _serve(dataset: Dataset[Any], collate: Collate | None, pipe: Connection) -> None:
    """A worker's life."""
    torch.set_num_threads(1)
    while True:
        try:
            ticket, indices = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = fetch(dataset, indices, collate)
        except Exception as error:
            answer = error
        pipe.send((ticket, answer))
