"""Whole jobs on played streams: PyTorch's CUDA sanitizer tells of no race between them, and of each that is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from sanitized_streams import CPU, PlayedStream, PlayedTransfer, Sanitizer, sanitized_streams
from thread_ranks import World, run_ranks, thread_plane
from torch import nn
from torch.utils.data import TensorDataset

import hetsync
from hetsync.plane.staging import CudaStaging
from hetsync.sync.device_order import StreamOrder
from hetsync.sync.rounds import Rounds
from hetsync.sync.shared_state import EngineOptions, SharedState
from hetsync.sync.worker import Worker
from hetsync.telemetry import Telemetry

BATCH, EPOCHS = 12, 2
POINTS = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
Settings = dict[str, Any]


@pytest.fixture
def sanitizer() -> Iterator[Sanitizer]:
    with sanitized_streams() as sanitizer:
        yield sanitizer


def train(
    sanitizer: Sanitizer,
    *,
    dtype: torch.dtype = torch.float32,
    evaluates: bool = False,
    own_stream: bool = False,
    steps_every: int = 1,
    leaves_at: int | None = None,
    holds: bool = False,
    ranks: int = 2,
    dies_at: int | None = None,
    **settings: Any,
) -> None:
    """With an `own_stream` the script has one around each batch, around what it evaluates, and at rest. The
    second rank dies with batch `dies_at`. `holds`: who leaves its loop ends the job, and holds the iterator."""

    def job(world: World, rank: int) -> None:
        plane = thread_plane(world, rank, sanitizer.library)
        model: nn.Module = nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)).to(dtype)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        held = POINTS.to(dtype).clone()

        def score() -> Any:
            with torch.cuda.stream(stream):
                return {"loss": (float(model(held).square().sum()), len(held))}

        with (
            sanitizer.rank(),
            hetsync.join(plane=plane, seed=1, profile_seconds=0.01, progress=False, **settings) as job,
        ):
            stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
            model, optimizer = job.prepare(model, optimizer)
            if evaluates:
                job.evaluate_every(60, score)
            batches = job.loader(TensorDataset(POINTS.to(dtype)), BATCH)
            for _ in job.epochs(EPOCHS):
                with torch.cuda.stream(stream), torch.no_grad():
                    for weight in model.parameters():
                        weight *= 0.9
                held_loop = iter(batches) if holds else None
                for number, (points,) in enumerate(held_loop or batches):
                    with torch.cuda.stream(stream):
                        model(points).square().mean().backward()
                        if (number + 1) % steps_every == 0:
                            optimizer.step()
                            optimizer.zero_grad()
                    if number == leaves_at:
                        break
                    if rank == 1 and number == dies_at:
                        world.die(rank)
                if holds:
                    break
                with torch.cuda.stream(stream), torch.no_grad():
                    for weight in model.parameters():
                        weight *= 0.5
                if dies_at is None:
                    job.evaluate(score)

    run_ranks(ranks, job)


JOBS: dict[str, Settings] = {
    "delayed": {},
    "synchronous": {"delay_bound": 0},
    "accumulation": {"delay_bound": 0, "accumulation": 2},
    "bfloat16 on the wire": {"wire": "bfloat16"},
    "int8 on the wire": {"wire": "int8", "fragments": 3},
    "synchronous, int8": {"delay_bound": 0, "wire": "int8"},
    "top64 on the wire": {"wire": "top64", "fragments": 3},
    "synchronous, int2": {"delay_bound": 0, "wire": "int2"},
    "snapshots": {"evaluates": True},
    "synchronous, evaluated": {"delay_bound": 0, "evaluates": True},
    "outer optimizer": {"outer": {"name": "nesterov"}, "evaluates": True},
    "16-bit weights": {"dtype": torch.bfloat16, "fragments": 2, "wire": "bfloat16"},
    "synchronous, 16-bit": {"dtype": torch.bfloat16, "delay_bound": 0},
}


ALIKE = "synchronous, int8", "top64 on the wire", "synchronous, 16-bit", "outer optimizer"  # to others here


@pytest.mark.parametrize(
    "settings",
    [pytest.param(job, id=name, marks=[pytest.mark.thorough] * (name in ALIKE)) for name, job in JOBS.items()],
)
def test_no_stream_overtakes_another(sanitizer: Sanitizer, settings: Settings) -> None:
    settings = {"delay_bound": 4, **settings}
    train(sanitizer, **settings)
    assert sanitizer.handler.seq_num > 300, "nothing was seen"
    assert not sanitizer.told


OWN_STREAM: dict[str, Settings] = {
    **{name: JOBS[name] for name in ("delayed", "synchronous", "accumulation", "snapshots", "synchronous, evaluated")},
    "adds up": {"steps_every": 3},
    "synchronous, adds up": {"delay_bound": 0, "steps_every": 3},
    "leaves": {"leaves_at": 1},
    "synchronous, leaves": {"delay_bound": 0, "leaves_at": 1},
    "holds": {"leaves_at": 1, "holds": True},
    "synchronous, holds": {"delay_bound": 0, "leaves_at": 1, "holds": True},
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(job, id=name, marks=[pytest.mark.thorough] * (name in (*JOBS, "leaves", "synchronous, holds")))
        for name, job in OWN_STREAM.items()
    ],
)
def test_a_script_may_have_a_stream_of_its_own_around_each_batch(sanitizer: Sanitizer, settings: Settings) -> None:
    settings = {"delay_bound": 4, **settings}
    train(sanitizer, own_stream=True, **settings)
    assert not sanitizer.told


DEATHS: dict[str, Settings] = {
    "delayed": {},
    "synchronous": {"delay_bound": 0},
    "int8 on the wire": {"wire": "int8", "fragments": 3},
    "outer optimizer": {"outer": {"name": "nesterov"}},
    "16-bit weights": {"dtype": torch.bfloat16, "wire": "bfloat16"},
}


@pytest.mark.each_value(2)
@pytest.mark.parametrize("settings", DEATHS.values(), ids=DEATHS)
def test_no_stream_overtakes_another_after_a_death(sanitizer: Sanitizer, settings: Settings) -> None:
    settings = {"delay_bound": 4, **settings}
    train(sanitizer, ranks=3, dies_at=2, **settings)
    assert not sanitizer.told


def test_what_a_dropped_round_has_begun_is_done_when_another_begins(sanitizer: Sanitizer) -> None:
    """Its copies are under way on the staging's stream."""
    plane, shared = thread_plane(World(2), 0, sanitizer.library), SharedState(Worker(0, 0), None, EngineOptions(BATCH))
    with sanitizer.rank():
        shared.order = StreamOrder(CPU)
        rounds: Any = Rounds(
            plane, EngineOptions(BATCH), shared, cast(Any, None), Telemetry(None), lambda _, steps: steps
        )
        flight = torch.ones(300)
        rounds._pending.post(flight, "float32")
        rounds.drop()
        flight.zero_()
    assert not sanitizer.told


