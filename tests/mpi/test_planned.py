"""Jobs by a plan end where one process does, also when they are resumed under another plan or under none.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_planned.py
"""

from __future__ import annotations

import json
import shutil
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
    EVERY,
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
from torch.utils.data import Dataset, default_collate

from hetsync import data
from hetsync.cli.train import parse, train
from hetsync.config.schema import (
    DataConfig,
    EmulationConfig,
    KeepBestConfig,
    ModelConfig,
    OptimizerConfig,
)
from hetsync.data import Data
from hetsync.data.loader import Loader
from hetsync.data.sets.images import as_it_is
from hetsync.errors import TERMINATED, UserError
from hetsync.models.steps import GoesBySteps
from hetsync.plane.base import Plane
from hetsync.sync import agreement
from hetsync.sync.optimizers import build_optimizer
from hetsync.train import checkpoint, planned

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(2, 4)]

HERE = "test_planned"


@pytest.mark.parametrize(
    ("kind", "optimizer", "clip"), [("pipeline", "sgd", 0.5), ("replicas", "adamw", None), ("shared", "sgd", 0.5)]
)
def test_it_ends_where_one_process_does(
    plane: Plane, folder: Path, kind: str, optimizer: str, clip: float | None
) -> None:
    alone(plane, recipe(folder / "alone", optimizer, clip))
    assert by_plan(plane, recipe(folder / "planned", optimizer, clip), kind) == 0
    if plane.rank != 0:
        return
    assert_same(saved(folder / "planned"), saved(folder / "alone"))
    found, wanted = summary_of(folder / "planned"), summary_of(folder / "alone")
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)
    assert found["samples_applied"] == SAMPLES
    assert found["status"] == "finished"
    assert found["shares"] == [replica.get("share", BATCH) for replica in PLANS[kind, RANKS]]
    assert found["plan"]["measured_step_seconds"] > 0
    assert found["plan"]["predicted_step_seconds"] > 0
    places = {
        rank: (index, number)
        for index, replica in enumerate(PLANS[kind, RANKS])
        for number, each in enumerate(replica["stages"])
        for rank in each["ranks"]
    }
    assert [(row["replica"], row["stage"]) for row in found["per_rank"]] == [places[rank] for rank in range(RANKS)]
    sent = [row["activation_bytes_sent"] > 0 for row in found["per_rank"]]
    assert sent == [len(PLANS[kind, RANKS][places[rank][0]]["stages"]) > 1 for rank in range(RANKS)]
    for row in found["per_rank"]:
        assert row["memory_bytes"] == pytest.approx(row["predicted_memory_bytes"], rel=0.15)


def test_it_goes_on_under_another_plan_and_under_none(plane: Plane, folder: Path) -> None:
    """Stopped after its first slice; gone on with up to the middle; then by one process; and by a plan from there."""
    config = recipe(folder / "run", "adamw", 0.5)
    alone(plane, recipe(folder / "alone", "adamw", 0.5))
    assert by_plan(plane, config, "pipeline", caught=signal.SIGTERM) == TERMINATED
    if plane.rank == 0:
        assert summary_of(folder / "run")["status"] == "stopped"
        assert summary_of(folder / "run")["samples_applied"] == BATCH
        shutil.copytree(folder / "run", folder / "none")
    plane.barrier()

    assert by_plan(plane, config, "replicas", resume=True) == 0
    alone(plane, recipe(folder / "none", "adamw", 0.5), resume=True)
    if plane.rank == 0:
        assert_same(saved(folder / "run"), saved(folder / "alone"))
        assert_same(saved(folder / "none"), saved(folder / "alone"))
        middle = folder / "none" / "checkpoints"
        shutil.rmtree(checkpoint.complete(middle)[-1])  # as if it had died after the one before
        assert checkpoint.complete(middle)[-1].name.endswith(f"{-(-EVERY // BATCH) * BATCH:012d}")
    plane.barrier()
    assert by_plan(plane, recipe(folder / "none", "adamw", 0.5), "pipeline", resume=True) == 0
    if plane.rank == 0:
        assert_same(saved(folder / "none"), saved(folder / "alone"))


