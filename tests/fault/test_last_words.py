"""Ranks that are killed say nothing: what the others, or launch/local, say last.

python -m pytest tests/fault
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ROOT, SECONDS, Done, finished, local_launcher, mpirun, program, ranks_alone, started
from test_kill_and_resume import process_of_rank

from hetsync.cgroups import groups_of

LIMIT_BYTES = 2**31
MEMORY_KILL = "the kernel has killed 1 process of this host for want of memory: lower data.batch_size (or sync.pins"
PATH = {"PATH": f"{Path(program('hetsync-train')).parent}:{os.environ['PATH']}"}

# Rank 1 takes ever more memory, or is killed otherwise, once something has been saved.
SCRIPT = """
import glob, os, signal, sys, time, torch, hetsync
from torch.utils.data import DataLoader, TensorDataset

how, saves, tolerate = sys.argv[1], sys.argv[2] == "saves", sys.argv[3] == "tolerate"
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
held, batches = [], 0
with hetsync.join(
    run="run", checkpoint_every=64 if saves else None, tolerate="auto" if tolerate else False, least_ranks=1
) as job:
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    if job.rank == 1 and how == "memory":
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # this one, whoever is larger
    for epoch in job.epochs(100):
        for (inputs,) in loader:
            batches += 1
            while job.rank == 1 and batches > 20 and (not saves or glob.glob("run/checkpoints/*/state.json")):
                if how == "memory":
                    held.append(b"x" * 2**24)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.005)
            job.backward(model(inputs).square().mean())
            job.step(optimizer)
"""


@contextlib.contextmanager
def memory_limit() -> Iterator[Path]:
    """A group within that of these tests, whose processes have so much memory together."""
    inside, version = next(groups_of("memory"))
    group = inside / f"hetsync-test-{os.getpid()}"
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    try:
        group.mkdir()
    except OSError:
        pytest.skip("takes a memory cgroup that this user may divide")
    try:
        try:
            (group / names[version]).write_text(str(LIMIT_BYTES))
        except OSError:
            pytest.skip("takes a memory cgroup that this user may divide")
        yield group
    finally:
        deadline = time.monotonic() + SECONDS
        while group.exists():  # until its last process has ended
            with contextlib.suppress(OSError):
                group.rmdir()
            assert time.monotonic() < deadline
            time.sleep(0.01)


def in_group(group: Path, words: list[str]) -> list[str]:
    return ["bash", "-c", f'echo $$ >"{group}/cgroup.procs" && exec "$@"', "-", *words]


def kills(group: Path) -> int:
    told = next(path for name in ("memory.events", "memory.oom_control") if (path := group / name).exists())
    return int(dict(line.split() for line in told.read_text().splitlines())["oom_kill"])


def script(folder: Path, how: str, saves: bool = True, tolerate: bool = True) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    return [
        sys.executable,
        "script.py",
        how,
        "saves" if saves else "never saves",
        "tolerate" if tolerate else "never tolerate",
    ]


def local(folder: Path, words: list[str]) -> Done:
    with started([local_launcher(folder), *words], folder, {"PYTHONPATH": str(ROOT), **PATH}) as job:
        return finished(job)


@pytest.mark.each_value(1)
@pytest.mark.parametrize(("flags", "status"), [([], 128 + signal.SIGKILL), (["--tolerate"], 0)])
def test_a_rank_killed_by_its_memory_limit(tmp_path: Path, flags: list[str], status: int) -> None:
    """mpirun said "signal 9 (Killed)"."""
    with memory_limit() as group:
        words = in_group(group, [local_launcher(tmp_path), *flags, "2", "--", *script(tmp_path, "memory")])
        with started(words, tmp_path, {"PYTHONPATH": str(ROOT), **PATH}) as job:
            done = finished(job)
        assert kills(group) == 1, done.story
    assert done.status == status, done.story
    assert MEMORY_KILL in done.out + done.err, done.story


@pytest.mark.thorough
def test_without_mpi_the_others_tell_of_memory(tmp_path: Path) -> None:
    with memory_limit() as group:
        words = in_group(group, script(tmp_path, "memory"))
        with ranks_alone(2, words, tmp_path, {"PYTHONPATH": str(ROOT)}) as ranks:
            ends = [finished(rank) for rank in ranks]
        assert kills(group) == 1, ends
    assert ends[1].status == -signal.SIGKILL, ends[1].story
    assert MEMORY_KILL in ends[0].out + ends[0].err, ends[0].story


def test_a_recipes_rank_is_killed(tmp_path: Path) -> None:
    """mpirun's were the last words. What is said to be done goes on."""
    (tmp_path / "cluster.yaml").write_text("name: two\nsource: none\ndevices: [{name: a, count: 2, speed: 1}]\n")
    recipe = ["--run.dir", "a run", "--run.samples", "100000", "--run.checkpoint_every", "300"]
    recipe += ["--emulate", "cluster.yaml", "--emulation.samples_per_second", "1000", "--run.profile_seconds", "0.1"]
    with started([local_launcher(tmp_path), "2", *recipe], tmp_path, PATH) as job:
        deadline = time.monotonic() + SECONDS
        while not list((tmp_path / "a run").glob("checkpoints/samples-*/state.json")):
            assert job.poll() is None, finished(job).story
            assert time.monotonic() < deadline, "nothing was saved in time"
            time.sleep(0.01)
        os.kill(process_of_rank(job, 1), signal.SIGKILL)
        done = finished(job)
    assert done.status == 128 + signal.SIGKILL, done.story
    last = done.err.splitlines()[-1]
    assert "for want of memory" not in done.err, done.story
    assert "launch/local --tolerate 2 (Open MPI 5)" in last, done.story
    again = last.partition("go on with: launch/local ")[2].partition(";")[0]
    assert again == f"2 --resume {tmp_path}/a\\ run", done.story


