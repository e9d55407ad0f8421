"""`hetsync test` and `hetsync predict`: what a run is worth, whatever ranks look, and however fast these are.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_predict.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import csv, parquet
from torch.utils.data import TensorDataset

from hetsync import data
from hetsync.cli.predict import evaluate_runs
from hetsync.config.schema import Config, DataConfig, EmaConfig, KeepBestConfig, ModelConfig, OptimizerConfig, RunConfig
from hetsync.data import Data, evaluation
from hetsync.data.evaluation import evaluate_range
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.profiling.measure import autocast
from hetsync.train import data_facts
from hetsync.train.checkpoint import load_newest
from hetsync.train.job import Job
from hetsync.train.tested import Request
from hetsync.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 4)]

SENSORS = {"sensors": 5, "days": 4, "missing": 0.1}
SMALL = {"blocks": 1, "residual": 4, "dilated": 4, "skip": 8, "end": 8, "norm": "layer", "week": True}


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def recipe(folder: Path, **run: Any) -> Config:
    run = {"samples": 640, "profile_seconds": 0.05, "dir": str(folder / "run"), **run}
    return Config(
        run=RunConfig(**run),
        model=ModelConfig("graph_wavenet", SMALL),
        data=DataConfig("synthetic_sensors", 32, options=SENSORS),
        optimizer=OptimizerConfig("adamw", 0.01),
    )


def trained(plane: Plane, config: Config) -> Trainer:
    with Job(config, plane, show="nothing") as job:
        trainer = Trainer(config, job)
        trainer.train()
    return trainer


def asked(part: Any = "test", weights: Any = None, predicts: bool = False) -> Request:
    return Request(part, weights, predicts)


def slow_down(monkeypatch: pytest.MonkeyPatch, rank: int) -> list[int]:
    """Each batch takes the higher ranks longer. How many samples this one gets in each round."""
    parts: list[int] = []
    once = evaluation.test_batches

    def slowly(source: Data, first: int, stop: int, *others: Any) -> Iterator[Any]:
        parts.append(stop - first)
        time.sleep(0.001 * rank * (stop - first))
        yield from once(source, first, stop, *others)

    monkeypatch.setattr("hetsync.train.tested.test_batches", slowly)
    return parts


def test_metrics_and_rows_are_those_of_one_process(plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(folder)
    trainer = trained(plane, config)
    parts = slow_down(monkeypatch, plane.rank)
    output = folder / "found.parquet"
    evaluate_runs(plane, [(folder / "run", config)], asked(predicts=True), output)
    told = json.loads((folder / "run" / "test.json").read_text())
    source = trainer.data
    samples = len(source.test)  # type: ignore[arg-type]
    assert told["part"] == "test"
    assert told["samples"] == samples
    assert told["weights"] == "newest"
    assert told["samples_applied"] == 640
    trainer.model.load_state_dict(load_newest(folder / "run").model)
    whole = evaluate_range(trainer.model, data.on_part(source, "test"), 0, samples)
    expected = source.report({**whole, "samples": samples})
    assert set(told["metrics"]) == {"model", "last value", "historic average"}
    for name, value in expected.items():
        assert told["metrics"]["model"][name] == pytest.approx(value, rel=1e-6), name
    table = parquet.read_table(output)
    assert table.num_rows == samples * 12 * 5
    found = {name: table[name].to_numpy() for name in table.column_names}
    np.testing.assert_array_equal(found["sample"], np.repeat(np.arange(samples), 60))
    there = ~np.isnan(found["actual"])
    error = np.abs(found["predicted"] - found["actual"])[there].mean(dtype=np.float64)
    assert error == pytest.approx(expected["mae"], rel=1e-5)
    if plane.size > 1:
        totals = plane.gather_objects(sum(parts))
        assert totals[0] > 1.3 * totals[-1]  # who is slow gets less


def test_the_best_weights_are_taken_where_they_are_kept(plane: Plane, folder: Path) -> None:
    config = recipe(folder, evaluate_every=320, keep_best=KeepBestConfig("mae", "min"))
    trained(plane, config)
    evaluate_runs(plane, [(folder / "run", config)], asked())
    best = json.loads((folder / "run" / "test.json").read_text())
    kept = json.loads((folder / "run" / "best" / "best.json").read_text())
    assert best["weights"] == "best"
    assert best["samples_applied"] == kept["samples_applied"]
    evaluate_runs(plane, [(folder / "run", config)], asked(part="validation"))  # of which the run's evaluations were
    assert json.loads((folder / "run" / "test.json").read_text()) == best


@pytest.mark.ranks(1, 2)
def test_evaluations_while_training_are_of_the_validation_part(plane: Plane, folder: Path) -> None:
    config = recipe(folder, evaluate_every=320)
    trainer = trained(plane, config)
    source = trainer.data
    validation = data.on_part(source, "validation")
    count = len(validation.test)  # type: ignore[arg-type]
    assert count == len(source.validation)  # type: ignore[arg-type]
    trainer.model.load_state_dict(load_newest(folder / "run").model)
    expected = source.report({**evaluate_range(trainer.model, validation, 0, count), "samples": count})
    plane.barrier()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["metrics"]["mae"] == pytest.approx(expected["mae"], rel=1e-6)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_newest_weights_are_those_of_the_average_in_the_runs_precision(
    plane: Plane, folder: Path, precision: Any
) -> None:
    kept = KeepBestConfig("mae", "max")  # of the worst, which the newest are not
    config = replace(recipe(folder, evaluate_every=160, keep_best=kept, precision=precision), ema=EmaConfig(decay=0.5))
    trainer = trained(plane, config)
    assert trainer.average is not None
    evaluate_runs(plane, [(folder / "run", config)], asked(weights="newest", predicts=True), folder / "found.parquet")
    told = json.loads((folder / "run" / "test.json").read_text())
    found = parquet.read_table(folder / "found.parquet")
    assert told["weights"] == "newest"
    assert told["rows"] == found.num_rows
    source, count = trainer.data, len(trainer.data.test)  # type: ignore[arg-type]
    with autocast(precision, torch.device("cpu")):
        sums = evaluate_range(trainer.average.module, data.on_part(source, "test"), 0, count)
    expected = source.report({**sums, "samples": count})
    assert told["metrics"]["model"]["mae"] == pytest.approx(expected["mae"], rel=1e-6)
    errors = np.abs(found["predicted"].to_numpy() - found["actual"].to_numpy())
    assert np.nanmean(errors, dtype=np.float64) == pytest.approx(expected["mae"], rel=1e-5)


def test_classes_have_rows_and_several_runs_a_mean(
    plane: Plane, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for seed in (0, 1):
        run = RunConfig(samples=320, profile_seconds=0.05, dir=str(folder / f"seed-{seed}"), seed=seed)
        config = Config(run=run)
        trained(plane, config)
        runs.append((folder / f"seed-{seed}", config))
    capsys.readouterr()
    evaluate_runs(plane, runs, asked(predicts=True), folder / "found.csv")
    said = capsys.readouterr().out
    values = [json.loads((run / "test.json").read_text())["metrics"]["model"]["accuracy"] for run, _ in runs]
    if plane.rank == 0:
        assert "2 runs" in said
        assert f"{np.mean(values):.4g}" in said
        assert f"{np.std(values, ddof=1):.2g}" in said
        rows = csv.read_csv(folder / "found.csv").to_pydict()
        right = np.mean(np.array(rows["label"]) == np.array(rows["predicted_label"]))
        assert right == pytest.approx(values[1])
        assert min(rows["probability"]) >= 0.1
    else:
        assert not said


def nothing_kept(folder: Path) -> None:
    pass


def foreign_best(folder: Path) -> None:
    from safetensors.torch import save_file

    (folder / "run" / "best").mkdir()
    save_file({"weight": torch.zeros(3)}, folder / "run" / "best" / "model.safetensors")
    (folder / "run" / "best" / "best.json").write_text('{"value": 1, "mode": "min", "samples_applied": 5}')


def damaged_best(folder: Path) -> None:
    foreign_best(folder)
    (folder / "run" / "best" / "model.safetensors").write_bytes(b"no tensors")


def no_rows(folder: Path) -> Data:
    tensors = TensorDataset(torch.zeros(64, 4), torch.zeros(64))
    return Data(tensors, tensors, lambda model, batch: model(batch[0]).mean(), lambda model, batch: {"one": 1.0})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "given", "sentence"),
    [
        (nothing_kept, {"weights": "best"}, "has kept no best weights: use --weights newest"),
        (foreign_best, {}, "do not fit the model"),
        (damaged_best, {}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_sentence_on_all_ranks(
    make: Any, given: dict[str, Any], sentence: str, plane: Plane, folder: Path
) -> None:
    config = recipe(folder, samples=64)
    trained(plane, config)
    if plane.rank == 0:
        make(folder)
    plane.barrier()
    with pytest.raises(UserError, match=sentence):
        evaluate_runs(plane, [(folder / "run", config)], asked(**given))


@pytest.mark.ranks(1, 2)
def test_a_naive_predictor_has_another_name_than_the_model(
    plane: Plane, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(run=RunConfig(samples=64, profile_seconds=0.05, dir=str(folder / "run")))
    trained(plane, config)
    once = data.build
    monkeypatch.setattr(data, "build", lambda *given: replace(once(*given), baselines={"model": torch.nn.Identity()}))
    with pytest.raises(UserError, match=r"data\.baselines has one named model, as the trained model is called"):
        evaluate_runs(plane, [(folder / "run", config)], asked())


@pytest.mark.ranks(1, 2)
def test_a_part_that_the_data_have_not_is_refused(plane: Plane, folder: Path) -> None:
    config = Config(run=RunConfig(samples=64, profile_seconds=0.05, dir=str(folder / "run")))
    trained(plane, config)
    with pytest.raises(UserError, match="--part is validation, which the data does not have: give test or train"):
        evaluate_runs(plane, [(folder / "run", config)], asked(part="validation"))


def readings(folder: Path, days: int, factor: float = 1.0) -> None:
    """A series of two sensors whose first days are always the same; later ones are others by a factor. And a graph."""
    hours = np.arange(24 * days)
    values = 40 + 10 * np.sin(hours[:, None] / 4 + np.arange(2)) + np.random.default_rng(0).normal(0, 1, (24 * days, 2))
    values[24 * 20 :] *= factor
    times = np.datetime64("2024-01-01T00:00:00") + hours * np.timedelta64(1, "h")
    lines = [f"{time},{a:.3f},{b:.3f}\n" for time, (a, b) in zip(times, values, strict=True)]
    folder.mkdir(exist_ok=True)
    (folder / "mine.csv").write_text("time,1,2\n" + "".join(lines))
    (folder / "roads.csv").write_text(
        "from,to,distance\n1,2,1\n2,1,1\n" if factor == 1 else "from,to,distance\n1,2,5\n"
    )


@pytest.mark.ranks(1, 2)
def test_a_run_keeps_the_constants_that_its_data_had(plane: Plane, folder: Path) -> None:
    """Where later readings, or another graph, would give others."""
    config = replace(
        recipe(folder, samples=128),
        data=DataConfig("sensors", 32, options={"path": str(folder / "mine")}),
    )
    if plane.rank == 0:
        readings(folder / "mine", 20)
    plane.barrier()
    with Job(config, plane, show="nothing") as job:
        trainer = Trainer(config, job)
        if plane.rank == 0:
            data_facts.keep(folder / "run", trainer.data.model_options)
        trainer.train()
    before = dict(trainer.data.model_options)
    plane.barrier()
    if plane.rank == 0:
        readings(folder / "mine", 40, 0.5)
    plane.barrier()
    evaluate_runs(plane, [(folder / "run", config)], asked())
    told = json.loads((folder / "run" / "test.json").read_text())["metrics"]["model"]["mae"]
    now = data.build("sensors", config.data.options)
    assert abs(now.model_options["mean"] / before["mean"] - 1) > 0.1  # or this would show nothing
    assert not np.array_equal(now.model_options["adjacency"], before["adjacency"])
    count = len(now.test)  # type: ignore[arg-type]
    sums = evaluate_range(trainer.model, data.on_part(now, "test"), 0, count)  # the model as it was trained
    assert told == pytest.approx(now.report({**sums, "samples": count})["mae"], rel=1e-6)
    config = replace(config, run=replace(config.run, samples=192))
    if plane.rank == 0:
        readings(folder / "mine", 20)
        (folder / "mine" / "roads.csv").write_text("from,to,distance\n1,2,7\n")
    plane.barrier()
    with Job(config, plane, resume=True, show="nothing") as job:
        again = Trainer(config, job)
        again.train()
    np.testing.assert_array_equal(again.data.model_options["adjacency"], before["adjacency"])
    torch.testing.assert_close(again.model.walks.along, trainer.model.walks.along)
