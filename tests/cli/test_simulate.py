"""`hetsync simulate`: the run folder that it leaves, against a real run's; and what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import run, summary_of

from hetsync.cli import main as cli
from hetsync.simulate.script import load_script

QUICK = ["--run.samples", "640", "--run.evaluate_every", "320", "--data.batch_size", "64"]


def simulated(folder: Path, *words: str | Path) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--run.dir", str(folder), *QUICK, *map(str, words)])
    assert ended.value.code == 0
    return summary_of(folder)


def kinds(folder: Path, rank: int = 0) -> dict[str, list[dict[str, Any]]]:
    lines = (folder / "telemetry" / f"rank-{rank:04d}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {kind: [r for r in records if r["kind"] == kind] for kind in {record["kind"] for record in records}}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, synchronous: what it learns does not depend on time."""
    folder = tmp_path_factory.mktemp("real") / "run"
    done = run("--run.dir", folder, *QUICK, "--sync.delay_bound", "0", folder=folder.parent)
    assert done.status == 0, done.story
    return folder


def shape(value: Any) -> Any:
    """Keys, down to the elements of lists."""
    if isinstance(value, dict) and not all(key.isdigit() for key in value):
        return {key: shape(item) for key, item in value.items()}
    return shape(value[0]) if isinstance(value, list) and value else None


