"""Worker processes deliver what a thread delivers, errors included, and end with their rank."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hetsync import threads
from hetsync.data.ledger import split
from hetsync.data.loader import EpochOrder, Loader, Source
from hetsync.data.workers import Fetcher, FetchProcesses, FetchThread
from hetsync.errors import UserError
from hetsync.sync.messages import Task

SECONDS = 60
SLOW = 19


class Squares(Dataset[Any]):
    """Item 13 cannot be read; item 17 ends the process; item `SLOW` takes its time."""

    def __init__(self, fatal: bool = False) -> None:
        self.fatal = fatal

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 13:
            raise OSError("the disk is gone")
        if index == 17 and self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == SLOW:
            time.sleep(0.3)
        return torch.tensor([index, index**2]), os.getpid()


@pytest.fixture(scope="module")
def processes() -> Iterator[Fetcher]:
    made = FetchProcesses(Squares(), None, 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def thread() -> Iterator[Fetcher]:
    made = FetchThread(Squares(), None)
    yield made
    made.close()


@pytest.fixture(params=["thread", "processes"])
def fetcher(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_batches_are_those_asked_for(fetcher: Fetcher) -> None:
    asked = [[3, 1], [2], [19, 0, 5], [4, 4]]
    futures = [fetcher.submit(indices, 0) for indices in asked]
    for indices, future in zip(asked, futures, strict=True):
        numbers, _ = future.result(SECONDS)
        assert numbers.tolist() == [[i, i**2] for i in indices]


def test_what_cannot_be_read_is_said_and_the_rest_goes_on(fetcher: Fetcher) -> None:
    bad, good = fetcher.submit([12, 13], 0), fetcher.submit([12], 0)
    with pytest.raises(UserError, match="the disk is gone"):
        bad.result(SECONDS)
    assert good.result(SECONDS)[0].tolist() == [[12, 144]]


def test_a_batch_that_is_wanted_no_more_disturbs_no_other(fetcher: Fetcher) -> None:
    unwanted = [fetcher.submit([SLOW], 0) for _ in range(3)]
    wanted = fetcher.submit([3, 4], 0)
    assert any([future.cancel() for future in unwanted])
    assert wanted.result(SECONDS)[0].tolist() == [[3, 9], [4, 16]]
    assert fetcher.submit([5], 0).result(SECONDS)[0].tolist() == [[5, 25]]


def pids_of(processes: Fetcher) -> set[int]:
    return {int(processes.submit([0], 0).result(SECONDS)[1]) for _ in range(4)}


def test_processes_are_others_and_share_the_work(processes: Fetcher) -> None:
    pids = pids_of(processes)
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_worker_that_dies_is_told_of() -> None:
    fetcher = FetchProcesses(Squares(fatal=True), None, 1)
    with pytest.raises(UserError, match=r"data worker.*data\.workers"):
        fetcher.submit([17], 0).result(SECONDS)
    with pytest.raises(UserError, match="data worker"):
        fetcher.submit([1], 0).result(SECONDS)
    fetcher.close()


def local_data() -> Dataset[Any]:
    class Local(Squares):
        pass

    return Local()


class Locked(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class NotALeaf(Squares):
    """Torch refuses to send it, by a RuntimeError."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = torch.ones(2, requires_grad=True) * 2


class OutOfProcesses(Squares):
    def __getstate__(self) -> dict[str, Any]:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Once(Squares):
    """Can be sent to one worker, but not to the next; notes which processes are there by then."""

    sent = False
    children: frozenset[BaseProcess] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        if self.sent:
            self.children = frozenset(multiprocessing.active_children())
            raise pickle.PicklingError("once is enough")
        self.sent = True
        return {"fatal": False}


@pytest.mark.parametrize(
    ("dataset", "collate", "error"),
    [
        (Squares, lambda items: items, "<lambda>"),
        (local_data, None, "Local"),
        (Locked, None, "_thread.lock"),
        (NotALeaf, None, "non-leaf tensor"),
    ],
    ids=["lambda", "local class", "lock", "with gradients"],
)
def test_what_workers_cannot_be_sent_is_said(dataset: Callable[[], Dataset[Any]], collate: Any, error: str) -> None:
    with pytest.raises(UserError, match=rf"cannot be sent to a data worker \(.*{error}.*data\.workers.*num_workers=0"):
        FetchProcesses(dataset(), collate, 1)


