"""Where samples are loaded: a thread of the rank, or worker processes for data sets that keep Python busy."""

from __future__ import annotations

import atexit
import errno
import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, current_process
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch.multiprocessing
from torch.utils.data import Dataset, TensorDataset, default_collate

from hetsync.data.changes import Content
from hetsync.data.random_state import seed_all
from hetsync.errors import USER_ERROR, UserError
from hetsync.shortage import killed_for_memory, shortage
from hetsync.stop_signal import signals_held
from hetsync.threads import HelperThread

Collate = Callable[[list[Any]], Any]

ENDING_SECONDS = 1.0  # between the end of a worker's pipe and its own
WORKER = "hetsync-data-worker"
RUN_ANEW = (
    "a data worker has run the script anew: put what is not a definition under if __name__ == '__main__', or load"
    " without workers"
)
FEWER = "lower data.workers, or set it to 0 (in a script: num_workers= or workers=)"
FROM_STANDARD_INPUT = (
    "a data worker does not find what the script defines, which was read from standard input: put it into a file, or"
    " load without workers (workers=0, num_workers=0)"
)
LONGEST_FOLDER = 60  # characters, of the 107 that a socket's path may have
SHORT_FOLDER = "/tmp"
OUT_OF_DESCRIPTORS = (
    "data workers hand over more tensors at a time than files may be open: raise that number by ulimit -n, or lower"
    " data.workers (in a script: workers=)"
)


def indexed_at_once(dataset: Dataset[Any], collate: Collate | None) -> bool:
    """Are its batches plain slices of tensors? Classes of the user's may have a __getitem__ of their own."""
    return type(dataset) is TensorDataset and collate is None


def fetch(dataset: Dataset[Any], indices: list[int], collate: Collate | None) -> Any:
    """One batch. Tensors are indexed at once; other data sets by `__getitems__` where they have it."""
    if isinstance(dataset, TensorDataset) and indexed_at_once(dataset, collate):
        index = torch.tensor(indices)  # once: each tensor would read the list anew, slowly
        return [tensor[index] for tensor in dataset.tensors]
    getitems = getattr(dataset, "__getitems__", None)
    try:
        items = getitems(indices) if getitems else [dataset[index] for index in indices]
    except OSError as error:
        raise UserError(f"the data cannot be read: {error}; look at the files (in recipes, at data.options)") from error
    return (collate or default_collate)(items)


class Fetcher(Protocol):
    """Loads batches in the background."""

    def submit(self, indices: list[int], seed: int) -> Future[Any]:
        """The batch of these samples; `seed` is what it may draw random numbers from. Called from one thread. Who
        wants it no more may cancel it."""
        ...

    def renew(self) -> None:
        """What has changed of the data set counts for batches that are submitted from now on. Called from the same
        thread."""

    def close(self) -> None: ...


class FetchThread:
    """A thread draws from the generators of the whole process, as the model does; to seed them would seed the model."""

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._thread = HelperThread("hetsync-loader")

    def submit(self, indices: list[int], seed: int) -> Future[Any]:
        return self._thread.submit(fetch, self._dataset, indices, self._collate)

    def renew(self) -> None:
        """It reads the data set itself."""

    def close(self) -> None:
        self._thread.close()


