"""Jobs by a plan that gives each rank the whole model train as jobs without a plan do, with the plan's shares.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_data_parallel_plan.py
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import RANKS
from planned_jobs import (
    BATCH,
    PLANS,
    SAMPLES,
    Asked,
    alone,
    assert_same,
    by_plan,
    lines,
    recipe,
    saved,
    stage,
    summary_of,
)

from hetsync.balance.profile import StepTime
from hetsync.balance.shares import SliceRule, speed_shares
from hetsync.cli.train import train
from hetsync.config.schema import (
    Config,
    ControlConfig,
    EmaConfig,
    EmulationConfig,
    FaultConfig,
    KeepBestConfig,
    PlanConfig,
    SyncConfig,
)
from hetsync.emulation.device import EmulatedDevice
from hetsync.errors import TERMINATED, UserError
from hetsync.plan.assignment import GivenPlan, given_plan
from hetsync.plane.base import Plane
from hetsync.sync.gradients import Gradients
from hetsync.train import ranks
from hetsync.train.rehearsal import rehearse
from hetsync.train.trainer import Trainer
from hetsync.train.workplace import take_place

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(2, 4)]

SHARES = {2: (37, 13), 4: (20, 8, 9, 13)}[RANKS] if RANKS in (2, 4) else ()
ORDER = {2: (1, 0), 4: (2, 0, 3, 1)}[RANKS] if RANKS in (2, 4) else ()  # the ranks of the plan's replicas


@pytest.fixture(autouse=True)
def _plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    given = [{"share": SHARES[rank], "stages": [stage(rank, "*")]} for rank in ORDER]
    monkeypatch.setitem(PLANS, ("data", RANKS), given)
    monkeypatch.setitem(PLANS, ("by speed", RANKS), [{"stages": [stage(rank, "*")]} for rank in ORDER])


def written(plane: Plane, folder: Path, replicas: list[dict[str, Any]]) -> GivenPlan:
    path = folder / "given.yaml"
    if plane.rank == 0:
        path.write_text(yaml.safe_dump({"format": 1, "batch_size": BATCH, "replicas": replicas}))
    plane.barrier()
    return given_plan(path, plane)


def emulated(folder: Path, config: Config, speeds: tuple[float, ...], **more: Any) -> Config:
    """On devices of these speeds, whose samples take 2 ms together."""
    devices = [{"name": f"d{rank}", "speed": speed} for rank, speed in enumerate(speeds)]
    (folder / "profile.yaml").write_text(
        yaml.safe_dump({"name": "unequal", "source": "made up", "devices": devices, **more})
    )
    return replace(config, emulation=EmulationConfig(str(folder / "profile.yaml"), 500.0))


def test_it_ends_where_one_process_does(plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients of the last buckets still to come while the first ones travel: as without a plan."""
    early: list[bool] = []
    release = Gradients._release_full

    def watched(gradients: Gradients) -> None:
        before = gradients._next
        release(gradients)
        early.append(gradients._next > before)

    monkeypatch.setattr(Gradients, "_release_full", watched)
    alone(plane, recipe(folder / "alone", "adamw", 0.5))
    assert by_plan(plane, recipe(folder / "planned", "adamw", 0.5), "data") == 0
    assert any(early)
    if plane.rank != 0:
        return
    assert_same(saved(folder / "planned"), saved(folder / "alone"))
    found, wanted = summary_of(folder / "planned"), summary_of(folder / "alone")
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)
    assert (found["status"], found["samples_applied"]) == ("finished", SAMPLES)
    assert found["shares"] == list(SHARES)
    plan = found["plan"]
    assert plan["replicas"] == [[[rank]] for rank in ORDER]
    assert plan["path"].endswith("data.yaml")
    assert plan["predicted_step_seconds"] > 0
    assert plan["measured_step_seconds"] == pytest.approx(BATCH * found["train_seconds"] / SAMPLES)
    for rank, row in enumerate(found["per_rank"]):
        assert (row["share"], row["replica"], row["stage"]) == (SHARES[rank], ORDER.index(rank), 0)
        assert (row["step_fraction"], row["activation_bytes_sent"], row["memory_bytes"]) == (1.0, 0, None)
        assert row["predicted_memory_bytes"] > 0