def test_the_folder_is_that_of_a_real_run(real: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--gradients", "--emulate", "homogeneous", "--ranks", "1", "--sync.delay_bound", "0"]
    summary, theirs = simulated(folder, *words), summary_of(real)
    assert summary["simulated"]
    assert shape(summary) == {**shape(theirs), "simulated": None}
    assert summary["anchor_sha256"] == theirs["anchor_sha256"]  # the same weights, bit for bit
    assert summary["metrics"] == pytest.approx(theirs["metrics"])
    ours, records = kinds(folder), kinds(real)
    for kind in ("start", "profile"):  # virtual seconds have no time of day, and the summary is there at once
        del records[kind]
    assert {kind: (len(lines), set(lines[0])) for kind, lines in ours.items()} == {
        kind: (len(lines), set(lines[0])) for kind, lines in records.items()
    }
    losses = ([task["loss"] for task in each["piece"]] for each in (ours, records))
    assert next(losses) == pytest.approx(next(losses), rel=1e-5)
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["emulation"]["profile"] == "homogeneous"


def test_timing_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = simulated(tmp_path / "run", "--emulate", "quickstart")
    assert summary["ranks"] == 8
    assert summary["samples_applied"] == 640
    assert summary["metrics"] == {}
    assert summary["anchor_sha256"] is None
    assert sum(rank["samples"] for rank in summary["per_rank"]) == 640
    times = [record["at"] for record in kinds(tmp_path / "run", 7)["piece"]]
    assert times == sorted(times)
    assert times[-1] <= summary["train_seconds"]
    said = capsys.readouterr().out
    assert "simulated in" in said
    assert "efficiency" in said


def test_ranks_rest_where_a_real_job_would(tmp_path: Path) -> None:
    """For checkpoints, and for evaluations that decide something, which are due at rests only."""
    words = ["--sync.delay_bound", "0", "--run.checkpoint_every", "256", "--run.evaluate_every", "128"]
    words += ["--run.keep_best.metric", "accuracy"]
    done = run("--run.dir", tmp_path / "real", *QUICK, *words, folder=tmp_path)
    assert done.status == 0, done.story
    simulated(tmp_path / "run", "--gradients", "--emulate", "homogeneous", "--ranks", "1", *words)
    ours, theirs = kinds(tmp_path / "run"), kinds(tmp_path / "real")
    reasons = [[record["reason"] for record in told["rest"]] for told in (ours, theirs)]
    assert reasons[0] == reasons[1] == [*2 * ["end of an epoch", "checkpoint"], "end"]
    found = [[(record["samples_applied"], record["loss"]) for record in told["evaluation"]] for told in (ours, theirs)]
    assert found[0] == [(samples, pytest.approx(loss)) for samples, loss in found[1]]
    assert len(found[0]) == 5
    assert "score" not in ours


def test_rests_cost_what_they_cost(tmp_path: Path) -> None:
    words = ["--emulate", "v100-p100-k80", "--run.samples", "3200", "--sync.delay_bound", "4"]
    plain = simulated(tmp_path / "plain", *words)
    averaged = simulated(tmp_path / "averaged", *words, "--run.evaluate_every", "160", "--ema.decay", "0.9")
    assert len(kinds(tmp_path / "plain")["rest"]) == 1
    assert len(kinds(tmp_path / "averaged")["rest"]) == 20
    assert averaged["train_seconds"] > 1.1 * plain["train_seconds"]


def test_many_ranks_leave_rank_0s_telemetry(tmp_path: Path) -> None:
    summary = simulated(
        tmp_path / "run",
        "--emulate",
        "quickstart",
        "--ranks",
        "200",
        "--data.batch_size",
        "2000",
        "--run.samples",
        "20000",
    )
    assert summary["ranks"] == 200
    assert Counter(rank["device"] for rank in summary["per_rank"])["slow (simulated)"] == 100
    assert [path.name for path in (tmp_path / "run" / "telemetry").iterdir()] == ["rank-0000.jsonl"]


def test_calibrated_by_a_run(tmp_path: Path) -> None:
    learning = ["--run.samples", "3200", "--optimizer.name", "adamw", "--optimizer.learning_rate", "0.003"]
    simulated(tmp_path / "run", "--emulate", "quickstart", "--gradients", *learning)
    summary = simulated(tmp_path / "like it", "--emulate", "quickstart", *learning, "--calibrate", tmp_path / "run")
    ours, theirs = ([r["loss"] for r in kinds(tmp_path / name)["piece"]] for name in ("like it", "run"))
    assert len(ours) == len(theirs)
    assert sum(ours) == pytest.approx(sum(theirs), rel=0.15)
    assert summary["metrics"]["loss"] < 0.5 * ours[0]
    assert 0 < summary["landscape"]["noise_scale"] < 1e5


def test_a_script_bends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.yaml"
    script.write_text(
        "- {at_seconds: 0.3, rank: 3, slow_by: 4}\n- {at_seconds: 0.7, rank: 3, recover: true}\n"
        "- {at_seconds: 0.2, rank: 7, leave: true}\n- {at_seconds: 0.6, rank: 7, join: true}\n"
    )
    words = ["--emulate", "quickstart", "--sync.delay_bound", "4"]
    plain = simulated(tmp_path / "plain", *words)
    bent = simulated(tmp_path / "bent", *words, "--script", script)
    assert bent["train_seconds"] > plain["train_seconds"]
    assert bent["per_rank"][7]["samples"] < plain["per_rank"][7]["samples"]
    assert bent["samples_applied"] == 640


MISTAKES = {
    "no cluster": ([], "name its profile by --emulate"),
    "no such cluster": (["--emulate", "nowhere"], "there is no cluster profile nowhere"),
    "too many for gradients": (
        ["--emulate", "quickstart", "--gradients", "--ranks", "65", "--data.batch_size", "100"],
        "64 ranks at most, not 65",
    ),
    "batch too small": (
        ["--emulate", "quickstart", "--ranks", "65"],
        "batch_size 64 is smaller than the 65 ranks",
    ),
    "both": (["--emulate", "quickstart", "--gradients", "--calibrate", "x"], "exclude each other"),
    "no run": (["--emulate", "quickstart", "--calibrate", "nowhere"], "--calibrate nowhere holds no finished run"),
    "calibrated fragments": (
        ["--emulate", "quickstart", "--calibrate", "x", "--sync.fragments", "2"],
        "sync.fragments is 2, which --calibrate's model of progress does not know: leave it out, or use --gradients",
    ),
    "no script": (["--emulate", "quickstart", "--script", "nowhere"], "cannot read --script nowhere"),
    "no ranks": (["--emulate", "quickstart", "--ranks", "0"], "ranks"),
    "early stop": (
        ["--emulate", "quickstart", "--run.early_stop.metric", "loss"],
        "run.early_stop.metric is loss, but a simulated job trains to its end: give --run.early_stop.metric null",
    ),
    "controller": (
        ["--emulate", "quickstart", "--control.name", "goodput"],
        "control.name is goodput, but a simulated job has no controller: give --control.name fixed",
    ),
    "average": (
        ["--emulate", "quickstart", "--gradients", "--ema.decay", "0.9"],
        "ema.decay is 0.9, but --gradients evaluates the weights themselves: give --ema.decay null",
    ),
    "calibrated average": (
        ["--emulate", "quickstart", "--calibrate", "x", "--ema.decay", "0.9"],
        "ema.decay is 0.9, but --calibrate evaluates the weights themselves: give --ema.decay null",
    ),
    "precision": (
        ["--emulate", "quickstart", "--gradients", "--run.precision", "bfloat16"],
        "run.precision is bfloat16, but --gradients trains in float32: give --run.precision float32",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = MISTAKES[mistake]
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--run.dir", str(tmp_path / "run"), *QUICK, *words])
    assert ended.value.code == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank: 1", "holds dict"),
        ("- {rank: 1, leave: true}", "entry 1 is"),
        ("- {at_seconds: 1, rank: 1, leave: true, join: true}", "give at_seconds, rank or link, and one of"),
        ("- {at_seconds: 1, rank: 1, link: true, slow_by: 2}", "give at_seconds, rank or link, and one of"),
        ("- {at_seconds: 1, link: true, leave: true}", "write link: true, with slow_by or recover"),
        ("- {at_seconds: 1, link: 3, slow_by: 2}", "write link: true, with slow_by or recover"),
        ("- {at_seconds: -1, rank: 1, leave: true}", "at_seconds -1"),
        ("- {at_seconds: 1, rank: one, leave: true}", "rank one"),
        ("- {at_seconds: 1, rank: 1, slow_by: 0}", "slow_by 0"),
        ("- {at_seconds: 1, rank: 1, leave: 2}", "write leave: true"),
        ("- {at_seconds: 1, rank: 8, leave: true}", "the last is 7"),
        ("- [1, 2", "cannot read"),
    ],
)
def test_scripts_are_checked(text: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "script.yaml"
    script.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_script(script, 8)
