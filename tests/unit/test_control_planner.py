"""The planner, which knows the landscape, and learning by its example."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from hetsync.config import Config, DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, SyncConfig
from hetsync.control import imitation
from hetsync.control.actions import DECREASE, INCREASE, Actions, Limits, direction
from hetsync.control.baselines import Fixed, Goodput
from hetsync.control.controller import Decision
from hetsync.control.environment import TuningEnvironment
from hetsync.control.imitation import imitate
from hetsync.control.jobs import WINDOW_BATCHES, Course, Job, devices, random_job, with_settings
from hetsync.control.observation import Observation
from hetsync.control.planner import Forecast, Outlook, Planner
from hetsync.control.policy import PolicyController, load_network
from hetsync.control.ppo import new_model
from hetsync.control.trial import run_course, run_trial
from hetsync.profiling.cluster import Cluster
from hetsync.simulate.quadratic import Landscape, NoisyQuadratic
from hetsync.sync.messages import Settings

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


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("settings", [Settings(4, 0.25, 1), Settings(0, 0.25, 1), Settings(0, 0.25, 8)])
@pytest.mark.parametrize("landscape", [NOISY, FADING])
def test_the_forecast_is_what_happens(settings: Settings, schedule: str, landscape: Landscape) -> None:
    courses = [Course(job(landscape, settings, schedule=schedule, seed=seed)) for seed in range(3)]
    forecast = Forecast(courses[0].job)
    outlook = Outlook(landscape.first_weights**2, 0)
    for _ in range(4):
        for course in courses:
            for _ in range(8):
                course.advance()
        applied = [course.simulation.policy.ledger.applied for course in courses]
        pace = (np.mean(applied) - outlook.applied) / (8 * WINDOW_BATCHES * BATCH)
        slices = 1 if settings.delay_bound else settings.accumulation
        outlook = forecast.after(outlook, 8, slices, float(pace))
        assert forecast.loss(outlook) == pytest.approx(np.mean([course.loss for course in courses]), rel=0.2)


def test_where_noise_is_all_that_remains_it_goes_over_to_large_synchronous_steps() -> None:
    ends: dict[str, float] = {}
    for name in ("planner", "goodput", "fixed"):
        course = Course(job(NOISY))
        controllers = {"planner": Planner(course, LIMITS), "goodput": Goodput(LIMITS, BATCH), "fixed": Fixed()}
        trial = run_course(course, controllers[name], LIMITS)
        ends[name] = trial.loss_in_time
        if name == "planner":
            assert trial.settings[0].delay_bound > 0
            assert (trial.settings[-1].delay_bound, trial.settings[-1].accumulation) == (0, 8)
            assert any("promise" in reason for reason in trial.reasons)
    assert ends["planner"] < 0.5 * min(ends["goodput"], ends["fixed"])


@pytest.mark.parametrize(
    ("landscape", "limits"),
    [
        (replace(NOISY, noise_scale=0.1), LIMITS),
        (NOISY, replace(LIMITS, least_delay_bound=1)),
        (NOISY, replace(LIMITS, greatest_accumulation=1)),
    ],
)
def test_it_is_the_goodput_controller_where_larger_synchronous_steps_are_useless_or_out_of_bounds(
    landscape: Landscape, limits: Limits
) -> None:
    course = Course(job(landscape))
    planner, goodput = Planner(course, limits), Goodput(limits, BATCH)
    for _ in range(10):
        course.advance()
        seen = course.observe()
        decision = planner.decide(seen)
        assert decision == goodput.decide(seen)
        course.tune(decision.settings)


def test_the_policy_that_comes_along_is_better_than_leaving_things_alone() -> None:
    """On jobs that it has not learned from, and never much worse on any. On most there is little to be gained."""
    falls = []
    for seed in range(20):
        drawn = with_settings(random_job(np.random.default_rng(10_000 + seed)), Settings())
        policy = PolicyController(load_network(None), LIMITS, drawn.batch_size)
        alone, steered = (run_trial(drawn, controller, LIMITS).loss_in_time for controller in (Fixed(), policy))
        falls.append(math.log(alone / steered))
    assert np.mean(falls) > 0.02
    assert min(falls) > -0.1


# Courses side by side.


def test_courses_differ_in_their_noise_only() -> None:
    losses: dict[int, list[float]] = {}
    for courses in (1, 16):
        noiseless = NoisyQuadratic(replace(NOISY, noise_scale=0.0), job(NOISY).config, 2, 1000, courses)
        assert noiseless.evaluate()["loss"] == pytest.approx(1.0)
        assert noiseless.noise_scale == 0
        assert NoisyQuadratic(NOISY, job(NOISY).config, 2, 1000, courses).noise_scale == pytest.approx(200.0)
        losses[courses] = []
        for seed in range(20):
            mine = job(NOISY, seed=seed)
            simulation = mine.start()
            simulation.learner = learner = NoisyQuadratic(NOISY, mine.config, 4, 20_000, courses)
            simulation._world.learner = learner
            simulation.advance(rounds=300)
            losses[courses].append(learner.evaluate()["loss"])
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

    def __init__(self, course: Course, limits: Limits) -> None:
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        self.asked += 1
        late = seen.progress > 0.5
        return Decision(Settings(16, 0.25, 1) if late else Settings(1, 0.25, 8), "by progress")


def environment() -> TuningEnvironment:
    return TuningEnvironment(lambda random: job(NOISY, ranks=2), LIMITS, rival=None, make_adviser=ByProgress)


def test_an_adviser_is_asked_once_a_window() -> None:
    tuning = environment()
    _, info = tuning.reset(seed=0)
    assert info["advice"] == (2, 0)
    *_, info = tuning.step(np.array(info["advice"]))
    assert info["advice"] == (2, 0)
    assert isinstance(tuning._adviser, ByProgress)
    assert tuning._adviser.asked == 2
    assert "advice" not in TuningEnvironment(lambda random: job(NOISY, ranks=2), LIMITS).reset(seed=0)[1]


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
    monkeypatch.setattr(imitation, "_fit", lambda model, seen, advised, dice: told.append(advised.tolist()) or 0.0)
    imitate(model, environments, 200, 0, lambda line: None)
    first, rest = taken[:40], taken[40:]
    assert rest.count((DECREASE, INCREASE)) > 0.7 * len(rest)
    assert first.count((DECREASE, INCREASE)) < 0.2 * len(first)
    assert told[-1][40:].count([DECREASE, INCREASE]) < 0.2 * len(rest)  # what the adviser would do, not what was done


def test_a_policy_learns_what_its_adviser_does() -> None:
    environments = DummyVecEnv([environment])
    model = new_model(environments, 0, n_steps=10, batch_size=10)
    said: list[str] = []
    assert imitate(model, environments, 998, 0, said.append) == 1000
    assert len(said) == 5
    vectors = environments.reset()
    advice, agreed = environments.reset_infos[0]["advice"], 0
    for _ in range(39):
        actions, _ = model.predict(vectors, deterministic=True)
        agreed += tuple(actions[0]) == tuple(advice)
        vectors, _, _, infos = environments.step(actions)
        advice = infos[0]["advice"]
    assert agreed > 30  # who never moves is told to each time
