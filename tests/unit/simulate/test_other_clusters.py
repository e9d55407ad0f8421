"""Which devices pay: laws of what a job reaches without some, and who is left out."""

from __future__ import annotations

import pytest

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import Config, DataConfig, SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, PairLink, Slowdown
from hetsync.errors import UserError
from hetsync.simulate.gain import gain_of
from hetsync.simulate.left_out import (
    Rates,
    by_rule,
    called,
    kinds,
    link_without,
    pins_without,
    predictions,
    ways_to_leave_out,
    without,
)
from hetsync.simulate.scenario import Traffic

TWO_HOSTS = (DeviceGroup("new", 2, host="a"), DeviceGroup("old", 1, host="b"))
SLOW = PairLink(("a", "b"), 1e-2, 1e6)
FAST = PairLink(("a", "a"), 1e-4, 1e9)


def profiled(rates: list[float], caps: list[int | None] | None = None) -> list[RankProfile]:
    given = caps or [None] * len(rates)
    return [RankProfile("d", "h", StepTime(0.0, 1 / rate), cap=cap) for rate, cap in zip(rates, given, strict=True)]


def cluster(names: str, **keys: object) -> Cluster:
    return Cluster("c", "s", tuple(DeviceGroup(name) for name in names), **keys)  # type: ignore[arg-type]


def predicted(
    made: Cluster, ranks: list[RankProfile], sync: SyncConfig | None = None, values: int = 1, adaptive: bool = False
) -> dict[str, Rates | None]:
    """By who is left out; slices of 0.1 s of all."""
    batch = round(sum(1 / rank.time.seconds_per_sample for rank in ranks) / 10)
    config = Config(data=DataConfig(batch_size=batch), sync=sync or SyncConfig())
    found = predictions(config, made, ranks, Traffic(values, (values,)), adaptive)
    return {each.left_out.name: each.rates for each in found}


def rates(found: dict[str, Rates | None], name: str) -> Rates:
    known = found[name]
    assert known is not None
    return known


def test_every_device_pays_where_sums_are_free() -> None:
    found = predicted(cluster("fffs"), profiled([300.0, 300.0, 300.0, 100.0]))
    whole = rates(found, "nothing")
    assert rates(found, "s (rank 3)").over(whole)[0] == pytest.approx(-0.1, abs=0.02)
    assert rates(found, "1 of the 3 x f (rank 2)").over(whole)[0] == pytest.approx(-0.3, abs=0.02)
    assert rates(found, "the 3 x f (ranks 0 to 2)").over(whole)[0] == pytest.approx(-0.9, abs=0.02)
    assert rates(found, "all but f (rank 0)").over(whole)[0] == pytest.approx(-0.7, abs=0.02)
    assert len(found) == 5


def test_an_old_card_does_not_pay_in_step_behind_a_slow_link_and_does_with_delay() -> None:
    """A sum takes 0.1 s: as long as a slice."""
    made = cluster("no", link=Link(0.0, 4e6))
    found = predicted(made, profiled([900.0, 100.0]), values=100_000)
    in_step, ruled = rates(found, "o (rank 1)").over(rates(found, "nothing"))
    assert 0.3 < in_step < 0.9
    assert -0.13 < ruled < -0.05
    assert (rates(found, "nothing").delay_bound, rates(found, "o (rank 1)").delay_bound) == (4, 0)


def test_auto_keeps_adam_in_step_where_waits_are_short() -> None:
    """A sum takes 0.03 s of a slice's 0.1 s."""
    made, ranks = cluster("no", link=Link(0.0, 12e6)), profiled([900.0, 100.0])
    plain, adaptive = (
        rates(predicted(made, ranks, values=100_000, adaptive=kind), "nothing") for kind in (False, True)
    )
    assert (plain.delay_bound, adaptive.delay_bound) == (4, 0)
    assert adaptive.ruled == adaptive.in_step == plain.in_step


def test_all_devices_reach_what_the_same_simulation_says_of_the_recipe() -> None:
    made, ranks = cluster("no", link=Link(0.0, 4e6)), profiled([900.0, 100.0])
    whole = rates(predicted(made, ranks, values=100_000), "nothing")
    config = Config(data=DataConfig(batch_size=100))
    assert whole.ruled == gain_of(config, made, ranks, Traffic(100_000, (100_000,))).recipe
    assert whole.in_step == gain_of(config, made, ranks, Traffic(100_000, (100_000,))).by_speed


