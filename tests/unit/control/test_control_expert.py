"""The expert, which knows the landscape, and learning by its example."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from hetsync.config.schema import Config, DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, SyncConfig
from hetsync.control.actions import DECREASE, INCREASE, Actions, Limits, direction
from hetsync.control.baselines import Fixed, Goodput
from hetsync.control.controller import Decision
from hetsync.control.learning import imitation
from hetsync.control.learning.environment import TuningEnvironment
from hetsync.control.learning.episodes import Episode, run_episode
from hetsync.control.learning.expert import Expert, Forecast, Outlook
from hetsync.control.learning.imitation import imitate
from hetsync.control.learning.jobs import WINDOW_BATCHES, Job, devices, random_job, with_settings
from hetsync.control.policy_network import PolicyController, load_network
from hetsync.control.ppo_model import new_model
from hetsync.emulation.cluster import Cluster
from hetsync.simulate.quadratic import Landscape, NoisyQuadratic
from hetsync.simulate.simulation import Simulation
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

BATCH = 16
LIMITS = Limits(1, 8, 0, 16)
NOISY = Landscape(1.0, 0.0, 4.0, 200.0)
FADING = Landscape(1.0, 0.1, 4.0, 20.0, 1.0)  # noise that falls with the loss


def job(
    landscape: Landscape, settings: Settings | None = None, ranks: int = 4, schedule: str = "constant", seed: int = 0
) -> Job:
    """Like devices, a free network."""
    settings = settings or Settings()
    config = Config(
        run=RunConfig(seed=seed),
        data=DataConfig(batch_size=BATCH),
        optimizer=OptimizerConfig("sgd", 0.05, 0.0),
        schedule=ScheduleConfig(schedule),
        sync=SyncConfig(delay_bound=settings.delay_bound, accumulation=settings.accumulation),
    )
    return Job(config, Cluster("like", "made up", devices([1.0] * ranks)), ranks, landscape, BATCH / 0.2)


@pytest.mark.each_value
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("settings", [Settings(4, 0.25, 1), Settings(0, 0.25, 1), Settings(0, 0.25, 8)])
@pytest.mark.parametrize("landscape", [NOISY, FADING])
def test_the_forecast_is_what_happens(settings: Settings, schedule: str, landscape: Landscape) -> None:
    episodes = [Episode(job(landscape, settings, schedule=schedule, seed=seed)) for seed in range(3)]
    forecast = Forecast(episodes[0].job)
    outlook = Outlook(landscape.first_weights**2, 0)
    for _ in range(4):
        for episode in episodes:
            for _ in range(8):
                episode.advance()
        applied = [episode.simulation.machine.ledger.applied for episode in episodes]
        pace = (np.mean(applied) - outlook.applied) / (8 * WINDOW_BATCHES * BATCH)
        slices = 1 if settings.delay_bound else settings.accumulation
        outlook = forecast.after(outlook, 8, slices, float(pace))
        assert forecast.loss(outlook) == pytest.approx(np.mean([episode.loss for episode in episodes]), rel=0.2)


def test_where_noise_is_all_that_remains_it_goes_over_to_large_synchronous_steps() -> None:
    ends: dict[str, float] = {}
    for name in ("expert", "goodput", "fixed"):
        episode = Episode(job(NOISY))
        controllers = {"expert": Expert(episode, LIMITS), "goodput": Goodput(LIMITS, BATCH), "fixed": Fixed()}
        result = run_episode(episode, controllers[name], LIMITS)
        ends[name] = result.loss_in_time
        if name == "expert":
            assert result.settings[0].delay_bound > 0
            assert (result.settings[-1].delay_bound, result.settings[-1].accumulation) == (0, 8)
            assert any("promise" in reason for reason in result.reasons)
    assert ends["expert"] < 0.5 * min(ends["goodput"], ends["fixed"])


@pytest.mark.parametrize(
    ("landscape", "limits"),
    [
        (replace(NOISY, noise_scale=0.1), LIMITS),
        (NOISY, replace(LIMITS, min_delay_bound=1)),
        (NOISY, replace(LIMITS, max_accumulation=1)),
    ],
)
def test_it_is_the_goodput_controller_where_larger_synchronous_steps_are_useless_or_out_of_bounds(
    landscape: Landscape, limits: Limits
) -> None:
    episode = Episode(job(landscape))
    expert, goodput = Expert(episode, limits), Goodput(limits, BATCH)
    for _ in range(10):
        episode.advance()
        seen = episode.observe()
        decision = expert.decide(seen)
        assert decision == goodput.decide(seen)
        episode.tune(decision.settings)


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [8, pytest.param(20, marks=pytest.mark.thorough)])
def test_the_policy_that_comes_along_is_better_than_leaving_things_alone(jobs: int) -> None:
    """On jobs that it has not learned from, and never much worse on any. On most there is little to be gained."""
    falls = []
    for seed in range(jobs):
        drawn = with_settings(random_job(np.random.default_rng(10_000 + seed)), Settings())
        policy = PolicyController(load_network(None), LIMITS, drawn.batch_size)
        alone, steered = (
            run_episode(Episode(drawn), controller, LIMITS).loss_in_time for controller in (Fixed(), policy)
        )
        falls.append(math.log(alone / steered))
    assert np.mean(falls) > 0.02
    assert min(falls) > -0.1


# Runs of the quadratic side by side.


@pytest.mark.thorough
def test_runs_side_by_side_differ_in_their_noise_only() -> None:
    losses: dict[int, list[float]] = {}
    for runs in (1, 16):
        noiseless = NoisyQuadratic(replace(NOISY, noise_scale=0.0), job(NOISY).config, 2, 1000, runs)
        assert noiseless.evaluate()["loss"] == pytest.approx(1.0)
        assert noiseless.noise_scale == 0
        assert NoisyQuadratic(NOISY, job(NOISY).config, 2, 1000, runs).noise_scale == pytest.approx(200.0)
        losses[runs] = []
        for seed in range(20):
            mine = job(NOISY, seed=seed)
            learner = NoisyQuadratic(NOISY, mine.config, 4, 20_000, runs)
            simulation = Simulation(mine.start().scenario, learner, mine.script)
            simulation.advance(rounds=300)
            losses[runs].append(learner.evaluate()["loss"])
            assert learner.squares.shape == NOISY.curvatures.shape
    assert np.mean(losses[16]) == pytest.approx(np.mean(losses[1]), rel=0.3)
    assert np.std(losses[16]) < 0.5 * np.std(losses[1])


# By example.


@given(
    *[st.builds(Settings, st.integers(0, 20), st.just(0.25), st.integers(1, 10)) for _ in range(2)],
)
def test_an_action_leads_towards_its_goal(settings: Settings, goal: Settings) -> None:
    actions = Actions(LIMITS)
    action = direction(settings, goal)
    assert all(choice in range(3) for choice in action)
    assert actions.apply(settings, action) == actions.towards(settings, goal)
    assert direction(goal, goal) == (1, 1)


class ByProgress:
    """K 8 in the first half, and 1 in the second; D 1, then 16."""

    def __init__(self, episode: Episode, limits: Limits) -> None:
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        self.asked += 1
        late = seen.progress > 0.5
        return Decision(Settings(16, 0.25, 1) if late else Settings(1, 0.25, 8), "by progress")


def environment() -> TuningEnvironment:
    return TuningEnvironment(lambda random: job(NOISY, ranks=2), LIMITS, baseline=None, make_expert=ByProgress)


def test_an_expert_is_asked_once_a_window() -> None:
    tuning = environment()
    _, info = tuning.reset(seed=0)
    assert info["expert_action"] == (2, 0)
    *_, info = tuning.step(np.array(info["expert_action"]))
    assert info["expert_action"] == (2, 0)
    assert isinstance(tuning._expert, ByProgress)
    assert tuning._expert.asked == 2
    assert "expert_action" not in TuningEnvironment(lambda random: job(NOISY, ranks=2), LIMITS).reset(seed=0)[1]


def test_after_the_first_round_it_is_the_policy_that_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = DummyVecEnv([environment])
    model = new_model(environments, 0, n_steps=10, batch_size=10)
    told: list[list[list[int]]] = []
    taken: list[tuple[int, int]] = []
    step = environments.step

    def watched(actions: np.ndarray) -> VecEnvStepReturn:
        taken.append(tuple(actions[0]))
        return step(actions)

    monkeypatch.setattr(environments, "step", watched)
    monkeypatch.setattr(model, "predict", lambda vectors: (np.array([[DECREASE, INCREASE]]), None))
    monkeypatch.setattr(imitation, "_fit", lambda model, seen, shown, dice: told.append(shown.tolist()) or 0.0)
    imitate(model, environments, 200, 0, lambda line: None)
    first, rest = taken[:40], taken[40:]
    assert rest.count((DECREASE, INCREASE)) > 0.7 * len(rest)
    assert first.count((DECREASE, INCREASE)) < 0.2 * len(first)
    assert told[-1][40:].count([DECREASE, INCREASE]) < 0.2 * len(rest)  # what the expert would do, not what was done


@pytest.mark.thorough
def test_a_policy_learns_what_its_expert_does() -> None:
    environments = DummyVecEnv([environment])
    model = new_model(environments, 0, n_steps=10, batch_size=10)
    said: list[str] = []
    assert imitate(model, environments, 998, 0, said.append) == 1000
    assert len(said) == 5
    vectors = environments.reset()
    expert, agreed = environments.reset_infos[0]["expert_action"], 0
    for _ in range(39):
        actions, _ = model.predict(vectors, deterministic=True)
        agreed += tuple(actions[0]) == tuple(expert)
        vectors, _, _, infos = environments.step(actions)
        expert = infos[0]["expert_action"]
    assert agreed > 30  # who never moves is told to each time
