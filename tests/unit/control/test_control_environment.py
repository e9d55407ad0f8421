"""Tuning a simulated job as Gymnasium environments, and the jobs that are drawn for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from control_jobs import job, same_job
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common import env_checker

from benchmarks.studies.papers import PapersEnvironment
from hetsync.config.schema import Config, DataConfig, OptimizerConfig, SyncConfig
from hetsync.control.actions import DECREASE, INCREASE, KEEP, Limits
from hetsync.control.baselines import Fixed
from hetsync.control.learning.environment import JobEnvironment, TuningEnvironment
from hetsync.control.learning.episodes import Episode, run_episode
from hetsync.control.learning.jobs import JobDraw, random_job, with_settings
from hetsync.emulation.cluster import load_cluster
from hetsync.sync.messages import Settings


def test_a_job_may_start_from_settings_that_leave_no_room_for_its_grace() -> None:
    drawn = random_job(np.random.default_rng(1))
    graceful = replace(drawn, config=replace(drawn.config, sync=SyncConfig(4, grace=1)))
    assert [with_settings(graceful, Settings(bound)).config.sync.grace for bound in (0, 2, 8)] == [0, 0, 1]


@pytest.mark.parametrize("make", [TuningEnvironment, PapersEnvironment])
def test_environments_keep_their_promises(make: Callable[..., JobEnvironment]) -> None:
    environment = make(same_job)
    check_env(environment, skip_render_check=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="We recommend you to use a symmetric and normalized Box")
        env_checker.check_env(environment)


def rollout(environment: gymnasium.Env, seed: int, actions: list[object]) -> list[object]:
    out: list[object] = [environment.reset(seed=seed)[0].tolist()]
    for action in actions:
        vector, reward, terminated, truncated, info = environment.step(action)
        out += [vector.tolist(), reward, terminated, truncated, info["loss"], info["settings"]]
        if terminated or truncated:
            break
    return out


def test_episodes_are_those_of_the_seed() -> None:
    actions: list[object] = [np.array(pair) for pair in ((2, 1), (1, 2), (0, 2), (1, 0))]
    twice = [rollout(TuningEnvironment(random_job), 3, actions) for _ in range(2)]
    assert twice[0] == twice[1]
    assert rollout(TuningEnvironment(random_job), 4, actions) != twice[0]


def test_illegal_actions_are_clipped_and_the_time_limit_holds() -> None:
    environment = TuningEnvironment(same_job, Limits(1, 2, 0, 1))
    environment.reset(seed=0)
    steps, truncated, terminated = 0, False, False
    while not (truncated or terminated):
        *_, terminated, truncated, info = environment.step(np.array([INCREASE, INCREASE]))
        settings = info["settings"]
        assert settings.accumulation <= 2
        assert settings.delay_bound <= 1
        steps += 1
    assert truncated
    assert steps == 160 / 16 - 1  # the first window is the reset's
    assert info["seconds"] == pytest.approx(environment.episode.job.time_limit)


def test_who_does_what_the_baseline_does_gets_nothing() -> None:
    environment = TuningEnvironment(lambda random: job(bound=4, link=2.0))
    environment.reset(seed=0)
    rewards = [environment.step(np.array([KEEP, KEEP]))[1] for _ in range(9)]
    assert rewards == [0.0] * 9
    environment.reset(seed=0)
    assert sum(environment.step(np.array([KEEP, DECREASE]))[1] for _ in range(9)) < -0.1


def test_a_loss_that_is_not_finite_ends_the_episode_and_costs() -> None:
    environment = TuningEnvironment(lambda random: job(curvature=4000.0, link=0.1, batches=4000), baseline=None)
    environment.reset(seed=0)
    reward, terminated = 0.0, False
    for _ in range(100):
        vector, reward, terminated, truncated, _ = environment.step(np.array([KEEP, KEEP]))
        assert np.isfinite(vector).all()
        if terminated or truncated:
            break
    assert terminated
    assert reward == TuningEnvironment.DIVERGED


def test_the_papers_action_scales_its_step() -> None:
    environment = PapersEnvironment(same_job)
    environment.reset(seed=0)
    trace = []
    for action in ([0.0, 1.0], [0.9, 1.0], [0.5, 0.5], [2.5, 1.0], [1.5, 0.0], [0.0, 1.0]):
        *_, info = environment.step(np.array(action, np.float32))
        trace.append(info["settings"].accumulation)
    assert trace == [2, 4, 6, 6, 5, 8]  # 10 is beyond the limit


def test_jobs_are_like_the_cluster_and_the_recipe_that_were_given() -> None:
    recipe = Config(data=DataConfig(batch_size=96), optimizer=OptimizerConfig("adamw", 0.003))
    draw = JobDraw(load_cluster("slow-link"), recipe)
    jobs = [draw(np.random.default_rng(seed)) for seed in range(5)]
    assert {j.ranks for j in jobs} == {8}
    assert {j.batch_size for j in jobs} == {96}
    assert len({j.cluster.devices[0].speed for j in jobs}) == 5
    assert all(0.25 <= j.cluster.link.compute_fraction <= 1.0 for j in jobs if j.cluster.link)
    episode = Episode(jobs[0])
    episode.advance()
    assert episode.observe().samples > 0


def test_drawn_landscapes_have_noise_of_every_kind_and_can_be_learned_on() -> None:
    landscapes = [random_job(np.random.default_rng(seed)).landscape for seed in range(200)]
    powers = [landscape.noise_power for landscape in landscapes]
    for count in (powers.count(0.0), powers.count(1.0), sum(0 < power < 1 for power in powers)):
        assert count > 30
    fading = [seed for seed in range(200) if powers[seed] == 1.0][:6]
    for seed in fading:
        drawn = with_settings(random_job(np.random.default_rng(seed)), Settings())
        result = run_episode(Episode(drawn), Fixed(), Limits())
        assert result.loss_in_time < landscapes[seed].first_loss


def test_decreasing_is_an_action() -> None:
    environment = TuningEnvironment(lambda random: job(bound=4))
    environment.reset(seed=0)
    *_, info = environment.step(np.array([KEEP, DECREASE]))
    assert info["settings"].delay_bound == 2
