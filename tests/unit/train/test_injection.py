"""Faults on order in a job of one rank: each strikes at its moment, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.config.faults import InjectedFault
from hetsync.plane.faulty import NeverStruckError
from hetsync.train.injection import EXIT_STATUS, require_struck

SAMPLES, BATCH = 64, 16


def train(folder: Path, fault: dict[str, Any], bound: int = 4, **settings: Any) -> int:
    """Batches that a job with this fault has had."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    points = torch.randn(SAMPLES, 4)
    data = TensorDataset(points, (points[:, 0] > 0).long())
    batches = 0
    with hetsync.join(
        run=folder / "run", progress=False, delay_bound=bound, fault={"inject": [{"rank": 0, **fault}]}, **settings
    ) as job:
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
        for _ in job.epochs(2):
            for inputs, labels in loader:
                batches += 1
                job.backward(nn.functional.cross_entropy(model(inputs), labels))
                job.step(optimizer)
            job.evaluate(lambda: (1.0, 1))
    return batches


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize(
    "when",
    [
        *({"when": when, "round": number} for when in ("before", "during", "after") for number in (0, 3)),
        *({"when": when} for when in ("evaluation", "checkpoint", "drain")),
    ],
)
def test_it_strikes_at_its_moment(tmp_path: Path, when: dict[str, Any], bound: int) -> None:
    with pytest.raises(RuntimeError, match="injected: raise on rank 0"):
        train(tmp_path, {"kind": "raise", **when}, bound)


def test_exit_has_its_status(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, {"kind": "exit", "round": 2})
    assert ended.value.code == EXIT_STATUS


def test_memory_is_really_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train(tmp_path, {"kind": "memory", "round": 2})


@pytest.mark.parametrize("bound", [0, 4])
def test_gradients_become_nan(tmp_path: Path, capfd: pytest.CaptureFixture[str], bound: int) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, {"kind": "not_finite", "round": 2}, bound)
    assert "became nan on rank 0" in capfd.readouterr().err


def test_a_full_disk_ends_no_job_but_at_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fault = {"kind": "disk_full", "when": "checkpoint"}
    assert train(tmp_path / "midway", fault, checkpoint_every=SAMPLES) == 8
    assert "cannot write the checkpoint: No space left on device (injected); training goes on" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        train(tmp_path / "end", fault)


def test_a_slow_rank_takes_longer(tmp_path: Path) -> None:
    assert train(tmp_path, {"kind": "slow", "factor": 5, "round": 0}) == 8
    lines = (tmp_path / "run" / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    assert any(json.loads(line)["kind"] == "piece" for line in lines)


@pytest.mark.parametrize(
    "fault",
    [{"kind": "die", "round": 1000}, {"kind": "corrupt", "round": 1}, {"kind": "stop", "when": "recovery"}],
)
def test_what_never_struck_ends_with_status_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: dict[str, Any]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, fault)
    assert ended.value.code == 1
    assert f"fault.inject: {fault['kind']} on rank 0" in capfd.readouterr().err


def test_those_who_have_gone_have_struck_if_they_could() -> None:
    die = InjectedFault("die", 1, round=3)
    slow = InjectedFault("slow", 1, round=2, factor=2.0)
    lost = InjectedFault("slow", 2, round=2, factor=2.0)
    require_struck([die, slow], [], members=[0, 2])
    with pytest.raises(NeverStruckError, match="slow on rank 2, during round 2"):
        require_struck([die, slow, lost], [], members=[0])
    with pytest.raises(NeverStruckError, match="die on rank 1"):
        require_struck([die], [die], members=[0, 1])
