"""`hetsync plan`: what it finds and writes, what it shows of a plan, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from hetsync.cli import main as cli
from hetsync.plan.search.registry import SEARCHES

CLUSTER = {
    "name": "three",
    "source": "made up",
    "devices": [{"name": "fast", "count": 2, "speed": 3, "memory_gib": 1}, {"name": "slow", "speed": 1}],
    "link": {"latency_seconds": 1e-4, "bytes_per_second": 1e8},
}
RATES = ["--emulation.samples_per_second", "700"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cluster profile, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "three.yaml").write_text(yaml.safe_dump(CLUSTER))
    return tmp_path


def plan(*words: str) -> int:
    """`hetsync plan` of the default recipe; its exit status."""
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--run.profile_seconds", "0.01", *words])
    torch.set_num_threads(threads)
    return int(ended.value.code or 0)


def test_a_plan_is_found_written_and_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--emulate", "three.yaml", *RATES]
    assert plan(*words, "--replicas", "0,2;1", "--micro-batches", "4", "--output", "plan.yaml") == 0
    found = capsys.readouterr().out.splitlines()
    written = yaml.safe_load((place / "plan.yaml").read_text())
    assert list(written) == ["format", "model", "batch_size", "replicas", "predicted"]
    assert [[stage["ranks"] for stage in replica["stages"]] for replica in written["replicas"]] == [[[0], [2]], [[1]]]
    assert sum(replica["share"] for replica in written["replicas"]) == written["batch_size"] == 64
    assert written["replicas"][1]["stages"][0]["blocks"] == ["*"]
    assert set(written["predicted"]["memory_bytes"]) == {0, 1, 2}
    assert found[0] == "contiguous: the best of 1 plan for 4 blocks on 3 ranks"

    assert plan("--explain", "plan.yaml") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:-1] == found[1:-1]  # but for "wrote plan.yaml", and how to get a timeline

    assert plan(*words, "--explain", "plan.yaml") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[: len(shown) - 1] == shown[:-1]  # block costs are those of the cache
    rows = [line for line in told if line.startswith("rank ")]
    assert [row.split()[2] for row in rows] == ["fast", "fast", "slow"]
    assert set("0123abcd") <= set(rows[1].split()[3])  # the whole model: none of its passes is too short to be seen


def test_speeds_decide_shares_of_data_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--emulate", "three.yaml", *RATES, "--search", "data") == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("replica")] == [
        "replica 0: 28 samples", "replica 1: 27 samples", "replica 2: 9 samples",
    ]  # fmt: skip
    assert "s a step, 69" in told or "s a step, 70" in told


def test_help_names_all_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--help") == 0
    told = capsys.readouterr().out.partition("--search SEARCH")[2].partition("--output")[0]
    assert set(SEARCHES) <= set(re.findall(r"[\w-]+", told))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "plan needs a cluster: name its profile by --emulate"),
        (["--emulate", "slow-link"], "slow-link: link.compute_fraction is 0.5, by which nobody can tell"),
        (["--emulate", "three.yaml", "--ranks", "4"], "--ranks is 4, but the cluster has 3 devices"),
        (["--emulate", "three.yaml", "--ranks", "1000000000"], "--ranks is 1000000000, but the cluster has 3 devices"),
        (["--emulate", "three.yaml", "--micro-batches", "100000"], "--micro-batches is 100000: give at most 1024"),
        (["--emulate", "three.yaml", "--replicas", "0,1;x"], "--replicas is 0,1;x: give ranks by commas"),
        (["--emulate", "three.yaml", "--replicas", "0,1"], "--replicas lacks rank 2 of 3: add it, or give --ranks 2"),
        (["--emulate", "three.yaml", "--replicas", "0,1;1,2"], "--replicas has rank 1 2 times"),
        (["--emulate", "three.yaml", "--replicas", "0,1;2,3"], "--replicas has rank 3, but there are 3: give 0 to 2"),
        (["--emulate", "three.yaml", "--search", "exct"], "there is no search exct"),
        (["--emulate", "three.yaml", "--sync.shares", "equal"], "sync.shares is equal, but a plan has shares"),
        (["--emulate", "three.yaml", "--search", "single", "--output", "p"], "leaves rank 1 without blocks"),
        (["--explain", "p", "--search", "nonsense"], "--search is nonsense, but --explain shows a plan as it is"),
        (["--explain", "p", "--search", "contiguous"], "--search is contiguous, but --explain shows"),
        (["--explain", "p", "--output", "never.yaml"], "--output is never.yaml, but --explain shows"),
        (["--explain", "p", "--ranks", "2"], "--ranks is 2, but --explain shows"),
        (["--explain", "p", "--replicas", "0,1"], "--replicas is 0,1, but --explain shows"),
        (["--explain", "p", "--micro-batches", "2"], "--micro-batches is 2, but --explain shows"),
        (["--explain", "absent.yaml"], "cannot read plan absent.yaml"),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


def test_a_plan_of_another_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--emulate", "three.yaml", *RATES]
    assert plan(*words, "--output", "plan.yaml") == 0
    assert plan(*words, "--data.batch_size", "32", "--explain", "plan.yaml") == 2
    assert "plan plan.yaml: batch_size is 64, but data.batch_size is 32" in capsys.readouterr().err
    assert plan(*words, "--model.options", '{"channels": 8}', "--explain", "plan.yaml") == 2


def test_a_stage_that_does_not_fit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--emulate", "three.yaml", *RATES]
    assert plan(*words, "--output", "plan.yaml") == 0
    small = CLUSTER | {"devices": [{"name": "tiny", "count": 3, "memory_gib": 1e-5}]}
    (place / "tiny.yaml").write_text(yaml.safe_dump(small))
    assert plan("--emulate", "tiny.yaml", "--explain", "plan.yaml") == 2
    assert "plan plan.yaml: rank 0 needs" in capsys.readouterr().err
    assert plan("--emulate", "tiny.yaml") == 2
    assert "no device holds block features.2: with one sample it needs" in capsys.readouterr().err