def test_a_worker_that_cannot_be_started_is_told_of() -> None:
    with pytest.raises(UserError, match=r"no more threads or processes can be started \(ulimit -u .*data workers"):
        FetchProcesses(OutOfProcesses(), None, 1)


def test_workers_end_where_another_cannot_be_started() -> None:
    before = set(multiprocessing.active_children())
    once = Once()
    with pytest.raises(UserError, match="once is enough"):
        FetchProcesses(once, None, 2)
    (worker,) = once.children - before
    worker.join(SECONDS)
    assert worker.exitcode == -signal.SIGKILL


def test_a_worker_that_does_not_find_the_data_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As with a class that is defined under if __name__ == "__main__"."""
    hidden = type("Hidden", (Squares,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Hidden", hidden, raising=False)
    fetcher = FetchProcesses(hidden(), None, 1)
    with pytest.raises(UserError, match=r"a data worker has ended.* its own words above say why"):
        fetcher.submit([1], 0).result(SECONDS)
    fetcher.close()
    assert "Can't get attribute 'Hidden'" in capfd.readouterr().err


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_slices_of_a_task_in_order(workers: int) -> None:
    source = Source(torch.utils.data.TensorDataset(torch.arange(40)), workers=workers)
    loader = Loader(source, 5, torch.device("cpu"))
    task = Task(0, split(((30, 50),), 20, 3), delay_bound=4, position=30, not_before=0)
    loader.prefetch(task)
    seen = [index for (numbers,) in loader.slices(task) for index in numbers.tolist()]
    loader.close()
    assert seen == EpochOrder(40, 5).indices([(30, 50)])


# Hangs.


class Bulky(Dataset[Any]):
    """What is asked for is large, and what comes back is, too: more than pipes hold."""

    def __len__(self) -> int:
        return 10**7

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        return [bytes(4 * 10**6)]


def first(items: list[Any]) -> Any:
    return items[0]


def in_time(work: Callable[[], Any]) -> Any:
    """What `work` returns; fails where that takes too long."""
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(work()), daemon=True)
    thread.start()
    thread.join(SECONDS / 2)
    assert not thread.is_alive(), "it hangs"
    return out[0]


def test_batches_that_fill_the_pipes_both_ways_come_through() -> None:
    fetcher = FetchProcesses(Bulky(), first, 1)
    indices = list(range(10**6, 10**6 + 10**5))
    futures = in_time(lambda: [fetcher.submit(indices, 0) for _ in range(6)])
    assert [len(future.result(SECONDS)) for future in futures] == [4 * 10**6] * 6
    fetcher.close()


class Slow(Squares):
    """Nothing comes before somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.go.wait(SECONDS)
        return super().__getitem__(index)


def task(number: int, start: int, stop: int) -> Task:
    return Task(number, split(((start, stop),), stop - start, 1), delay_bound=4, position=start, not_before=0)


def test_the_order_of_an_epoch_is_worked_out_by_a_thread_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tells of a task, which is the communication thread, does not wait."""
    threads = []
    indices = EpochOrder.indices

    def watched(order: EpochOrder, spans: Any) -> list[int]:
        threads.append(threading.current_thread())
        return indices(order, spans)

    monkeypatch.setattr(EpochOrder, "indices", watched)
    loader = Loader(Source(torch.utils.data.TensorDataset(torch.arange(40))), 5, torch.device("cpu"))
    loader.prefetch(task(0, 0, 4))
    list(loader.slices(task(0, 0, 4)))
    loader.close()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_data_that_never_comes_is_told_of_in_time() -> None:
    data = Slow()
    loader = Loader(Source(data), 5, torch.device("cpu"), timeout_seconds=0.5)
    loader.prefetch(task(0, 0, 2))

    def wait() -> str:
        with pytest.raises(UserError) as told:
            next(iter(loader.slices(task(0, 0, 2))))
        return str(told.value)

    try:
        assert "run.timeout_seconds" in in_time(wait)
    finally:
        data.go.set()
        loader.close()


STOPS = """
import os, signal, time
import torch
from hetsync.data.ledger import split
from hetsync.data.loader import Loader, Source
from hetsync.sync.messages import Task

