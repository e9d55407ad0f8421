"""What a job logs, and where: by the real libraries where they are installed."""

from __future__ import annotations

import csv
import glob
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync import errors
from hetsync.errors import UserError
from hetsync.train import tracking
from hetsync.train.trackers import Csv, Forgiven, MLflow, TensorBoard, Wandb, check_trackers, trackers_of

VALUES = {"train/loss": 0.5, "share/rank_0": 32.0}


class Mine:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int, float]] = []
        self.closed = 0

    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        self.logged.append((dict(values), samples, seconds))

    def close(self) -> None:
        self.closed += 1

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(samples, values[name]) for values, samples, _ in self.logged if name in values]


def lines(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_csv_has_a_line_for_each_value(tmp_path: Path) -> None:
    Csv(tmp_path, 0).log({"a,b": 1.5, "c": float("nan")}, 64, 0.25)
    assert lines(tmp_path) == [
        ["samples", "seconds", "name", "value"],
        ["64", "0.250000", "a,b", "1.5"],
        ["64", "0.250000", "c", "nan"],
    ]


def test_csv_goes_on_where_the_checkpoint_is(tmp_path: Path) -> None:
    first = Csv(tmp_path, 0)
    for samples in (64, 128, 192):
        first.log({"loss": 1.0}, samples, samples / 64)
    Csv(tmp_path, 128).log({"loss": 2.0}, 192, 3.5)
    assert [row[0] + " " + row[3] for row in lines(tmp_path)[1:]] == ["64 1.0", "128 1.0", "192 2.0"]


def test_csv_keeps_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Csv(tmp_path, 0)
    with monkeypatch.context() as full:
        full.setattr("hetsync.telemetry._write", lambda file, block: 0)
        with pytest.raises(OSError, match="No space left"):
            tracker.log({"loss": 1.0}, 64, 1.0)
    tracker.log({"loss": 2.0}, 128, 2.0)
    assert [row[0] for row in lines(tmp_path)[1:]] == ["64", "128"]


def test_tensorboard_has_steps_of_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for applied in (0, 64):
        tracker = TensorBoard(tmp_path, applied)
        tracker.log(VALUES, applied + 64, 2.0)
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(64, 0.5), (128, 0.5)]
    assert [event.value for event in events.Scalars("seconds")] == [2.0, 2.0]


def test_mlflow_has_one_run_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    for applied in (0, 64):
        tracker = MLflow(tmp_path, applied)
        tracker.log(VALUES, applied + 64, 2.0)
        tracker.close()
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("hetsync").experiment_id])
    assert run.info.status == "FINISHED"
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")] == [
        (64, 0.5),
        (128, 0.5),
    ]


def test_wandb_is_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tracker = Wandb(tmp_path, 0)
    tracker.log(VALUES, 64, 2.0)
    tracker.close()
    (file,) = glob.glob(str(tmp_path / "wandb" / "offline-run-*" / "*.wandb"))
    deadline = time.monotonic() + 30
    while b"train/loss" not in Path(file).read_bytes():  # a process of its own writes it
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Broken(Mine):
    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        raise OSError(28, "No space left on device")


def test_a_tracker_that_fails_is_told_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Forgiven("mine", Broken)
    for samples in (64, 128):
        tracker.log(VALUES, samples, 1.0)
    assert capsys.readouterr().err.count("hetsync: tracker mine failed: [Errno 28] No space left on device; train") == 1
    monkeypatch.setattr(errors, "REPEAT_SECONDS", 0.0)
    tracker.log(VALUES, 192, 1.0)
    assert "tracker mine failed" in capsys.readouterr().err
    tracker.close()


