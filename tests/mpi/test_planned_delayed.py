"""Replicas on several ranks as members of a delayed synchronisation: whole jobs by a plan with D >= 1.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_planned_delayed.py
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RANKS
from planned_jobs import EVERY, PLANS, SAMPLES, alone, by_plan, lines, recipe, saved, summary_of

from hetsync import models
from hetsync.config.schema import Config, KeepBestConfig, SyncConfig
from hetsync.errors import TERMINATED
from hetsync.plane.base import Plane
from hetsync.replica.passes import Passes
from hetsync.train import planned_delayed

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

BOUND = 3


def delayed(folder: Path, bound: int | None = BOUND, quorum: float = 0.25, **more: Any) -> Config:
    config = recipe(folder, "adamw", 0.5, **more)
    grace = 1 if bound == BOUND and quorum < 1 else 0
    return replace(config, sync=SyncConfig(bound, quorum=quorum, grace=grace, rebalance=False))


@pytest.mark.parametrize(
    ("kind", "bound", "quorum"),
    [
        ("replicas", BOUND, 0.25),
        ("mixed", 1, 1.0),
        pytest.param("lockstep", 4, 0.25, marks=pytest.mark.ranks(4)),
        pytest.param("couple", 1, 1.0, marks=pytest.mark.ranks(4)),
    ],
)
def test_replicas_train_on_their_own(plane: Plane, folder: Path, kind: str, bound: int, quorum: float) -> None:
    """That all ranks hold the same weights, and the ledger's books, are looked at in each rest."""
    config = delayed(folder / "run", bound, quorum, evaluate_every=100)
    assert by_plan(plane, config, kind) == 0
    if plane.rank != 0:
        return
    found = summary_of(folder / "run")
    assert (found["status"], found["samples_applied"], found["delay_bound"]) == ("finished", SAMPLES, bound)
    assert found["grace"] == config.sync.grace
    books = json.loads(next((folder / "run" / "checkpoints").glob("samples-*/state.json")).read_text())
    assert books["progress"]["grace"] == config.sync.grace
    assert sum(found["staleness"]["histogram"].values()) > 0
    assert found["staleness"]["max"] <= bound
    assert found["shares"] == [replica["share"] for replica in PLANS[kind, RANKS]]
    assert found["plan"]["measured_step_seconds"] > 0
    assert found["metrics"]["loss"] < 3
    computed = [
        {sum(found["per_rank"][rank]["samples"] for rank in each["ranks"]) for each in replica["stages"]}
        for replica in PLANS[kind, RANKS]
    ]
    assert [len(each) for each in computed] == [1] * len(computed), f"stages have computed {computed}"
    assert sum(sum(each) for each in computed) == SAMPLES
    told = [line["samples_applied"] for line in lines(folder / "run", 0, "evaluation")]
    assert told == [100, 200, 300, SAMPLES]
    for replica in PLANS[kind, RANKS]:
        pieces = [lines(folder / "run", rank, "piece") for each in replica["stages"] for rank in each["ranks"]]
        own = [[(line["piece"], line["version"]) for line in each] for each in pieces]
        assert all(each == own[0] for each in own), "ranks of a replica have computed other tasks, or other versions"
    assert len(lines(folder / "run", RANKS - 1, "round")) == found["rounds"]
    assert {row["runtime_cpu_fraction"] > 0 for row in found["per_rank"]} == {True}
    for row in found["per_rank"]:
        assert row["memory_bytes"] == pytest.approx(row["predicted_memory_bytes"], rel=0.15)
    steps = [tensor for name, tensor in saved(folder / "run").items() if name.endswith("step")]
    assert len(steps) > 1
    for each in steps:  # an average over replicas by samples, however many ranks a weight is on
        torch.testing.assert_close(each, steps[0])


