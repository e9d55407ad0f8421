"""Learning to control simulated jobs: PPO, policy files, controllers on jobs, learning on."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from control_jobs import BATCH, job, same_job
from safetensors import safe_open
from safetensors.torch import save_file
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor
from test_control_parts import SEEN

from hetsync.config.schema import ControlConfig
from hetsync.control import policy_network as policy
from hetsync.control.actions import Actions, Limits
from hetsync.control.baselines import Fixed, Goodput
from hetsync.control.controller import Controller
from hetsync.control.features import FEATURES
from hetsync.control.fine_tuning import ROLLOUT, FineTuned
from hetsync.control.learning.environment import TuningEnvironment
from hetsync.control.learning.episodes import Episode, EpisodeResult, best_static, run_episode
from hetsync.control.learning.jobs import Job, devices
from hetsync.control.learning.ppo import Curve, improve, learned, train
from hetsync.control.policy_network import (
    PolicyController,
    PolicyNetwork,
    chosen,
    load_network,
    load_policy,
    save_policy,
    untrained,
)
from hetsync.control.ppo_model import new_model, weights_of
from hetsync.control.registry import make_controller
from hetsync.emulation.cluster import Cluster, Link, LognormalJitter
from hetsync.errors import UserError
from hetsync.simulate.quadratic import Landscape
from hetsync.sync.messages import Settings


def run(job: Job, controller: Controller, limits: Limits) -> EpisodeResult:
    return run_episode(Episode(job), controller, limits)


# PPO.


@pytest.fixture(scope="module")
def pupil() -> torch.nn.Module:
    """A policy that has learned one job: synchronous at first, behind a slow network."""
    environments = DummyVecEnv([lambda: TuningEnvironment(same_job, Limits(1, 1, 0, 8), baseline=None)])
    model = learned(environments, 1080, 0, n_steps=108, batch_size=54, learning_rate=2e-3)
    network = PolicyNetwork((64, 64))
    network.load(weights_of(model))
    return network


def test_ppo_solves_a_trivial_job(pupil: PolicyNetwork) -> None:
    limits, tests = Limits(1, 1, 0, 8), [job(seed) for seed in (2001, 2002)]

    def loss(controller: Callable[[], Controller]) -> float:
        return float(np.mean([run(test, controller(), limits).loss_in_time for test in tests]))

    best, results = best_static(tests, limits, lambda result: result.loss_in_time)
    oracle = float(np.mean([result.loss_in_time for result in results[best]]))
    assert best.delay_bound >= 4
    assert oracle < 0.5 * loss(Fixed)
    assert loss(lambda: PolicyController(pupil, limits, BATCH)) < oracle + 0.3 * (loss(Fixed) - oracle)


def test_the_critic_learns_before_the_actor() -> None:
    environments = VecMonitor(DummyVecEnv([lambda: TuningEnvironment(same_job)]))
    model = new_model(environments, 0, n_steps=20, batch_size=20, learning_rate=1e-2)
    before = weights_of(model)

    def changed() -> set[str]:
        after = weights_of(model)
        names = {name for name in after if not torch.equal(after[name], before[name])}
        return {"critic" if "value" in name else "actor" for name in names}

    improve(model, environments, 20, 0, Curve(lambda line: None))
    assert changed() == {"critic"}
    improve(model, environments, 0, 20, Curve(lambda line: None))
    assert changed() == {"critic", "actor"}


def quick(output: Path, seed: int) -> policy.Specification:
    said: list[str] = []
    made = train(same_job, output, 60, seed, "hetsync control train", said.append, processes=1)
    assert len(said) == 5 + len(made.learning_curve) > 5  # by example, then by reward
    return made


def test_learning_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    quick(tmp_path / "policy", 0)
    assert list(temporary.glob("SB3*")) == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "made" / "policy.safetensors"
    quick(path, 0)
    return path


@pytest.mark.thorough
def test_training_is_deterministic_by_seed(trained: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    quick(again, 0)
    quick(other, 1)
    assert again.read_bytes() == trained.read_bytes()
    weights = [load_policy(str(path))[0]["action_net.weight"] for path in (trained, other)]
    assert not torch.equal(*weights)


# Files.


def test_a_file_tells_what_it_learned_from(trained: Path) -> None:
    weights, told = load_policy(str(trained))
    assert told.features == FEATURES
    assert told.limits == Limits()
    assert (told.seed, told.command) == (0, "hetsync control train")
    assert 60 <= told.steps < 70  # whole rollouts
    assert told.reward == "FallOfLogLoss"
    assert {name.split(".")[0] for name in weights} == {"mlp_extractor", "action_net", "value_net"}


def test_the_network_decides_as_the_one_that_learned(trained: Path) -> None:
    tuned = FineTuned(str(trained), Limits(), BATCH, 10.0, 0)
    network = load_network(str(trained))
    for seed in range(20):
        features = torch.rand(len(FEATURES), generator=torch.Generator().manual_seed(seed)) * 2 - 1
        theirs = [choice.logits for choice in tuned.model.policy.get_distribution(features[None]).distribution]
        torch.testing.assert_close(network(features).log_softmax(1), torch.cat(theirs))


@pytest.mark.parametrize(("sure", "settings"), [(0.5, Settings(8, 0.25, 4)), (0.8, Settings(4, 0.25, 4))])
def test_changes_are_made_where_the_policy_is_sure_of_them(sure: float, settings: Settings) -> None:
    logits = torch.tensor([[0.0, 0.0, 0.9], [0.0, 0.2, 0.6]]).log()
    decision = chosen(logits, SEEN, Actions(Limits()), sure)
    assert decision.settings == settings
    assert decision.reason.startswith("K up (up p 1.00), D " + ("up" if sure == 0.5 else "kept") + " (up p 0.75)")


def altered(source: Path, target: Path, **changes: object) -> str:
    weights, told = load_policy(str(source))
    metadata = {policy.SPECIFICATION: json.dumps({**dataclasses.asdict(told), **changes})}
    save_file(weights, target, metadata)
    return str(target)


def test_policies_that_do_not_fit_are_refused_in_a_sentence(trained: Path, tmp_path: Path) -> None:
    old = altered(trained, tmp_path / "old", features_version=0)
    foreign, text = tmp_path / "foreign", tmp_path / "text"
    save_file({"weight": torch.zeros(2)}, foreign)
    text.write_text("no weights")
    wide = altered(trained, tmp_path / "wide", hidden=[32, 64])
    weights, told = load_policy(str(trained))
    metadata = {policy.SPECIFICATION: json.dumps(dataclasses.asdict(told))}
    save_file({name: tensor * math.nan for name, tensor in weights.items()}, tmp_path / "nan", metadata)
    save_file(weights, tmp_path / "list", {policy.SPECIFICATION: "[1, 2]"})
    for path, words in (
        (old, "knows version 0 of what controllers see, this HetSync version 2: train it anew"),
        (altered(trained, tmp_path / "names", features=["loss"]), "train it anew"),
        (str(foreign), "is no policy of HetSync"),
        (str(text), "is no policy of HetSync"),
        (str(tmp_path / "nowhere"), "does not exist"),
        (wide, "other layers"),
        (altered(trained, tmp_path / "words", hidden=["wide"]), "other layers"),
        (altered(trained, tmp_path / "limits", limits=5), "is no policy of HetSync"),
        (str(tmp_path / "list"), "is no policy of HetSync"),
        (str(tmp_path / "nan"), "its weights are not finite"),
    ):
        with pytest.raises(UserError, match=words) as refused:
            load_network(path)
        assert "\n" not in str(refused.value)


def test_the_policy_that_comes_along_fits() -> None:
    weights, told = load_policy(None)
    assert told.command.startswith("hetsync control train")
    assert len(told.learning_curve) > 10
    decision = make_controller(ControlConfig("ppo"), 0, 160).decide(SEEN)
    assert decision.reason.startswith("K ")
    assert sum(tensor.numel() for tensor in weights.values()) < 20_000


def test_a_policy_that_cannot_be_written_is_a_sentence(trained: Path, tmp_path: Path) -> None:
    weights, told = load_policy(str(trained))
    with pytest.raises(UserError, match=r"cannot write .*; free space or choose another --output"):
        save_policy(trained / "policy", weights, told)
    assert list(trained.parent.iterdir()) == [trained]
    save_policy(tmp_path / "again", weights, told)
    assert (tmp_path / "again").read_bytes() == trained.read_bytes()


def test_files_hold_no_code(trained: Path) -> None:
    with safe_open(trained, framework="pt") as opened:
        assert set(opened.metadata()) == {policy.SPECIFICATION}


# Controllers on jobs.


@pytest.mark.parametrize("name", ["fixed", "ppo", "proportional", "goodput", "schedule", "random"])
def test_every_controller_by_name_runs_a_job_twice_alike(name: str) -> None:
    config = ControlConfig(name, min_delay_bound=0)  # type: ignore[arg-type]
    results = [run(job(link=2.0), make_controller(config, 0, BATCH), Limits.of(config)) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0].samples[-1] == 160 * BATCH
    assert results[0].final_loss < 0.5
    assert all(results[0].reasons)
    if name in ("fixed", "schedule", "random"):
        assert (len(set(results[0].settings)) > 1) == (name != "fixed")


def test_an_untrained_policy_is_the_seeds_and_leaves_torchs_dice_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    decisions = [untrained(Limits(), BATCH, 5).decide(SEEN) for _ in range(2)]
    assert decisions[0] == decisions[1]
    assert {untrained(Limits(), BATCH, seed).decide(SEEN).settings for seed in range(5)} != {SEEN.settings}
    assert torch.equal(torch.rand(3), expected)


def test_goodputs_goal_is_about_the_fastest_on_the_virtual_clock() -> None:
    """Its model of throughput, against every setting that the simulator can be run at."""
    limits = Limits(1, 2, 0, 8)
    noisy = replace(
        job(link=1.5, batches=400),
        cluster=Cluster("four", "made up", devices([2, 1, 1, 1]), Link(compute_fraction=1.5), LognormalJitter(0.4)),
        ranks=4,
        landscape=Landscape(1.0, 0.0, 0.01, 1e5),
    )
    best, results = best_static([noisy], limits, lambda result: -result.samples_per_second)
    steered = run(noisy, Goodput(limits, BATCH), limits)
    end: Settings = steered.settings[-1]
    assert results[end][0].samples_per_second > 0.93 * results[best][0].samples_per_second


def test_times_to_a_target_are_interpolated() -> None:
    result = run(job(bound=4), Fixed(), Limits())
    reached = [result.seconds_to(target) for target in (0.7, 0.4, 0.2)]
    assert reached == sorted(reached)
    assert 0 < reached[0] < reached[-1] < result.seconds[-1]
    assert result.seconds_to(1e-9) == np.inf
    assert result.loss_in_time >= result.final_loss > 0


# Learning on.


def test_a_policy_learns_on_from_its_windows(trained: Path) -> None:
    config = ControlConfig("ppo", policy=str(trained), fine_tune=True, interval_seconds=10.0)
    controller = make_controller(config, 0, BATCH)
    assert isinstance(controller, FineTuned)
    before = weights_of(controller.model)
    seen, loss = SEEN, 1.0
    for index in range(ROLLOUT + 1):
        decision = controller.decide(seen)
        loss *= 0.95
        # Of the 32 windows, one was overruled: it teaches nothing.
        settings = seen.settings if index == 3 else decision.settings
        seen = replace(seen, losses=(loss,), settings=settings)
    overruled = decision.settings != seen.settings
    assert not overruled
    controller.decide(seen)
    controller.decide(seen)
    assert controller.updates == 1
    after = weights_of(controller.model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
