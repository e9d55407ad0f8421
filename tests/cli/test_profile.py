"""`hetsync profile`: what it measures, shows and writes; of a cluster that is not there, what it would gain."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.cli import main as cli
from hetsync.cli.profile_report import (
    gain_sentences,
    link_sentence,
    links_sentences,
    settings_sentence,
    slower_sentences,
)
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, LognormalJitter, PairLink, load_cluster
from hetsync.simulate.gain import Gain
from hetsync.simulate.left_out import LeftOut, Prediction, Rates


def profiled(*words: str | Path) -> int:
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", "--run.profile_seconds", "0.2", *map(str, words)])
    torch.set_num_threads(threads)
    return int(ended.value.code or 0)


def test_a_real_rank_is_measured_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mine.yaml"
    assert profiled("--output", output, "--run.device", "cpu") == 0
    out = capsys.readouterr().out
    assert load_cluster(str(output)).size == 1
    assert out.count("wrote ") == 1
    assert "link: free" in out
    assert "without" not in out.partition("simulated without jitter")[0], "there is nobody to leave out"
    for row in ("synchronous, equal shares", "synchronous, shares by speed", "this recipe  "):
        assert row in out
    assert "\nthis recipe: D = auto, q = auto, grace auto, K = 1\n" in out
    # A few tens of milliseconds are simulated, of which a rank alone keeps the books of several steps at once.
    assert re.search(r"HetSync gains nothing \(a factor of (0\.9\d|1\.0\d)\) over equal shares and nothing", out)


def test_of_a_profile_nothing_is_measured_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profiled("--emulate", "slow-link", "--sync.delay_bound", "8") == 0
    out = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "link: a sum of all weights takes 0.5 of a slice's time" in out
    assert "\nthis recipe: D = 8, q = auto, grace auto, K = 1\n" in out
    found = re.search(
        r"gains a factor of ([\d.]+) over equal shares and a factor of ([\d.]+) over shares by speed", out
    )
    assert found is not None
    assert float(found[1]) > float(found[2]) > 1.3


@pytest.mark.parametrize(("optimizer", "gains"), [("sgd", True), ("adamw", False)])
def test_what_is_gained_is_what_the_rule_would_choose_for_the_optimizer(
    capsys: pytest.CaptureFixture[str], optimizer: str, gains: bool
) -> None:
    """Ranks wait there for 46 % of what they compute."""
    assert profiled("--emulate", "v100-p100-k80", "--optimizer.name", optimizer) == 0
    assert ("nothing (a factor of 1.00) over shares by speed" in capsys.readouterr().out) != gains


def test_a_profile_that_would_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profiled("--emulate", "quickstart", "--output", tmp_path / "x.yaml") == 2
    assert "--emulate quickstart measures nothing: leave one of them out" in capsys.readouterr().err


def test_settings_in_words() -> None:
    assert settings_sentence(SyncConfig(delay_bound=0)) == "this recipe: D = 0, K = 1"
    free = SyncConfig(delay_bound=None, quorum=1.0, grace=0, accumulation=2)
    assert settings_sentence(free) == "this recipe: no bound, q = 1.0, grace 0, K = 2"


def test_links_in_words() -> None:
    assert link_sentence(None, 4) == link_sentence(Link(0.1), 1) == "link: free"
    assert link_sentence(Link(0.002, 125e6), 4) == "link: 2.000 ms a sum, 125.0 MB/s a rank"
    assert link_sentence(Link(0.002), 4) == "link: 2.000 ms a sum, unlimited"


def test_links_by_pair_the_slowest_first() -> None:
    pairs = [PairLink(("a", "a"), 1e-6, 1e10), PairLink(("a", "b"), 1e-3, 1e8)]
    slow, fast = links_sentences(pairs)
    assert slow == "  between a and b: 1.000 ms, 100.0 MB/s"
    assert fast == "  within a: 0.001 ms, 10,000.0 MB/s"
    assert links_sentences(20 * pairs)[-1] == "  8 others are faster"


def test_what_the_answer_leaves_out() -> None:
    cluster = Cluster("c", "s", (DeviceGroup("d", 2),))
    shaky = [RankProfile("d", "h", StepTime(0.0, 0.01), uncertainty=u) for u in (0.01, None, 0.2)]
    gain = Gain(100.0, 100.0, 150.0, 200.0, 200)
    gains, jitter, careful = gain_sentences(cluster, shaky, gain)
    assert gains.startswith("HetSync gains a factor of 1.50 over equal shares")
    assert "without jitter" in jitter
    assert "the speeds of 2 ranks are uncertain by more than 10%" in careful
    jittery = Cluster("c", "s", (DeviceGroup("d", 2),), jitter=LognormalJitter(0.5))
    assert len(gain_sentences(jittery, shaky[:1], gain)) == 1


@pytest.mark.thorough
def test_large_clusters_are_not_shown_rank_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = tmp_path / "large.yaml"
    large.write_text("name: large\nsource: none\ndevices: [{name: a, count: 64}]\n")
    assert profiled("--emulate", large) == 0
    assert "64 ranks, too many to show one by one" in capsys.readouterr().out


OLD_CARD = """
name: old card
source: none
devices: [{name: new, speed: 9}, {name: old, speed: 1}]
link: {bytes_per_second: 1.0e+6}
"""


@pytest.fixture
def old_card(tmp_path: Path) -> Path:
    path = tmp_path / "old.yaml"
    path.write_text(OLD_CARD)
    return path


def test_who_makes_the_job_slower_is_told_before_it_trains(old_card: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profiled("--emulate", old_card, "--emulation.samples_per_second", "600", "--run.samples", "6000") == 0
    out = capsys.readouterr().out
    assert "the time that 6,000 samples take" in out
    found = re.search(r"faster without old \(rank 1\): \+([\d.]+)% samples/s at D = 0, -([\d.]+)% at auto; start", out)
    assert found is not None, out
    assert float(found[1]) > 10
    assert 5 < float(found[2]) < 13
    assert "who holds them up is not known" in out


def test_all_of_it_as_json(old_card: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profiled("--emulate", old_card, "--json", "--run.samples", "6000") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 6000
    assert [rank["share"] for rank in told["ranks"]] == [58, 6]
    assert [each["left_out"] for each in told["predicted"]] == [
        {"name": "nothing", "ranks": []},
        {"name": "old (rank 1)", "ranks": [1]},
        {"name": "new (rank 0)", "ranks": [0]},
    ]
    whole, without_old, _ = (each["rates"] for each in told["predicted"])
    assert whole["ruled"] == told["gain"]["recipe"]
    assert without_old["in_step"] > whole["in_step"]


def test_real_ranks_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profiled("--output", tmp_path / "mine.yaml", "--run.device", "cpu", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (len(told["ranks"]), told["samples"], told["predicted"]) == (1, 14380, [])


def told_of(*without: tuple[float, float], link: Link | None = None) -> list[str]:
    """Of devices a, b, ..., without which there are such rates; with all 100 at D = 0 and 110 at D = 4."""
    cluster = Cluster("c", "s", (DeviceGroup("d", 2),), link)
    predicted = [Prediction(LeftOut("nothing"), Rates(100.0, 110.0, 4))]
    for name, rates in zip("ab", without, strict=False):
        predicted.append(Prediction(LeftOut(name, (1,)), Rates(*rates, 0)))
    return slower_sentences(cluster, predicted)


def test_who_is_better_left_out() -> None:
    start = "this job is faster without"
    assert told_of((101.9, 90.0)) == ["no device makes this job slower"]
    (in_step,) = told_of((120.0, 110.0))
    assert in_step == f"{start} a: +20.0% samples/s at D = 0, +0.0% at auto; start it so, or take sync.delay_bound auto"
    (both,) = told_of((120.0, 121.0), (119.0, 120.0))
    assert both == f"{start} a: +20.0% samples/s at D = 0, +10.0% at auto; start it so"
    assert [line.split(":")[0] for line in told_of((120.0, 121.0), (119.0, 132.0))] == [f"{start} a", f"{start} b"]


def test_what_is_not_known_of_sums_of_fewer_ranks() -> None:
    assert "this latency and bandwidth" in told_of(link=Link(1e-3))[-1]
    assert "what fewer save is not known" in told_of(link=Link(compute_fraction=0.5))[-1]


def test_who_cannot_be_left_out_is_told() -> None:
    cluster = Cluster("c", "s", (DeviceGroup("d", 2),))
    whole = Prediction(LeftOut("nothing"), Rates(100.0, 110.0, 4))
    refused = Prediction(LeftOut("a", (1,)), None, "batch_size 64 is too large")
    assert slower_sentences(cluster, [whole, refused])[1] == "not without a: batch_size 64 is too large"
