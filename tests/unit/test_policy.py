"""Laws of the policy under arbitrary speeds, delays and event orders.

`virtual.py` checks most of them at every step: staleness, exactly once, rounds in order, finished work only,
nobody at work at a drain, an end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from virtual import VirtualCluster, make_policy

from hetsync.data.ledger import length, split
from hetsync.slicing import apportion
from hetsync.sync import policy as policy_module
from hetsync.sync.members import TRANSITIONS, Activity
from hetsync.sync.messages import (
    NO_BOUND,
    Began,
    Completed,
    DrainRequested,
    Finished,
    Give,
    Joined,
    Left,
    Reshared,
    Settings,
    StartRound,
    Took,
    Tuned,
)
from hetsync.sync.policy import ProtocolError

relaxed = hypothesis_settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def arguments(draw_seconds):
    """The times of a cluster, all from one source."""
    return {
        "compute": lambda rank, samples: draw_seconds(),
        "delay": draw_seconds,
        "communicate": draw_seconds,
        "land": draw_seconds,
    }


bounds = st.integers(1, 32) | st.sampled_from([1, 1, 2, 3, NO_BOUND])
delayed = st.builds(Settings, bounds, st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.75, 1.0]), st.integers(1, 4))
synchronous = st.builds(Settings, st.just(0), st.just(1.0), st.integers(1, 4))
any_settings = delayed | synchronous


def share_lists(most_ranks: int, most: int = 8):
    """Shares of some ranks, zeros among them; rank 0's is not zero."""
    first = st.integers(1, most)
    return st.tuples(first, st.lists(st.integers(0, most), max_size=most_ranks - 1)).map(lambda t: [t[0], *t[1]])


# Small clusters, where hypothesis chooses every single delay and can shrink it.


@relaxed
@given(share_lists(4), any_settings, st.integers(1, 80), st.none() | st.integers(1, 60), st.data())
def test_any_order_of_events(shares, settings, total, every, data):
    seconds = st.sampled_from([0.0, 1.0, 3.0, 20.0])
    policy = make_policy(shares, settings, total, every)
    VirtualCluster(policy, **arguments(lambda: data.draw(seconds))).run()


# Larger ones, where a seed does: speeds, jitter, message delays and collectives differ by orders of magnitude.


@dataclass(frozen=True)
class Times:
    """Seconds a sample by rank (`spread`: fastest to slowest), and means of all else in units of one slice."""

    seed: int
    spread: float
    jitter: float
    delay: float
    communicate: float
    land: float

    def arguments(self, ranks: int):
        draw = random.Random(self.seed)
        speeds = [self.spread ** draw.random() for _ in range(10 * ranks)]
        return {
            "compute": lambda rank, n: speeds[rank] * n / 4 * draw.lognormvariate(0, self.jitter),
            "delay": lambda: draw.expovariate(1) ** 2 * self.delay,
            "communicate": lambda: draw.random() * self.communicate,
            "land": lambda: draw.expovariate(1) * self.land,
        }


times = st.builds(
    Times,
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([1, 4, 50]),
    jitter=st.sampled_from([0, 0.5, 1.5]),
    delay=st.sampled_from([0, 0.01, 1, 10]),
    communicate=st.sampled_from([0, 0.3, 5, 50]),
    land=st.sampled_from([0, 0.01, 3]),
)
everyday = Times(1, 4, 0.5, 0.01, 0.5, 0.01)


