"""`hetsync join RUN`: processes that somebody starts by hand take the places of ranks that have died, without MPI.

Each case is a job of its own. python -m pytest tests/fault/test_joining.py
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import SECONDS, Done, command, finished, program, ranks_alone, run, started, summary_of

from hetsync.train.checkpoint import load_newest

RANKS = 3
SAMPLES = 3200  # few, as over many a rounding may flip a ReLU, and weights part
CLUSTER = "name: three\nsource: none\ndevices: [{name: a, count: 2, speed: 2}, {name: b, count: 1, speed: 1}]\n"
OPTIMIZER = ["--optimizer.name", "sgd", "--optimizer.momentum", "0.9"]

SCRIPT = """
import os, time, torch, hetsync
from hetsync.plane.shared_sums import SharedSums
SharedSums.least_values = 1  # small sums, too
with hetsync.join(run=os.environ.get("RUN"), delay_bound=4, fault={"replace": True}) as job:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(6400, 4), torch.randn(6400, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for _ in job.epochs(100):
        for x, y in loader:
            time.sleep(0.01)
            optimizer.zero_grad()
            job.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
"""


def words(folder: Path, *more: str) -> list[str]:
    """Emulated devices make it last some seconds, whatever machine this is."""
    (folder / "three.yaml").write_text(CLUSTER)
    mine = ["--run.dir", "run", "--run.samples", str(SAMPLES), "--emulate", "three.yaml", "--fault.replace", "true"]
    return command(*mine, "--emulation.samples_per_second", "100", *OPTIMIZER, *more)


@contextlib.contextmanager
def job(folder: Path, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Once rounds land."""
    with ranks_alone(RANKS, words(folder, *more), folder) as ranks:
        told = folder / "run" / "telemetry" / "rank-0000.jsonl"
        until(lambda: told.exists() and told.read_text().count('"round"') > 5, ranks)
        yield ranks


def until(done: Callable[[], bool], ranks: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert ranks[0].poll() is None, finished(ranks[0]).story
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)


def join(folder: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return started([program("hetsync"), "join", "run"], folder)


def says(process: subprocess.Popen[str], what: str) -> None:
    assert process.stderr is not None
    assert what in process.stderr.readline()


def settled(folder: Path, ranks: list[subprocess.Popen[str]], dead: int) -> Done:
    """Of rank 0, once all have ended well but the dead one."""
    ends = [finished(process) for process in ranks]
    story = [done.story for done in ends]
    assert [done.status for done in ends] == [-signal.SIGKILL if rank == dead else 0 for rank in range(RANKS)], story
    summary = summary_of(folder / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert (summary["status"], summary["ranks"], summary["ranks_at_start"]) == ("finished", RANKS, RANKS), story
    assert [failure["rank"] for failure in summary["failures"]] == [dead]
    assert [entry["rank"] for entry in summary["joins"]] == [dead]
    assert summary["staleness"]["max"] <= summary["delay_bound"]
    assert not (folder / "run" / "join.json").exists()
    return ends[0]


def test_a_process_takes_a_dead_ranks_place(tmp_path: Path) -> None:
    """Anchors are compared at each rest: ranks that differed would end the job."""
    with job(tmp_path, "--sync.delay_bound", "0") as ranks:
        kill(ranks[1])
        with join(tmp_path) as newcomer:
            says(newcomer, "this process takes the place of rank 1")
            says(newcomer, "this process is rank 1 of the job from now on")
            with join(tmp_path) as spare:
                says(spare, "no rank has died")
                first = settled(tmp_path, ranks, 1)
                assert finished(spare).status == 0
            assert "the place of rank 1 is free: hetsync join" in first.err
            assert finished(newcomer).status == 0
    mine = ["--run.dir", "alone", "--run.samples", SAMPLES, *OPTIMIZER, "--sync.delay_bound", 0]
    alone = run(*mine, folder=tmp_path)
    assert alone.status == 0, alone.story
    theirs, one = (load_newest(tmp_path / name).model for name in ("run", "alone"))
    assert max(float((theirs[name] - value).abs().max()) for name, value in one.items()) < 1e-5


@pytest.mark.thorough
def test_who_comes_first_waits_and_one_of_two_takes_it(tmp_path: Path) -> None:
    """The other waits, and leaves as the job ends."""
    with job(tmp_path, "--sync.fragments", "2") as ranks, join(tmp_path) as one, join(tmp_path) as other:
        time.sleep(2)
        kill(ranks[2])
        settled(tmp_path, ranks, 2)
        ends = [finished(one), finished(other)]
    assert [done.status for done in ends] == [0, 0], [done.story for done in ends]
    assert sum("this process is not needed: the job has ended" in done.err for done in ends) == 1


@pytest.mark.thorough
def test_who_waits_leaves_at_a_signal_and_one_that_is_killed_gives_its_place_away(tmp_path: Path) -> None:
    with job(tmp_path, "--sync.delay_bound", "4") as ranks:
        with join(tmp_path) as waiting:
            says(waiting, "no rank has died")
            waiting.send_signal(signal.SIGUSR1)
            assert finished(waiting).status == 85
        kill(ranks[1])
        settings = tmp_path / "three.yaml"
        kept = settings.read_text()
        with join(tmp_path) as wrong:
            settings.write_text("no profile")  # its own mistake is not the job's
            assert finished(wrong).status == 2
        settings.write_text(kept)
        with join(tmp_path) as stopped:
            assert stopped.stderr is not None
            told = stopped.stderr.readline()
            if "no rank has died whose place is free" in told:  # it becomes so just now
                told = stopped.stderr.readline()
            assert "this process takes the place of rank 1" in told
            stopped.send_signal(signal.SIGUSR1)  # which is not the job's
            assert finished(stopped).status == 85
        with join(tmp_path) as newcomer:
            settled(tmp_path, ranks, 1)
            assert finished(newcomer).status == 0


@pytest.mark.thorough
def test_who_keeps_no_run_or_has_other_versions_is_not_let_in(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {"RUN": "run"}
    with ranks_alone(RANKS, [sys.executable, str(script)], tmp_path, env) as ranks:
        told = tmp_path / "run" / "telemetry" / "rank-0000.jsonl"
        until(lambda: told.exists() and told.read_text().count('"round"') > 5, ranks)
        kill(ranks[1])
        with join(tmp_path) as newcomer:
            done = finished(newcomer)
        assert done.status == 2, done.story
        assert "in the process that joins" in done.err
        assert ranks[0].poll() is None
        script.write_text("import torch\ntorch.__version__ = '1.0.0'\n" + SCRIPT)
        with join(tmp_path) as newcomer:
            done = finished(newcomer)
        assert done.status == 2, done.story
        assert "has torch 1.0.0, but the job on" in done.err
        assert "takes the place" not in done.err
        assert ranks[0].poll() is None


def test_where_nobody_can_join_one_sentence_says_so(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path)
    (tmp_path / "run").mkdir()
    assert "has no join.json: its job has ended" in refused(tmp_path)
    notice = tmp_path / "run" / "join.json"
    notice.write_text("{}")
    assert "is not of format 1" in refused(tmp_path)
    notice.chmod(0o666)
    assert "others may write there" in refused(tmp_path)
    notice.write_text("[" * 100_000)
    notice.chmod(0o600)
    assert "cannot be read" in refused(tmp_path)
    (tmp_path / "run").chmod(0o775)  # as with umask 002
    told = {"format": 1, "asked_at": {}, "command": [sys.executable, "-c", ""], "directory": str(tmp_path)}
    for word, sentence in (("command", "command is [] in"), ("directory", "which this host has not")):
        notice.write_text(json.dumps({**told, word: [] if word == "command" else "nowhere"}))
        assert sentence in refused(tmp_path)
    notice.write_text(json.dumps({**told, "command": [program("hetsync-train"), "digits"]}))
    assert "HETSYNC_ASKS is {}" in refused(tmp_path)


def refused(folder: Path) -> str:
    with join(folder) as process:
        done = finished(process)
    assert done.status == 2
    assert len(done.sentences) == 1, done.story
    return done.sentences[0]