def test_what_only_jobs_without_a_plan_know_works(plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay bound, a wire format, several slices in a contribution, and evaluation beside training."""
    wires: list[str] = []
    allreduce = type(plane).allreduce

    def watched(self: Plane, tensor: torch.Tensor, wire: Any = "float32", residual: Any = None) -> Any:
        wires.append(wire)
        return allreduce(self, tensor, wire, residual)

    monkeypatch.setattr(type(plane), "allreduce", watched)
    config = recipe(folder / "planned", "adamw", 0.5, evaluate_every=100)
    config = replace(config, sync=SyncConfig(3, wire="bfloat16", accumulation=2))
    assert by_plan(plane, config, "data") == 0
    assert "bfloat16" in wires
    if plane.rank != 0:
        return
    found = summary_of(folder / "planned")
    assert (found["status"], found["samples_applied"], found["delay_bound"]) == ("finished", SAMPLES, 3)
    assert found["shares"] == list(SHARES)  # pinned by the plan
    assert found["staleness"]["max"] <= 3
    assert found["accumulation"] == 2
    assert found["plan"]["measured_step_seconds"] == pytest.approx(BATCH * found["train_seconds"] / SAMPLES)
    assert len(lines(folder / "planned", 0, "evaluation")) >= 3
    assert {line["reason"] for line in lines(folder / "planned", 0, "rest")} == {"checkpoint", "end"}


def assert_by_speed(shares: list[int]) -> None:
    """Of ranks of speeds 4 and 1. The update takes as long whatever the share is, so a slow rank has still less."""
    slow = {2: [1], 4: [1, 2]}[RANKS]
    assert sum(shares) == BATCH
    assert all(0 < shares[rank] <= shares[0] / 4 for rank in slow)


def test_shares_that_are_left_out_follow_speed(plane: Plane, folder: Path) -> None:
    speeds = {2: (4.0, 1.0), 4: (4.0, 1.0, 1.0, 4.0)}[RANKS]
    config = emulated(folder, recipe(folder / "planned"), speeds)
    assert by_plan(plane, config, "by speed") == 0
    if plane.rank == 0:
        assert_by_speed(summary_of(folder / "planned")["shares"])


def test_emulated_devices_and_what_they_reach_alone_are_the_plans(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update takes a time of its own, whatever the share is: on the device, and in what it reaches alone."""
    made: list[tuple[StepTime, float]] = []
    make = ranks.make_device

    def watched(cluster: Any, rank: int, time: StepTime, seed: int, device: Any, update: float = 0.0) -> Any:
        made.append((time, update))
        return make(cluster, rank, time, seed, device, update)

    monkeypatch.setattr(ranks, "make_device", watched)
    speeds = {2: (4.0, 1.0), 4: (4.0, 1.0, 1.0, 4.0)}[RANKS]
    config = replace(emulated(folder, recipe(folder / "planned", "adamw"), speeds), sync=SyncConfig(4))
    assert by_plan(plane, config, "data") == 0
    ((passes, update),) = made
    whole = StepTime(0.0, sum(speeds) / speeds[plane.rank] / 500.0)  # of a step, in the job's settings
    average = BATCH / RANKS
    assert update > 0
    assert passes.fixed_seconds == 0
    assert passes.seconds_per_sample * average + update == pytest.approx(whole.seconds_per_sample * average)
    told = plane.gather_objects((passes.seconds_per_sample, update))
    if plane.rank == 0:
        times = [StepTime(update, each) for each, update in told]
        shares = speed_shares(times, BATCH, rule=SliceRule(config.sync.least_slice))
        rows = summary_of(folder / "planned")["per_rank"]
        for row, time, share in zip(rows, times, shares, strict=True):
            assert row["solo_samples_per_second"] == pytest.approx(time.rate(share))


def test_the_shares_of_a_run_so_far_give_way_to_the_plans(plane: Plane, folder: Path) -> None:
    speeds = {2: (4.0, 1.0), 4: (4.0, 1.0, 1.0, 4.0)}[RANKS]
    config = emulated(folder, recipe(folder / "planned"), speeds)
    assert by_plan(plane, config, "data", caught=signal.SIGTERM) == TERMINATED
    assert by_plan(plane, config, "by speed", resume=True) == 0
    if plane.rank == 0:
        assert_by_speed(summary_of(folder / "planned")["shares"])


@pytest.mark.ranks(2)
def test_without_the_plan_ranks_go_on_with_shares_of_their_own(plane: Plane, folder: Path) -> None:
    """A plan that cuts the batch into micro-batches has the faster rank in the first of its replicas."""
    config = emulated(folder, recipe(folder / "run"), (1.0, 4.0))
    replicas = [{"micro_batches": 2, "stages": [stage(1, "*")]}, {"stages": [stage(0, "*")]}]
    path = written(plane, folder, replicas).path
    planned = replace(config, plan=PlanConfig(str(path)))
    assert train(plane, planned, None, Asked(signal.SIGTERM), "nothing") == TERMINATED
    by_replica = plane.broadcast_object(summary_of(folder / "run")["shares"] if plane.rank == 0 else None)
    assert by_replica[0] > by_replica[1]
    assert train(plane, config, folder / "run", Asked(None), "nothing") == 0
    if plane.rank == 0:
        assert summary_of(folder / "run")["shares"] == by_replica[::-1]


def test_it_goes_on_under_another_plan_and_under_none(plane: Plane, folder: Path) -> None:
    config = recipe(folder / "run", "adamw", 0.5)
    alone(plane, recipe(folder / "alone", "adamw", 0.5))
    assert by_plan(plane, config, "pipeline", caught=signal.SIGTERM) == TERMINATED
    assert by_plan(plane, config, "data", resume=True, caught=signal.SIGTERM) == TERMINATED
    if plane.rank == 0:
        found = summary_of(folder / "run")
        assert (found["status"], found["shares"]) == ("stopped", list(SHARES))
        assert BATCH < found["samples_applied"] < SAMPLES
    assert by_plan(plane, config, "replicas", resume=True, caught=signal.SIGTERM) == TERMINATED
    alone(plane, config, resume=True)
    if plane.rank == 0:
        assert_same(saved(folder / "run"), saved(folder / "alone"))


@pytest.mark.parametrize(
    "given",
    [
        {"ema": EmaConfig(0.9)},
        {"control": ControlConfig("random")},
        {"fault": FaultConfig(not_finite="skip")},
        {"run": {"precision": "bfloat16"}},
    ],
    ids=["ema", "control", "fault", "precision"],
)
def test_settings_that_cut_models_do_not_know_work(plane: Plane, folder: Path, given: dict[str, Any]) -> None:
    config = recipe(folder / "planned", **given.pop("run", {}))
    config = replace(config, sync=SyncConfig(2), **given)
    assert by_plan(plane, config, "data") == 0
    if plane.rank == 0:
        found = summary_of(folder / "planned")
        assert (found["status"], found["samples_applied"]) == ("finished", SAMPLES)
        assert found["plan"]["measured_step_seconds"] > 0


@pytest.mark.parametrize("bound", [0, 4])
def test_a_rehearsal_takes_what_steps_take(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """Whatever the recipe has beside training, and without a trace. Nothing is evaluated."""
    monkeypatch.setattr(Trainer, "_score", lambda trainer: pytest.fail("it has evaluated"))
    slices: list[float] = []
    wait = EmulatedDevice.end_slice

    def watched(device: EmulatedDevice, *words: Any, **named: Any) -> Any:
        slices.append(0.0)
        return wait(device, *words, **named)

    monkeypatch.setattr(EmulatedDevice, "end_slice", watched)
    run = {"evaluate_every": 10, "keep_best": KeepBestConfig("loss", "min")}
    config = recipe(folder / "run", **run)
    config = replace(emulated(folder, config, (4.0, 1.0) * (RANKS // 2)), sync=SyncConfig(bound))
    shares = [BATCH // RANKS] * (RANKS - 1) + [BATCH - BATCH // RANKS * (RANKS - 1)]
    replicas = [{"share": share, "stages": [stage(rank, "*")]} for rank, share in enumerate(shares)]
    seconds = rehearse(written(plane, folder, replicas), take_place(config, plane, folder, None), 3)
    assert len(slices) == 4
    assert len(set(plane.gather_objects(seconds))) == 1
    slowest = max(shares) / (500.0 / (2.5 * RANKS))  # seconds of a device of speed 1
    together = BATCH / 500.0  # of all, none of which waits
    # Emulated devices are never faster, but the first of few steps may have ended late.
    assert seconds > 0.8 * (slowest if bound == 0 else together)
    assert bound == 0 or seconds < slowest
    assert not (folder / "run").exists()


@pytest.mark.parametrize("bound", [0, 4])
def test_a_rehearsal_of_pipelines_is_of_their_rates(plane: Plane, folder: Path, bound: int) -> None:
    """Beside a replica of one rank, a quarter as fast with as large a share."""
    speeds = {2: (4.0, 1.0), 4: (4.0, 4.0, 4.0, 1.0)}[RANKS]
    config = emulated(folder, recipe(folder / "run"), speeds)
    config = replace(config, sync=SyncConfig(bound))
    pipeline = (
        [stage(0, "*")] if RANKS == 2 else [stage(0, "features.0"), stage(1, "features.2"), stage(2, "classifier")]
    )
    replicas = [
        {"share": 25, "micro_batches": 2, "stages": pipeline},
        {"share": 25, "stages": [stage(RANKS - 1, "*")]},
    ]
    seconds = rehearse(written(plane, folder, replicas), take_place(config, plane, folder, None), 4)
    assert len(set(plane.gather_objects(seconds))) == 1
    slowest = 25 / (500.0 / sum(speeds))
    assert seconds > 0.8 * slowest if bound == 0 else 0.1 * slowest < seconds < slowest
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fault": FaultConfig(replace=True)}, "fault.replace is true, which jobs by a plan"),
        ({"sync": SyncConfig(0, shares="equal")}, "sync.shares is equal, but a plan has shares of its own"),
        ({"sync": SyncConfig(0, pins={0: 3})}, r"sync.pins is \{0: 3\}, but a plan has shares of its own"),
    ],
    ids=["replace", "shares", "pins"],
)
def test_what_does_not_fit_is_refused_on_every_rank(
    plane: Plane, folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        by_plan(plane, replace(recipe(folder / "run"), **changes), "data")
