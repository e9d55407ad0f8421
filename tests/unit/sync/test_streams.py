"""Whole jobs on played streams: PyTorch's CUDA sanitizer tells of no race between them, and of each that is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sanitized_streams import CPU, PlayedStream, PlayedTransfer, Sanitizer, sanitized_streams
from thread_ranks import World, run_ranks, thread_plane
from torch import nn
from torch.utils.data import TensorDataset

import hetsync
from hetsync.plane.staging import CudaStaging
from hetsync.sync.device_order import StreamOrder

BATCH, SAMPLES = 12, 144
POINTS = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
Settings = dict[str, Any]


@pytest.fixture
def sanitizer() -> Iterator[Sanitizer]:
    with sanitized_streams() as sanitizer:
        yield sanitizer


def train(
    sanitizer: Sanitizer, *, dtype: torch.dtype = torch.float32, evaluates: bool = False, **settings: Any
) -> None:
    def job(world: World, rank: int) -> None:
        plane = thread_plane(world, rank, sanitizer.library)
        model: nn.Module = nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)).to(dtype)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        held = POINTS.to(dtype).clone()

        def score() -> Any:
            return {"loss": (float(model(held).square().sum()), len(held))}

        with (
            sanitizer.rank(),
            hetsync.join(plane=plane, seed=1, profile_seconds=0.01, progress=False, **settings) as job,
        ):
            model, optimizer = job.prepare(model, optimizer)
            if evaluates:
                job.evaluate_every(60, score)
            for (points,) in job.loader(TensorDataset(POINTS.to(dtype)), BATCH, samples=SAMPLES):
                job.backward(model(points).square().mean())
                job.step(optimizer)

    run_ranks(2, job)


JOBS: dict[str, Settings] = {
    "delayed": {},
    "synchronous": {"delay_bound": 0},
    "accumulation": {"delay_bound": 0, "accumulation": 2},
    "bfloat16 on the wire": {"wire": "bfloat16"},
    "int8 on the wire": {"wire": "int8", "fragments": 3},
    "synchronous, int8": {"delay_bound": 0, "wire": "int8"},
    "snapshots": {"evaluates": True},
    "synchronous, evaluated": {"delay_bound": 0, "evaluates": True},
    "outer optimizer": {"outer": {"name": "nesterov"}, "evaluates": True},
    "16-bit weights": {"dtype": torch.bfloat16, "fragments": 2, "wire": "bfloat16"},
    "synchronous, 16-bit": {"dtype": torch.bfloat16, "delay_bound": 0},
}


@pytest.mark.parametrize("settings", JOBS.values(), ids=JOBS)
def test_no_stream_overtakes_another(sanitizer: Sanitizer, settings: Settings) -> None:
    settings = {"delay_bound": 4, **settings}
    train(sanitizer, **settings)
    assert sanitizer.handler.seq_num > 500, "nothing was seen"
    assert not sanitizer.told


def nothing(*_: Any) -> None:
    pass


PLANTED: dict[str, tuple[type, str, Any, Settings, str]] = {
    "follow": (StreamOrder, "_follow", lambda order, passes: None, {}, "deltas"),
    "leave": (StreamOrder, "leave", nothing, {}, "deltas"),
    "synchronous follow": (StreamOrder, "_follow", lambda order, passes: None, {"delay_bound": 0}, "gradients"),
    "synchronous leave": (StreamOrder, "leave", nothing, {"delay_bound": 0}, "gradients"),
    "applying": (StreamOrder, "applying", lambda order: nullcontext(), {}, "deltas"),
    "staging": (CudaStaging, "begin", nothing, {}, "staging.fetch"),
    "transfer": (PlayedTransfer, "complete", lambda transfer, arriving: arriving[0], {}, "transfer.each_tensor"),
}


@pytest.mark.parametrize(("owner", "name", "planted", "settings", "where"), PLANTED.values(), ids=PLANTED)
def test_a_planted_race_is_told(
    sanitizer: Sanitizer,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    planted: Callable[..., Any],
    settings: Settings,
    where: str,
) -> None:
    monkeypatch.setattr(owner, name, planted)
    settings = {"delay_bound": 4, **settings}
    train(sanitizer, **settings)
    assert where in sanitizer.told


@pytest.mark.parametrize("kept", [False, True])
def test_memory_that_is_still_read_elsewhere_is_not_used_anew(sanitizer: Sanitizer, kept: bool) -> None:
    order, other = StreamOrder(CPU), PlayedStream(sanitizer, "another stream")
    with sanitizer.rank():
        with torch.cuda.stream(other):  # type: ignore[arg-type]
            snapshot = torch.ones(3)
        torch.cuda.current_stream().wait_event(other.record_event())
        snapshot.sum()
        if kept:
            order.keep(snapshot)
        del snapshot
        with torch.cuda.stream(other):  # type: ignore[arg-type]
            torch.ones(3)
    assert ("memory is used anew on another stream" in sanitizer.told) is not kept