class Stops(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)
        return torch.ones(1)

loader = Loader(Source(Stops()), 5, torch.device("cpu"), timeout_seconds=2.0)
task = Task(0, split(((0, 1),), 1, 1), delay_bound=4, position=0, not_before=0)
loader.prefetch(task)
assert len(list(loader.slices(task))) == 1
loader.close()
"""


def test_what_was_stopped_with_the_whole_process_may_come_later() -> None:
    words = [sys.executable, "-c", STOPS]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as stopped:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        time.sleep(2.5)
        stopped.send_signal(signal.SIGCONT)
        _, told = stopped.communicate(timeout=SECONDS)
    assert stopped.returncode == 0, told


class Endless(Dataset[Any]):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Any:
        time.sleep(1000)


def test_closing_waits_for_no_worker_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe is full, and the thread that asks it for batches waits there."""
    monkeypatch.setattr(threads, "ENDING_SECONDS", 1000.0)
    loader = Loader(Source(Endless(), workers=1), 5, torch.device("cpu"))
    asked, submit = threading.Semaphore(0), loader._fetcher.submit
    monkeypatch.setattr(loader._fetcher, "submit", lambda *words: (asked.release(), submit(*words))[1])
    for number in range(2):
        loader.prefetch(task(number, number * 10**5, (number + 1) * 10**5))
    for _ in range(2):  # the first is with the worker
        assert asked.acquire(timeout=SECONDS)
    in_time(loader.close)
    assert loader._fetcher.submit([1], 0).cancelled()


class Odd(Exception):
    """Pickles, but not back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Failing(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 13:
            raise Odd(1, 2)
        if index == 14:
            sys.exit(7)
        return super().__getitem__(index)


def test_any_error_of_a_worker_arrives() -> None:
    fetcher = FetchProcesses(Failing(), None, 1)
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        fetcher.submit([13], 0).result(SECONDS / 2)
    with pytest.raises(SystemExit, match="7"):
        fetcher.submit([14], 0).result(SECONDS / 2)
    assert fetcher.submit([3], 0).result(SECONDS)[0].tolist() == [[3, 9]]
    fetcher.close()


class Manifold(Squares):
    """Many small tensors, each of which a descriptor stands for on its way."""

    def __getitem__(self, index: int) -> Any:
        return [torch.zeros(1) for _ in range(100)]


@pytest.fixture
def descriptors() -> Iterator[Callable[[int], None]]:
    """Leaves this process so many more at most."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(more: int) -> None:
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (number for number in range(before[0]) if number not in used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), before[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_rank_that_runs_out_of_descriptors_says_what_to_raise(descriptors: Callable[[int], None]) -> None:
    fetcher = FetchProcesses(Manifold(), None, 1)
    descriptors(20)
    with pytest.raises(UserError, match=r"ulimit -n.*data\.workers"):
        fetcher.submit([1], 0).result(SECONDS / 4)
    with pytest.raises(UserError, match="ulimit -n"):
        fetcher.submit([2], 0).result(SECONDS / 4)
    fetcher.close()


def test_a_worker_that_runs_out_of_descriptors_says_what_to_raise(descriptors: Callable[[int], None]) -> None:
    descriptors(60)
    fetcher = FetchProcesses(Manifold(), None, 1)
    with pytest.raises(UserError, match=r"ulimit -n.*data\.workers"):
        fetcher.submit([1], 0).result(SECONDS / 4)
    fetcher.close()


def fall() -> None:
    raise ArithmeticError("it has fallen")


class Fragile:
    """Pickles, but not back."""

    def __reduce__(self) -> Any:
        return fall, ()


class Rigid:
    """Does not even pickle."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("it does not bend")


class Parcels(Squares):
    def __getitem__(self, index: int) -> Any:
        return Fragile() if index else Rigid()


def test_batches_that_are_lost_on_their_way_are_told_of() -> None:
    fetcher = FetchProcesses(Parcels(), first, 1)
    with pytest.raises(pickle.PicklingError, match="does not bend"):
        fetcher.submit([0], 0).result(SECONDS / 4)
    with pytest.raises(UserError, match=r"ArithmeticError: it has fallen.*data\.workers"):
        fetcher.submit([1], 0).result(SECONDS / 4)
    fetcher.close()


# Changes of the data set.


class Named(torch.Tensor):
    number: int


class Changing(Squares):
    """Tells how many samples this copy has given: one that is sent once more begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0
        self.own: Any = 1
        self.tensor = torch.ones(2)
        self.array = np.ones(2)
        self.named = torch.ones(2).as_subclass(Named)
        self.named.number = 1

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        named = self.named[0].item() * self.named.number
        return self.given, float(self.own), self.tensor[0].item(), self.array[0].item(), named


class Shared(Changing):
    """Has what only the start of a process can take along."""

    def __init__(self) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self.lock, self.value = context.Lock(), context.Value("i", 1)

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), self.value.value