@pytest.mark.parametrize("kind", ["pipeline", "data"])
def test_it_resumes_by_the_copy_of_its_plan(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever has become of the file."""
    monkeypatch.setitem(PLANS, ("data", RANKS), [{"stages": [stage(rank, "*")]} for rank in range(RANKS)])
    config = recipe(folder / "run")
    assert by_plan(plane, config, kind, caught=signal.SIGTERM) == TERMINATED
    if plane.rank == 0:
        (folder / f"{kind}.yaml").unlink()
    plane.barrier()
    resumed, _, _ = parse(["--resume", str(folder / "run"), "--quiet"])
    assert train(plane, resumed, folder / "run", Asked(None), "nothing") == 0
    if plane.rank == 0:
        found = summary_of(folder / "run")
        assert (found["status"], found["samples_applied"]) == ("finished", SAMPLES)
        assert found["plan"]["path"] == str((folder / "run" / "plan.yaml").resolve())
        assert len(found["plan"]["replicas"]) == len(PLANS[kind, RANKS])


def test_it_evaluates_on_its_way_and_keeps_the_best(plane: Plane, folder: Path) -> None:
    run = {"evaluate_every": 100, "keep_best": KeepBestConfig("loss", "min")}
    config = recipe(folder / "planned", **run)
    alone(plane, recipe(folder / "alone", **run))
    assert by_plan(plane, config, "pipeline") == 0
    if plane.rank == 0:
        best = [json.loads((folder / name / "best" / "best.json").read_text()) for name in ("planned", "alone")]
        assert best[0].pop("value") == pytest.approx(best[1].pop("value"), rel=1e-5)
        assert best[0] == best[1]
        told = [
            [line["samples_applied"] for line in map(json.loads, lines) if line["kind"] == "evaluation"]
            for name in ("planned", "alone")
            for lines in [(folder / name / "telemetry" / "rank-0000.jsonl").read_text().splitlines()]
        ]
        assert told[0] == told[1] == [100, 200, 300, SAMPLES]
        found = summary_of(folder / "planned")  # its slices before evaluations are shorter than a batch
        assert found["plan"]["measured_step_seconds"] == pytest.approx(BATCH * found["train_seconds"] / SAMPLES)


@pytest.mark.parametrize("by", [1e-7, 1e-2])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_holders_whose_processors_round_otherwise(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, by: float
) -> None:
    """Played: each rank's step is off by a little of its own. At a rest they are even, or were no roundings."""

    def rounding(*given: Any) -> torch.optim.Optimizer:
        made = build_optimizer(*given)

        def after(*_: Any) -> None:
            for group in made.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:  # it is held here
                        weight.data.mul_(1 + by * plane.rank)

        made.register_step_post_hook(after)
        return made

    monkeypatch.setattr(planned, "build_optimizer", rounding)
    monkeypatch.setattr(agreement, "processor", lambda device: f"kind {plane.rank}")
    config = recipe(folder / "run", optimizer)
    if by > agreement.TOLERANCE:
        with pytest.raises(agreement.AnchorMismatchError, match=r"holders of \S+ differ by .* of its largest value"):
            by_plan(plane, config, "replicas")
        return
    assert by_plan(plane, config, "replicas") == 0
    if plane.rank == 0:
        assert summary_of(folder / "run")["status"] == "finished"


def test_an_evaluation_that_falls_due_with_a_stop_is_made(plane: Plane, folder: Path) -> None:
    """After the resume only later ones are due."""
    config = recipe(folder / "run", evaluate_every=BATCH)
    assert by_plan(plane, config, "pipeline", caught=signal.SIGTERM) == TERMINATED
    if plane.rank == 0:
        assert [line["samples_applied"] for line in lines(folder / "run", 0, "evaluation")] == [BATCH]


def test_another_models_plan_is_refused_on_every_rank(plane: Plane, folder: Path) -> None:
    with pytest.raises(UserError, match=r"plan .*pipeline.yaml: model.name is resnet18, but the job's is digits_cnn"):
        by_plan(plane, recipe(folder / "run"), "pipeline", model={"name": "resnet18"})


class WholeBatches(Dataset[Any]):
    """As data sets of images are: `__getitems__` returns what others would be collated to."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


def with_costs(**options: Any) -> Data:
    """By which samples are put into slices."""
    digits = data.build("digits", options)
    return replace(digits, costs=[1.0 + index % 7 for index in range(len(digits.train))])  # type: ignore[arg-type]


def in_whole_batches(**options: Any) -> Data:
    digits = with_costs(**options)
    return replace(digits, train=WholeBatches(digits.train), test=WholeBatches(digits.test), collate=as_it_is)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_of_whole_batches_is_cut_as_any(plane: Plane, folder: Path, workers: int) -> None:
    given = DataConfig(f"{HERE}:in_whole_batches", BATCH, workers=workers)
    alone(plane, replace(recipe(folder / "alone"), data=DataConfig(f"{HERE}:with_costs", BATCH)))
    assert by_plan(plane, replace(recipe(folder / "planned"), data=given), "pipeline") == 0
    if plane.rank == 0:
        assert_same(saved(folder / "planned"), saved(folder / "alone"))
        found, wanted = summary_of(folder / "planned"), summary_of(folder / "alone")
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)


def test_all_slices_are_loaded_ahead(plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By workers, which draw alike on all ranks, and on to the device: the first one, too, and that after a resume."""
    taken: list[bool] = []
    slices = Loader.slices

    def watched(loader: Loader, task: Any) -> Any:
        taken.append(task.number in loader._loading or not task.slices)
        return slices(loader, task)

    monkeypatch.setattr(Loader, "slices", watched)
    config = recipe(folder / "planned")
    assert by_plan(plane, config, "pipeline", caught=signal.SIGTERM) == TERMINATED
    assert by_plan(plane, config, "pipeline", resume=True) == 0
    assert len(taken) > 5
    assert all(taken)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(64, 64) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x.flatten(1))))