@pytest.mark.parametrize(
    ("track", "folder", "sentence"),
    [
        (["tensorbord"], Path(), r"track has tensorbord \(did you mean tensorboard\?\): use tensorboard, mlflow"),
        (["tensorboard"], None, "track has tensorboard, which writes into the run folder: give hetsync.join a run"),
        ("tensorboard", Path(), r"track is 'tensorboard': give a list"),
        ([print], None, "track has a builtin_function_or_method: give names, and objects with log and close"),
    ],
)
def test_what_is_no_tracker_is_refused(track: Any, folder: Path | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_trackers(track, folder)


def test_a_lone_tracker_needs_no_folder() -> None:
    mine = Mine()
    (only,) = trackers_of([mine], None, 0)
    only.log(VALUES, 64, 1.0)
    only.close()
    assert mine.logged == [(VALUES, 64, 1.0)]
    assert mine.closed == 1


# What a job logs.


def job_that_tracks(mine: Mine, run: Path | None, epochs: int = 2, bound: int = 4, **options: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(320, 4)
    train_set = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    with hetsync.join(run=run, track=[mine], delay_bound=bound, progress=False, **options) as job:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler, loader = job.prepare(
            model, optimizer, scheduler, DataLoader(train_set, batch_size=32, shuffle=True)
        )
        for epoch in job.epochs(epochs):
            for number, (given, labels) in enumerate(loader):
                loss = torch.nn.functional.cross_entropy(model(given), labels)
                job.backward(loss)
                job.step(optimizer)
                job.log({"number": torch.tensor(float(number))})
            job.evaluate(lambda: {"always": (1.0, 1)})
            job.log({"epoch": epoch})
            scheduler.step()


@pytest.mark.parametrize("bound", [0, 4])
def test_a_job_logs_its_figures(tmp_path: Path, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "LOG_SECONDS", 0.0)
    mine = Mine()
    job_that_tracks(mine, tmp_path / "run", bound=bound)
    names = {name for values, _, _ in mine.logged for name in values}
    assert names == {
        "train/loss",
        "train/learning_rate",
        "speed/efficiency",
        "speed/samples_per_second",
        "sync/staleness",
        "sync/accumulation",
        "sync/delay_bound",
        "share/rank_0",
        "memory/max_rss_bytes",
        "evaluation/always",
        "number",
        "epoch",
    }
    assert all(0 < value <= 1 for _, value in mine.of("speed/efficiency"))
    assert {value for _, value in mine.of("sync/delay_bound")} == {bound}
    assert {value for _, value in mine.of("share/rank_0")} == {32}
    assert {value for _, value in mine.of("train/learning_rate")} == {0.01, 0.005}
    assert mine.of("evaluation/always") == [(320, 1.0), (640, 1.0)]
    assert [samples for samples, _ in mine.of("train/loss")][-1] == 640
    assert mine.of("epoch") == [(320, 0.0), (640, 1.0)]
    seconds = [seconds for _, _, seconds in mine.logged]
    assert seconds == sorted(seconds)
    assert mine.closed == 1
    told = {row[2] for row in lines(tmp_path / "run")[1:]}
    assert told == names


def test_values_of_ones_own_become_means(tmp_path: Path) -> None:
    mine = Mine()
    job_that_tracks(mine, None, epochs=1)
    assert mine.of("number") == [(320, 4.5)]  # of 0 to 9


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    first, second = Mine(), Mine()
    job_that_tracks(first, tmp_path / "run", epochs=1)
    job_that_tracks(second, tmp_path / "run", epochs=2, resume=True)
    assert [value for _, value in second.of("epoch")] == [0.0, 1.0]  # its last lines are run again
    assert second.logged[-1][2] > first.logged[-1][2]
    assert {row[0] for row in lines(tmp_path / "run")[1:]} == {"320", "640"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"train/loss": 1.0}, "job.log got train/loss, a name that is kept for the job's own figures: give it another"),
        ({"mine": "text"}, "job.log gave mine as str: give a number"),
    ],
)
def test_values_that_cannot_be_logged(
    values: Any, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hetsync.train.job.Job, "evaluate", lambda job, function: job.log(values))
    with pytest.raises(SystemExit) as ended:
        job_that_tracks(Mine(), None)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
