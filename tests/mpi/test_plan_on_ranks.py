"""`hetsync plan` under mpirun: for the ranks that are there, and by measuring the best plans on them.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_plan_on_ranks.py
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RANKS

from hetsync.cli import planning_ranks
from hetsync.cli.planning import Request, plan
from hetsync.cli.train import train
from hetsync.config.schema import (
    Config,
    DataConfig,
    EmulationConfig,
    ModelConfig,
    OptimizerConfig,
    PlanConfig,
    RunConfig,
    SyncConfig,
)
from hetsync.errors import INTERRUPTED, UserError
from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.placement import Placement
from hetsync.plan.search.policy_file import SHIPPED
from hetsync.plane.base import LostError, Plane, decided_by_first
from hetsync.stop_signal import StopSignal
from hetsync.train.workplace import Workplace

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


def request(**given: object) -> Request:
    asked = {"ranks": None, "replicas": None, "micro_batches": None, "search": "best", "evaluations": 60}
    asked |= {"seconds": None, "weights": None, "seed": 0, "groups": None, "policy": None}
    return Request(**{**asked, **given})  # type: ignore[arg-type]


def config() -> Config:
    return Config(run=RunConfig(profile_seconds=0.1), data=DataConfig(batch_size=40), sync=SyncConfig(delay_bound=0))


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


def test_the_best_plans_are_run_and_one_is_written(
    plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning_ranks, "MEASURED_STEPS", 2)
    assert planning_ranks.plan_on_ranks(plane, config(), request(), place / "plan.yaml", measure=True) == 0
    told = capsys.readouterr().out
    if plane.rank != 0:
        assert told == ""
        return
    rows = [line.split() for line in told.splitlines()]
    (head,) = [index for index, row in enumerate(rows) if row[:3] == ["place", "search", "s"]]
    measured = [row for row in rows[head + 1 : head + 6] if row[0].isdigit()]
    assert len(measured) > 1
    assert all(float(row[3]) > 0 for row in measured)
    written = yaml.safe_load((place / "plan.yaml").read_text())
    least = min(float(row[4]) for row in measured)
    assert written["search"]["method"] in {row[1] for row in measured if float(row[4]) == least}  # as printed
    assert {rank for one in written["replicas"] for stage in one["stages"] for rank in stage["ranks"]} == {0, 1}


def test_what_was_found_outlives_plans_that_fail(
    plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> float:
        raise UserError("this plan takes more memory than there is")

    monkeypatch.setattr(planning_ranks, "rehearse", fails)
    with pytest.raises(UserError, match="more memory than there is"):
        planning_ranks.plan_on_ranks(plane, config(), request(), place / "plan.yaml", measure=True)
    plane.barrier()
    assert yaml.safe_load((place / "plan.yaml").read_text())["search"]["method"]
    assert ("the best by prediction" in capsys.readouterr().out) == (plane.rank == 0)


def test_plans_are_run_at_the_speed_that_they_were_found_for(
    plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rehearsed(_: object, at: Workplace, __: int) -> float:
        rates.append(at.config.emulation.samples_per_second)
        return 1.0

    rates: list[float | None] = []
    monkeypatch.setattr(planning_ranks, "rehearse", rehearsed)
    if plane.rank == 0:
        devices = [{"name": "d", "count": RANKS}]
        (place / "two.yaml").write_text(yaml.safe_dump({"name": "two", "source": "made up", "devices": devices}))
    plane.barrier()
    emulated = replace(config(), emulation=EmulationConfig(str(place / "two.yaml")))
    assert planning_ranks.plan_on_ranks(plane, emulated, request(), None, measure=True) == 0
    (rate,) = set(plane.broadcast_object(rates))
    assert set(rates) == {rate}
    if plane.rank == 0:
        assert f"--emulation.samples_per_second {rate:g}, too" in capsys.readouterr().out


def test_mistakes_are_told_on_every_rank(plane: Plane, place: Path) -> None:
    with pytest.raises(UserError, match=f"--ranks is 3, but the job has {RANKS}"):
        planning_ranks.plan_on_ranks(plane, config(), request(ranks=3), None, measure=False)
    with pytest.raises(UserError, match="--seconds is 600, but other ranks wait"):
        planning_ranks.plan_on_ranks(plane, config(), request(seconds=600.0), None, measure=False)
    wired = replace(config(), sync=SyncConfig(wire="float16"))
    with pytest.raises(UserError, match=r"sync\.wire is float16, which jobs by a plan"):
        planning_ranks.plan_on_ranks(plane, wired, request(), None, measure=True)


def test_whole_models_are_measured_with_what_only_they_know(
    plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_ranks, "MEASURED_STEPS", 2)
    wired = replace(config(), sync=SyncConfig(0, wire="bfloat16"))
    asked = request(search="data", micro_batches=1)
    assert planning_ranks.plan_on_ranks(plane, wired, asked, place / "plan.yaml", measure=True) == 0


def test_whole_models_are_then_measured_with_one_micro_batch_each(
    plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_ranks, "MEASURED_STEPS", 2)
    wired = replace(config(), sync=SyncConfig(0, wire="bfloat16"))
    assert planning_ranks.plan_on_ranks(plane, wired, request(search="data"), place / "plan.yaml", measure=True) == 0
    plane.barrier()
    written = yaml.safe_load((place / "plan.yaml").read_text())
    assert {one.get("micro_batches", 1) for one in written["replicas"]} == {1}


def test_only_plans_of_all_ranks_are_run(plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one micro-batch `list` leaves a rank without blocks, and with many it does not."""
    monkeypatch.setattr(planning_ranks, "MEASURED_STEPS", 1)
    output = place / "plan.yaml"
    with pytest.raises(UserError, match=r"leaves rank \d without blocks"):
        planning_ranks.plan_on_ranks(plane, config(), request(search="single"), output, measure=True)
    assert not output.exists()
    assert planning_ranks.plan_on_ranks(plane, config(), request(search="list"), output, measure=True) == 0
    plane.barrier()
    written = yaml.safe_load(output.read_text())
    assert {rank for one in written["replicas"] for stage in one["stages"] for rank in stage["ranks"]} == {0, 1}