class WithComplexWeights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.classifier = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)
        self.filter = torch.nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.fft(self.features(x.flatten(1))) * self.filter
        scores: torch.Tensor = self.classifier(torch.fft.ifft(spectrum).real)
        return scores


class WithSparseGradients(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.EmbeddingBag(17, 8, sparse=True)
        self.classifier = torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features((x.flatten(1).clamp(0, 1) * 16).long()))
        return scores


def twice(**options: Any) -> Data:
    """Data whose loss calls the model twice."""
    digits = data.build("digits", options)
    return replace(digits, loss=lambda model, batch: digits.loss(model, batch) + model(batch[0]).mean())


def with_penalty(**options: Any) -> Data:
    """Data whose loss takes weights itself."""
    digits = data.build("digits", options)
    return replace(digits, loss=lambda model, batch: digits.loss(model, batch) + model.features[0].weight.norm())


class ByStep(GoesBySteps, Tied):
    """A plan that cuts it cannot tell it steps."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        (
            {"model": ModelConfig(f"{HERE}:ByStep")},
            "pipeline",
            "ByStep, which goes by the job's steps, and a plan that cuts the model keeps those of its first one: use a",
        ),
        (
            {"model": ModelConfig(f"{HERE}:Tied")},
            "tied",
            r"tied.yaml: replicas\[0\].stages\[1\].blocks has last, whose weights are part of block first and cannot",
        ),
        (
            {"model": ModelConfig(f"{HERE}:WithComplexWeights")},
            "pipeline",
            "filter is complex, which jobs by a plan that cuts the model, or has micro-batches, do not know: train",
        ),
        (
            {"model": ModelConfig(f"{HERE}:WithSparseGradients")},
            "replicas",
            r"features\.weight has sparse gradients, which jobs by a plan that cuts",
        ),
        ({"data": DataConfig(f"{HERE}:twice", BATCH)}, "pipeline", "the loss calls the model twice: where a plan cuts"),
        (
            {"data": DataConfig(f"{HERE}:with_penalty", BATCH)},
            "pipeline",
            r"loss computes with features\.0\.weight itself",
        ),
        (
            {"emulation": EmulationConfig("tiny.yaml", 700)},
            "pipeline",
            r"pipeline.yaml: rank 1 needs [\d,]+ bytes for its stage, and 965 of its tiny may be used: give it fewer",
        ),
    ],
    ids=["steps", "tied", "complex", "sparse", "twice", "penalty", "memory"],
)
def test_what_cannot_be_cut_or_held_is_refused_on_every_rank(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], kind: str, sentence: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.chdir(folder)
    monkeypatch.setitem(PLANS, ("tied", 2), [{"stages": [stage(0, "first"), stage(1, "last")]}])
    devices = [{"name": "large", "memory_gib": 1}, {"name": "tiny", "memory_gib": 1e-6}]
    (folder / "tiny.yaml").write_text(yaml.safe_dump({"name": "tiny", "source": "made up", "devices": devices}))
    with pytest.raises(UserError, match=sentence):
        by_plan(plane, replace(recipe(folder / "run"), **changes), kind)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["WithComplexWeights", "WithSparseGradients"])
def test_plans_of_whole_models_train_what_no_other_plan_does(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setitem(PLANS, ("data", 2), [{"stages": [stage(rank, "*")]} for rank in range(2)])
    plain = OptimizerConfig("sgd", 0.01)  # sparse gradients know no weight decay
    config = replace(recipe(folder / "run"), model=ModelConfig(f"{HERE}:{kind}"), optimizer=plain)
    assert by_plan(plane, config, "data") == 0