def renewed(fetcher: Fetcher) -> list[float]:
    fetcher.renew()
    return [value.item() for value in fetcher.submit([0], 0).result(SECONDS)]


def test_changes_reach_workers_and_nothing_is_sent_without_any() -> None:
    data = Changing()
    fetcher = FetchProcesses(data, None, 1)
    assert renewed(fetcher) == [1, 1, 1, 1, 1]
    assert renewed(fetcher) == [2, 1, 1, 1, 1]
    data.own = 2
    assert renewed(fetcher) == [1, 2, 1, 1, 1]
    data.array[0] = 3
    assert renewed(fetcher) == [1, 2, 1, 3, 1]
    data.tensor.fill_(4)  # which they see as it is
    data.named.fill_(5)
    assert renewed(fetcher) == [2, 2, 4, 3, 5]
    data.tensor = torch.full((2,), 6.0)
    assert renewed(fetcher) == [1, 2, 6, 3, 5]
    data.tensor.fill_(7)
    assert renewed(fetcher) == [2, 2, 7, 3, 5]
    data.named.number = 2
    assert renewed(fetcher) == [1, 2, 7, 3, 10]
    data.own = lambda: 7
    with pytest.raises(UserError, match=r"cannot be sent to a data worker \(.*lambda.*num_workers=0"):
        fetcher.renew()
    fetcher.close()


def test_what_processes_share_is_shared_and_not_sent_again() -> None:
    data = Shared()
    fetcher = FetchProcesses(data, None, 1)
    assert renewed(fetcher) == [1, 1, 1, 1, 1, 1]
    data.value.value = 2
    assert renewed(fetcher) == [2, 1, 1, 1, 1, 2]
    data.own = 3
    with pytest.raises(UserError, match=r"cannot be sent to a data worker \(RuntimeError: .*inheritance"):
        fetcher.renew()
    fetcher.close()


def test_every_worker_hears_of_a_change() -> None:
    data = Changing()
    fetcher = FetchProcesses(data, None, 2)
    data.own = 2
    assert renewed(fetcher) == renewed(fetcher) == [1, 2, 1, 1, 1]
    fetcher.close()


# Signals and random numbers.


def test_workers_do_not_hear_what_is_meant_for_their_rank(processes: Fetcher) -> None:
    pids = pids_of(processes)
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert pids_of(processes) == pids


class Noise(Dataset[Any]):
    """Augmented at random, by every generator that there is."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


def draws(spans: list[tuple[int, int]], workers: int, seed: int = 5) -> list[list[float]]:
    loader = Loader(Source(Noise(), workers=workers), seed, torch.device("cpu"))
    for number, (start, stop) in enumerate(spans):
        loader.prefetch(task(number, start, stop))
    out = [next(iter(loader.slices(task(n, start, stop)))).flatten().tolist() for n, (start, stop) in enumerate(spans)]
    loader.close()
    return out


@pytest.mark.thorough
def test_what_workers_draw_comes_of_the_seed_and_of_the_place_in_the_stream() -> None:
    """So a resumed run, which begins with another batch and has other workers, draws alike."""
    everything = draws([(0, 3), (3, 6), (20, 23)], workers=1)
    resumed = draws([(3, 6), (20, 23)], workers=2)
    assert resumed == everything[1:]
    assert len({value for batch in everything for value in batch}) > 3 * 9
    assert draws([(3, 6)], workers=1, seed=6) != resumed[:1]