def test_a_host_behind_the_slowest_link_is_one_to_leave_out() -> None:
    made = Cluster("c", "s", (DeviceGroup("x", 2, host="a"), DeviceGroup("x", 2, host="b")), links=(SLOW,))
    names = [each.name for each in ways_to_leave_out(made, profiled([1.0] * 4))]
    assert names == ["1 of the 4 x x (rank 3)", "host a (ranks 0 and 1)", "all but x (rank 0)"]
    third = (DeviceGroup("x", 2, host="c"),)
    fast = PairLink(("a", "c"), 1e-4, 1e9)
    made = Cluster("c", "s", made.devices + third, links=(SLOW, PairLink(("b", "c"), 1e-2, 1e6), fast))
    assert "host b (ranks 2 and 3)" in [each.name for each in ways_to_leave_out(made, profiled([1.0] * 6))]


def test_devices_of_a_name_are_of_one_kind_where_they_are_as_fast() -> None:
    made = Cluster("c", "s", (DeviceGroup("t", 4), DeviceGroup("t", 1, memory_gib=8), DeviceGroup("v", 1)))
    assert kinds(made, profiled([100.0, 50.0, 98.0, 99.0, 100.0, 100.0])) == [(1,), (2, 3, 0), (5,), (4,)]


def test_all_of_the_only_kind_are_not_left_out_and_no_way_comes_twice() -> None:
    assert [each.name for each in ways_to_leave_out(cluster("xxx"), profiled([1.0] * 3))] == [
        "1 of the 3 x x (rank 2)",
        "all but x (rank 0)",
    ]
    assert [each.ranks for each in ways_to_leave_out(cluster("xy"), profiled([2.0, 1.0]))] == [(1,), (0,)]


def test_one_device_alone_is_compared_with_nothing() -> None:
    assert predicted(cluster("x"), profiled([100.0])) == {}


def test_those_who_are_left_keep_what_is_theirs_under_new_numbers() -> None:
    events = (Slowdown(0, 2.0, 10), Slowdown(2, 3.0, 20))
    left, ranks = without(cluster("xyz", events=events), profiled([1.0, 2.0, 3.0]), [0])
    assert [left.device_of(rank).name for rank in range(2)] == ["y", "z"]
    assert left.events == (Slowdown(1, 3.0, 20),)
    assert [rank.time.seconds_per_sample for rank in ranks] == [1 / 2, 1 / 3]
    assert pins_without(SyncConfig(pins={0: 4, 1: 5, 2: 6}), [1]) == {0: 4, 1: 6}
    assert pins_without(SyncConfig(shares="first", pins={0: 4}), [0]) == {0: 4}


def test_sums_are_as_much_faster_as_the_slowest_link_of_the_ring() -> None:
    """Where a sum of all takes longer than links say, what they do not explain stays."""
    measured = Cluster("c", "s", TWO_HOSTS, Link(2e-2, 5e5), links=(SLOW, FAST))
    assert link_without(measured, 3, [0]) == Link(2e-2, 5e5)
    fast = link_without(measured, 3, [2])
    assert fast.latency_seconds == pytest.approx(2e-4)
    assert fast.bytes_per_second == pytest.approx(5e8)
    given = Cluster("c", "s", TWO_HOSTS, Link(1e-5, 1e10), links=(SLOW,))
    assert link_without(given, 3, [2]).bytes_per_second == pytest.approx(given.ring_link([0, 1]).bytes_per_second)


@pytest.mark.parametrize("link", [Link(1e-3, 1e6), Link(compute_fraction=0.5), None])
def test_without_links_nothing_is_known_of_those_who_are_left(link: Link | None) -> None:
    assert link_without(cluster("xyz", link=link), 3, [2]) == (link or Link())


def test_who_cannot_hold_the_batch_without_a_device_is_told_and_all_are_refused_at_once() -> None:
    made, ranks = cluster("xy"), profiled([100.0, 100.0], [15, 10])
    found = predictions(Config(data=DataConfig(batch_size=14)), made, ranks, Traffic())
    assert [each.rates is None for each in found] == [False, False, True]
    assert "batch_size 14 is larger than the 10 samples" in str(found[2].refused)
    with pytest.raises(UserError, match="batch_size 30 is larger"):
        predictions(Config(data=DataConfig(batch_size=30)), made, ranks, Traffic())


def test_a_grace_that_auto_has_no_room_for_is_as_large_as_it_may_be() -> None:
    assert by_rule(SyncConfig(delay_bound=9, grace=4)).grace == 1
    assert by_rule(SyncConfig(delay_bound=0)).grace == "auto"


def test_ranks_in_words() -> None:
    assert called([3]) == "rank 3"
    assert called([1, 0]) == "ranks 0 and 1"
    assert called([2, 3, 4, 5]) == "ranks 2 to 5"
    assert called([5, 1, 2]) == "ranks 1, 2 and 5"
    assert called([1, 3, 5, 7, 9]) == "5 ranks from 1 on"