def test_a_policy_stays_where_it_is_begun_with(plane: Plane, place: Path) -> None:
    asked = request(search="trinity", policy=SHIPPED, evaluations=40)
    assert planning_ranks.plan_on_ranks(plane, config(), asked, place / "plan.yaml", measure=False) == 0


def test_a_path_that_cannot_be_written_is_told_on_every_rank(plane: Plane, place: Path) -> None:
    with pytest.raises(UserError, match="is no folder that may be written"):
        planning_ranks.plan_on_ranks(plane, config(), request(), Path(__file__, "plan.yaml"), measure=False)


def test_what_was_found_outlives_ranks_that_are_lost_meanwhile(
    plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions: list[object] = []

    def lost(messages: Plane, decide: Callable[[], Any]) -> Any:
        decisions.append(decided_by_first(messages, decide))
        if len(decisions) == 2:
            raise LostError("rank 1 has gone")
        return decisions[-1]

    monkeypatch.setattr(planning_ranks, "decided_by_first", lost)
    with pytest.raises(LostError):
        planning_ranks.plan_on_ranks(plane, config(), request(), place / "plan.yaml", measure=False)
    plane.barrier()
    assert yaml.safe_load((place / "plan.yaml").read_text())["search"]["method"]


def test_terminated_it_writes_the_best_so_far(
    plane: Plane, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As launch/local does on Ctrl-C: all ranks hear SIGTERM."""
    calls, evaluate = [], Evaluator.evaluate

    def terminated(self: Evaluator, placement: Placement) -> Costs:
        calls.append(placement)
        if len(calls) == 12:
            time.sleep(1.0)
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, placement)

    monkeypatch.setattr(Evaluator, "evaluate", terminated)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    decisions: list[object] = []
    heard = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))

    def decided(messages: Plane, decide: Callable[[], Any]) -> Any:
        decisions.append(decide)
        if len(decisions) == 2:  # to search
            plane.barrier()
            if not messages.leads:
                heard.start()
        return decided_by_first(messages, decide)

    monkeypatch.setattr(planning_ranks, "decided_by_first", decided)
    status = planning_ranks.plan_on_ranks(plane, config(), request(), place / "plan.yaml", measure=True)
    assert status == (INTERRUPTED if plane.rank == 0 else 0)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    if plane.rank == 0:
        assert "interrupted after 12 evaluations: this is the best so far" in capsys.readouterr().err
        found = yaml.safe_load((place / "plan.yaml").read_text())["search"]["method"]
        assert found in ("data", "contiguous"), "which is better is a matter of how fast ranks were measured to be"
    else:
        assert heard.finished.is_set()


@pytest.mark.ranks(2, 4)
def test_a_model_that_no_device_holds_trains_by_the_plan_that_is_found(plane: Plane, place: Path) -> None:
    """Its weights with gradients and Adam's state alone are 1.36 MB, of which a device may use 1.25."""
    profile, found = place / "tight.yaml", place / "found.yaml"
    tight = {"name": "tight", "source": "made up", "devices": [{"name": "d", "count": RANKS, "memory_gib": 1.294e-3}]}
    asked = replace(
        config(),
        run=RunConfig(dir=str(place / "run"), samples=120, profile_seconds=0.1, checkpoint_every=None),
        model=ModelConfig(options={"channels": 32}),
        optimizer=OptimizerConfig("adamw"),
        emulation=EmulationConfig(str(profile), 400.0),
    )
    if plane.rank == 0:
        profile.write_text(yaml.safe_dump(tight))
        for search in ("data", "single"):
            with pytest.raises(
                UserError, match=r"the model fits nowhere: .* bytes short: rank 0 needs [\d,]+ and may use"
            ):
                plan(asked, request(search=search), None)
        assert plan(asked, request(), found) == 0
    plane.barrier()
    by_plan = replace(asked, plan=PlanConfig(str(found)))
    assert train(plane, by_plan, None, StopSignal(), "nothing") == 0
    if plane.rank != 0:
        return
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert (summary["status"], summary["samples_applied"]) == ("finished", 120)
    for row in summary["per_rank"]:
        assert row["memory_bytes"] == pytest.approx(row["predicted_memory_bytes"], rel=0.15)
        assert row["predicted_memory_bytes"] <= 0.9 * 1.294e-3 * 2**30
