"""Laws of the shares: sums, caps and pins hold, no split is better, and faster devices never get less."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime, fit
from hetsync.balance.shares import (
    IN_STEP_PATIENCE,
    SliceRule,
    equal_share_ceiling,
    equal_shares,
    first_pinned_shares,
    makespan,
    may_stay,
    rebalanced,
    slices_of,
    speed_shares,
    whole_parts,
)
from hetsync.errors import UserError

IN_STEP = SliceRule(1, 1.0, in_step=True)
step_times = st.builds(StepTime, st.floats(0, 1, allow_subnormal=False), st.floats(1e-4, 1, allow_subnormal=False))
constant_times = st.builds(StepTime, st.floats(0, 1, allow_subnormal=False), st.just(0.0))


@st.composite
def problems(draw, most_ranks=8, most_batch=2000, times=step_times):
    """(times, batch, caps, pins) that have a solution: caps and pins are drawn around one."""
    times = draw(st.lists(times, min_size=1, max_size=most_ranks))
    ranks = len(times)
    cuts = draw(st.lists(st.integers(1, max(1, most_batch // ranks)), min_size=ranks, max_size=ranks))
    caps = [draw(st.none() | st.integers(n, 2 * n)) for n in cuts]
    pins = {i: n for i, n in enumerate(cuts) if draw(st.integers(0, 3)) == 0}
    return times, sum(cuts), caps, pins


def allowed(shares, times, batch, caps, pins):
    return sum(shares) == batch and all(
        n == pins.get(i, n) and n >= (0 if i in pins else 1) and (caps[i] is None or n <= caps[i])
        for i, n in enumerate(shares)
    )


@given(problems())
def test_sum_caps_and_pins_hold(problem):
    assert allowed(speed_shares(*problem), *problem)


@given(problems(times=step_times | constant_times))
def test_times_without_slope_are_shared_too(problem):
    assert allowed(speed_shares(*problem), *problem)


@settings(max_examples=60)
@given(problems(most_ranks=3, most_batch=24, times=step_times | constant_times))
def test_no_allowed_split_is_faster(problem):
    times, batch, *_ = problem
    splits = itertools.product(range(batch + 1), repeat=len(times))
    best = min(makespan(split, times) for split in splits if allowed(split, *problem))
    assert makespan(speed_shares(*problem), times) <= best * (1 + 1e-12)


@given(problems())
def test_no_single_sample_move_is_faster(problem):
    times, *_ = problem
    shares = speed_shares(*problem)
    for source, target in itertools.permutations(range(len(shares)), 2):
        moved = list(shares)
        moved[source] -= 1
        moved[target] += 1
        if allowed(moved, *problem):
            assert makespan(moved, times) >= makespan(shares, times) * (1 - 1e-12)


@given(st.lists(step_times, min_size=1, max_size=8), step_times, st.integers(9, 2000))
def test_another_device_never_slows_the_job_unless_one_sample_is_too_much_for_it(times, extra, batch):
    before = makespan(speed_shares(times, batch), times)
    after = makespan(speed_shares([*times, extra], batch), [*times, extra])
    assert after <= max(before, extra.seconds(1)) * (1 + 1e-12)


@given(st.lists(step_times, min_size=1, max_size=8), st.integers(8, 2000))
def test_a_larger_batch_never_ends_earlier(times, batch):
    spans = [makespan(speed_shares(times, size), times) for size in (batch, batch + 1)]
    assert spans[1] >= spans[0] * (1 - 1e-12)


@given(st.lists(st.integers(10, 1000), min_size=2, max_size=8), st.integers(8, 2000))
def test_a_faster_device_never_gets_less(rates, batch):
    shares = speed_shares([StepTime(0, 100 / rate) for rate in rates], batch)
    for i, j in itertools.permutations(range(len(rates)), 2):
        assert rates[i] <= rates[j] or shares[i] >= shares[j]


@given(problems(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_unit_of_time_does_not_matter(problem, unit):
    times, *rest = problem
    scaled = [StepTime(t.fixed_seconds * unit, t.seconds_per_sample * unit) for t in times]
    assert makespan(speed_shares(scaled, *rest), times) == pytest.approx(
        makespan(speed_shares(times, *rest), times), rel=1e-9
    )


def test_shares_follow_the_speeds():
    times = [StepTime(0, 1 / rate) for rate in (4, 4, 2, 2, 1, 1, 1, 1)]
    assert speed_shares(times, 256) == (64, 64, 32, 32, 16, 16, 16, 16)


def test_a_slow_rank_keeps_one_sample():
    assert speed_shares([StepTime(0, 0.001), StepTime(100, 100)], 50) == (49, 1)


def test_a_cap_of_nothing_excludes_a_rank():
    assert speed_shares([StepTime(0, 1)] * 3, 2, caps=[None, 0, None]) == (1, 0, 1)


def test_the_rule_of_the_deeptte_paper():
    assert first_pinned_shares(8, 1024, 70) == (70, 137, 137, 136, 136, 136, 136, 136)


@given(st.integers(1, 16), st.integers(16, 5000))
def test_equal_shares_differ_by_one_at_most(ranks, batch):
    shares = equal_shares(ranks, batch)
    assert sum(shares) == batch
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 4), "batch_size 4 is smaller than the 8 ranks: raise it to at least 8, or start fewer"),
        ((2, 10, [4, 5]), "batch_size 10 is larger than the 9 samples"),
        ((2, 10, None, {2: 1}), "sync.pins names rank 2, but the last is 1"),
        ((2, 10, None, {0: -1}), "sync.pins gives rank 0 -1 samples"),
        ((2, 10, None, {0: 11}), "sync.pins gives rank 0 11 samples: give it 0 to 10"),
        ((2, 10, [3, None], {0: 4}), "only 3 samples fit into its memory"),
        ((3, 10, None, {0: 9}), "leaves 1 of batch_size 10 for the 2 ranks"),
        ((2, 10, None, {0: 6, 1: 6}), "leaves -2 of batch_size 10"),
        ((2, 10, None, {0: 4, 1: 4}), "adds up to 8, but batch_size is 10"),
    ],
)
def test_impossible_demands_say_what_to_change(arguments, words):
    with pytest.raises(UserError) as error:
        equal_shares(*arguments)
    assert words in str(error.value)


@given(st.floats(0, 1), st.floats(1e-4, 1), st.lists(st.integers(1, 512), min_size=2, unique=True))
def test_fit_finds_an_exact_line(fixed, slope, sizes):
    found = fit(sizes, [fixed + slope * n for n in sizes])
    for n in sizes:
        assert found.seconds(n) == pytest.approx(fixed + slope * n, rel=1e-4)


points = st.tuples(st.integers(1, 512), st.floats(1e-4, 10))


@given(st.lists(points, min_size=1, max_size=6))
def test_fit_is_never_negative_and_beats_its_neighbours(pairs):
    sizes, seconds = zip(*pairs, strict=True)
    found = fit(sizes, seconds)

    def misfit(line):
        return math.fsum((line.seconds(n) / t - 1) ** 2 for n, t in pairs)

    for a, c in itertools.product((0.9, 1.0, 1.1), repeat=2):
        assert misfit(found) <= misfit(StepTime(found.fixed_seconds * a, found.seconds_per_sample * c)) + 1e-6


def test_fit_needs_measurements():
    with pytest.raises(ValueError, match="cannot fit"):
        fit([], [])
    with pytest.raises(ValueError, match="cannot fit"):
        fit([1, 2], [0.1, 0.0])


def test_one_size_gives_a_line_through_the_origin():
    assert fit([8, 8], [2.0, 2.0]) == StepTime(0.0, 0.25)


def test_rates_and_times():
    time = StepTime(1.0, 0.5)
    assert (time.seconds(0), time.seconds(2), time.rate(0), time.rate(2)) == (0.0, 2.0, 0.0, 1.0)
    assert StepTime(0, 0).rate(3) == math.inf
    with pytest.raises(ValueError, match="non-negative"):
        StepTime(-1, 1)


def test_equal_shares_waste_the_fast_devices():
    assert equal_share_ceiling([4, 4, 2, 2, 1, 1, 1, 1]) == 0.5
    assert equal_share_ceiling([3.0, 3.0]) == 1.0


@given(problems())
def test_rebalancing_changes_only_for_a_gain(problem):
    times, batch, caps, pins = problem
    start = equal_shares(len(times), batch, caps, pins, IN_STEP)
    new = rebalanced(start, times, batch, caps, pins, rule=IN_STEP)
    assert new == start or makespan(new, times) < 0.95 * makespan(start, times)
    assert makespan(speed_shares(*problem, IN_STEP), times) >= 0.95 * makespan(new, times) * (1 - 1e-12)
    assert rebalanced(new, times, batch, caps, pins, rule=IN_STEP) == new


def test_rebalancing_replaces_shares_that_no_longer_fit():
    times = [StepTime(0, 1.0)] * 2
    assert rebalanced((5, 5), times, 10, caps=[4, None]) == (4, 6)
    assert rebalanced((4, 3, 3), times, 10) == (5, 5)


@st.composite
def least_slices(draw, most_ranks=6, most_batch=40):
    """(times, batch, least): a batch of one sample for each rank, or more."""
    times = draw(st.lists(step_times, min_size=1, max_size=most_ranks))
    return times, draw(st.integers(len(times), most_batch)), draw(st.integers(1, 6))


@given(least_slices())
def test_no_slice_in_step_is_smaller_than_the_least(problem):
    times, batch, least = problem
    shares = speed_shares(times, batch, rule=SliceRule(least, 1.0, in_step=True))
    assert sum(shares) == batch
    assert all(share == 0 or share >= min(least, batch) for share in shares)


@settings(max_examples=60)
@given(least_slices(most_ranks=3, most_batch=16), st.integers(0, 1))
def test_no_split_in_step_into_such_slices_is_faster(problem, fixed):
    times, batch, least = problem
    if not fixed:
        times = [StepTime(0.0, time.seconds_per_sample) for time in times]
    splits = itertools.product(range(batch + 1), repeat=len(times))
    best = min(
        makespan(split, times)
        for split in splits
        if sum(split) == batch and all(n == 0 or n >= min(least, batch) for n in split)
    )
    found = makespan(speed_shares(times, batch, rule=SliceRule(least, 1.0, in_step=True)), times)
    # Where there is no room for all whose least slices would be in time, those with the shortest of these remain.
    crowded = sum(time.seconds(min(least, batch)) <= best for time in times) * min(least, batch) > batch
    assert found <= best * (1 + 1e-12) or (fixed and crowded)


@given(least_slices())
def test_waiting_for_least_slices_in_step_makes_batches_a_third_longer_at_most(problem):
    times, batch, least = problem
    shortest = makespan(speed_shares(times, batch, rule=SliceRule(least, 1.0, in_step=True)), times)
    shares = speed_shares(times, batch, rule=SliceRule.of(least, 0, 0.25))
    assert makespan(shares, times) <= IN_STEP_PATIENCE * shortest * (1 + 1e-12)
    if len(times) * least <= batch:
        out = [time for n, time in zip(shares, times, strict=True) if not n]
        assert all(time.seconds(least) > makespan(shares, times) * (1 - 1e-12) for time in out)


@given(least_slices(), st.sampled_from([0, 4]), st.data())
def test_who_may_be_quick_at_best_is_not_left_out(problem, bound, data):
    times, batch, least = problem
    rule, quick = SliceRule.of(least, bound, 0.25), data.draw(st.integers(0, len(times) - 1))
    at_best = [StepTime(0.0, 0.0) if rank == quick else time for rank, time in enumerate(times)]
    old = speed_shares(times, batch, rule=SliceRule(least))
    if sum(old) == batch:
        assert rebalanced(old, times, batch, rule=rule, at_best=at_best)[quick] or batch < least * len(times)


def test_in_step_a_rank_is_left_out_for_a_large_gain_only():
    rule = SliceRule.of(2, 0, 0.25)
    quick, slow, slower = StepTime(0, 0.05), StepTime(0, 0.65), StepTime(0, 0.75)  # two samples: 1.3 s and 1.5 s
    assert speed_shares([quick, quick, slow], 40, rule=rule) == (19, 19, 2)
    assert speed_shares([quick, quick, slower], 40, rule=rule) == (20, 20, 0)
    times = [quick, quick, slower]
    assert rebalanced((19, 19, 2), times, 40, rule=rule) == (20, 20, 0)
    assert rebalanced((19, 19, 2), times, 40, rule=rule, at_best=[quick, quick, slow]) == (19, 19, 2)


@given(least_slices(), st.integers(1, 8))
def test_delayed_ranks_are_waited_for_or_work(problem, bound):
    times, batch, least = problem
    rule = SliceRule.of(least, bound, 0.25)
    shares, least = speed_shares(times, batch, rule=rule), min(least, batch)
    assert sum(shares) >= batch
    assert all(share == 0 or share >= least for share in shares)
    assert sum(shares) == batch or all(share in (0, least) for share in shares)
    working = max(time.seconds(n) / (bound if n == least else 1) for n, time in zip(shares, times, strict=True))
    pace = max(working, min(time.seconds(least) for time in times))
    out = [time for n, time in zip(shares, times, strict=True) if not n]
    assert all(time.seconds(least) > bound * pace / 2 for time in out)


@given(least_slices(), st.integers(0, 8), st.data())
def test_shares_that_stand_are_kept(problem, bound, data):
    times, batch, least = problem
    rule = SliceRule.of(least, bound, 0.25)
    shares = speed_shares(times, batch, rule=rule)
    assert may_stay(shares, batch, [None] * len(times), {}, rule)
    other = data.draw(st.lists(step_times, min_size=len(times), max_size=len(times)))
    moved = rebalanced(shares, other, batch, rule=rule)
    assert may_stay(moved, batch, [None] * len(times), {}, rule)
    assert rebalanced(moved, other, batch, rule=rule) == moved


def test_a_slow_rank_gets_the_least_slice_or_none():
    times = [StepTime(0, 1 / rate) for rate in (11, 11, 7, 7, 1, 1, 1, 1)]
    assert speed_shares(times, 40) == (11, 11, 7, 7, 1, 1, 1, 1)
    assert speed_shares(times, 40, rule=SliceRule.of(2, 4, 0.25)) == (10, 10, 6, 6, 2, 2, 2, 2)
    assert speed_shares(times, 40, rule=SliceRule.of(2, 0, 0.25)) == (12, 12, 8, 8, 0, 0, 0, 0)
    slow = [*times[:4], *[StepTime(0, 10)] * 4]  # four rounds are over before one slice of theirs
    assert speed_shares(slow, 40, rule=SliceRule.of(2, 4, 0.25)) == (12, 12, 8, 8, 0, 0, 0, 0)
    assert speed_shares(slow, 40, rule=SliceRule.of(2, None, 0.25)) == (10, 10, 6, 6, 2, 2, 2, 2)


def test_a_batch_without_room_for_all():
    times = [StepTime(0, 1.0), StepTime(0, 2.0), StepTime(0, 1.5), StepTime(0, 1.0)]
    assert speed_shares(times, 5, rule=SliceRule.of(2, 0, 0.25)) == (3, 0, 0, 2)
    assert speed_shares(times, 5, rule=SliceRule.of(2, 4, 0.25)) == (2, 2, 2, 2)
    even = [StepTime(0, 1.0)] * 4
    assert speed_shares(even, 5, rule=SliceRule.of(2, 1, 0.25)) == (2, 2, 2, 2)  # slices are ranks' own
    assert speed_shares([StepTime(0, 1.0)], 1, rule=SliceRule.of(2, 4, 0.25)) == (1,)
    assert speed_shares(times[:2], 3, [1, None], rule=SliceRule.of(2, 4, 0.25)) == (1, 2)  # what fits into its memory


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.data())
def test_parts_make_no_slice_smaller_than_the_least(sizes: list[int], data: st.DataObject) -> None:
    least = data.draw(st.integers(1, 6))
    shares = {rank: 0 if size < least else size for rank, size in enumerate(sizes)}
    if not any(shares.values()):
        return
    batches = data.draw(st.integers(1, 3))
    total = data.draw(st.integers(0, batches * sum(shares.values())))
    parts = whole_parts(shares, total, least)
    assert sum(parts.values()) == total
    for rank, part in parts.items():
        assert part == 0 or shares[rank]
        assert part == 0 or part >= min(least, total)
        slices = slices_of(part, shares[rank], least)
        assert slices <= max(1, batches)
        assert part == 0 or min(least, total) <= part // slices
        assert -(-part // slices) <= max(shares[rank], 2 * least - 1)


def test_parts_respect_memory() -> None:
    assert whole_parts({0: 2, 1: 2, 2: 2}, 5, 2, {0: 3, 1: 3, 2: 3}) == {0: 3, 1: 2, 2: 0}
    assert sorted(whole_parts({0: 2, 1: 2, 2: 2}, 5, 2, {0: 2, 1: 2, 2: 2}).values()) == [1, 2, 2]
    assert slices_of(3, 2, 2) == 1
    assert slices_of(3, 2, 2, cap=2) == 2


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.data())
def test_parts_without_single_samples(sizes: list[int], data: st.DataObject) -> None:
    shares = dict(enumerate(sizes))
    total = data.draw(st.integers(0, sum(sizes)))
    parts = whole_parts(shares, total, 2)
    assert sum(parts.values()) == total
    assert all(0 <= parts[rank] <= (3 if share == 2 else share) for rank, share in shares.items())
    single = [rank for rank, part in parts.items() if part == 1 and shares[rank] > 1]
    if total > 1 and min((share for share in sizes if share), default=0) > 2:
        assert not single


def test_a_batch_of_a_few_goes_to_some_ranks_in_twos() -> None:
    assert sorted(whole_parts({0: 8, 1: 8, 2: 8}, 3, 2).values()) == [0, 0, 3]
    assert sorted(whole_parts({0: 8, 1: 8, 2: 8}, 4, 2).values()) == [0, 2, 2]
    assert whole_parts({0: 1, 1: 8}, 9, 2) == {0: 1, 1: 8}
