"""What the command line explains, and what a small run leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import Done, run, summary_of

from hetsync import __version__
from hetsync.cli import main as cli
from hetsync.cli import train
from hetsync.config.schema import Config


def keys(kind: Any = Config, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting, dotted, with its default."""
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        default = factory() if factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            yield from keys(default, f"{where}{field.name}.")
        else:
            yield f"{where}{field.name}", default


KEYS = dict(keys())


def said(argv: list[str], capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None] = train.main) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert not ended.value.code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.fixture(scope="module")
def helped() -> str:
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "1000")
        with contextlib.redirect_stdout(told), pytest.raises(SystemExit) as ended:
            train.main(["--help"])
    assert not ended.value.code
    return told.getvalue()


def test_there_is_something_to_explain() -> None:
    assert len(KEYS) > 30
    assert KEYS["sync.delay_bound"] == "auto"
    assert KEYS["sync.outer.momentum"] == 0.9


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_explained_with_its_default(key: str, helped: str) -> None:
    lines = helped.splitlines()
    named = (f"--{key} ", f"--{key}, ")  # the second from Python 3.13 on, where a list has two names
    (at,) = [number for number, line in enumerate(lines) if line.strip().startswith(named)]
    entry = re.split(r" {2,}", lines[at].strip(), maxsplit=1)[1:]  # behind the option's names and its value's
    for line in lines[at + 1 :]:
        if not line.strip() or line.strip().startswith("--"):
            break
        entry.append(line)
    explanation = " ".join(" ".join(entry).split())
    words = explanation.partition("(type:")[0].split()
    assert len(words) > 2, explanation
    default = "null" if KEYS[key] is None else str(KEYS[key])
    assert f"default: {default})" in explanation


def test_help_tells_of_recipes_and_resuming(helped: str) -> None:
    for part in ("RECIPE]", "--resume RUN", "--print_config", "--version"):
        assert part in helped


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["--version"], capsys).split() == ["hetsync-train", __version__]


VERBS = ("train", "plan", "profile", "simulate", "data", "control", "checkpoint", "report", "top", "trace", "doctor")


def test_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(["--help"], capsys, cli.main)
    for verb in VERBS:
        assert re.search(rf"^ +{verb}\s+\w", listed, re.MULTILINE)
        assert "usage:" in said([verb, "--help"], capsys, cli.main)
    assert said(["--version"], capsys, cli.main).split() == ["hetsync", __version__]
    assert "--sync.delay_bound" in said(["train", "--help"], capsys, cli.main)


