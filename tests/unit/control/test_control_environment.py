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
from hetsync.control.learning.jobs import Job, JobDraw, random_job, with_settings
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, PairLink, load_cluster
from hetsync.simulate.scenario import Traffic
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


TWO_HOSTS = Cluster(
    "measured",
    "two hosts",
    (
        DeviceGroup("v100", 2, 4.0, samples_per_second={"digits_cnn": 800.0}, fixed_seconds=0.01, host="a"),
        DeviceGroup("k80", 1, 1.0, samples_per_second={"digits_cnn": 200.0}, host="b"),
    ),
    Link(1e-3, 1e8),
    links=(PairLink(("a", "b"), 1e-3, 1e6), PairLink(("a", "a"))),
)


def test_a_measured_cluster_keeps_all_but_its_speeds() -> None:
    drawn = [JobDraw(TWO_HOSTS)(np.random.default_rng(seed)) for seed in range(20)]
    for cluster in (each.cluster for each in drawn):
        assert [(d.name, d.host, d.fixed_seconds) for d in cluster.devices] == [
            ("v100", "a", 0.01),
            ("v100", "a", 0.01),
            ("k80", "b", 0.0),
        ]
        for device, speed in zip(cluster.devices, (4, 4, 1), strict=True):
            assert 0.8 <= device.speed / speed <= 1.2
            assert device.samples_per_second["digits_cnn"] == pytest.approx(200 * device.speed)
        assert [pair.between for pair in cluster.links] == [("a", "b"), ("a", "a")]
        assert cluster.link_between(0, 1).bytes_per_second is None
        slowed = cluster.link_between(1, 2).latency_seconds / 1e-3
        assert 0.5 <= slowed <= 2
        assert cluster.link_between(1, 2).bytes_per_second == pytest.approx(1e6 / slowed)
        assert cluster.link is not None
        assert cluster.link.latency_seconds == pytest.approx(1e-3 * slowed)
        assert cluster.link.bytes_per_second == pytest.approx(1e8 / slowed)
    assert len({each.cluster.devices[0].speed for each in drawn}) == 20
    run_episode(Episode(drawn[0]), Fixed(), Limits())


def pace(job: Job) -> float:
    """Samples/s in steps together, of what the ranks reach alone."""
    alone = replace(with_settings(job, Settings(0)), script=(), batches=40)
    return run_episode(Episode(alone), Fixed(), Limits()).samples_per_second / job.samples_per_second


def test_bytes_take_time_on_a_link_that_tells_its_bandwidth() -> None:
    """Also where no recipe says how many there are; never so long that a job gets nowhere."""
    for seed in range(3):
        devices = (DeviceGroup("one"), DeviceGroup("two"))
        free, slow = (
            pace(JobDraw(Cluster("two", "made up", devices, link))(np.random.default_rng(seed)))
            for link in (None, Link(0.0, 1e4))
        )
        assert 0.05 * free < slow < 0.5 * free


def test_a_recipes_model_makes_its_traffic() -> None:
    recipe, traffic = Config(data=DataConfig(batch_size=96)), Traffic(40_000, (30_000, 10_000))
    drawn = JobDraw(TWO_HOSTS, recipe, traffic)(np.random.default_rng(0))
    assert drawn.traffic == traffic
    scenario = drawn.start().scenario
    link = drawn.cluster.link_between(1, 2)
    assert link.bytes_per_second is not None
    seconds = link.latency_seconds + 4 / 3 * 160_000 / link.bytes_per_second
    assert scenario.link_seconds(40_000) == pytest.approx(seconds)


def test_a_profile_that_knows_the_recipes_model_tells_its_speed() -> None:
    """And what a slice takes whatever its samples counts for what ranks reach alone."""
    drawn = JobDraw(TWO_HOSTS, Config(data=DataConfig(batch_size=96)))(np.random.default_rng(0))
    times = [profile.time for profile in drawn.start().scenario.ranks]
    assert [time.fixed_seconds for time in times] == [0.01, 0.01, 0.0]
    told = [device.samples_per_second["digits_cnn"] for device in drawn.cluster.devices]
    assert [1 / time.seconds_per_sample for time in times] == pytest.approx(told)
    slice_seconds = drawn.window_seconds / 16
    assert sum((slice_seconds - time.fixed_seconds) / time.seconds_per_sample for time in times) == pytest.approx(96)
    assert drawn.time_limit == pytest.approx(640 * slice_seconds)


@pytest.mark.thorough
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
