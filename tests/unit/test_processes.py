"""What peers on one host see of each other: a process that computes in C, one that is stopped, one that has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hetsync.processes import Process, Stacks

PROGRAM = """
import sys, time
from hetsync.processes import Stacks

def busy():
    print(*stacks.process[1:], flush=True)
    sum(range(10**11))  # keeps Python's lock

stacks = Stacks()
busy()
"""


def test_a_peer_reads_the_stack_of_a_process_that_keeps_its_lock_and_ends_it() -> None:
    own = Stacks()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        process = Process(own.process.host, *map(int, child.stdout.readline().split()))
        assert process.state == "runs"
        assert "in busy" in process.stack()
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while process.state != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.state == "stopped"
        assert process.stack() == ""
        assert process.kill()
        child.wait()
    assert process.state == "gone"
    assert not process.kill()
    own.close()


BUSY = """
import gc, sys, threading, time
from hetsync.processes import own_stack

class Circle:
    def __init__(self):
        self.me = self

    def __del__(self):  # Python in the middle of whatever allocates, so that other threads get their turn
        for _ in range(30):
            pass

def numbers(depth):
    if depth:
        yield from numbers(depth - 1)
    yield depth

def recurse(depth):
    Circle()
    return sum(numbers(5)) + (recurse(depth - 1) if depth else 0)

def look():
    end = time.monotonic() + 1
    while time.monotonic() < end:
        told.append("in recurse" in own_stack())

gc.set_threshold(20)
sys.setswitchinterval(1e-6)
told = []
looking = threading.Thread(target=look)
looking.start()
while looking.is_alive():
    recurse(15)
print(sum(told) / len(told))
"""


def test_a_process_tells_its_own_stack_while_it_runs_on() -> None:
    """A walk through frames, which ruff forbids, ended this by a segmentation fault within 20 s on a busy machine, five
    times in seven; here it is short."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.5


def test_another_process_of_the_same_id_is_left_alone() -> None:
    own = Stacks()
    other = own.process._replace(started=own.process.started + 1)
    assert other.state == "gone"
    assert not other.kill()
    assert not own.process._replace(host="elsewhere 1").kill()
    own.close()
    own.close()


def test_a_handler_of_the_user_s_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        stacks = Stacks()
        assert stacks.process.stacks == -1
        stacks.close()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
