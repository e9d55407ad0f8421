"""How a failure ends a job of several ranks; with real processes: tests/fault."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from jobs import ROOT

from hetsync.errors import UserError
from hetsync.plane import ending
from hetsync.plane.base import CutOffError, LostError, StalledError
from hetsync.plane.ending import end_job, memory_lacking
from hetsync.plane.local import LocalPlane

SECONDS = 30.0


class Ended(Exception):
    pass


class OneOfTwo(LocalPlane):
    """Rank 1, whose abort does not end this process."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.members = 1, (0, 1)

    def abort(self, code: int) -> None:
        raise Ended(code)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (256, 1, ""),  # eight bits are kept, and a failure is none that looks like success
        (2**40 + 7, 7, ""),
        ("no more data", 1, ": no more data"),
    ],
)
def test_an_exit_on_one_rank_is_that_of_the_job(
    capsys: pytest.CaptureFixture[str], code: object, status: int, said: str
) -> None:
    with pytest.raises(Ended) as ended:
        end_job(OneOfTwo(), SystemExit(code))
    assert ended.value.args == (status,)
    sentence = f"hetsync: rank 1: sys.exit was called{said}, so the job ends with status {status}\n"
    assert capsys.readouterr().err == sentence


def test_leaving_in_the_middle_of_a_sentence_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler leaves, while the thread that it has interrupted is about to write."""
    statuses: list[int] = []

    class Interrupted(io.StringIO):
        def flush(self) -> None:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    monkeypatch.setattr(sys, "stderr", Interrupted())
    monkeypatch.setattr(os, "_exit", statuses.append)
    ending.leave(85)
    assert statuses == [85]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        self.write("")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("failure", [ZeroDivisionError(), UserError("lr is 0"), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("make", [FullDisk, closed, lambda: None], ids=["full disk", "closed", "none"])
def test_others_are_told_though_nothing_can_be_said(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], io.StringIO | None], failure: BaseException
) -> None:
    monkeypatch.setattr(sys, "stdout", make())
    monkeypatch.setattr(sys, "stderr", make())
    with pytest.raises(Ended):
        end_job(OneOfTwo(), failure)


class LongWinded(Exception):
    def __str__(self) -> str:
        time.sleep(0.5)
        return "what it has to say"


def test_only_writing_is_limited_and_not_what_it_takes_to_find_the_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback reads the files of all its lines, which may lie on slow storage."""
    monkeypatch.setattr(ending, "SECONDS_TO_SPEAK", 0.1)
    with pytest.raises(Ended):
        end_job(OneOfTwo(), LongWinded())
    traceback, sentence = capsys.readouterr().err.splitlines()
    assert traceback.endswith("LongWinded: what it has to say")
    assert sentence == "hetsync: rank 1: failed, so the job ends"


def leaving(code: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", f"import os\nfrom hetsync.plane.ending import leave\n{code}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONUNBUFFERED", None)  # print would wait by itself where a pipe is full
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_was_said_before_leaving_is_written() -> None:
    with leaving("print('last words')\nleave(85, 'why')") as process:
        assert process.communicate(timeout=SECONDS) == ("last words\n", "hetsync: why\n")
    assert process.returncode == 85


FILLED = """
os.set_blocking({stream}, False)
try:
    while True:
        os.write({stream}, bytes(4096))
except BlockingIOError:
    os.set_blocking({stream}, True)
"""


def test_leaving_does_not_wait_for_a_reader() -> None:
    """As of a terminal where output is stopped."""
    with leaving(f"{FILLED.format(stream=1)}{FILLED.format(stream=2)}print('last words')\nleave(85, 'why')") as process:
        try:
            assert process.wait(SECONDS) == 85
        finally:
            process.kill()


def test_a_full_pipe_holds_up_only_its_own_words() -> None:
    with leaving(f"{FILLED.format(stream=1)}print('last words')\nleave(85, 'why')") as process:
        assert process.stderr is not None
        try:
            assert process.wait(SECONDS) == 85
        finally:
            process.kill()
        assert process.stderr.read() == "hetsync: why\n"


@pytest.mark.parametrize(
    ("failure", "tolerant", "killed", "told"),
    [
        (LostError("rank 0 has gone"), False, None, ["--resume", "with-ft ulfm"]),
        (LostError("rank 0 has gone"), True, None, ["--resume"]),
        (CutOffError("others may go on"), True, None, []),
        (StalledError("nothing moved"), False, None, []),
        (StalledError("nothing moved"), False, "the kernel has killed 1 process", ["the kernel has killed 1 process"]),
        (UserError("lr is 0"), False, "the kernel has killed 1 process", []),
    ],
    ids=repr,
)
def test_what_to_do_after_a_death_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
    tolerant: bool,
    killed: str | None,
    told: list[str],
) -> None:
    monkeypatch.setattr(ending, "killed_for_memory", lambda: killed)
    plane = OneOfTwo()
    plane.tolerant = tolerant
    with pytest.raises(Ended):
        end_job(plane, failure)
    what, *advice = capsys.readouterr().err.strip().split("; ")
    assert what == f"hetsync: rank 1: {failure}"
    assert len(advice) == len(told)
    assert all(word in sentence for word, sentence in zip(told, advice, strict=True))


@pytest.mark.parametrize(
    ("failure", "lacking"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), "GPU memory"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB, max allowed: 9.07 GB)."), "GPU memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("shapes differ"), None),
    ],
)
def test_of_which_memory_there_was_too_little(failure: RuntimeError, lacking: str | None) -> None:
    assert memory_lacking(failure) == lacking