def test_help_and_parsing_load_no_torch() -> None:
    program = f"""
import sys
from hetsync.cli.main import main
for words in [[], *([verb] for verb in {VERBS})]:
    try:
        main([*words, "--help"])
    except SystemExit as ended:
        assert not ended.code, words
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: hetsync") == 1 + len(VERBS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the following arguments are required: VERB; see hetsync --help"),
        (["trian"], "there is no verb trian (did you mean train?): use one of train, test, predict"),
        (["--verbose"], "hetsync: "),
    ],
)
def test_no_such_verb(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert sentence in captured.err


def test_printed_recipe_is_complete_and_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sync.delay_bound", "null", "--optimizer.name", "adamw", "--optimizer.learning_rate", "1e-3"]
    words += ["--model.options", "{channels: 4}", "--sync.pins", "{0: 5}", "--sync.outer.name", "nesterov"]
    words += ["--emulate", "quickstart", "--run.samples", "100", "--run.dir", "here"]
    printed = tmp_path / "printed.yaml"
    printed.write_text(said([*words, "--print_config"], capsys))
    content = yaml.safe_load(printed.read_text())
    assert set(_flat(content)) >= {key for key in KEYS if not key.endswith((".pins", ".options"))}
    assert set(content) == {field.name for field in dataclasses.fields(Config)}
    config, *_ = train.parse([str(printed)])
    assert config == train.parse(words)[0]
    assert (config.sync.delay_bound, config.sync.pins, config.emulation.profile) == (None, {0: 5}, "quickstart")


def _flat(content: dict[str, Any], where: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{where}{key}.")
        yield f"{where}{key}"


def test_words_go_before_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("sync:\n  delay_bound: 2\n  quorum: 0.5\n")
    for words in ([str(recipe), "--sync.quorum", "1"], ["--sync.quorum", "1", str(recipe)]):
        config, resume, _ = train.parse(words)
        assert (config.sync.delay_bound, config.sync.quorum, resume) == (2, 1.0, None)


def test_printed_recipe_takes_the_given_one_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("sync:\n  delay_bound: 2\n  quorum: 0.5\n")
    printed = yaml.safe_load(said([str(recipe), "--sync.quorum", "1", "--print_config"], capsys))
    assert (printed["sync"]["delay_bound"], printed["sync"]["quorum"]) == (2, 1.0)


def test_a_resumed_run_keeps_its_recipe_but_for_what_is_said_anew(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run:\n  seed: 5\nsync:\n  delay_bound: 2\n  quorum: 0.5\n")
    other = tmp_path / "other.yaml"
    other.write_text("sync:\n  delay_bound: 7\n  quorum: 0.6\n")
    config, resume, _ = train.parse(["--resume", str(tmp_path), "--sync.quorum", "1"])
    assert (config.run.seed, config.sync.delay_bound, config.sync.quorum, resume) == (5, 2, 1.0, tmp_path)
    config, *_ = train.parse([str(other), f"--resume={tmp_path}", "--sync.quorum", "1"])
    assert (config.run.seed, config.sync.delay_bound, config.sync.quorum) == (5, 7, 1.0)


def test_shipped_recipes_parse() -> None:
    recipes = sorted((Path(cli.__file__).parents[2] / "models" / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        train.parse([str(recipe)])


# A run, alone and under mpirun.

SUMMARY = {
    "status", "ranks", "emulated", "samples_applied", "samples_expected", "samples_per_second",
    "solo_samples_per_second_sum", "efficiency", "rounds", "staleness", "delay_bound", "accumulation", "shares",
    "metrics", "anchor_sha256", "wall_seconds", "per_rank",
}  # fmt: skip
CHECKPOINT = ["model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture(scope="module", params=[None, 2], ids=["alone", "two ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, Done]:
    folder = tmp_path_factory.mktemp("job")
    words = ["--run.samples", 1500, "--run.evaluate_every", 500, "--run.checkpoint_every", 600, "--run.dir", "run"]
    words += ["--sync.delay_bound", 4]
    return request.param or 1, folder / "run", run(*words, folder=folder, ranks=request.param)


def test_a_run_ends_well(job: tuple[int, Path, Done]) -> None:
    ranks, folder, done = job
    assert done.status == 0, done.story
    assert done.sentences == []
    sent = summary_of(folder)["bytes_of_ddp"]
    assert (sent is not None) == (" times the bytes of DistributedDataParallel" in done.out) == (ranks > 1)
    assert sent is None or f" rounds of {sent:.2g} times" in done.out


def test_run_folder(job: tuple[int, Path, Done]) -> None:
    ranks, folder, _ = job
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "data.safetensors",
        "metrics.csv",
        "recipe.yaml",
        "summary.json",
        "telemetry",
    ]
    telemetry = sorted(path.name for path in (folder / "telemetry").iterdir())
    assert telemetry == [f"rank-{rank:04d}.jsonl" for rank in range(ranks)]
    checkpoints = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == [f"samples-{n:012d}" for n in (640, 1216, 1500)]  # at ends of batches
    for checkpoint in checkpoints:
        assert sorted(path.name for path in checkpoint.iterdir()) == CHECKPOINT
    config, *_ = train.parse([str(folder / "recipe.yaml")])
    assert config.run.evaluate_every == 500


def test_summary(job: tuple[int, Path, Done]) -> None:
    ranks, folder, _ = job
    summary = summary_of(folder)
    assert set(summary) >= SUMMARY
    assert (summary["status"], summary["ranks"], summary["emulated"]) == ("finished", ranks, False)
    assert summary["samples_applied"] == summary["samples_expected"] == 1500
    assert (summary["delay_bound"], summary["accumulation"]) == (4, 1)
    assert 0 <= summary["staleness"]["mean"] <= summary["staleness"]["max"] <= 4
    assert sum(summary["shares"]) == 64
    assert len(summary["anchor_sha256"]) == 64
    assert summary["rounds"] > 0
    assert 0 < summary["metrics"]["accuracy"] <= 1
    assert summary["metrics"]["loss"] > 0
    assert summary["solo_fraction"] == pytest.approx(
        summary["samples_per_second"] / summary["solo_samples_per_second_sum"]
    )
    capable = summary["device_samples_per_second_sum"]
    assert summary["efficiency"] == pytest.approx(summary["samples_per_second"] / capable)
    assert 0 < summary["efficiency"] <= 1
    assert summary["samples_per_second"] > 0
    assert summary["wall_seconds"] > summary["train_seconds"] > 0


def test_summary_of_each_rank(job: tuple[int, Path, Done]) -> None:
    ranks, folder, _ = job
    summary = summary_of(folder)
    per_rank = summary["per_rank"]
    assert [rank["rank"] for rank in per_rank] == list(range(ranks))
    assert [rank["share"] for rank in per_rank] == summary["shares"]
    assert sum(rank["samples"] for rank in per_rank) == 1500
    for rank in per_rank:
        assert 0 < rank["compute_fraction"] <= 1
        assert 0 <= rank["wait_fraction"] < 1
    alone = sum(rank["solo_samples_per_second"] for rank in per_rank)
    assert alone == pytest.approx(summary["solo_samples_per_second_sum"])


def test_telemetry(job: tuple[int, Path, Done]) -> None:
    ranks, folder, _ = job
    used = 0
    for rank in range(ranks):
        path = folder / "telemetry" / f"rank-{rank:04d}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert all({"kind", "at"} <= set(record) for record in records)
        assert {record["kind"] for record in records} >= {"piece", "round", "score", "rest"}
        used += sum(record["samples"] for record in records if record["kind"] == "piece")
        evaluations = [r for r in records if r["kind"] == "evaluation"]
        assert bool(evaluations) == (rank == 0), "rank 0 speaks for all"
        applied = [evaluation["samples_applied"] for evaluation in evaluations]
        assert applied == sorted(set(applied))
        assert rank != 0 or (applied[0] >= 500 and len(applied) >= 2 and applied[-1] == 1500)
        assert all(0 <= evaluation["accuracy"] <= 1 for evaluation in evaluations)
        seconds = [evaluation["train_seconds"] for evaluation in evaluations]
        assert seconds == sorted(seconds)
        assert not seconds or 0 < seconds[-1] <= summary_of(folder)["train_seconds"] + 1e-5
        rounds = [record["round"] for record in records if record["kind"] == "round"]
        assert rounds == list(range(summary_of(folder)["rounds"]))
    assert used == 1500


def test_without_a_terminal_lines_are_plain(job: tuple[int, Path, Done]) -> None:
    ranks, _, done = job
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out
    assert done.out.count("finished: 1,500 of 1,500 samples") == 1
    assert f"on {ranks} ranks" in done.out
    assert done.out.count("efficiency") == 1


def test_a_run_tells_of_itself(job: tuple[int, Path, Done]) -> None:
    _, folder, done = job
    lines = done.out.splitlines()
    assert lines[0] == f"the run folder is {folder}"
    evaluations = [line for line in lines if line.startswith("evaluated after ")]
    path = folder / "telemetry" / "rank-0000.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    applied = [record["samples_applied"] for record in records if record["kind"] == "evaluation"]
    assert len(applied) >= 2
    for line, samples in zip(evaluations, applied[:-1], strict=True):
        assert re.match(rf"evaluated after {samples:,} samples, .* s of training: accuracy 0\.\d+  loss ", line)
    assert lines.index(evaluations[0]) < lines.index(next(line for line in lines if line.startswith("finished")))
    waits = [rank["wait_fraction"] for rank in summary_of(folder)["per_rank"]]
    assert f"rank {waits.index(max(waits))} ({socket.gethostname()}, " in done.out
    assert "waited longest, " in done.out


@pytest.mark.parametrize(
    ("words", "unknown"),
    [(["--vers"], "--vers"), (["checkpoint", "verify", "--hel"], "--hel"), (["control", "train", "--ou", "x"], "--ou")],
)
def test_options_are_written_out(words: list[str], unknown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_a_finished_run_has_nothing_to_resume(job: tuple[int, Path, Done]) -> None:
    """So a job that is queued again by itself does not count as failed."""
    ranks, folder, _ = job
    done = run("--resume", folder, folder=folder.parent, ranks=None if ranks == 1 else ranks)
    assert done.status == 0, done.story
    assert len(done.sentences) == 1
    assert "is finished after 1500 samples" in done.sentences[0]
