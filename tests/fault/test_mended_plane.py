"""A plane after deaths, where MPI tells of them (`mpirun --with-ft ulfm`), and where no launcher does.

Each case is a job of its own. python -m pytest tests/fault
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, ranks_alone, started

JOB_SECONDS = 60.0
ULFM = ["--with-ft", "ulfm"]

PREAMBLE = """
import os, signal, sys, threading, time
import torch
from hetsync.plane import open_plane
from hetsync.plane.base import LostError, MembersLost
plane = open_plane("auto", 20.0)
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


BETWEEN_HOSTS = f"""
import hetsync.plane.mpi
hetsync.plane.mpi.ranks_here = lambda among: 1
{PREAMBLE}
assert plane.sums._first.algorithm.segment_values < 1 << 16, "of one host"
"""


def job(folder: Path, ranks: int, code: str, flags: list[str] = ULFM, preamble: str = PREAMBLE) -> Done:
    words = [*mpirun(ranks), *flags, sys.executable, "-c", preamble + code]
    with started(words, folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process, JOB_SECONDS)


def job_between_hosts(folder: Path, ranks: int, code: str) -> Done:
    """As if each rank were on a host of its own: by TCP, in segments so small that nothing waits for an answer."""
    tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
    return job(folder, ranks, code, [*ULFM, *tcp], BETWEEN_HOSTS)


def job_without_mpi(folder: Path, ranks: int, code: str) -> Done:
    """Its ranks' words, one after the other, and the worst status of those that were not killed."""
    with ranks_alone(ranks, [sys.executable, "-c", PREAMBLE + code], folder, {"PYTHONPATH": str(ROOT)}) as processes:
        ends = [finished(process, JOB_SECONDS) for process in processes]
    status = max(done.status for done in ends)
    return Done(status, "".join(done.out for done in ends), "".join(done.err for done in ends))


Run = Callable[[Path, int, str], Done]
BY = pytest.mark.parametrize("run_job", [job, job_without_mpi])


@pytest.mark.parametrize(("run_job", "second"), [(job, 0), (job_between_hosts, 0), (job_without_mpi, 1)])
def test_survivors_sum_and_talk_after_deaths(tmp_path: Path, run_job: Run, second: int) -> None:
    """Of a rank in a sum of many segments beside messages, and then of another, with MPI the first, in a meeting."""
    left = [rank for rank in (0, 1, 3) if rank != second]
    done = run_job(
        tmp_path,
        4,
        f"second, left = {second}, {left}"
        + """
# Stale after the death: a message that nobody has read, and one that waits for its receiver.
plane.send("stale", to=(first + 1) % 4)
plane.barrier()
def large():
    return plane.allocate(3_000_000, torch.device("cpu"))
if first == 2:
    plane.allreduce(large().fill_(1))
    die()
addend, handle = large().fill_(1), None
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
wait(plane.allreduce(addend.fill_(first + 1)))
assert addend.eq(7).all()
if (shared := plane.sums.shared_memory) is not None:  # on one host
    assert shared.offset(addend) is not None, "memory from before is shared with those who are left"
    print("shared", first, flush=True)  # it may be killed
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
while sum(message != "have all" for message in arrived) < 2:
    arrived += [message for _, message in plane.receive()]
fresh = [message for message in arrived if message != "have all"]
assert sorted(fresh) == [("fresh", rank) for rank in others], arrived

if first == second:
    while arrived.count("have all") < 2:  # the others wait for nothing any more
        arrived += [message for _, message in plane.receive()]
    die()
def meet():
    plane.send("have all", to=second)  # who may be gone before this returns
    plane.gather_objects(first)
until_lost(meet)
plane.mend()
plane.heed()
assert plane.members == tuple(left)
assert plane.broadcast_object(first) == left[0]
tensor = torch.full((5,), float(first))
wait(plane.allreduce(tensor))
assert tensor.tolist() == [float(sum(left))] * 5
plane.close()
plane.close()
print("survived", first)
""",
    )
    assert done.status == 0, done.story
    shared = [f"shared {rank}" for rank in (0, 1, 3)] if run_job is not job_between_hosts else []
    assert sorted(done.out.split("\n"))[1:] == [*shared, *(f"survived {rank}" for rank in left)], done.story


@BY
def test_a_death_while_survivors_mend_is_mended_too(tmp_path: Path, run_job: Run) -> None:
    done = run_job(
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


@BY
def test_the_main_thread_hears_of_a_death_while_another_thread_mends(tmp_path: Path, run_job: Run) -> None:
    done = run_job(
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


MENDED = "until_lost(plane.receive)\nplane.mend()\nplane.heed()\n"


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("run_job", "ranks", "before"),
    [
        (job, 3, ""),
        (job, 4, f"if first == 0: die()\n{MENDED}"),
        (job_without_mpi, 3, ""),
        (job_without_mpi, 4, f"if first == 3: die()\n{MENDED}"),
    ],
)
def test_abort_ends_the_job_with_its_code(tmp_path: Path, run_job: Run, ranks: int, before: str) -> None:
    """MPI_Abort would end nobody but its caller. Others wait for a message, and in a meeting."""
    done = run_job(
        tmp_path,
        ranks,
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


@pytest.mark.thorough
def test_where_nobody_has_gone_all_begin_anew(tmp_path: Path) -> None:
    done = job_without_mpi(
        tmp_path,
        3,
        """
handle = plane.allreduce(torch.ones(3)) if first > 0 else None  # which rank 0 never joins
for rank in range(3):
    plane.send("ready", to=rank)
if first == 1:
    ready = []
    while len(ready) < 3:
        ready += plane.receive()
    plane.mend()
else:
    until_lost(plane.receive)
    plane.mend()
plane.heed()
assert plane.members == (0, 1, 2)
tensor = torch.ones(3)
wait(plane.allreduce(tensor))
assert tensor.tolist() == [3.0] * 3
plane.barrier()
assert plane.receive() == []
plane.close()
print("went on", first)
""",
    )
    assert done.status == 0, done.story
    assert done.out.count("went on") == 3, done.story


def test_without_mpi_rank_0_is_the_last_to_die(tmp_path: Path) -> None:
    """It holds what the others meet at. These say so at once, whether they wait in a meeting or not."""
    done = job_without_mpi(
        tmp_path,
        3,
        """
assert plane.tolerant
if first == 0:
    die()
try:
    until_lost(plane.receive if first == 1 else lambda: plane.gather_objects(None))
except LostError as lost:
    print(lost)
    plane.abort(7)
""",
    )
    assert done.status == 7, done.story
    assert done.out.count("rank 0 has gone") == 2, done.story
