"""`hetsync plan`: what it finds and writes, what it shows of a plan, and what it refuses."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.cli import main as cli
from hetsync.emulation import device
from hetsync.emulation.cluster import DeviceGroup
from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.placement import Placement
from hetsync.plan.search.registry import PARTS, SEARCHES
from hetsync.profiling.report import times_of_kinds

CLUSTER = {
    "name": "three",
    "source": "made up",
    "devices": [{"name": "fast", "count": 2, "speed": 3, "memory_gib": 1}, {"name": "slow", "speed": 1}],
    "link": {"latency_seconds": 1e-4, "bytes_per_second": 1e8},
}
RATES = ["--emulation.samples_per_second", "700"]
MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from hetsync.data import Data

class Plain(nn.Module):
    def __init__(self, ties: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        if ties:
            self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)))

def once(model, batch):
    return model(batch[0]).square().mean()

def twice(model, batch):
    return once(model, batch) + model(batch[0]).mean()

def never(model, batch):
    return model.first.weight.square().sum()

def touches(model, batch):
    return once(model, batch) + model.first.weight.square().sum()

class Complex(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x):
        return (super().forward(x) * self.filter).abs()

class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(8, 8, sparse=True)

    def forward(self, x):
        return super().forward(x.argsort())

class Uncut(Plain):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -super().forward(x)

def data(loss: str = "once", count: int = 64):
    samples = TensorDataset(torch.randn(count, 8))
    return Data(samples, samples, lambda model, batch: globals()[loss](model, batch), lambda model, batch: {})
"""


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


