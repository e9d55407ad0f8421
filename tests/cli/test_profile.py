"""`hetsync profile`: what it measures, shows and writes; of a cluster that is not there, what it would gain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.cli import main as cli
from hetsync.cli.profile_report import gain_sentences, link_sentence, links_sentences, settings_sentence
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, LognormalJitter, PairLink, load_cluster
from hetsync.simulate.gain import Gain


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


def test_large_clusters_are_not_shown_rank_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = tmp_path / "large.yaml"
    large.write_text("name: large\nsource: none\ndevices: [{name: a, count: 64}]\n")
    assert profiled("--emulate", large) == 0
    assert "64 ranks, too many to show one by one" in capsys.readouterr().out