def nothing(*_: Any) -> None:
    pass


PLANTED: dict[str, tuple[Any, str, Any, Settings, str]] = {
    "follow": (StreamOrder, "_follow", lambda order, passes: None, {}, "deltas"),
    "leave": (StreamOrder, "leave", nothing, {}, "deltas"),
    "synchronous follow": (StreamOrder, "_follow", lambda order, passes: None, {"delay_bound": 0}, "gradients"),
    "synchronous leave": (StreamOrder, "leave", nothing, {"delay_bound": 0}, "gradients"),
    "applying": (StreamOrder, "applying", lambda order: nullcontext(), {}, "deltas"),
    "staging": (CudaStaging, "begin", nothing, {}, "staging.fetch"),
    "lead the script": (StreamOrder, "lead_script", nothing, {"own_stream": True}, "the script"),
    "follow the script": (StreamOrder, "follow_script", nothing, {"own_stream": True}, "after the script"),
    "unknown stream": (torch.cuda, "synchronize", nothing, {"own_stream": True}, "the script"),
    "transfer": (PlayedTransfer, "complete", lambda transfer, arriving: arriving[0], {}, "transfer.each_tensor"),
}


@pytest.mark.each_value(4)
@pytest.mark.parametrize(("owner", "name", "planted", "settings", "where"), PLANTED.values(), ids=PLANTED)
def test_a_planted_race_is_told(
    sanitizer: Sanitizer,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    planted: Callable[..., Any],
    settings: Settings,
    where: str,
) -> None:
    monkeypatch.setattr(owner, name, planted)
    settings = {"delay_bound": 4, **settings}
    train(sanitizer, **settings)
    assert where in sanitizer.told


def test_a_script_without_a_stream_of_its_own_costs_no_event(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = StreamOrder(CPU)
    with sanitizer.rank():
        order.lead_script()
        order.note_script()
        monkeypatch.setattr(PlayedStream, "record_event", lambda stream: pytest.fail("an event"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("the host waits"))
        for _ in range(3):
            order.follow_script()
            order.lead_script()
            order.note_script()


def test_a_stream_that_the_script_begins_to_use_later_is_followed(sanitizer: Sanitizer) -> None:
    order, later = StreamOrder(CPU), PlayedStream(sanitizer, "a later stream")
    with sanitizer.rank():
        order.note_script()
        weight = torch.ones(3)
        for _ in range(2):
            order.lead_script()
            with torch.cuda.stream(later):  # type: ignore[arg-type]
                order.note_script()
                weight += 1
            order.follow_script()
            weight += 1
    assert not sanitizer.told


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