@pytest.mark.each_value(1)
@pytest.mark.parametrize(
    ("saves", "how"), [(True, "go on with the same command, where resume is 'auto'"), (False, "so start anew")]
)
def test_a_scripts_rank_is_killed(tmp_path: Path, saves: bool, how: str) -> None:
    done = local(tmp_path, ["2", "--", *script(tmp_path, "blow", saves)])
    assert done.status == 128 + signal.SIGKILL, done.story
    assert how in done.err.splitlines()[-1], done.story
    assert "--tolerate 2" in done.err.splitlines()[-1], done.story


@pytest.mark.each_value(1)
@pytest.mark.parametrize("dies", [0, 1])
def test_the_others_tell_how_to_go_on_while_mpirun_ends_them(tmp_path: Path, dies: int) -> None:
    """mpirun's "signal 9 (Killed)" was all. Who is left of that host says it once, whichever has died."""
    words = script(tmp_path, "blow", tolerate=False)
    text = SCRIPT.replace("while job.rank == 1", f"while job.rank == {dies}")
    (tmp_path / "script.py").write_text(text)
    with started([*mpirun(3), *words], tmp_path, {"PYTHONPATH": str(ROOT), **PATH}) as job:
        done = finished(job)
    assert done.status == 128 + signal.SIGKILL, done.story
    (told,) = [line for line in done.err.splitlines() if f"rank {dies} was killed or crashed" in line]
    assert f"go on with: the same command, where resume is 'auto' (the run: {tmp_path}/run)" in told, done.story
    assert "with-ft ulfm" in told, done.story


@pytest.mark.each_value(1)
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_who_is_told_to_stop_is_not_taken_for_dead(tmp_path: Path, whom: str) -> None:
    """All ranks then end within moments of each other."""
    words = script(tmp_path, "never", tolerate=False)
    (tmp_path / "script.py").write_text(SCRIPT.replace("while job.rank == 1", "while job.rank < 0"))
    with started([*mpirun(3), *words], tmp_path, {"PYTHONPATH": str(ROOT), **PATH}) as job:
        deadline = time.monotonic() + SECONDS
        while not list(tmp_path.glob("run/checkpoints/*/state.json")):
            assert time.monotonic() < deadline, "nothing was saved in time"
            time.sleep(0.01)
        os.kill(job.pid if whom == "launcher" else process_of_rank(job, 1), signal.SIGTERM)
        done = finished(job)
    assert done.status != 0, done.story
    assert "was killed or crashed" not in done.err, done.story


@pytest.mark.thorough
def test_of_other_programs_nothing_is_said(tmp_path: Path) -> None:
    done = local(tmp_path, ["2", "--", "bash", "-c", "kill -9 $$"])
    assert done.status == 128 + signal.SIGKILL, done.story
    assert "local:" not in done.err, done.story


def test_without_mpi_the_others_tell_how_to_go_on(tmp_path: Path) -> None:
    """They said that rank 1 has gone."""
    with ranks_alone(2, script(tmp_path, "blow", tolerate=False), tmp_path, {"PYTHONPATH": str(ROOT)}) as ranks:
        first, second = (finished(rank) for rank in ranks)
    assert (first.status, second.status) == (1, -signal.SIGKILL), first.story
    (last,) = [sentence for sentence in first.sentences if "has gone" in sentence]
    assert "--resume (in a script: resume='auto')" in last, first.story
    assert "with-ft ulfm" in last, first.story