@st.composite
def jobs(draw, settings=any_settings, most_ranks=64):
    """(policy, times): up to `most_ranks` ranks and a few hundred pieces."""
    ranks = draw(st.sampled_from([n for n in (1, 2, 3, 5, 8, 16, 64) if n <= most_ranks]))
    shares = [draw(st.integers(1, 12)), *draw(st.lists(st.integers(0, 12), min_size=ranks - 1, max_size=ranks - 1))]
    chosen = draw(settings)
    contributions = draw(st.integers(1, 6 if ranks > 8 else 25))
    total = sum(shares) * chosen.accumulation * contributions + draw(st.integers(0, 20))
    every = draw(st.none() | st.integers(total // 5 + 1, total + 1))
    return make_policy(shares, chosen, total, every), draw(times)


@relaxed
@given(jobs())
def test_the_laws_hold_and_every_run_ends(job):
    policy, times = job
    cluster = VirtualCluster(policy, **times.arguments(len(policy.members)))
    cluster.run()
    assert cluster.starts[-1].final
    assert max(policy.staleness) <= policy.settings.delay_bound
    assert sum(policy.samples_by_rank.values()) == policy.ledger.total


def test_every_milestone_is_a_drain_with_its_reason():
    policy = make_policy([3, 1, 2], Settings(4, 0.25, 2), 1000, 250)
    cluster = VirtualCluster(policy, **everyday.arguments(3))
    cluster.run()
    assert cluster.drains == [(250, "evaluation"), (500, "evaluation"), (750, "evaluation"), (1000, "end")]


def test_a_run_of_nothing_ends_at_once():
    for settings in (Settings(0), Settings(4)):
        cluster = VirtualCluster(make_policy([2, 2], settings, 10, applied=10, version=7), lambda rank, n: 1.0)
        cluster.run()
        assert [(start.number, start.final) for start in cluster.starts] == [(7, True)]


@relaxed
@given(any_settings, st.integers(0, 100), st.integers(0, 9))
def test_a_resumed_run_goes_on_from_its_books(settings, applied, version):
    policy = make_policy([3, 1], settings, 100, 30, applied=applied, version=version)
    cluster = VirtualCluster(policy, **everyday.arguments(2))
    cluster.run()
    assert cluster.starts[0].number == version
    assert sum(policy.samples_by_rank.values()) == 100 - applied


# Synchronous mode.


@relaxed
@given(jobs(synchronous))
def test_synchronous_rounds_are_the_stream_cut_into_batches(job):
    """Round r holds positions [r·K·B, (r+1)·K·B), less where a milestone cuts it short."""
    policy, times = job
    stops, position, full = [], 0, policy.full_set
    while position < policy.ledger.total:
        position = min(position + full, policy._milestones(position).position)
        stops.append(position)
    cluster = VirtualCluster(policy, **times.arguments(len(policy.members)))
    cluster.run()
    rounds = [cluster.round_spans[s.number] for s in cluster.starts if not s.drain]
    assert [(spans[0][0], spans[-1][1]) for spans in rounds] == list(zip([0, *stops], stops, strict=False))
    assert [length(spans) for spans in rounds] == [b - a for a, b in zip([0, *stops], stops, strict=False)]
    assert set(policy.staleness) == {0}


def batches(shares, accumulation, total, every):
    cluster = VirtualCluster(make_policy(shares, Settings(0, 1.0, accumulation), total, every), lambda rank, n: n)
    cluster.run()
    spans = (cluster.round_spans[s.number] for s in cluster.starts if not s.drain)
    return [(min(a for a, _ in s), max(b for _, b in s), length(s)) for s in spans]


def test_synchronous_batches_do_not_depend_on_the_ranks():
    expected = batches([24], 2, 1000, 300)
    for shares in ([12, 12], [23, 1], [8, 0, 16], [1] * 24, [5, 7, 12]):
        assert batches(shares, 2, 1000, 300) == expected


def test_synchronous_work_is_handed_out_two_rounds_ahead():
    given = [i for i in make_policy([2, 3], Settings(0, 1.0, 2), 1000).begin() if isinstance(i, Give)]
    assert [(g.rank, g.piece.samples, g.piece.synchronous_round, g.piece.round_samples) for g in given] == [
        (rank, samples, number, 10) for number in (0, 1) for rank, samples in ((0, 4), (1, 6))
    ]
    assert [length(spans) for spans in given[1].piece.slices] == [3, 3]


def test_what_is_left_before_a_milestone_is_split_by_the_shares_too():
    given = [i for i in make_policy([4, 8], Settings(0), 100, 15).begin() if isinstance(i, Give)]
    assert [(g.piece.synchronous_round, g.piece.samples) for g in given] == [(0, 4), (0, 8), (1, 1), (1, 2)]


# Delayed mode.


@relaxed
@given(jobs(st.builds(Settings, st.integers(1, 8), st.just(1.0), st.integers(1, 3)), most_ranks=16))
def test_a_quorum_of_one_is_stale_synchronous_parallel(job):
    """Ho et al. 2013, with the piece as the clock: away from a milestone nobody has finished more than D + 1
    pieces more than the slowest (D ahead of it, and the one that the slowest is on)."""
    policy, times = job
    bound = policy.settings.delay_bound
    sharing = {rank for rank, member in policy.members.items() if member.share}

    def look(cluster, step):
        unapplied = [node.worker.unapplied for node in cluster.nodes.values()]
        assert max(unapplied) <= bound + 1
        if cluster.policy.ledger.available(cluster.policy._milestone.position) >= cluster.policy.full_set:
            assert all(start.drain or start.contributors == sharing for start in cluster.starts[look.seen :])
            if len(cluster.drains) == 0:
                counts = [cluster.finished[rank] for rank in sharing]
                assert max(counts) <= min(counts) + bound + 1
        look.seen = len(cluster.starts)
        return []

    look.seen = 0
    VirtualCluster(policy, **times.arguments(len(policy.members)), before=look).run()


def activities(job):
    policy, times = job
    seen = set()

    def look(cluster, step):
        seen.update(member.activity for member in cluster.policy.members.values())
        return []

    VirtualCluster(policy, **times.arguments(len(policy.members)), before=look).run()
    return seen


@relaxed
@given(jobs(st.builds(Settings, st.just(NO_BOUND), st.floats(0.01, 1.0)), most_ranks=8))
def test_without_a_bound_nobody_is_blocked(job):
    assert Activity.BLOCKED not in activities(job)


def test_with_a_bound_somebody_is():
    slow = Times(1, 4, 0.5, 0.01, 50, 0.01)
    assert Activity.BLOCKED in activities((make_policy([4, 4], Settings(1, 0.1), 1000), slow))


def test_a_larger_bound_and_a_smaller_quorum_never_cost_much_time():
    """Delay hides jitter and communication: that is what it is for."""

    def seconds(settings):
        policy = make_policy([4] * 8, settings, 4 * 8 * 100)
        cluster = VirtualCluster(policy, **Times(3, 1, 0.5, 0.01, 1, 0.01).arguments(8))
        cluster.run()
        return cluster.now

    synchronous, one, eight = (seconds(s) for s in (Settings(0), Settings(1, 0.5), Settings(8, 0.25)))
    assert synchronous > 1.2 * one > 1.2 * eight


def test_ranks_of_unequal_speed_come_to_rest_together():
    """Near a milestone pieces shrink with what is left, so that a drain costs less than a slice of waiting."""
    shares, speeds = [16, 16, 8, 4], [1, 1, 2, 4]
    policy = make_policy(shares, Settings(8, 0.25, 4), 44 * 4 * 20)
    ends = {}

    def compute(rank, samples):
        ends[rank] = cluster.now + samples * speeds[rank] * (1.4 if rank == 3 else 1)
        return ends[rank] - cluster.now

    cluster = VirtualCluster(policy, compute)
    cluster.run()
    assert max(ends.values()) - min(ends.values()) <= 16 * 1.4


# The controller's hands: new settings, shares and drains at any moment.


@st.composite
def interventions(draw, ranks, batch):
    """[(step, event)]: in order."""
    tuned = st.builds(Tuned, any_settings)
    reshared = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).map(
        lambda weights: Reshared(apportion(batch, {r: w + (r == 0) for r, w in enumerate(weights)}))
    )
    drain = st.builds(DrainRequested, st.sampled_from(["stop", "save"]))
    steps = st.integers(0, 60) | st.integers(0, 600)
    events = st.lists(st.tuples(steps, tuned | tuned | reshared | drain), max_size=12)
    return sorted(draw(events), key=lambda pair: pair[0])


def script(planned):
    planned = list(planned)

    def before(cluster, step):
        due = []
        while planned and planned[0][0] <= step and not cluster.policy.ended:
            due.append(planned.pop(0)[1])
        return due

    return before


@hypothesis_settings(relaxed, max_examples=120)
@given(st.data())
def test_settings_shares_and_drains_change_at_any_moment(data):
    policy, times = data.draw(jobs(most_ranks=8))
    planned = data.draw(interventions(len(policy.members), policy.batch))
    cluster = VirtualCluster(policy, **times.arguments(len(policy.members)), before=script(planned))
    cluster.run()


@hypothesis_settings(relaxed, max_examples=100)
@given(share_lists(3, 4), any_settings, st.integers(10, 60), st.data())
def test_interventions_in_any_order_of_events(shares, settings, total, data):
    policy = make_policy(shares, settings, total, 25)
    planned = [(step // 3, event) for step, event in data.draw(interventions(len(shares), sum(shares)))]
    seconds = st.sampled_from([0.0, 1.0, 3.0, 20.0])
    VirtualCluster(policy, **arguments(lambda: data.draw(seconds)), before=script(planned)).run()


@pytest.mark.parametrize("first", [Settings(0, 1.0, 2), Settings(4, 0.25, 1)])
def test_the_two_modes_never_overlap(first):
    second = Settings(4, 0.25, 1) if first.synchronous else Settings(0, 1.0, 2)
    policy = make_policy([4, 2, 2], first, 800)
    before = script([(60, Tuned(second)), (300, Tuned(first))])
    cluster = VirtualCluster(policy, **everyday.arguments(3), before=before)
    cluster.run()
    modes = [start.synchronous for start in cluster.starts]
    switches = [i for i in range(1, len(modes)) if modes[i] != modes[i - 1]]
    assert len(switches) == 2
    assert all(cluster.starts[i - 1].drain == "mode change" for i in switches)
    assert policy.settings == first


def test_taking_a_mode_change_back_leaves_the_mode():
    policy = make_policy([4, 2], Settings(4), 400)
    before = script([(30, Tuned(Settings(0))), (31, Tuned(Settings(2)))])
    cluster = VirtualCluster(policy, **everyday.arguments(2), before=before)
    cluster.run()
    assert policy.settings == Settings(2)
    assert not any(start.synchronous for start in cluster.starts)


@relaxed
@given(any_settings, st.integers(0, 400), st.integers(0, 2))
def test_no_drain_request_is_forgotten(settings, step, also):
    """Pre-emption asks once: also while all ranks are coming to rest for another reason."""
    policy = make_policy([4, 2, 2], settings, 200, 60)
    requests = [(step, DrainRequested("stop")), (step, DrainRequested("save")), (step, Tuned(Settings(3)))]
    planned = script(requests[: also + 1])
    asked = []

    def before(cluster, now):
        due = planned(cluster, now)
        if not policy._milestone.final or policy.ledger.frontier < 200:  # the end answers for any
            asked.extend(event.reason for event in due if isinstance(event, DrainRequested))
        return due

    cluster = VirtualCluster(policy, **everyday.arguments(3), before=before)
    cluster.run()
    assert [reason for _, reason in cluster.drains if reason in ("stop", "save")] == asked


def numbers(instructions, rank):
    return [i.piece.number for i in instructions if isinstance(i, Give) and i.rank == rank]


def rounds(instructions):
    return [i.number for i in instructions if isinstance(i, StartRound)]


def test_a_lowered_bound_holds_for_work_that_may_have_begun_unheard():
    """A rank computes a piece with bound 8 and holds one with bound 1. It may have begun that one from version 1,
    with the word of it still on its way: version 1 + 2 rounds would be too late for it."""
    policy = make_policy([4, 4], Settings(8, 0.25), 400)
    first = policy.begin()
    (a, a2), (b, b2) = numbers(first, 0), numbers(first, 1)
    policy.on(Tuned(Settings(1, 0.25)))
    policy.on(Began(1, b, 0))
    out = policy.on(Finished(1, b, 4))
    (tight,) = numbers(out, 1)  # the piece with bound 1
    assert rounds(out) == [0]
    policy.on(Began(1, b2, 0))
    policy.on(Took(1, 0, b))
    policy.on(Completed(0))
    policy.on(Began(0, a, 1))
    assert rounds(policy.on(Finished(0, a, 4))) == []
    policy.on(Began(0, a2, 1))
    out = policy.on(Finished(1, b2, 4)) + policy.on(Began(1, tight, 1))  # what was on its way
    assert rounds(out) == [1]


def test_a_rank_that_gets_a_share_again_is_not_expected_to_work_beyond_its_bound():
    """It rests with D + 1 contributions that wait; the quorum is out of its reach; nobody else works either."""
    policy = make_policy([7, 1], Settings(1, 1.0), 400)

    def before(cluster, step):
        resting = cluster.policy.members[1].activity is Activity.RESTING
        if not before.taken:
            before.taken = True
            return [Reshared({0: 8, 1: 0})]
        if resting and not before.given:
            before.given = True
            assert len(cluster.policy.members[1].ready) == 2
            return [Reshared({0: 2, 1: 6})]
        return []

    before.taken = before.given = False
    VirtualCluster(policy, lambda rank, n: 1.0 if rank else 30.0, before=before).run()
    assert before.given


# Membership.


def test_a_rank_that_leaves_between_a_synchronous_sum_and_its_word_gives_nothing_back_twice():
    policy = make_policy([4, 4], Settings(0, 1.0), 400)
    first = policy.begin()
    for rank in (0, 1):
        policy.on(Began(rank, numbers(first, rank)[0], 0))
    policy.on(Completed(0))
    policy.on(Left(1))  # its piece of round 0 is applied; it holds one of round 1 and one of round 2
    assert policy.ledger.applied == 8
    assert policy.ledger.applied + policy.ledger.outstanding() + policy.ledger.available(400) == 400


@hypothesis_settings(relaxed, max_examples=120)
@given(st.data())
def test_ranks_leave_and_join_between_rounds(data):
    policy, times = data.draw(jobs(most_ranks=8))
    ranks = len(policy.members)
    changes = data.draw(st.lists(st.tuples(st.integers(0, 300), st.none() | st.integers(0, 7)), max_size=10))
    planned = sorted(changes, key=lambda pair: pair[0])
    tuned = script(
        data.draw(
            interventions(ranks, policy.batch).map(
                lambda events: [(s, e) for s, e in events if not isinstance(e, Reshared)]
            )
        )
    )
    fresh = iter(range(ranks, 1000))
    living = set(policy.members)

    def before(cluster, step):
        if planned and planned[0][0] <= step and cluster.between_rounds and not policy.ended:
            _, leaver = planned.pop(0)
            if leaver is None:
                living.add(rank := next(fresh))
                return [Joined(rank, policy.version, 3)]
            if others := sorted(living - {0}):
                living.discard(rank := others[leaver % len(others)])
                return [Left(rank)]
        return tuned(cluster, step)

    cluster = VirtualCluster(policy, **times.arguments(ranks), before=before)
    cluster.run()
    assert set(policy.members) == living == set(cluster.nodes)


def test_a_round_does_not_wait_for_the_word_of_the_dead():
    policy = make_policy([4, 4], Settings(4, 1.0), 400)
    first = policy.begin()
    for rank in (0, 1):
        policy.on(Began(rank, numbers(first, rank)[0], 0))
        out = policy.on(Finished(rank, numbers(first, rank)[0], 4))
    assert rounds(out) == [0]
    policy.on(Took(0, 0, numbers(first, 0)[0]))
    policy.on(Left(1))
    policy.on(Completed(0))
    assert (policy.version, policy.ledger.applied) == (1, 4)


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 1), Settings(4, 0.25, 1)])
def test_what_the_dead_held_goes_out_again(settings):
    policy = make_policy([4, 4], settings, 80)
    lost = [i.piece for i in policy.begin() if isinstance(i, Give) and i.rank == 1]
    assert length(span for piece in lost for spans in piece.slices for span in spans) == 8
    given = policy.on(Left(1))
    assert policy.ledger.available(80) + policy.ledger.outstanding() == 80
    assert policy.ledger.outstanding() == 8 + length(
        span for i in given if isinstance(i, Give) for spans in i.piece.slices for span in spans
    )


