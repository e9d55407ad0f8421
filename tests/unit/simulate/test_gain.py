"""What a recipe gains: laws of it, on clusters whose answer is known."""

from __future__ import annotations

import dataclasses

import pytest

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import Config, DataConfig, SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, LognormalJitter
from hetsync.simulate.gain import MOST_SLICES, Gain, gain_of
from hetsync.simulate.scenario import Traffic


def gain(rates: list[float], sync: SyncConfig | None = None, adaptive: bool = False, **cluster: object) -> Gain:
    """On ranks of so many samples/s; slices of about 0.1 s."""
    batch = round(sum(rates) / 10)
    ranks = [RankProfile("d", "h", StepTime(0.0, 1 / rate)) for rate in rates]
    made = Cluster("c", "s", tuple(DeviceGroup("d") for _ in rates), **cluster)  # type: ignore[arg-type]
    config = Config(data=DataConfig(batch_size=batch), sync=sync or SyncConfig())
    return gain_of(config, made, ranks, Traffic(), adaptive)


def test_unequal_devices_gain_what_equal_shares_leave_idle() -> None:
    found = gain([400.0, 400.0, 100.0, 100.0])
    assert found.alone == pytest.approx(1000)
    assert 0.36 < found.equal / found.alone <= 0.4  # n·min/Σ, less what HetSync itself takes
    assert found.by_speed / found.alone > 0.95
    assert found.recipe / found.by_speed == pytest.approx(1.0, abs=0.05)
    assert found.slices == MOST_SLICES


def test_equal_devices_gain_nothing() -> None:
    found = gain([100.0] * 4)
    assert found.equal == pytest.approx(found.by_speed, rel=0.01)
    assert found.recipe == pytest.approx(found.equal, rel=0.05)


@pytest.mark.parametrize("trouble", [{"link": Link(compute_fraction=0.5)}, {"jitter": LognormalJitter(0.5)}])
def test_slow_links_and_jitter_cost_those_who_wait(trouble: dict[str, object]) -> None:
    found = gain([400.0, 200.0, 100.0, 100.0], **trouble)
    assert found.recipe > 1.2 * found.by_speed > 1.2 * found.equal


def test_a_synchronous_recipe_by_speed_gains_nothing_over_itself() -> None:
    found = gain([400.0, 100.0], SyncConfig(delay_bound=0))
    assert found.recipe == found.by_speed


def test_what_d_has_no_room_for_is_no_matter_in_step() -> None:
    assert gain([400.0, 100.0], SyncConfig(grace=1)).equal == gain([400.0, 100.0]).equal


def test_pins_are_the_recipes_alone() -> None:
    even, pinned = gain([400.0, 100.0]), gain([400.0, 100.0], SyncConfig(pins={0: 10}, rebalance=False))
    assert dataclasses.replace(pinned, recipe=even.recipe) == even
    assert pinned.recipe < even.recipe / 2


@pytest.mark.parametrize(("cluster", "bound"), [({}, 0), ({"jitter": LognormalJitter(0.5)}, 4)])
def test_delay_by_rule_gains_what_it_comes_to(cluster: dict[str, object], bound: int) -> None:
    """In the long run: the rule takes a second of every device to decide."""
    auto, settled = (gain([400.0, 100.0], SyncConfig(delay_bound=given), **cluster) for given in ("auto", bound))
    assert auto == settled


def test_grace_that_is_given_has_no_room_without_delay() -> None:
    assert gain([400.0, 100.0], SyncConfig(delay_bound="auto", grace=1)).recipe > 0


def test_a_recipe_with_adam_is_not_said_to_gain_by_a_delay_that_its_rule_does_not_choose() -> None:
    rates, trouble = [100.0, 100.0], {"jitter": LognormalJitter(0.2)}
    plain, adaptive = gain(rates, **trouble), gain(rates, adaptive=True, **trouble)
    assert plain.recipe > 1.1 * plain.by_speed
    assert adaptive.recipe == adaptive.by_speed
