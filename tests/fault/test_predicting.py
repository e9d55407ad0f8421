"""`hetsync predict` where a rank dies: the others say so, and nothing half-written is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import ROOT, finished, local_launcher, program, run, started

MINE = """
import os
import signal

import torch
from torch.utils.data import TensorDataset

from hetsync.data import Data


def rows(model, batch):
    if os.environ.get("DIES") == os.environ.get("OMPI_COMM_WORLD_RANK") and batch[0].min() > 600:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"actual": batch[1][:, 0], "predicted": model(batch[0])[:, 0]}


def line():
    inputs = torch.arange(3000.0)[:, None]
    data = TensorDataset(inputs, 2 * inputs)
    return Data(
        data,
        data,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).abs().mean() / 6000,
        metrics=lambda model, batch: {"mae": (model(batch[0]) - batch[1]).abs().sum()},
        rows=rows,
    )


def network():
    return torch.nn.Linear(1, 1)
"""


@pytest.mark.each_value(1)
@pytest.mark.parametrize("dies", [0, 1])
def test_a_death_leaves_no_half_of_a_file(tmp_path: Path, dies: int) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    programs = f"{Path(program('hetsync-train')).parent}:{os.environ['PATH']}"
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": programs}
    words = ["--model.name", "mine:network", "--data.name", "mine:line", "--run.samples", "640", "--run.dir", "a run"]
    done = run(*words, folder=tmp_path, env=path)
    assert done.status == 0, done.story
    predict = [
        local_launcher(tmp_path),
        "--tolerate",
        "3",
        "--",
        "hetsync",
        "predict",
        "a run",
        "--output",
        "found.csv",
    ]
    with started(predict, tmp_path, {**path, "DIES": str(dies)}) as job:
        done = finished(job)
    assert done.status != 0, done.story
    assert f"rank {dies} has gone; start the command again" in done.err, done.story
    assert not list(tmp_path.glob("*found.csv*")) or dies == 0, done.story  # a killed writer cannot tidy up
    assert not (tmp_path / "found.csv").exists(), done.story
    with started(predict, tmp_path, path) as job:
        done = finished(job)
    assert done.status == 0, done.story
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 3001, done.story