# The machine.


def test_every_transition_is_exercised(monkeypatch):
    seen = set()

    class Recorded(dict):
        def get(self, pair, default=None):
            seen.add(pair)
            return super().get(pair, default)

    monkeypatch.setattr(policy_module, "TRANSITIONS", Recorded(TRANSITIONS))
    late = Times(5, 50, 0.5, 10, 5, 0.01)
    for settings in (Settings(1, 0.25), Settings(2, 1.0), Settings(0)):
        for when in (everyday, late):
            VirtualCluster(make_policy([4, 4, 1], settings, 900, 300), **when.arguments(3)).run()
    # A rank without a share gets one while its work waits for a quorum that it cannot reach alone.
    policy = make_policy([2, 2], Settings(1, 1.0), 200)
    hold = script([(3, Reshared({0: 4, 1: 0})), (40, Reshared({0: 2, 1: 2}))])
    VirtualCluster(policy, lambda rank, n: 1.0 if rank else 30.0, before=hold).run()
    assert seen == set(TRANSITIONS)


def working(settings=None, shares=(4, 4)):
    """A policy whose rank 0 computes its first piece; what it told rank 0."""
    policy = make_policy(list(shares), settings or Settings(4, 0.25), 400)
    first = next(i for i in policy.begin() if isinstance(i, Give) and i.rank == 0).piece.number
    policy.on(Began(0, first, 0))
    return policy, first


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (lambda first: Began(0, first, 0), "BEGAN while COMPUTING"),
        (lambda first: Began(1, 99, 0), "rank 1 began another piece"),
        (lambda first: Finished(0, first + 1, 4), "rank 0 finished another piece"),
        (lambda first: Finished(1, first, 4), "rank 1 finished another piece"),
        (lambda first: Took(0, 0, first), "no such round"),
        (lambda first: Completed(0), "no such round"),
        (lambda first: Began(7, first, 0), "rank 7 is no member"),
        (lambda first: Left(7), "rank 7 is no member"),
        (lambda first: Joined(1, 0, 4), "rank 1 is a member already"),
        (lambda first: Reshared({7: 4}), "rank 7 is no member"),
    ],
)
def test_an_impossible_event_tells_the_story(event, what):
    policy, first = working()
    with pytest.raises(ProtocolError, match=what) as error:
        policy.on(event(first))
    assert str(Began(0, first, 0)) in str(error.value)
    assert str(event(first)) in str(error.value)


