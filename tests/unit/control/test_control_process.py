"""The controller's process: what goes in comes out answered, nobody waits for it, and nothing of MPI is in it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetsync.config.schema import ControlConfig
from hetsync.control.controller import Decision
from hetsync.control.process import NICENESS, QUEUE_LENGTH, ControlProcess, Decided, Failed, Make, Ready
from hetsync.errors import UserError
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

SECONDS = 60.0
CONFIG = ControlConfig("random", max_accumulation=4)
SEEN = Observation(1.0, 3, 96, (2.0, 1.0), 0.5, 0.9, 0.1, 0.05, 0.2, None, 0.3, 1.0, Settings(4, 0.25, 1))


class Told:
    """Decides what the progress stands for; the reason tells of the process."""

    def __init__(self, config: ControlConfig, seed: int, batch_size: int) -> None:
        self.made_with = (config.max_accumulation, seed, batch_size)

    def decide(self, seen: Observation) -> Decision:
        if seen.progress == 13:
            raise ZeroDivisionError("no progress")
        if seen.progress == 17:
            time.sleep(SECONDS)
        print(f"decided at {seen.progress}", flush=True)
        settings = replace(seen.settings, accumulation=int(seen.progress))
        return Decision(settings, f"{self.made_with} nice {os.nice(0)}")


class SaysWhetherTorchIsLoaded(Told):
    def decide(self, seen: Observation) -> Decision:
        return Decision(seen.settings, str("torch" in sys.modules))


def mistaken(config: ControlConfig, seed: int, batch_size: int) -> Told:
    raise UserError("control.policy is old.zip: it is of another version")


@pytest.fixture
def start() -> Iterator[Callable[..., ControlProcess]]:
    processes = []

    def starting(make: Make = Told, log: Path | None = None) -> ControlProcess:
        processes.append(ControlProcess(CONFIG, 7, 32, log, make))
        return processes[-1]

    yield starting
    for process in processes:
        process.close(0.0)


def answers(process: ControlProcess, count: int) -> list[object]:
    got: list[object] = []
    deadline = time.monotonic() + SECONDS
    while len(got) < count:
        assert time.monotonic() < deadline, got
        got += process.answers()
        time.sleep(0.005)
    return got


def ended(process: ControlProcess) -> int:
    deadline = time.monotonic() + SECONDS
    while (code := process.exit_code) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return code


def seen(progress: float) -> Observation:
    return replace(SEEN, progress=progress)


def test_every_observation_is_answered_in_order_by_a_process_apart(start, tmp_path: Path) -> None:
    process = start(log=tmp_path / "control.log")
    assert process.answers() == []  # the answer queue is empty: no waiting
    for sent in (signal.SIGUSR1, signal.SIGINT):  # meant for the whole job
        os.kill(process.pid, sent)
    assert process.offer(seen(3))
    ready, first = answers(process, 2)
    assert isinstance(ready, Ready)
    assert isinstance(first, Decided)
    assert first.decision == Decision(Settings(4, 0.25, 3), f"(4, 7, 32) nice {NICENESS}")
    assert first.cpu_seconds >= ready.cpu_seconds > 0
    for progress in (2, 5, 1):
        while not process.offer(seen(progress)):
            time.sleep(0.005)
    assert [a.decision.settings.accumulation for a in answers(process, 3)] == [2, 5, 1]
    assert process.exit_code is None
    process.close(SECONDS)
    assert process.exit_code == 0  # it ended by itself
    assert (tmp_path / "control.log").read_text().splitlines() == [f"decided at {n}" for n in (3, 2, 5, 1)]


def test_a_full_queue_is_said_and_one_that_hangs_is_killed_at_the_end(start) -> None:
    process = start()
    process.offer(seen(1))
    answers(process, 2)
    began = time.monotonic()
    process.offer(seen(17))  # it will be busy with this one
    taken = 0
    while process.offer(seen(1)):
        taken += 1
        assert taken <= QUEUE_LENGTH + 1
    assert taken >= QUEUE_LENGTH - 1
    assert process.answers() == []
    process.close(0.1)
    assert process.exit_code == -signal.SIGKILL
    assert time.monotonic() - began < SECONDS  # it slept on


def test_it_begins_without_torch(start) -> None:
    """Which takes longer to load than all the rest, and only policies need it."""
    process = start(SaysWhetherTorchIsLoaded)
    process.offer(seen(3))
    _, first = answers(process, 2)
    assert first.decision.reason == "False"


def test_an_error_is_the_last_answer_and_its_story_is_in_the_log(start, tmp_path: Path) -> None:
    process = start(log=tmp_path / "control.log")
    process.offer(seen(13))
    ready, last = answers(process, 2)
    assert isinstance(ready, Ready)
    assert last == Failed("ZeroDivisionError: no progress", mistake=False)
    assert ended(process) == 0
    assert "Traceback" in (tmp_path / "control.log").read_text()


def test_a_mistake_of_the_user_comes_back_as_its_sentence(start, capfd: pytest.CaptureFixture[str]) -> None:
    process = start(mistaken)
    assert answers(process, 1) == [Failed("control.policy is old.zip: it is of another version", mistake=True)]
    assert ended(process) == 0
    assert capfd.readouterr().err == ""


def test_a_policy_that_is_not_there_is_told_before_anything_is_started(tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(UserError, match=r"control\.policy .*nowhere does not exist"):
        ControlProcess(ControlConfig("ppo", policy=str(tmp_path / "nowhere")), 7, 32)
    assert multiprocessing.active_children() == before


def test_a_log_that_cannot_be_opened_stops_nobody(start, tmp_path: Path) -> None:
    process = start(log=tmp_path)  # a folder
    process.offer(seen(3))
    ready, first = answers(process, 2)
    assert isinstance(ready, Ready)
    assert isinstance(first, Decided)


def test_an_error_is_answered_where_the_disk_is_full(start) -> None:
    process = start(log=Path("/dev/full"))
    process.offer(seen(13))
    assert answers(process, 2)[1] == Failed("ZeroDivisionError: no progress", mistake=False)


def test_its_end_is_known(start) -> None:
    process = start()
    assert process.exit_code is None
    os.kill(process.pid, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    for _ in range(2 * QUEUE_LENGTH):
        process.offer(seen(1))  # to nobody
    assert process.answers() == []


def test_it_does_not_outlive_rank_0(tmp_path: Path) -> None:
    """Nor run the script that it was started from, though that has no guard."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from hetsync.config.schema import ControlConfig\n"
        "from hetsync.control.process import ControlProcess\n"
        "from test_control_process import Told, answers\n"
        "process = ControlProcess(ControlConfig('random'), 0, 1, None, Told)\n"
        "answers(process, 1)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3])])}
    words = [sys.executable, str(script)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=path) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        assert parent.communicate()[0] == ""  # one line only, and its output is closed: by its child, too
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