@pytest.fixture
def mine(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Words that name a model and data of the user's own, and a cluster."""
    (place / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield ["--model.name", "mine:Plain", "--data.name", "mine:data", "--emulate", "three.yaml", *RATES]
    sys.modules.pop("mine", None)


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
    methods = [part.method for part in PARTS["best"]]
    tried = [one["method"] for one in written["tried"]]
    assert tried == methods[: len(tried)]
    assert set(tried) == set(methods)
    assert set(methods) <= {row[0] for row in table if row}
    assert written["objective"] == min(one["objective"] for one in written["tried"] if "objective" in one)
    assert written["evaluations"] == 1 + sum(one["evaluations"] for one in written["tried"]) <= 300
    assert written["seed"] == 3
    assert any(row[0] == "break-even" for row in table if row)


def test_a_plan_that_leaves_ranks_unused_does_not_count_where_one_is_written(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over so slow a link the fastest rank alone is the fastest of all with one replica."""
    slow = {**CLUSTER, "link": {"latency_seconds": 1.0, "bytes_per_second": 1e3}}
    (place / "slow.yaml").write_text(yaml.safe_dump(slow))
    words = ["--emulate", "slow.yaml", *RATES, "--replicas", "0,1,2", "--evaluations", "60"]
    assert plan(*words) == 0
    assert "does not count" not in capsys.readouterr().out
    assert plan(*words, "--output", "plan.yaml") == 0
    told = capsys.readouterr().out
    assert "single: does not count, as it leaves 2 of the ranks, of which a job runs all, unused\n" in told
    written = yaml.safe_load((place / "plan.yaml").read_text())["search"]
    tried = {one["method"]: one.get("objective") for one in written["tried"]}
    assert tried["single"] is None
    assert written["objective"] == min(each for each in tried.values() if each is not None)


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


def test_a_plan_is_written_whatever_becomes_of_what_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody reads the pipe that it goes to."""

    def nobody(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", nobody)
    with pytest.raises(BrokenPipeError):
        cli.main(["plan", "--run.profile_seconds", "0.01", "--emulate", "three.yaml", *RATES, "--output", "plan.yaml"])
    assert yaml.safe_load((place / "plan.yaml").read_text())["search"]["method"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_other_signals_end_a_search_as_ctrl_c_does(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    calls, evaluate, before = [], Evaluator.evaluate, signal.getsignal(number)

    def ended(self: Evaluator, placement: Placement) -> Costs:
        calls.append(placement)
        if len(calls) == 12:
            signal.raise_signal(number)
        return evaluate(self, placement)

    monkeypatch.setattr(Evaluator, "evaluate", ended)
    assert plan("--emulate", "three.yaml", *RATES, "--output", "plan.yaml") == 130
    assert "interrupted after 12 evaluations: this is the best so far" in capsys.readouterr().err
    assert yaml.safe_load((place / "plan.yaml").read_text())["search"]["method"] == "data"
    assert signal.getsignal(number) is before


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
    assert plan("--emulate", "three.yaml", *RATES, "--search", "data", "--micro-batches", "1") == 0
    told = capsys.readouterr().out
    shares = [int(share) for share in re.findall(r"replica \d: (\d+) samples", told)]
    # 27, 27 and 9 but for the update, which is measured, and takes each rank as long whatever its share.
    assert sum(shares) == 64
    assert abs(shares[0] - shares[1]) <= 1
    assert 2 <= shares[2] <= 10
    samples_per_second = re.search(r"s a step, ([\d.]+) samples/s", told)
    assert samples_per_second is not None
    assert 600 < float(samples_per_second[1]) < 710


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
        (["--emulate", "three.yaml", "--output", "."], "cannot write '.': it is a folder"),
        (["--emulate", "three.yaml", "--output", "three.yaml/p"], "three.yaml is no folder that may be written"),
        (["--pretrain"], "--pretrain learns a policy, but --output does not say where"),
        (["--pretrain", "--output", "p", "--emulate", "three.yaml"], "--emulate is three.yaml, but --pretrain learns"),
        (["--emulate", "three.yaml", "--evaluations", "0"], "--evaluations is 0: give a whole number above 0"),
        (["--emulate", "three.yaml", "--micro-batchs", "2"], "--micro-batchs (did you mean --micro-batches?)"),
        (["--emulate", "three.yaml", "--evaluations", "9" * 400], "--evaluations is 9999"),
        (["--emulate", "three.yaml", "--micro-batches", "9" * 5000], "--micro-batches is 9999"),
        (["--emulate", "three.yaml", "--seconds", "-1"], "--seconds is -1: give a number above 0"),
        (["--emulate", "three.yaml", "--ranks", "x"], "--ranks is x: give a whole number above 0"),
        (["--emulate", "three.yaml", "--seed", "-1"], "--seed is -1: give a whole number, at least 0"),
        (["--emulate", "three.yaml", "--seed", "9" * 20], "--seed is 99999999999999999999: it must be at most"),
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


def test_a_speed_that_nothing_tells_is_one_that_the_machine_can_imitate(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not a slice of 0.1 s, whatever the model takes: jobs emulate no such cluster."""
    monkeypatch.setattr(device, "COMPUTE_FRACTION", 1e-4)
    assert plan("--emulate", "three.yaml", "--search", "data", "--output", "assumed.yaml") == 0
    (rate,) = re.findall(r"fast the cluster is: ([\d.]+) samples/s", capsys.readouterr().out)
    assert 0 < float(rate) < 640
    words = ["--search", "data", "--output", "told.yaml", "--emulation.samples_per_second", rate]
    assert plan("--emulate", "three.yaml", *words) == 0
    assert "how fast the cluster is" not in capsys.readouterr().out
    assumed, told = (yaml.safe_load((place / name).read_text()) for name in ("assumed.yaml", "told.yaml"))
    assert assumed["predicted"] == told["predicted"]


def test_a_batch_of_fewer_samples_than_ranks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--emulate", "three.yaml", *RATES, "--search", "contiguous", "--data.batch_size", "2"]
    assert plan(*words) == 0
    assert "break-even at once: data parallelism has no sample for every rank" in capsys.readouterr().out


def test_a_plan_of_another_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--emulate", "three.yaml", *RATES]
    assert plan(*words, "--output", "plan.yaml") == 0
    assert plan(*words, "--data.batch_size", "32", "--explain", "plan.yaml") == 2
    assert "plan plan.yaml: batch_size is 64, but data.batch_size is 32" in capsys.readouterr().err
    assert plan(*words, "--model.options", '{"channels": 8}', "--explain", "plan.yaml") == 2


def test_stages_that_would_share_a_weight(place: Path, mine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"ranks": [0], "blocks": ["first"]}, {"ranks": [1, 2], "blocks": ["last"]}]
    (place / "tied.yaml").write_text(yaml.safe_dump({"format": 1, "batch_size": 64, "replicas": [{"stages": stages}]}))
    assert plan(*mine, "--model.options", "{ties: true}", "--explain", "tied.yaml") == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hetsync:")]
    assert "plan tied.yaml: replicas[0].stages[1].blocks has last, whose weights are part of block first and" in told


def test_losses_by_which_no_model_is_cut(mine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also once the model's costs are known, so that no loss is measured."""
    assert plan(*mine, "--search", "data") == 0
    capsys.readouterr()
    for loss, sentence in (("twice", "the loss calls the model twice"), ("never", "<lambda> never calls the model")):
        assert plan(*mine, "--data.options.loss", loss, "--search", "data") == 2
        (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hetsync:")]
        assert sentence in told


def test_what_a_job_would_refuse_is_not_written(
    place: Path, mine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """But for plans of whole models, with one micro-batch, which jobs without a plan are like."""
    refused = ["--ema.decay", "0.99", "--output", "plan.yaml"]
    touching = ["--data.options.loss", "touches", "--output", "plan.yaml"]
    for words, sentence in (
        (refused, "ema.decay is 0.99, which jobs by a plan that cuts the model do not know: give null, or plan with"),
        ([*refused, "--search", "data", "--micro-batches", "2"], "or plan with --search data and --micro-batches 1"),
        (touching, "the loss computes with first.weight itself, which another rank may hold in plans that cut"),
    ):
        assert plan(*mine, *words) == 2
        (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hetsync:")]
        assert sentence in told
        assert not (place / "plan.yaml").exists()
    for words in (refused, touching):
        assert plan(*mine, *words, "--search", "data") == 0
        written = yaml.safe_load((place / "plan.yaml").read_text())
        assert [one["stages"][0]["blocks"] for one in written["replicas"]] == [["*"]] * 3
        assert words is touching or {one.get("micro_batches", 1) for one in written["replicas"]} == {1}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("Complex", "filter is complex, which"), ("Sparse", "first.weight has sparse gradients, which")],
)
def test_weights_of_which_no_other_plans_are_written_than_of_whole_models(
    place: Path, mine: list[str], capsys: pytest.CaptureFixture[str], kind: str, sentence: str
) -> None:
    words = [*mine, "--model.name", f"mine:{kind}", "--optimizer.name", "sgd", "--output", "plan.yaml"]
    assert plan(*words) == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hetsync:")]
    assert sentence in told
    assert told.endswith("train without a plan, or plan with --search data and --micro-batches 1")
    assert not (place / "plan.yaml").exists()
    assert plan(*words, "--search", "data") == 0
    written = yaml.safe_load((place / "plan.yaml").read_text())
    assert {one.get("micro_batches", 1) for one in written["replicas"]} == {1}


def test_why_a_model_is_one_block_is_told(mine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*mine, "--model.name", "mine:Uncut", "--search", "data") == 0
    assert re.search(r"mine:Uncut is one block, which no plan can cut: .*mine\.py:\d+", capsys.readouterr().err)


def test_events_of_a_profile_are_not_planned_for_and_that_is_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eventful = {**CLUSTER, "events": [{"rank": 0, "factor": 2.0, "after_samples": 100}]}
    (place / "eventful.yaml").write_text(yaml.safe_dump(eventful))
    assert plan("--emulate", "eventful.yaml", *RATES, "--search", "data") == 0
    assert "the events of three are not planned for" in capsys.readouterr().err


def test_one_sample_is_too_few_to_measure_blocks(mine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*mine, "--data.options.count", "1", "--data.batch_size", "1", "--ranks", "1") == 2
    assert "data mine:data has one sample to train on, but blocks are measured" in capsys.readouterr().err


def test_equal_devices_that_measure_alike_are_of_one_kind() -> None:
    groups = [DeviceGroup("fast", 3), DeviceGroup("fast", 3), DeviceGroup("slow", 2), DeviceGroup("fast", host="b")]
    seconds = [1.0, 1.02, 5.0, 1.01]
    profiles = [RankProfile("d", "h", StepTime(0.0, each)) for each in seconds]
    times = times_of_kinds(groups, profiles)
    assert [time.seconds_per_sample for time in times] == pytest.approx([1.01, 1.01, 5.0, 1.01])
    assert times[0] == times[1]
    profiles[1] = RankProfile("d", "h", StepTime(0.0, 1.2))  # busy with something else, or throttled
    assert times_of_kinds(groups, profiles)[:2] == [StepTime(0.0, 1.0), StepTime(0.0, 1.2)]


def test_what_does_not_fit(place: Path, mine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A stage, a model, and a block: with the bytes that are needed, and those that are there or short."""
    tiny = CLUSTER | {"devices": [{"name": "small", "memory_gib": 1}, {"name": "tiny", "count": 2, "memory_gib": 1e-6}]}
    (place / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    small = CLUSTER | {"devices": [{"name": "small", "count": 3, "memory_gib": 2e-6}]}
    (place / "small.yaml").write_text(yaml.safe_dump(small))
    stages = [{"ranks": [rank], "blocks": [name]} for rank, name in enumerate(["first", "middle", "last"])]
    (place / "given.yaml").write_text(yaml.safe_dump({"format": 1, "batch_size": 64, "replicas": [{"stages": stages}]}))
    mine += ["--optimizer.name", "adamw"]
    limit, limit_of_small = (int(0.9 * int(gib * 2**30)) for gib in (1e-6, 2e-6))
    weights = 4 * (8 * 8 + 8) * 4  # and gradients, and two values each for the optimizer

    assert plan(*mine, "--emulate", "tiny.yaml", "--explain", "given.yaml") == 2
    told = capsys.readouterr().err
    (needed,) = re.findall(
        rf"given.yaml: rank 1 needs ([\d,]+) bytes for its stage, and {limit:,} of its tiny may", told
    )
    assert weights <= int(needed.replace(",", "")) <= weights + 64 * 3 * 8 * 4

    assert plan(*mine, "--emulate", "small.yaml", "--search", "single") == 2
    told = capsys.readouterr().err
    sentence = (
        r"fits nowhere: of \d+ plans the nearest is ([\d,]+) bytes short: rank 0 needs ([\d,]+) and may use ([\d,]+)"
    )
    (figures,) = re.findall(sentence, told)
    short, needed, there = (int(figure.replace(",", "")) for figure in figures)
    assert short == needed - there > 0
    assert there == limit_of_small

    (place / "tiny.yaml").write_text(yaml.safe_dump(CLUSTER | {"devices": [{"name": "tiny", "memory_gib": 1e-6}]}))
    assert plan(*mine, "--emulate", "tiny.yaml") == 2
    told = capsys.readouterr().err
    assert re.search(r"no device holds block first: with one sample it needs [\d,]+ bytes, [\d,]+ more than any", told)


def test_a_stage_that_does_not_fit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--emulate", "three.yaml", *RATES]
    assert plan(*words, "--output", "plan.yaml") == 0
    small = CLUSTER | {"devices": [{"name": "tiny", "count": 3, "memory_gib": 1e-5}]}
    (place / "tiny.yaml").write_text(yaml.safe_dump(small))
    assert plan("--emulate", "tiny.yaml", "--explain", "plan.yaml") == 2
    assert "plan plan.yaml: rank 0 needs" in capsys.readouterr().err
    assert plan("--emulate", "tiny.yaml") == 2
    assert "no device holds block features.2: with one sample it needs" in capsys.readouterr().err
