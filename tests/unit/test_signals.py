"""A signal may interrupt the main thread anywhere, also while it holds a lock."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.plane.local import LocalPlane
from hetsync.stop_signal import StopSignal
from hetsync.sync.messages import Settings
from hetsync.train.session import Session

SIGNALS = 200
SECONDS = 40.0
ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of before, afterwards; a main thread that hangs fails."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"the main thread has hung for {SECONDS} s")

    before = {number: signal.getsignal(number) for number in (*ASKING, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def session() -> Iterator[Session]:
    """Of a job whose first batch is out."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetsync.join(plane=LocalPlane(), progress=False) as job:
        job.prepare(model, optimizer)
        for (inputs,) in job.loader(TensorDataset(torch.ones(8, 3)), 4, epochs=1):
            job.backward(model(inputs).mean())
            job.step()
            yield job.session
            break


def test_many_requests_from_a_handler_while_the_main_thread_speaks(session: Session) -> None:
    """Each strikes somewhere in `tune`, which takes the engine's locks."""
    tuned, handled = [0], [0]

    def ask(number: int, frame: FrameType | None) -> None:
        session.request_stop()
        handled[0] += 1

    signal.signal(signal.SIGUSR1, ask)

    def strike() -> None:
        for _ in range(SIGNALS):
            before = tuned[0], handled[0]
            os.kill(os.getpid(), signal.SIGUSR1)
            while tuned[0] == before[0] or handled[0] == before[1]:
                time.sleep(1e-4)

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    while striker.is_alive():
        session.tune(Settings())
        tuned[0] += 1
    assert handled[0] >= SIGNALS


@pytest.mark.parametrize("number", ASKING)
def test_the_first_signal_is_what_asks(number: signal.Signals) -> None:
    stop, heard = StopSignal(), []
    stop.listen(lambda: heard.append(number))
    assert stop.caught is None
    os.kill(os.getpid(), number)
    assert (stop.caught, heard) == (number, [number])
    if number == signal.SIGUSR1:
        os.kill(os.getpid(), number)  # launchers repeat it
        assert heard == [number]
    else:
        assert signal.getsignal(number) == signal.SIG_DFL


def test_a_request_that_came_before_there_was_a_job_is_kept() -> None:
    stop, heard = StopSignal(), []
    os.kill(os.getpid(), signal.SIGUSR1)
    stop.listen(lambda: heard.append("asked"))
    assert heard == ["asked"]


def test_before_a_job_trains_there_is_nothing_to_save() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    StopSignal()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def trained(run: Path, during: Callable[[], None] = lambda: None) -> int:
    """A short job of a script with a run folder; how many samples it applied."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4, shuffle=True)
    with hetsync.join(run=run, progress=False, plane=LocalPlane()) as job:
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        for _ in job.epochs(2):
            for (inputs,) in loader:
                during()
                job.backward(model(inputs).square().mean())
                job.step(optimizer)
    return int(job.session.applied)


def test_a_scripts_handlers_are_back_when_its_job_is_over(tmp_path: Path) -> None:
    mine = dict.fromkeys((*ASKING, signal.SIGHUP), lambda number, frame: None)
    mine[signal.SIGINT] = signal.default_int_handler
    before = signal.getsignal(signal.SIGHUP)
    for number, handler in mine.items():
        signal.signal(number, handler)
    during = dict[signal.Signals, object]()
    try:
        assert trained(tmp_path / "run", lambda: during.update({each: signal.getsignal(each) for each in mine})) == 16
        assert not set(during.values()) & set(mine.values()), "they were the job's meanwhile"
        assert {each: signal.getsignal(each) for each in mine} == mine
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_a_script_has_set_meanwhile_stays(tmp_path: Path) -> None:
    def later(number: int, frame: FrameType | None) -> None: ...

    assert trained(tmp_path / "run", lambda: signal.signal(signal.SIGTERM, later) and None) == 16
    assert signal.getsignal(signal.SIGTERM) is later


def test_a_scripts_own_handler_hears_the_signal_that_stops_its_job(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

    def strike() -> None:
        if not heard:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as stopped:
        trained(tmp_path / "run", strike)
    assert (heard, stopped.value.code) == ([signal.SIGTERM], 143)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2, "it is back, after a stop too"


def test_a_job_saves_before_a_scripts_own_handler_exits(tmp_path: Path) -> None:
    """As scripts for SLURM do: save in their way, and `sys.exit(0)`."""
    heard: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    with pytest.raises(SystemExit) as stopped:
        trained(tmp_path / "run", lambda: None if heard else os.kill(os.getpid(), signal.SIGTERM))
    assert (heard, stopped.value.code) == ([signal.SIGTERM], 143)
    assert list((tmp_path / "run").glob("checkpoints/*")), "it has saved"


def test_after_a_stop_a_launchers_further_word_ends_nothing(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with pytest.raises(SystemExit):
        trained(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_job_in_a_thread_trains_without_hearing_signals(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in ASKING}
    during = dict[signal.Signals, object]()
    with ThreadPoolExecutor(1) as threads:
        hear = lambda: during.update({number: signal.getsignal(number) for number in ASKING})  # noqa: E731
        assert threads.submit(trained, tmp_path / "run", hear).result(SECONDS) == 16
    assert during == before == {number: signal.getsignal(number) for number in ASKING}
