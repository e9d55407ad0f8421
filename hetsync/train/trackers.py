"""Where a run's figures go: RUN/metrics.csv, TensorBoard, MLflow, Weights & Biases, or a tracker of the user's own."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hetsync.config.schema import check_tracker
from hetsync.errors import Trouble, UserError, one_sentence
from hetsync.extras import require
from hetsync.files import write_atomically
from hetsync.telemetry import append_whole

METRICS = "metrics.csv"  # in a run folder
PROJECT = "hetsync"  # what others know as experiment


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        """Values by name, after so many samples of the whole job and seconds of training."""

    def close(self) -> None: ...


class Csv:
    """A line a value: samples, seconds, name, value. Lines that cannot be written are tried again with the next."""

    HEADER = ("samples", "seconds", "name", "value")

    def __init__(self, folder: Path, applied: int) -> None:
        self._path = folder / METRICS
        self._unwritten = b""
        if self._path.is_file():
            self._forget_after(applied)
        else:
            append_whole(self._path, _lines([self.HEADER]))

    def _forget_after(self, applied: int) -> None:
        """What a job that died has told of samples that are trained on again."""
        with self._path.open(newline="", encoding="utf-8") as file:
            header, *rows = list(csv.reader(file)) or [list(self.HEADER)]
        kept = [row for row in rows if int(row[0]) <= applied]
        if len(kept) < len(rows):
            write_atomically(self._path, _lines([header, *kept]))

    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        rows = [(samples, f"{seconds:.6f}", name, value) for name, value in values.items()]
        self._unwritten += _lines(rows)
        append_whole(self._path, self._unwritten)
        self._unwritten = b""

    def close(self) -> None: ...


def _lines(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


class TensorBoard:
    """Files in RUN/tensorboard; steps are samples."""

    def __init__(self, folder: Path, applied: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=applied + 1 if applied else None)

    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        for name, value in {**values, "seconds": seconds}.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A file store in RUN/mlruns, with one MLflow run that a resumed run goes on with; steps are samples."""

    def __init__(self, folder: Path, applied: int) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # version 3 reads it
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=(folder / "mlruns").resolve().as_uri())
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(PROJECT)
        runs = self._client.search_runs([experiment], max_results=1)
        run = runs[0] if runs else self._client.create_run(experiment, run_name=folder.name)
        self._run: str = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        told = {**values, "seconds": seconds}
        self._client.log_batch(self._run, [Metric(name, value, now, samples) for name, value in told.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Wandb:
    """Offline, in RUN/wandb, for `wandb sync`: a W&B run for each start, in one group."""

    def __init__(self, folder: Path, applied: int) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True)
        self._run: Any = wandb.init(
            mode="offline", dir=str(folder), project=PROJECT, group=folder.name, settings=settings
        )
        self._run.define_metric("*", step_metric="samples")

    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        self._run.log({**values, "samples": samples, "seconds": seconds})

    def close(self) -> None:
        self._run.finish()


BUILT_IN: dict[str, Callable[[Path, int], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb}


class Forgiven:
    """A tracker whose failures do not end the job: they are told once a minute."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        """It is made when there is something to log."""
        self._name = name
        self._make = make
        self._made: Tracker | None = None
        self._trouble = Trouble()

    def log(self, values: Mapping[str, float], samples: int, seconds: float) -> None:
        try:
            if self._made is None:
                self._made = self._make()
            self._made.log(values, samples, seconds)
        except Exception as error:
            self._tell(error)

    def close(self) -> None:
        try:
            if self._made is not None:
                self._made.close()
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        why = one_sentence(str(error)) or type(error).__name__
        self._trouble.tell(f"tracker {self._name} failed: {why}; training goes on without what it was to log")


Tracked = Sequence[str | Tracker]


def check_trackers(track: Tracked, folder: Path | None) -> None:
    """UserError unless each is a tracker that is installed, and those with files have a run folder."""
    if isinstance(track, str) or not isinstance(track, Sequence):
        raise UserError(f"track is {track!r}: give a list, such as track=['tensorboard']")
    for each in track:
        if not isinstance(each, str):
            if not callable(getattr(each, "log", None)) or not callable(getattr(each, "close", None)):
                raise UserError(f"track has a {type(each).__name__}: give names, and objects with log and close")
            continue
        check_tracker("track", each)
        if folder is None:
            raise UserError(f"track has {each}, which writes into the run folder: give hetsync.join a run")
        require(each, f"tracker {each}")


def trackers_of(track: Tracked, folder: Path | None, applied: int) -> list[Forgiven]:
    """Those that are named, and metrics.csv where there is a run folder, to go on after so many samples."""
    found = [] if folder is None else [Forgiven(METRICS, lambda: Csv(folder, applied))]
    for each in track:
        if isinstance(each, str):
            assert folder is not None
            found.append(Forgiven(each, _maker(BUILT_IN[each], folder, applied)))
        else:
            found.append(Forgiven(type(each).__name__, _given(each)))
    return found


def _maker(kind: Callable[[Path, int], Tracker], folder: Path, applied: int) -> Callable[[], Tracker]:
    return lambda: kind(folder, applied)


def _given(tracker: Tracker) -> Callable[[], Tracker]:
    return lambda: tracker
