"""Control without learning: ladders, features, rewards, the envelope, controllers that follow rules."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.studies.papers import PapersGain
from hetsync.control.actions import DECREASE, INCREASE, KEEP, Actions, Limits
from hetsync.control.baselines import Fixed, Goodput, Proportional, Random, Schedule, predicted_efficiency
from hetsync.control.controller import Decision
from hetsync.control.envelope import PATIENCE, Envelope
from hetsync.control.features import FEATURES, Features
from hetsync.control.rewards import FallOfLogLoss
from hetsync.errors import UserError
from hetsync.sync.messages import NO_BOUND, Settings
from hetsync.sync.observation import Observation

SEEN = Observation(
    seconds=10.0,
    rounds=20,
    samples=3200,
    losses=(1.0, 0.9),
    staleness=1.0,
    efficiency=0.9,
    communication_share=0.5,
    waiting_share=0.03,
    jitter=0.1,
    noise_scale=100.0,
    progress=0.2,
    learning_rate=0.7,
    settings=Settings(4, 0.25, 2),
)


def feature(name: str, vector: np.ndarray) -> float:
    return float(vector[FEATURES.index(name)])


# Ladders.


def test_ladders_are_powers_of_two_and_the_bounds() -> None:
    actions = Actions(Limits(3, 10, 0, 16))
    assert actions.ladders["accumulation"] == (3, 4, 8, 10)
    assert actions.ladders["delay_bound"] == (0, 1, 2, 4, 8, 16)
    assert Actions(Limits(2, 2, 1, 1)).all(Settings()) == [Settings(1, 0.25, 2)]


@pytest.mark.parametrize(
    ("before", "action", "after"),
    [
        ((2, 4), (INCREASE, DECREASE), (4, 2)),
        ((2, 4), (KEEP, KEEP), (2, 4)),
        ((8, 16), (INCREASE, INCREASE), (8, 16)),  # illegal: nothing beyond
        ((1, 0), (DECREASE, DECREASE), (1, 0)),
        ((3, 5), (DECREASE, INCREASE), (2, 8)),  # from between two rungs
        ((50, NO_BOUND), (DECREASE, DECREASE), (8, 16)),
        ((50, NO_BOUND), (INCREASE, KEEP), (50, NO_BOUND)),
    ],
)
def test_actions(before: tuple[int, int], action: tuple[int, int], after: tuple[int, int]) -> None:
    moved = Actions(Limits(1, 8, 0, 16)).apply(Settings(before[1], 0.25, before[0]), action)
    assert (moved.accumulation, moved.delay_bound, moved.quorum) == (*after, 0.25)


@pytest.mark.parametrize("limits", [(0, 8, 1, 4), (4, 2, 1, 4), (1, 8, -1, 4), (1, 8, 5, 4)])
def test_limits_are_checked(limits: tuple[int, int, int, int]) -> None:
    with pytest.raises(UserError, match=r"control\.min_"):
        Limits(*limits)


# Features.

anything = st.floats(allow_nan=True, allow_infinity=True)
figures = st.floats(0, 1e12)
windows = st.builds(
    Observation,
    seconds=figures,
    rounds=st.integers(0, 10**6),
    samples=st.integers(0, 10**9),
    losses=st.lists(anything, max_size=6).map(tuple),
    staleness=figures,
    efficiency=figures,
    communication_share=figures,
    waiting_share=figures,
    jitter=figures,
    noise_scale=st.none() | figures,
    progress=st.floats(0, 1),
    settings=st.builds(Settings, st.integers(0, NO_BOUND), st.floats(0.01, 1), st.integers(1, 2**40)),
)


@given(st.lists(windows, min_size=1, max_size=4), st.integers(1, 10**6))
def test_features_are_finite_and_bounded(seen: list[Observation], batch: int) -> None:
    features = Features(batch)
    for window in seen:
        vector = features.of(window)
        assert vector.shape == (len(FEATURES),)
        assert vector.dtype == np.float32
        assert np.isfinite(vector).all()
        assert np.abs(vector).max() <= 1


@given(st.floats(1e-3, 1e3))
def test_features_do_not_depend_on_the_unit_of_the_loss(unit: float) -> None:
    plain, scaled = Features(160), Features(160)
    for losses in ((2.0, 1.5), (1.2, 1.4, 0.9), (), (0.8,)):
        seen = replace(SEEN, losses=losses)
        ours = scaled.of(replace(seen, losses=tuple(unit * loss for loss in losses)))
        np.testing.assert_allclose(ours, plain.of(seen), atol=1e-5)


def test_features_say_what_their_names_say() -> None:
    features = Features(100)
    first = features.of(SEEN)
    assert feature("synchronous", first) == 0
    assert feature("accumulation", first) == 0.25
    assert feature("noise_scale_known", first) == 1
    assert feature("noise_scale", first) == pytest.approx(math.log10(100 / 200) / 3)
    assert feature("trend", first) == 0
    moved = replace(SEEN, losses=(0.8, 0.85), settings=Settings(0, 0.25, 1), noise_scale=None)
    second = features.of(moved)
    assert feature("trend", second) == pytest.approx(4 * math.log(0.95 / 0.825))
    assert feature("gained", second) > 0
    assert feature("synchronous", second) == 1
    assert feature("noise_scale_known", second) == feature("noise_scale", second) == 0
    assert (feature("last_accumulation_move", second), feature("last_delay_bound_move", second)) == (-1, -1)
    assert feature("since_move", second) == 0
    assert feature("since_move", features.of(moved)) == pytest.approx(0.1)


# Rewards.


def test_falls_of_the_log_loss_add_up_whatever_the_way() -> None:
    ways = [[1.0, 0.5, 0.25, 0.1, 0.1], [1.0, 3.0, 0.1, 0.1, 0.1]]
    totals = []
    for way in ways:
        reward = FallOfLogLoss(10.0, smoothing=1.0)
        totals.append(sum(reward(SEEN, loss) for loss in way))
    assert totals == pytest.approx([math.log(10)] * 2)
    slow = FallOfLogLoss(10.0, smoothing=1.0)
    slow(SEEN, 1.0)
    assert slow(replace(SEEN, seconds=20.0), 0.5) == pytest.approx(math.log(2) / 2)
    assert slow(SEEN, math.inf) == 0


def test_the_papers_gain_can_be_gamed() -> None:
    def total(slices: int) -> float:
        reward = PapersGain(10.0)
        windows = [replace(SEEN, losses=(loss,), settings=Settings(0, 1.0, slices)) for loss in (1.0, 0.9, 0.8)]
        return sum(reward(window, loss=1.0) for window in windows)

    assert total(1) > 0
    assert total(8) == pytest.approx(8 * total(1))  # nothing more is learnt


# The envelope.


class Wants:
    """Wants these settings, always."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def decide(self, seen: Observation) -> Decision:
        return Decision(self.settings, "wanted")


