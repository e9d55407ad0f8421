"""`hetsync test` and `hetsync predict` in one process: what they say and write, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from in_process import train
from pyarrow import parquet

from hetsync.cli import main as cli
from hetsync.plane.local import LocalPlane


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert train("--run.samples", 640, "--run.dir", folder, "--quiet") == 0
    return folder


def hetsync(*words: str | Path) -> int:
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words)])
    torch.set_num_threads(threads)
    return int(ended.value.code or 0)


def test_a_table_and_a_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hetsync("predict", run) == 0
    assert (run / "data.safetensors").is_file()
    said = capsys.readouterr().out
    told = json.loads((run / "test.json").read_text())
    assert f"{run}: 359 samples of the test part, newest weights, after 640 samples of training" in said
    assert f"{told['metrics']['model']['accuracy']:.4g}" in said
    assert f"{run / 'predictions.parquet'}: 359 rows" in said
    rows = parquet.read_table(run / "predictions.parquet")
    assert rows.column_names[:4] == ["sample", "label", "predicted_label", "probability"]
    shown = rows.filter(rows["image"].is_valid())
    assert (shown["label"].to_numpy() != shown["predicted_label"].to_numpy()).all()


def test_keys_override_the_recipe(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hetsync("test", run, "--data.options", "{test_fraction: 0.5}", "--part", "train") == 0
    assert "899 samples of the train part" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["test"], "hetsync test got no run: give the run folder of a job, such as runs/NAME-DATE-TIME"),
        (["test", "nowhere"], "nowhere: there is no recipe.yaml in it; give the folder of a run of hetsync-train"),
        (["predict", "RUN", "--output", "found.txt"], "--output is found.txt: name a file that ends in .parquet or"),
        (["predict", "RUN", "RUN", "--output", "a.csv"], "--output is a.csv, but there are 2 runs: leave it out"),
        (["predict", "RUN", "--output", "/proc/a.csv"], "cannot write /proc/a.csv"),
        (["test", "RUN", "--weights", "best"], "has kept no best weights: use --weights newest"),
        (["test", "RUN", "--part", "validation"], "--part is validation, which the data does not have"),
        (["test", "RUN", "--model.options", "{classes: 12}"], "do not fit the model"),
        (["test", "RUN", "--modl.name", "x"], "there is no option --modl.name"),
    ],
)
def test_mistakes(
    words: list[str],
    sentence: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalPlane, "abort", lambda plane, code: sys.exit(code))
    assert hetsync(*(str(run) if word == "RUN" else word for word in words)) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_run_folder_that_is_not_to_be_seen_is_one_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(self: Path, **options: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", hidden)
    assert hetsync("test", run) == 2
    assert f"{run / 'recipe.yaml'} cannot be read: Permission denied" in capsys.readouterr().err