class FetchProcesses:
    """Worker processes, each with a copy of the data set, served in turn; a batch is drawn from its own seed.

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
        self._loads = dataset, collate
        self._workers, self._pipes = [], []
        shorten_sockets()
        for _ in range(workers):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(dataset, collate, theirs), name=WORKER, daemon=True)
            with signals_held(), without_lost_script():
                try:
                    worker.start()
                except BrokenPipeError:
                    self.close()
                    raise ended([worker]) from None
                except OSError as error:
                    self.close()
                    raise UserError(shortage(error) or f"a data worker cannot be started ({error}): {FEWER}") from error
                except Exception as error:  # to pickle runs what its classes say
                    self.close()
                    raise unsendable(error) from error
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        try:
            self._sent = Content(self._loads)
        except Exception as error:  # the first time it could
            self.close()
            raise unsendable(error) from error
        atexit.register(self.close)  # before multiprocessing waits for the workers
        threading.Thread(target=self._collect, name="hetsync-loader", daemon=True).start()

    def submit(self, indices: list[int], seed: int) -> Future[Any]:
        """Waits while the worker's pipe is full.

        Without the lock, or nobody would take the answer that keeps the worker from reading on:

            submit: holds the lock, waits for the worker    worker: waits for _collect    _collect: waits for the lock
        """
        future: Future[Any] = Future()
        with self._lock:
            ticket, self._tickets = self._tickets, self._tickets + 1
            if self._closed:
                future.cancel()
                return future
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._futures[ticket] = future
        try:
            self._pipes[ticket % len(self._pipes)].send((ticket, indices, seed))
        except OSError as loss:
            self._fail(loss)
        return future

    def renew(self) -> None:
        """Workers get the data set once more where it has changed: to start them anew would take seconds."""
        try:
            if Content(self._loads).digest == self._sent.digest:
                return
            for pipe in self._pipes:
                words = ForkingPickler.dumps(self._loads)  # for each: whoever reads tensors uses them up
                try:
                    pipe.send_bytes(words)
                except OSError as loss:
                    self._fail(loss)
            self._sent = Content(self._loads)  # tensors that were not shared before have moved
        except Exception as error:  # to pickle runs what its classes say
            raise unsendable(error) from error

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            while self._futures:
                self._futures.popitem()[1].cancel()  # or a thread that waits for one would keep the process
        for worker in self._workers:
            worker.kill()
        for pipe in self._pipes:
            pipe.close()

    def _collect(self) -> None:
        """Answers to their futures, until a worker or the rank ends, or an answer is lost."""
        try:
            while True:
                for pipe in wait(self._pipes):
                    assert isinstance(pipe, Connection)
                    ticket, answer = pipe.recv()
                    with self._lock:
                        future = self._futures.pop(ticket, None)
                    if future is None or not future.set_running_or_notify_cancel():
                        continue
                    if isinstance(answer, BaseException):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        except Exception as loss:  # to read a batch runs what its classes say
            self._fail(loss)

    def _fail(self, loss: Exception) -> None:
        """No answer comes any more."""
        with self._lock:
            if self._closed:
                return
            self._failure = verdict(loss, self._workers)
            while self._futures:
                _, future = self._futures.popitem()
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._failure)


def unsendable(error: Exception) -> UserError:
    unpicklable = (
        f"the data set or its collate function cannot be sent to a data worker ({type(error).__name__}: {error}): use"
        " functions and classes of a module's top level in place of lambdas and local ones, open files in __getitem__,"
        " or set data.workers to 0 (in a script: num_workers=0 or workers=0)"
    )
    return UserError(shortage(error) or unpicklable)


def verdict(loss: Exception, workers: Sequence[BaseProcess]) -> UserError:
    """Why their answers cannot be had."""
    if out_of_descriptors(loss):
        return UserError(OUT_OF_DESCRIPTORS)
    if (short := shortage(loss)) is not None:
        return UserError(short)
    if isinstance(loss, EOFError | OSError):
        return ended(workers)
    return UserError(
        f"a batch of a data worker cannot be read ({type(loss).__name__}: {loss}): mend how its samples are pickled, or"
        " set data.workers to 0 (in a script: workers=0)"
    )


def out_of_descriptors(error: Exception) -> bool:
    """A tensor takes a file descriptor on its way. Only some of the layers that it passes say which error it was."""
    if isinstance(error, OSError):
        return error.errno == errno.EMFILE
    return isinstance(error, RuntimeError) and ("ancdata" in str(error) or "Too many open files" in str(error))


def script_is_lost() -> bool:
    """Was it read from standard input, so that no other process can run it?"""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return file is not None and not os.path.exists(file)


@contextmanager
def without_lost_script() -> Iterator[None]:
    """Inside, a new process does not look for what it could not find."""
    if not script_is_lost():
        yield
        return
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__")
    try:
        yield
    finally:
        main.__file__ = file


def shorten_sockets() -> None:
    """Tensors are handed over by sockets, whose paths are short: here, where TMPDIR is too long for multiprocessing's.
    Its processes all take the folder that the first has."""
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(tempfile.gettempdir()) > LONGEST_FOLDER:
        config["tempdir"] = folder = tempfile.mkdtemp(prefix="hetsync-", dir=SHORT_FOLDER)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def ended(workers: Sequence[BaseProcess]) -> UserError:
    """Why one of these has ended."""
    for worker in workers:
        worker.join(ENDING_SECONDS)
        if worker.exitcode == USER_ERROR:
            return UserError(RUN_ANEW)
        if worker.exitcode is not None:
            break
    if script_is_lost():
        return UserError(FROM_STANDARD_INPUT)
    if (killed := killed_for_memory()) is not None:
        return UserError(f"a data worker has ended, and {killed}, or lower data.workers (in a script: workers=)")
    return UserError(
        "a data worker has ended: its own words above say why, or, where there are none, it was perhaps for want of"
        " memory: lower data.workers (in a script: workers=), or set it to 0"
    )


def _serve(dataset: Dataset[Any], collate: Collate | None, pipe: Connection) -> None:
    """A worker's life."""
    torch.set_num_threads(1)
    while True:
        try:
            words = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        message = ForkingPickler.loads(words)
        del words  # those of a data set may be many
        if len(message) == 2:
            dataset, collate = message
            continue
        ticket, indices, seed = message
        seed_all(seed)
        try:
            answer = ForkingPickler.dumps((ticket, fetch(dataset, indices, collate)))
        except (Exception, SystemExit) as error:
            answer = ForkingPickler.dumps((ticket, _portable(error)))
        pipe.send_bytes(answer)


def _portable(error: BaseException) -> BaseException:
    """The error, or what it says, where its class cannot be pickled there and back."""
    if isinstance(error, Exception) and out_of_descriptors(error):
        return UserError(OUT_OF_DESCRIPTORS)
    if (short := shortage(error)) is not None:
        return UserError(short)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