def test_changes_wait_for_the_interval_and_stay_within_bounds() -> None:
    envelope = Envelope(Wants(Settings(32, 0.25, 2)), Limits(1, 8, 1, 16, interval_seconds=25.0))
    seen, changes = SEEN, []
    for _ in range(6):
        decision = envelope.decide(seen)
        changes.append(decision.settings != seen.settings)
        assert decision.reason
        seen = replace(seen, settings=replace(decision.settings, delay_bound=4))  # somebody else puts it back
        assert decision.settings.delay_bound in (4, 16)
    assert changes == [False, False, True, False, False, True]


def test_diverging_losses_bring_the_best_settings_back() -> None:
    good, bad = Settings(2, 0.25, 1), Settings(16, 0.25, 8)
    envelope = Envelope(Wants(bad), Limits())
    for loss in (2.0, 1.0):
        envelope.decide(replace(SEEN, settings=good, losses=(loss,)))
    seen = replace(SEEN, settings=bad, losses=(1.9,))
    for _ in range(PATIENCE - 1):
        assert envelope.decide(seen).settings == bad
    decision = envelope.decide(seen)
    assert decision.settings == good
    assert "diverges" in decision.reason
    high = replace(seen, settings=good)
    assert envelope.decide(high).settings == good  # the controller is not heard yet
    assert envelope.decide(replace(high, losses=(1.1,))).settings == bad  # recovered


def test_a_loss_that_soars_acts_at_once_and_only_while_it_rises() -> None:
    good, bad = Settings(2, 0.25, 1), Settings(16, 0.25, 8)
    envelope = Envelope(Wants(bad), Limits())
    for loss in (2.0, 1.0):
        envelope.decide(replace(SEEN, settings=good, losses=(loss,)))
    assert envelope.decide(replace(SEEN, settings=bad, losses=(3.9,))).settings == bad
    assert envelope.decide(replace(SEEN, settings=bad, losses=(4.1,))).settings == good
    assert envelope.decide(replace(SEEN, settings=good, losses=(4.05,))).settings == good
    assert envelope.decide(replace(SEEN, settings=good, losses=(4.2,))).settings == Settings(1, 0.25, 1)


def test_settings_that_diverge_do_not_come_back() -> None:
    """A slow instability: the loss was lowest under the very settings that it diverges under."""
    envelope = Envelope(Fixed(), Limits())
    seen, tried = replace(SEEN, losses=(1.0,)), []
    for loss in (1.0, 0.1, 3.0, 9.0, 27.0, 81.0):
        seen = replace(seen, losses=(loss,))
        seen = replace(seen, settings=envelope.decide(seen).settings)
        tried.append((seen.settings.accumulation, seen.settings.delay_bound))
    assert tried == [(2, 4), (2, 4), (1, 2), (1, 1), (1, 0), (1, 0)]