def test_a_rank_below_its_floor_is_an_error():
    policy = make_policy([4], Settings(4), 400, version=5)
    (give, *_) = policy.begin()
    with pytest.raises(ProtocolError, match="below its floor 5"):
        policy.on(Began(0, give.piece.number, 4))


def test_who_was_not_asked_to_contribute_is_an_error():
    policy, first = working(Settings(4, 0.25))
    assert [i for i in policy.on(Finished(0, first, 4)) if isinstance(i, StartRound)]
    second = policy.members[1].held[0].piece.number
    policy.on(Began(1, second, 0))
    policy.on(Finished(1, second, 4))
    with pytest.raises(ProtocolError, match="was not asked"):
        policy.on(Took(1, 0, second))


def test_staleness_over_the_bound_is_an_error():
    """Even if the rules above failed, no such contribution is booked."""
    policy, first = working(Settings(1, 0.25))
    policy.on(Finished(0, first, 4))
    policy.members[0].ready[0].version = -2
    with pytest.raises(ProtocolError, match="is applied with staleness 2"):
        policy.on(Took(0, 0, first))


# Small parts.


@given(st.integers(0, 500), st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any))
def test_apportion_gives_everything_in_proportion(total, shares):
    parts = apportion(total, dict(enumerate(shares)))
    assert sum(parts.values()) == total
    assert all(abs(parts[r] - total * n / sum(shares)) < 1 for r, n in enumerate(shares))


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 6))
def test_split_keeps_the_order_and_equal_sizes(lengths, slices):
    spans = tuple((100 * i, 100 * i + n) for i, n in enumerate(lengths))
    parts = split(spans, length(spans), slices)
    positions = [p for part in parts for start, stop in part for p in range(start, stop)]
    assert positions == [p for start, stop in spans for p in range(start, stop)]
    sizes = [length(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(parts) == min(slices, length(spans))


def test_waited_for_names_the_ranks_at_work():
    policy, _ = working()
    assert policy.waited_for() == [0, 1]
