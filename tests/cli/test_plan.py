"""`hetsync plan`: what it finds and writes, what it shows of a plan, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from hetsync.cli import main as cli
from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.placement import Placement
from hetsync.plan.search.registry import ARMS, SEARCHES

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
    contiguous = ["--search", "contiguous", "--replicas", "0,2;1", "--micro-batches", "4"]
    assert plan(*words, *contiguous, "--output", "plan.yaml") == 0
    found = capsys.readouterr().out.splitlines()
    written = yaml.safe_load((place / "plan.yaml").read_text())
    assert list(written) == ["format", "model", "batch_size", "replicas", "predicted", "search"]
    assert [[stage["ranks"] for stage in replica["stages"]] for replica in written["replicas"]] == [[[0], [2]], [[1]]]
    assert sum(replica["share"] for replica in written["replicas"]) == written["batch_size"] == 64
    assert written["replicas"][1]["stages"][0]["blocks"] == ["*"]
    assert set(written["predicted"]["memory_bytes"]) == {0, 1, 2}
    assert found[0] == "contiguous: the best of 2 plans for 4 blocks on 3 ranks"  # and data's, for comparison
    searched = written["search"]
    assert [(one["method"], one["evaluations"]) for one in searched["tried"]] == [("contiguous", 1)]
    assert [searched[key] for key in ("method", "evaluations", "seed", "weights")] == ["contiguous", 2, 0, [1, 0, 0]]
    assert searched["objective"] == pytest.approx(searched["bound"] * (1 + searched["gap"]), rel=1e-3)

    assert plan("--explain", "plan.yaml") == 0
    shown = capsys.readouterr().out.splitlines()[:-1]  # but for how to get a timeline
    own = [line for line in shown if line not in found]  # how it was found: there is a table when it is
    assert own[0].startswith("search  contiguous found objective")
    assert len(own) == 3

    assert plan(*words, "--explain", "plan.yaml") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[: len(shown)] == shown  # block costs are those of the cache
    assert [line.split()[0] for line in told[-2:]] == ["busiest", "fullest"]
    assert "link from rank " in told[-1]
    rows = [line for line in told if line.startswith("rank ")]
    assert [row.split()[2] for row in rows] == ["fast", "fast", "slow"]
    assert set("0123abcd") <= set(rows[1].split()[3])  # the whole model: none of its passes is too short to be seen


def test_best_is_the_default_and_tells_of_every_search(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--emulate", "three.yaml", *RATES, "--weights", "1,1,0", "--seed", "3", "--output", "plan.yaml"]
    assert plan(*words, "--evaluations", "300") == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    written = yaml.safe_load((place / "plan.yaml").read_text())["search"]
    assert [one["method"] for one in written["tried"]] == list(ARMS["best"])
    assert set(ARMS["best"]) <= {row[0] for row in table if row}
    assert written["objective"] == min(one["objective"] for one in written["tried"])
    assert written["evaluations"] == 1 + sum(one["evaluations"] for one in written["tried"]) <= 300
    assert written["seed"] == 3
    assert any(row[0] == "break-even" for row in table if row)


def test_interrupted_it_writes_the_best_so_far(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, evaluate = [], Evaluator.evaluate

    def interrupted(self: Evaluator, placement: Placement) -> Costs:
        calls.append(placement)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return evaluate(self, placement)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    assert plan("--emulate", "three.yaml", *RATES, "--output", "plan.yaml") == 130
    told = capsys.readouterr()
    assert "interrupted after 12 evaluations: this is the best so far" in told.err
    assert yaml.safe_load((place / "plan.yaml").read_text())["search"]["method"] == "data"


def test_interrupted_before_anything_is_found(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Evaluator, placement: Placement) -> Costs:
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    assert plan("--emulate", "three.yaml", *RATES, "--output", "plan.yaml") == 130
    assert capsys.readouterr().err == "hetsync: interrupted\n"
    assert not (place / "plan.yaml").exists()


def test_speeds_decide_shares_of_data_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--emulate", "three.yaml", *RATES, "--search", "data") == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("replica")] == [
        "replica 0: 28 samples", "replica 1: 27 samples", "replica 2: 9 samples",
    ]  # fmt: skip
    assert "s a step, 69" in told or "s a step, 70" in told


def test_help_names_all_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--help") == 0
    told = capsys.readouterr().out.partition("--search SEARCH")[2].partition("--evaluations")[0]
    assert {*SEARCHES, "best"} <= set(re.findall(r"[\w-]+", told))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "plan needs a cluster: name its profile by --emulate, or start hetsync plan under mpirun"),
        (["--emulate", "three.yaml", "--measure"], "--measure runs plans on their ranks, and there is one: start"),
        (["--explain", "p", "--measure"], "--measure is True, but --explain shows"),
        (["--emulate", "slow-link"], "slow-link: link.compute_fraction is 0.5, by which nobody can tell"),
        (["--emulate", "three.yaml", "--ranks", "4"], "--ranks is 4, but the cluster has 3 devices"),
        (["--emulate", "three.yaml", "--ranks", "1000000000"], "--ranks is 1000000000, but the cluster has 3 devices"),
        (["--emulate", "three.yaml", "--micro-batches", "100000"], "--micro-batches is 100000: give at most 1024"),
        (["--emulate", "three.yaml", "--micro-batches", "65"], "--micro-batches is 65, but a batch of 64 has"),
        (["--emulate", "three.yaml", "--micro-batches", "0"], "--micro-batches is 0: give a whole number above"),
        (["--emulate", "three.yaml", "--weights", "0,0,0"], "--weights is 0,0,0, by which all plans are alike"),
        (["--emulate", "three.yaml", "--weights", "1,-2,0"], "--weights is 1,-2,0: give finite numbers"),
        (["--emulate", "three.yaml", "--weights", "fast"], "--weights is fast: give three numbers by commas"),
        (["--emulate", "three.yaml", "--groups", "2"], "--groups is 2, but a replica may have 3 ranks"),
        (["--emulate", "three.yaml", "--search", "data", "--replicas", "0,1;2"], "--replicas is 0,1;2, but the plan"),
        (["--emulate", "three.yaml", "--data.batch_size", "9000"], "data.batch_size is 9000, but the training set has"),
        (["--emulate", "three.yaml", "--replicas", "0,1;x"], "--replicas is 0,1;x: give ranks by commas"),
        (["--emulate", "three.yaml", "--replicas", "0,1"], "--replicas lacks rank 2 of 3: add it, or give --ranks 2"),
        (["--emulate", "three.yaml", "--replicas", "0,1;1,2"], "--replicas has rank 1 2 times"),
        (["--emulate", "three.yaml", "--replicas", "0,1;2,3"], "--replicas has rank 3, but there are 3: give 0 to 2"),
        (["--emulate", "three.yaml", "--search", "exct"], "there is no search exct"),
        (["--emulate", "three.yaml", "--sync.shares", "equal"], "sync.shares is equal, but a plan has shares"),
        (["--emulate", "three.yaml", "--search", "single", "--output", "p"], "leaves rank 1 without blocks"),
        (["--pretrain"], "--pretrain learns a policy, but --output does not say where"),
        (["--pretrain", "--output", "p", "--search", "exact"], "--search is exact, but --pretrain learns"),
        (["--steps", "4"], "--steps is 4, but only --pretrain takes it"),
        (["--search", "exact", "--policy", "p"], "--policy is p, but --search exact learns from nothing or not at all"),
        (["--explain", "p", "--search", "nonsense"], "--search is nonsense, but --explain shows a plan as it is"),
        (["--explain", "p", "--search", "contiguous"], "--search is contiguous, but --explain shows"),
        (["--explain", "p", "--output", "never.yaml"], "--output is never.yaml, but --explain shows"),
        (["--explain", "p", "--ranks", "2"], "--ranks is 2, but --explain shows"),
        (["--explain", "p", "--replicas", "0,1"], "--replicas is 0,1, but --explain shows"),
        (["--explain", "p", "--evaluations", "2"], "--evaluations is 2, but --explain shows"),
        (["--explain", "p", "--seed", "0"], "--seed is 0, but --explain shows"),
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