def test_a_loss_that_is_not_finite_acts_at_once_and_the_best_settings_go_down_a_rung() -> None:
    envelope = Envelope(Fixed(), Limits())
    assert envelope.decide(SEEN).settings == SEEN.settings
    decision = envelope.decide(replace(SEEN, losses=(1.0, math.nan)))
    assert (decision.settings.accumulation, decision.settings.delay_bound) == (1, 2)


def test_a_job_that_begins_with_a_loss_that_is_not_finite_is_watched_from_the_first_that_is() -> None:
    envelope = Envelope(Fixed(), Limits())
    decision = envelope.decide(replace(SEEN, losses=(math.inf,)))
    assert (decision.settings.accumulation, decision.settings.delay_bound) == (1, 2)  # none is the best yet
    seen = replace(SEEN, settings=decision.settings)
    for loss in (2.0, 1.0, *[1.9] * (PATIENCE - 1)):
        assert envelope.decide(replace(seen, losses=(loss,))).settings == seen.settings
    assert envelope.decide(replace(seen, losses=(1.9,))).settings != seen.settings


def test_who_has_gained_little_has_little_to_lose() -> None:
    envelope = Envelope(Fixed(), Limits())
    for loss in (2.0, 1.9, *[2.5] * (2 * PATIENCE)):
        assert envelope.decide(replace(SEEN, losses=(loss,))).settings == SEEN.settings


@given(st.lists(st.floats(0.5, 1.4), min_size=1, max_size=30))
def test_noise_is_no_divergence(factors: list[float]) -> None:
    envelope = Envelope(Fixed(), Limits())
    envelope.decide(replace(SEEN, losses=(2.0,)))
    for factor in factors:
        assert envelope.decide(replace(SEEN, losses=(0.3 * factor,))).settings == SEEN.settings


# Controllers.


def test_random_is_the_seeds() -> None:
    def walk(seed: int) -> list[Settings]:
        controller, seen, out = Random(Limits(), seed), SEEN, []
        for _ in range(20):
            seen = replace(seen, settings=controller.decide(seen).settings)
            out.append(seen.settings)
        return out

    assert walk(1) == walk(1) != walk(2)
    assert len(set(walk(1))) > 5


def test_the_schedule_follows_progress_within_the_bounds() -> None:
    def at(progress: float, limits: Limits) -> tuple[int, int]:
        settings = Schedule(limits).decide(replace(SEEN, progress=progress)).settings
        return settings.accumulation, settings.delay_bound

    assert [at(p, Limits()) for p in (0.0, 0.5, 0.8)] == [(1, 4), (2, 2), (4, 0)]
    assert at(0.8, Limits(1, 2, 1, 8)) == (2, 1)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"waiting_share": 0.2}, (2, 8)),
        ({"waiting_share": 0.0, "staleness": 0.5}, (2, 2)),
        ({"waiting_share": 0.0, "staleness": 2.0}, (2, 4)),
        ({"communication_share": 0.95}, (4, 4)),
        ({"communication_share": 0.01}, (1, 4)),
    ],
)
def test_proportional(figures: dict[str, float], expected: tuple[int, int]) -> None:
    settings = Proportional(Limits()).decide(replace(SEEN, **figures)).settings
    assert (settings.accumulation, settings.delay_bound) == expected


def window(settings: Settings, network: float, jitter: float, noise: float | None) -> Observation:
    """100 slices of a batch of 160, each 0.1 s, at the predicted efficiency."""
    efficiency = predicted_efficiency(settings, network, jitter)
    seconds = 100 * 0.1 / efficiency
    share = 100 * network * 0.1 / seconds
    return replace(
        SEEN,
        settings=settings,
        seconds=seconds,
        rounds=100,
        samples=16_000,
        efficiency=efficiency,
        communication_share=share,
        jitter=jitter,
        noise_scale=noise,
    )


@pytest.mark.parametrize(
    ("limits", "network", "jitter", "noise", "expected"),
    [
        (Limits(1, 8, 0, 0), 1.0, 0.0, 10.0, (1, 0)),  # synchronous, little noise: larger batches are wasted
        (Limits(1, 8, 0, 0), 1.0, 0.0, 1e6, (8, 0)),  # much noise: nothing but throughput counts
        (Limits(1, 8, 0, 16), 0.0, 0.0, 10.0, (1, 0)),  # nothing to wait for: synchronous is as good
        (Limits(1, 8, 0, 16), 1.0, 0.5, 10.0, (1, 8)),  # a network and jitter to hide
    ],
)
def test_goodput_finds_the_optimum(
    limits: Limits, network: float, jitter: float, noise: float, expected: tuple[int, int]
) -> None:
    controller, settings = Goodput(limits, 160), Settings(0, 0.25, 4)
    for _ in range(30):
        decision = controller.decide(window(settings, network, jitter, noise))
        settings = decision.settings
    assert (settings.accumulation, settings.delay_bound) == expected, decision.reason


def test_goodput_leaves_a_window_without_rounds_alone() -> None:
    assert Goodput(Limits(), 160).decide(replace(SEEN, rounds=0)).settings == SEEN.settings
