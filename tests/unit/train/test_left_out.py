"""fault.not_finite skip, on a rank alone: what is not finite moves nothing, and its samples go out once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from normed_net import NormedNet
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.config.faults import FaultConfig
from hetsync.config.schema import Config, ControlConfig
from hetsync.errors import UserError

SAMPLES, BATCH = 96, 16


class Spoiled:
    """A data set of which one sample has been spoiled; `heals` once it has been used."""

    def __init__(self, index: int, heals: bool) -> None:
        points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(points, (points[:, 0] > 0).long(), torch.arange(SAMPLES))
        self._bad, self._heals, self.used = index, heals, 0
        self.seen: list[int] = []

    def batch(self, points: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        self.seen += indices.tolist()
        if self._bad in indices and not (self._heals and self.used):
            self.used += 1
            return points * torch.nan
        return points


def train(
    folder: Path,
    spoiled: Spoiled,
    bound: int,
    accumulation: int = 1,
    every: int = 1,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> nn.Module:
    """Steps after so many batches. Returns the model and an average of it and its statistics."""
    model = NormedNet().to(dtype)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with hetsync.join(
        run=folder / "run",
        progress=False,
        delay_bound=bound,
        accumulation=accumulation,
        fault={"not_finite": "skip"},
        **settings,
    ) as job:
        loader = job.prepare(model, optimizer, average, DataLoader(spoiled.data, BATCH, shuffle=True))[-1]
        for _ in job.epochs(2):
            for number, (points, labels, indices) in enumerate(loader, 1):
                loss = nn.functional.cross_entropy(model(spoiled.batch(points, indices).to(dtype)), labels)
                job.backward(loss)
                if number % every == 0 and job.step(optimizer):
                    average.update_parameters(model)
    return nn.ModuleList([model, average])


@pytest.mark.parametrize(("bound", "accumulation"), [(0, 1), (0, 2), (4, 1), (4, 3), (None, 2)])
def test_it_is_left_out_and_goes_out_once_more(tmp_path: Path, bound: int, accumulation: int) -> None:
    spoiled = Spoiled(37, heals=True)
    model = train(tmp_path, spoiled, bound, accumulation)
    assert spoiled.used == 1
    assert all(value.isfinite().all() for value in model.state_dict().values())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["samples_applied"] == summary["samples_expected"] == 2 * SAMPLES
    (failure,) = summary["failures"]
    assert (failure["rank"], failure["kind"], failure["action"]) == (0, "not_finite", "left out")
    assert failure["samples_returned"] == BATCH * accumulation
    assert len(spoiled.seen) == 2 * SAMPLES + failure["samples_returned"]
    assert set(spoiled.seen) == set(range(SAMPLES))


@pytest.mark.parametrize("bound", [0, 4])
def test_what_spoils_again_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], bound: int) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, Spoiled(37, heals=False), bound)
    assert ended.value.code == 2
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hetsync:")]
    named = said.partition("on rank 0 now: ")[2].partition(";")[0].split(", ")
    assert "37" in named
    assert len(named) <= BATCH


@pytest.mark.parametrize("bound", [0, 4])
def test_it_is_refused_where_the_loop_adds_gradients_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], bound: int
) -> None:
    """Those of the batches before are in no other place, and count as applied."""
    with pytest.raises(SystemExit):
        train(tmp_path, Spoiled(37, heals=True), bound, every=2)
    assert "while the loop adds them up over batches" in capfd.readouterr().err


def test_it_is_refused_for_weights_of_sixteen_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, Spoiled(37, heals=True), 4, dtype=torch.bfloat16)
    assert "fault.not_finite is skip, but weights are torch.bfloat16" in capfd.readouterr().err


def test_it_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(UserError, match=r"fault\.not_finite is skip, but control.name is goodput"):
        Config(fault=FaultConfig(not_finite="skip"), control=ControlConfig("goodput"))
