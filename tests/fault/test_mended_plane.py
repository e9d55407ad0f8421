"""A plane after deaths, where MPI tells of them (`mpirun --with-ft ulfm`): each case is a job of its own.

python -m pytest tests/fault
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, started

JOB_SECONDS = 60.0
ULFM = ["--with-ft", "ulfm"]

PREAMBLE = """
import os, signal, sys, threading, time
import torch
from hetsync.plane.base import LostError, MembersLost
from hetsync.plane.mpi import MpiPlane
plane = MpiPlane(20.0)
first = plane.rank  # the number that it started with
def wait(handle):
    while not handle.done():
        time.sleep(1e-3)
def until_lost(call):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            call()
        except MembersLost as lost:
            return lost
        time.sleep(1e-3)
    raise TimeoutError("nobody was missed")
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def job(folder: Path, ranks: int, code: str, flags: list[str] = ULFM) -> Done:
    words = [*mpirun(ranks), *flags, sys.executable, "-c", PREAMBLE + code]
    with started(words, folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process, JOB_SECONDS)


def test_survivors_sum_and_talk_after_deaths(tmp_path: Path) -> None:
    """Of a rank in a sum of many segments beside messages, and then of the first rank, in a meeting."""
    done = job(
        tmp_path,
        4,
        """
# Stale after the death: a message that nobody has read, and one that waits for its receiver.
plane.send("stale", to=(first + 1) % 4)
plane.barrier()
large = torch.ones(3_000_000)
if first == 2:
    plane.allreduce(large.clone())
    die()
addend, handle = large.clone(), None
def sum_large():  # begins it, unless the death is known by then
    global handle
    handle = handle or plane.allreduce(addend)
    handle.done()
until_lost(sum_large)
until_lost(plane.receive)  # from every call, until it is mended
until_lost(lambda: plane.send("more", to=(first + 1) % 4))
until_lost(lambda: plane.allreduce(torch.ones(2)))
until_lost(lambda: plane.gather_objects(None))
plane.mend()
plane.heed()
assert plane.rank == first and plane.members == (0, 1, 3) and plane.size == 3
for wire, n in (("float32", 3_000_000), ("int8", 1000), ("bfloat16", 1000)):
    tensor = torch.full((n,), float(first + 1))
    wait(plane.allreduce(tensor, wire))
    assert tensor.min() == tensor.max(), wire
    assert abs(tensor[0] - 7.0) < 0.1, (wire, tensor[0])
assert plane.gather_objects(first) == [0, 1, 3]
others = [rank for rank in plane.members if rank != first]
for rank in others:
    plane.send(("fresh", first), to=rank)
arrived = []
while len(arrived) < 2:
    arrived += plane.receive()
assert sorted(arrived) == [(rank, ("fresh", rank)) for rank in others], arrived

if first == 0:
    die()
until_lost(lambda: plane.gather_objects(first))
plane.mend()
plane.heed()
assert plane.members == (1, 3)
assert plane.broadcast_object(first) == 1
tensor = torch.full((5,), float(first))
wait(plane.allreduce(tensor))
assert tensor.tolist() == [4.0] * 5
plane.close()
plane.close()
print("survived", first)
""",
    )
    assert done.status == 0, done.story
    assert sorted(done.out.split("\n"))[1:] == ["survived 1", "survived 3"], done.story


def test_a_death_while_survivors_mend_is_mended_too(tmp_path: Path) -> None:
    done = job(
        tmp_path,
        4,
        """
if first == 1:
    die()
until_lost(plane.receive)
if first == 3:
    threading.Timer(0.05, die).start()
    time.sleep(5)
while plane.members != (0, 2):
    try:
        plane.mend()
        plane.heed()
        while plane.members == (0, 2, 3):
            plane.receive()
    except MembersLost:
        pass
plane.barrier()
plane.close()
print("survived", first)
""",
    )
    assert done.status == 0, done.story
    assert sorted(done.out.split("\n"))[1:] == ["survived 0", "survived 2"], done.story


def test_the_main_thread_hears_of_a_death_while_another_thread_mends(tmp_path: Path) -> None:
    done = job(
        tmp_path,
        3,
        """
if first == 1:
    time.sleep(0.3)
    die()
heard = threading.Event()
def communicate():
    until_lost(plane.receive)
    heard.wait(20)
    plane.mend()
    plane.heed()
thread = threading.Thread(target=communicate)
thread.start()
until_lost(lambda: plane.broadcast_object(first))
heard.set()
thread.join()
assert plane.gather_objects(first) == [0, 2]
plane.close()
print("survived", first)
""",
    )
    assert done.status == 0, done.story
    assert sorted(done.out.split("\n"))[1:] == ["survived 0", "survived 2"], done.story


@pytest.mark.parametrize(
    "before", ["", "if first == 0: die()\nuntil_lost(plane.receive)\nplane.mend()\nplane.heed()\n"]
)
def test_abort_ends_the_job_with_its_code(tmp_path: Path, before: str) -> None:
    """MPI_Abort would end nobody but its caller. Others wait for a message, and in a meeting."""
    done = job(
        tmp_path,
        4,
        before
        + """
if first == 1:
    print("last words")
    threading.Thread(target=plane.abort, args=(9,)).start()
if first == 2:
    while True:
        plane.receive()
        time.sleep(1e-3)
plane.gather_objects(None)
print("came back")
""",
    )
    assert done.status == 9, done.story
    assert "last words" in done.out
    assert "came back" not in done.out
    assert "MembersLost" not in done.err, done.story


def test_without_ulfm_a_death_ends_the_job(tmp_path: Path) -> None:
    code = "assert not plane.tolerant\nif first == 1: die()\nplane.gather_objects(None)\nprint('came back')\n"
    done = job(tmp_path, 2, code, flags=[])
    assert done.status != 0
    assert "came back" not in done.out