def test_each_step_is_timed_as_an_update(plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, entered = [], Passes.updating
    monkeypatch.setattr(Passes, "updating", lambda passes: seen.append(1) or entered(passes))
    assert by_plan(plane, delayed(folder / "run"), "replicas") == 0
    steps = plane.broadcast_object(len(lines(folder / "run", plane.rank, "piece")) if plane.rank == 0 else None)
    if plane.rank == 0:
        assert len(seen) == steps > 2


def test_what_replicas_average_at_rest_is_a_batchs(plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, averaged = [], planned_delayed.average_over_holders

    def look(optimizer: torch.optim.Optimizer, *more: Any) -> None:
        seen.extend(group["eps"] for group in optimizer.param_groups)
        averaged(optimizer, *more)

    monkeypatch.setattr(planned_delayed, "average_over_holders", look)
    assert by_plan(plane, delayed(folder / "run"), "replicas") == 0
    assert {eps for theirs in plane.gather_objects(seen) for eps in theirs} == {1e-8}


def test_it_goes_on_under_another_plan_and_under_none(plane: Plane, folder: Path) -> None:
    """By a signal stopped at D >= 1; gone on with in step, on its own, without a plan, and by two plans more."""
    config = delayed(folder / "run")
    assert by_plan(plane, config, "replicas", caught=signal.SIGTERM) == TERMINATED
    applied = None
    if plane.rank == 0:
        stopped = summary_of(folder / "run")
        applied = stopped["samples_applied"]
        assert stopped["status"] == "stopped"
    assert 0 < plane.broadcast_object(applied) < SAMPLES

    def until(samples: int, **sync: Any) -> Config:
        return replace(config, run=replace(config.run, samples=samples), sync=SyncConfig(rebalance=False, **sync))

    assert by_plan(plane, until(EVERY + 10, delay_bound=0), "mixed", resume=True) == 0
    assert by_plan(plane, until(EVERY + 50, delay_bound=None), "lockstep", resume=True) == 0
    alone(plane, until(EVERY + 100, delay_bound=2), resume=True)
    assert by_plan(plane, until(SAMPLES, delay_bound=2), "replicas", resume=True) == 0
    if plane.rank == 0:
        found = summary_of(folder / "run")
        assert (found["status"], found["samples_applied"]) == ("finished", SAMPLES)
        assert all(torch.isfinite(tensor).all() for tensor in saved(folder / "run").values())


def test_a_run_that_has_saved_its_end_but_no_summary_is_finished(plane: Plane, folder: Path) -> None:
    """It was killed in its last evaluation, which is made once after a resume."""
    config = delayed(folder / "run", keep_best=KeepBestConfig("accuracy"))
    assert by_plan(plane, config, "replicas") == 0
    path, whole = folder / "run" / "summary.json", {}
    if plane.rank == 0:
        whole = summary_of(folder / "run")
        path.write_text(json.dumps({**whole, "status": "running"}))
    assert by_plan(plane, config, "replicas", resume=True) == 0
    if plane.rank == 0:
        found = summary_of(folder / "run")
        assert found["status"] == "finished"
        for name in ("metrics", "anchor_sha256", "rounds"):
            assert found[name] == whole[name]
        assert [line["samples_applied"] for line in lines(folder / "run", 0, "evaluation")] == [SAMPLES] * 2


@pytest.mark.ranks(4)
def test_stages_with_nothing_to_sum_take_part(plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first replica it is the leader's stage, of the second the other."""
    build = models.build_for

    def frozen(*given: Any) -> torch.nn.Module:
        model = build(*given)
        model.get_submodule("features").requires_grad_(False)
        return model

    monkeypatch.setattr(models, "build_for", frozen)
    config = delayed(folder / "run", 4, timeout_seconds=60.0)
    assert by_plan(plane, config, "replicas") == 0
    if plane.rank == 0:
        found = summary_of(folder / "run")
        assert (found["status"], found["samples_applied"]) == ("finished", SAMPLES)
        assert sum(found["staleness"]["histogram"].values()) > 0
        moved = {name for name in saved(folder / "run") if "exp_avg" in name}
        assert len(moved) == 8, "of two weights and two biases, two moments each"
