"""`hetsync control train`: the policy that it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetsync.cli import main as cli
from hetsync.control.policy_network import load_policy


def control(*words: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["control", *map(str, words)])
    return ended.value.code


def test_a_policy_for_a_cluster_and_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, recipe = tmp_path / "policy.safetensors", tmp_path / "recipe.yaml"
    recipe.write_text("data: {batch_size: 32}\noptimizer: {name: sgd, learning_rate: 0.1, momentum: 0.0}\n")
    words = ["--output", output, "--steps", "80", "--seed", "3", "--cluster", "slow-link", "--recipe", recipe]
    assert control("train", *words) == 0
    told = load_policy(str(output))[1]
    assert told.seed == 3
    assert told.command == " ".join(map(str, ["hetsync control train", *words]))
    assert told.steps == 80
    assert f"wrote {output}" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_policy_for_measured_hosts(tmp_path: Path) -> None:
    """Whose links are by the names of hosts, and tell their bandwidth."""
    profile = tmp_path / "cluster.yaml"
    profile.write_text(
        "name: two\nsource: made up\ndevices: [{name: v100, host: a}, {name: k80, host: b, speed: 0.5}]\n"
        "links: [{between: [a, b], latency_seconds: 0.001, bytes_per_second: 1000000.0}]\n"
    )
    assert control("train", "--output", tmp_path / "p.safetensors", "--steps", "8", "--cluster", profile) == 0


MISTAKES = {
    "no verb": ([], "VERB"),
    "no output": (["train"], "--output"),
    "no steps": (["train", "--output", "x", "--steps", "0"], "--steps is 0"),
    "no seed": (["train", "--output", "x", "--seed", "-1"], "--seed -1"),
    "no cluster": (["train", "--output", "x", "--cluster", "nowhere"], "there is no cluster profile nowhere"),
    "no recipe": (["train", "--output", "x", "--recipe", "nowhere.yaml"], "recipe nowhere.yaml does not exist"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = MISTAKES[mistake]
    assert control(*words) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1
