"""D, K, q and grace by rule: rounds become fewer where they are dear, and no fewer than that pays."""

import random
from dataclasses import replace
from functools import partial

import pytest

from hetsync.config import schema
from hetsync.config.schema import SMALL_VALUES, OuterConfig
from hetsync.sync.messages import NO_BOUND, Settings, settings_of
from hetsync.sync.rounds_rule import (
    ADAPTIVE_DELAY_COSTS,
    CALM_WINDOWS,
    DELAY_COSTS,
    FIRST_TASKS,
    GREATER_QUORUM,
    LASTING_WINDOWS,
    MOST_ACCUMULATION,
    MOST_PATIENCE,
    OVERWHELMING,
    PATIENCE_WITH_OTHERS,
    RETRY_WINDOWS,
    SETTLING_TASKS,
    WINDOW_ROUNDS,
    WINDOW_TASKS,
    RoundsChange,
    RoundsRule,
    begun_behind,
    found_before,
    rises_of,
    rule_for,
)

SHARES = {0: 30, 1: 10}
SyncConfig = partial(schema.SyncConfig, wire="float32")  # for the other keys' rules
K_BY_RULE = SyncConfig(delay_bound=4, quorum=0.25, accumulation="auto", grace=0, fragments=1)
BY_RULE = SyncConfig(delay_bound=4, grace=0, fragments=1)


class Job:
    """Feeds a rule with windows; `costs` tells the work and the waits at a K, over a second of computing."""

    def __init__(self, accumulation=1, sync=K_BY_RULE, adaptive=False):
        self.rule, self.version = rule_for(sync, adaptive=adaptive), 0
        self.settings = replace(settings_of(sync), accumulation=accumulation)

    @property
    def accumulation(self):
        return self.settings.accumulation

    def window(self, costs):
        for rank in SHARES:
            for _ in range(SETTLING_TASKS + WINDOW_TASKS):
                self.rule.observe(rank, 1.0, *costs(self.accumulation))
        self.version += WINDOW_ROUNDS
        change = self.rule.decide(self.settings, self.version, SHARES)
        if change is not None:
            self.settings = change.applied_to(self.settings)
        return change

    def windows(self, costs, count):
        """K after each."""
        return [self.accumulation for _ in range(count) if self.window(costs) or True]


def work(at_one):
    return lambda k: (at_one / k, 0.0)


def test_k_doubles_where_rounds_are_a_notable_part_of_a_slice():
    change = Job().window(work(0.5))
    assert (change.accumulation, change.round, change.work, change.waits) == (2, WINDOW_ROUNDS, 0.5, 0.0)
    assert change.reason == "rounds take 50% of a slice, and waits 0%: D = 4, K = 2, q = 0.25"


def test_k_stays_where_a_doubling_would_cost_more_than_it_saves():
    assert Job().windows(work(0.35), 5) == [1] * 5


def test_waits_count_twice_since_a_doubling_may_end_them():
    assert Job().windows(lambda k: (0.0, 0.15), 5) == [1] * 5
    assert Job().window(lambda k: (0.0, 0.25)).accumulation == 2


def test_a_second_doubling_must_save_more():
    assert Job().windows(work(1.2), 4) == [2] * 4
    assert Job().windows(work(2.0), 4) == [2, 4, 4, 4]


def test_k_is_bounded():
    assert max(Job().windows(work(100.0), 10)) == MOST_ACCUMULATION


def test_a_doubling_that_saves_too_little_is_taken_back_and_tried_again_ever_more_seldom():
    job = Job()
    assert job.window(lambda k: (0.0, 0.5)).accumulation == 2
    back = job.window(lambda k: (0.0, 0.4))
    assert (back.accumulation, back.reason) == (
        1,
        "rounds take 0% of a slice, and waits 40%, so fewer or smaller ones save too little: D = 4, K = 1, q = 0.25",
    )
    assert job.windows(lambda k: (0.0, 0.5), RETRY_WINDOWS - 1) == [1] * (RETRY_WINDOWS - 1)
    assert job.windows(lambda k: (0.0, 0.4), 2) == [2, 1]
    assert job.windows(lambda k: (0.0, 0.5), 4 * RETRY_WINDOWS) == [1] * (4 * RETRY_WINDOWS - 1) + [2]


def test_a_window_is_long_enough_to_be_more_than_a_moment_and_ends_where_ranks_change():
    rule = rule_for(K_BY_RULE)
    for _ in range(SETTLING_TASKS + 99):
        for rank in SHARES:
            rule.observe(rank, 0.01, 0.01, 0.01)
    assert rule.decide(settings_of(K_BY_RULE), WINDOW_ROUNDS, SHARES) is None
    for rank in SHARES:
        rule.observe(rank, 0.0101, 0.01, 0.01)
    rule.restart(WINDOW_ROUNDS)
    assert rule.decide(settings_of(K_BY_RULE), 2 * WINDOW_ROUNDS, SHARES) is None
    for rank in SHARES:
        for _ in range(SETTLING_TASKS + WINDOW_TASKS):
            rule.observe(rank, 1.0, 1.0, 0.0)
    assert rule.decide(settings_of(K_BY_RULE), 2 * WINDOW_ROUNDS, SHARES).accumulation == 2


def test_k_falls_once_rounds_have_been_cheap_for_long_and_ever_more_seldom():
    slow, quick = lambda k: (0.0, 0.5 if k == 1 else 0.0), lambda k: (0.0, 0.0)
    assert Job(accumulation=2).windows(quick, CALM_WINDOWS) == [2] * (CALM_WINDOWS - 1) + [1]
    course = Job().windows(slow, 1000)  # K = 2 ends the waits, K = 1 brings them back
    lowered = [n for n in range(1, 1000) if course[n] < course[n - 1]]
    assert lowered == [4 * CALM_WINDOWS, 4 * CALM_WINDOWS + 1 + 16 * CALM_WINDOWS, *lowered[2:]]
    assert len(lowered) == 3


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_make_k_swing(seed):
    dice = random.Random(seed)
    middle = dice.uniform(0.01, 2.0)
    course = Job().windows(lambda k: (middle / k * dice.uniform(0.9, 1.1), 0.0), 50)
    assert sum(course[n] != course[n - 1] for n in range(1, 50)) <= 2


def test_ranks_count_by_their_parts_of_a_batch():
    rule = rule_for(K_BY_RULE)
    for rank, part in ((0, 0.2), (1, 1.6)):
        for _ in range(SETTLING_TASKS + WINDOW_TASKS):
            rule.observe(rank, 1.0, part, part)
    change = rule.decide(settings_of(K_BY_RULE), WINDOW_ROUNDS, SHARES)
    assert change.work == change.waits == pytest.approx(0.75 * 0.2 + 0.25 * 1.6)


def test_a_window_has_tasks_of_every_rank_and_enough_rounds():
    rule = RoundsRule(rises_of(K_BY_RULE), version=100)
    for _ in range(SETTLING_TASKS + WINDOW_TASKS):
        rule.observe(0, 1.0, 1.0, 0.0)
    assert rule.decide(settings_of(K_BY_RULE), 100 + WINDOW_ROUNDS, SHARES) is None  # nothing of rank 1
    for _ in range(SETTLING_TASKS + WINDOW_TASKS):
        rule.observe(1, 1.0, 1.0, 0.0)
    assert rule.decide(settings_of(K_BY_RULE), 100 + WINDOW_ROUNDS - 1, SHARES) is None
    assert rule.decide(settings_of(K_BY_RULE), 100 + WINDOW_ROUNDS, {}) is None
    assert rule.decide(settings_of(K_BY_RULE), 100 + WINDOW_ROUNDS, SHARES).accumulation == 2


def test_the_first_tasks_after_the_start_and_after_a_change_do_not_count():
    """Rounds have yet to come to their number."""
    job = Job(sync=BY_RULE)
    for expected in (GREATER_QUORUM, 0.25):
        for rank in SHARES:
            for number in range(SETTLING_TASKS + WINDOW_TASKS):
                job.rule.observe(rank, 1.0, 0.0 if number < SETTLING_TASKS else 0.1, 0.0)
        job.version += WINDOW_ROUNDS
        change = job.rule.decide(job.settings, job.version, SHARES)
        assert (change.quorum, change.work) == (expected, pytest.approx(0.1))
        job.settings = replace(job.settings, quorum=change.quorum)


# The quorum.


def rounds_work(at_first):
    """With q = 0.25, and less with what the rule has come to."""
    return lambda settings: at_first / settings.accumulation * (1.0 if settings.quorum < GREATER_QUORUM else 0.56)


def windows(job, work, count):
    """K and q after each."""
    found = []
    for _ in range(count):
        now = work(job.settings)
        job.window(lambda k, now=now: (now, 0.0))
        found.append((job.settings.accumulation, job.settings.quorum))
    return found


def test_by_default_the_quorum_grows_where_a_rounds_work_is_a_notable_part_of_a_slice():
    assert windows(Job(sync=BY_RULE), rounds_work(0.05), 5) == [(1, 0.25)] * 5
    job = Job(sync=BY_RULE)
    assert windows(job, rounds_work(0.1), 5) == [(1, GREATER_QUORUM)] * 5
    assert windows(Job(sync=BY_RULE), rounds_work(5.0), 5) == [(1, GREATER_QUORUM)] * 5  # K is the recipe's


def test_the_quorum_grows_before_k_does():
    both = SyncConfig(delay_bound=4, accumulation="auto", grace=0, fragments=1)
    assert windows(Job(sync=both), rounds_work(0.2), 5) == [(1, 0.5)] * 5
    assert windows(Job(sync=both), rounds_work(0.9), 3) == [(1, 0.5), (2, 0.5), (2, 0.5)]
    assert Job(sync=both).window(lambda k: (0.0, 0.5)).accumulation == 2  # waits, which a quorum does not end


def test_the_quorum_falls_once_rounds_have_been_cheap_for_long():
    job = Job(sync=BY_RULE)
    windows(job, rounds_work(0.1), 1)
    course = windows(job, rounds_work(0.01), 4 * CALM_WINDOWS)
    assert course == [(1, 0.5)] * (4 * CALM_WINDOWS - 1) + [(1, 0.25)]


def test_a_quorum_that_saves_too_little_is_taken_back():
    job = Job(sync=BY_RULE)
    assert windows(job, lambda settings: 0.1, 3) == [(1, 0.5), (1, 0.25), (1, 0.25)]


@pytest.mark.parametrize(
    "sync",
    [
        SyncConfig(1),
        SyncConfig(2),
        SyncConfig(delay_bound=4, quorum=1.0),
        SyncConfig(delay_bound=4, quorum=0.7),
        SyncConfig(delay_bound=4, grace=1),
    ],
)
def test_a_rule_gives_no_grace_where_it_would_change_nothing(sync):
    assert "grace" not in {rise.key for rise in rises_of(sync)}


def test_grace_comes_where_a_greater_quorum_leaves_work_that_is_a_notable_part():
    def work(at_first):
        part = {(0.25, 0): 1.0, (0.5, 0): 0.56, (0.5, 1): 0.4}
        return lambda settings: at_first / settings.accumulation * part[settings.quorum, settings.grace]

    def course(sync, at_first):
        job, found, now = Job(sync=sync), [], work(at_first)
        for _ in range(4):
            job.window(lambda k: (now(job.settings), 0.0))
            found.append((job.settings.accumulation, job.settings.quorum, job.settings.grace))
        return found

    default = SyncConfig(delay_bound=4, fragments=1)
    assert course(default, 0.1) == [(1, 0.5, 0)] * 4
    assert course(default, 0.2) == [(1, 0.5, 0), *[(1, 0.5, 1)] * 3]
    assert course(replace(default, accumulation="auto"), 1.2) == [(1, 0.5, 0), (1, 0.5, 1), (2, 0.5, 1), (2, 0.5, 1)]


def test_beside_fragments_grace_must_save_more():
    job = Job(sync=SyncConfig(delay_bound=4, quorum=0.5))
    assert job.window(lambda k: (0.16, 0.0)) is None
    change = job.window(lambda k: (0.21, 0.0))
    assert change.grace == 1
    assert change.reason == "rounds take 21% of a slice, and waits 0%: D = 4, K = 1, q = 0.5, grace 1, 2 fragments"


def test_without_fragments_seven_hundredths_are_enough():
    job = Job(sync=SyncConfig(delay_bound=4, quorum=0.5, fragments=1))
    assert job.window(lambda k: (0.066, 0.0)) is None
    assert job.window(lambda k: (0.068, 0.0)).grace == 1


def test_what_came_last_goes_first():
    job = Job(sync=SyncConfig(delay_bound=4, fragments=1))
    job.settings = replace(job.settings, quorum=0.5, grace=1)  # as a resumed job may have it
    for expected in ((0.5, 0), (0.25, 0)):
        for _ in range(CALM_WINDOWS - 1):
            assert job.window(lambda k: (0.0, 0.0)) is None
        change = job.window(lambda k: (0.0, 0.0))
        assert (change.quorum, change.grace) == expected


def test_it_goes_below_an_eighth_of_the_work_at_which_it_came():
    for work, last in ((0.0095, 0.5), (0.0075, 0.25)):  # q comes at 0.068
        job = Job(sync=SyncConfig(delay_bound=4, grace=0, fragments=1))
        job.settings = replace(job.settings, quorum=0.5)
        for _ in range(CALM_WINDOWS):
            job.window(lambda k, work=work: (work, 0.0))
        assert job.settings.quorum == last


def test_what_was_refused_once_falls_as_if_it_had_not_been_tried():
    job = Job(sync=BY_RULE)
    assert windows(job, lambda settings: 0.1, 2) == [(1, 0.5), (1, 0.25)]
    windows(job, rounds_work(0.1), RETRY_WINDOWS)
    assert job.settings.quorum == 0.5
    course = windows(job, rounds_work(0.01), 4 * CALM_WINDOWS)
    assert course[-2:] == [(1, 0.5), (1, 0.25)]


def test_fewer_rounds_that_save_nothing_are_no_reason_against_a_greater_k():
    """As behind a link that carries one round after the other: all are ready when the next may start."""
    job = Job(sync=SyncConfig(delay_bound=4, accumulation="auto", fragments=1))
    found = []
    for _ in range(6):
        job.window(work(0.6))
        found.append((job.accumulation, job.settings.quorum, job.settings.grace))
    assert found == [(1, 0.5, 0), (1, 0.25, 0), (1, 0.25, 1), (1, 0.25, 0), (2, 0.25, 0), (2, 0.25, 0)]


def test_what_was_refused_does_not_come_back_with_something_else():
    job = Job(sync=SyncConfig(delay_bound=4))
    assert job.window(lambda k: (0.5, 0.0)).quorum == 0.5
    assert job.window(lambda k: (0.25, 0.0)).grace == 1
    assert job.window(lambda k: (0.25, 0.0)).grace == 0  # it has saved nothing
    change = job.window(lambda k: (0.25, 0.3))
    assert (change.quorum, change.grace, change.fragments) == (0.5, 0, 4)


def test_each_refusal_has_a_time_of_its_own():
    job = Job(sync=SyncConfig(delay_bound=4, quorum=0.25, accumulation="auto", fragments=1))
    assert [job.window(lambda k: (0.1, 0.0)).grace for _ in range(2)] == [1, 0]
    for _ in range(RETRY_WINDOWS - 2):
        assert job.window(lambda k: (0.1, 0.0)) is None
    assert job.window(lambda k: (0.1, 0.5)).accumulation == 2
    assert job.window(lambda k: (0.1, 0.5)).accumulation == 1
    assert [job.window(lambda k: (0.1, 0.0)).grace for _ in range(2)] == [1, 0]  # as its time was over
    assert job.windows(lambda k: (0.0, 0.5), RETRY_WINDOWS - 2) == [1] * (RETRY_WINDOWS - 2)
    assert job.windows(lambda k: (0.0, 0.5), 1) == [2]


def test_nothing_is_by_rule_where_the_recipe_sets_both():
    assert rule_for(SyncConfig(delay_bound=4, quorum=0.25, grace=0, fragments=1)) is None


@pytest.mark.parametrize(
    ("sync", "found", "expected"),
    [
        (SyncConfig(delay_bound=4, fragments=1), Settings(4, 0.5, 1), (0.5, 0, 1)),
        (SyncConfig(delay_bound=4, fragments=1), Settings(4, 0.5, 1, grace=1), (0.5, 1, 1)),
        (SyncConfig(delay_bound=4, fragments=1), Settings(4, 0.25, 1), (0.25, 0, 1)),
        (SyncConfig(delay_bound=4, fragments=1), Settings(4, 1.0, 4), (0.5, 0, 1)),  # of another recipe
        (SyncConfig(delay_bound=4, quorum=0.4, fragments=1), Settings(4, 0.5, 4, grace=2), (0.4, 1, 1)),
        (
            SyncConfig(delay_bound=4, grace=1, fragments=1),
            Settings(4, 0.5),
            (0.25, 1, 1),
        ),  # with grace a greater q saves nothing
        (SyncConfig(delay_bound=4, quorum=0.7, grace=0, fragments=1), Settings(4, 0.5, 4), (0.7, 0, 1)),
        (SyncConfig(delay_bound=4, quorum=0.7, accumulation="auto", fragments=1), Settings(4, 0.7, 8), (0.7, 0, 4)),
        (SyncConfig(delay_bound=4, accumulation="auto", fragments=1), Settings(4, 0.5, 2), (0.5, 0, 2)),
        (SyncConfig(delay_bound=4, accumulation="auto", fragments=1), Settings(4, 0.25, 2), (0.25, 0, 2)),
    ],
)
def test_a_resumed_job_goes_on_with_what_the_rule_had_come_to(sync, found, expected):
    settings = found_before(sync, found)
    assert (settings.quorum, settings.grace, settings.accumulation) == expected


def test_a_step_takes_nothing_along_that_was_not_worth_its_cost():
    job = Job(sync=SyncConfig(delay_bound=4, accumulation="auto", grace=0, fragments=1))
    raised = job.window(lambda k: (0.05, 0.3))
    assert (raised.accumulation, raised.quorum) == (2, 0.25)
    back = job.window(lambda k: (0.05, 0.3))
    assert (back.accumulation, back.quorum) == (1, 0.25)


@pytest.mark.parametrize("change", [lambda job: job.rule.restart(job.version), lambda job: job.rule.forget_promise()])
def test_what_was_promised_to_other_ranks_or_shares_is_forgotten(change):
    job = Job(sync=BY_RULE)
    assert job.window(lambda k: (0.1, 0.0)).quorum == GREATER_QUORUM
    change(job)
    assert job.window(lambda k: (0.1, 0.0)) is None


def test_settings_that_a_death_has_set_back_are_not_taken_back_further():
    sync = SyncConfig(delay_bound=4, accumulation="auto", grace=0, fragments=1)
    job = Job(sync=sync)
    assert job.window(lambda k: (0.1, 0.0)).quorum == GREATER_QUORUM
    job.settings = settings_of(sync)
    assert job.window(lambda k: (0.1, 0.0)) is None


def test_a_greater_quorum_is_not_tried_again_where_rounds_have_grace():
    job = Job(sync=SyncConfig(delay_bound=4, fragments=1))
    assert [job.window(lambda k: (0.1, 0.0)).quorum for _ in range(2)] == [0.5, 0.25]
    assert job.window(lambda k: (0.1, 0.0)).grace == 1
    for _ in range(2 * RETRY_WINDOWS):
        assert job.window(lambda k: (0.08, 0.0)) is None


# Fragments.


def test_they_become_more_where_ranks_wait_for_the_link():
    rises = [(rise.key, rise.before, rise.value) for rise in rises_of(SyncConfig(delay_bound=4))]
    assert rises == [("quorum", 0.25, 0.5), ("grace", 0, 1), ("fragments", 2, 4)]
    sync = SyncConfig(delay_bound=4, quorum=0.5, grace=0)
    job = Job(sync=sync)
    change = job.window(lambda k: (0.0, 0.2))
    assert job.settings == replace(settings_of(sync), fragments=4)
    assert change.reason == "rounds take 0% of a slice, and waits 20%: D = 4, K = 1, q = 0.5, 4 fragments"


def test_more_of_them_that_save_nothing_do_not_keep_rounds_from_being_fewer():
    """As where ranks wait for stragglers, or for a link's latency."""
    job, found = Job(sync=SyncConfig(delay_bound=4, quorum=0.5, accumulation="auto", grace=0)), []
    for _ in range(3):
        job.window(lambda k: (0.0, 0.3 if k == 1 else 0.0))
        found.append((job.accumulation, job.settings.fragments))
    assert found == [(1, 4), (1, 2), (2, 2)]


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_a_resumed_job_has_what_the_rule_had_found_whatever_fragments_it_had(fragments):
    found = found_before(
        SyncConfig(delay_bound=4), replace(settings_of(SyncConfig(delay_bound=4)), quorum=0.5, fragments=fragments)
    )
    assert (found.quorum, found.fragments) == (0.5, max(2, fragments))
    larger = found_before(
        SyncConfig(delay_bound=4, fragments=8),
        replace(settings_of(SyncConfig(delay_bound=4)), quorum=0.5, fragments=fragments),
    )
    assert (larger.quorum, larger.fragments) == (0.5, 8)


# Delay.

AUTO = SyncConfig(delay_bound="auto", quorum=0.25, grace=0, fragments=1)
WAITS = 2 * DELAY_COSTS


def no_waits_with_delay(job, at_zero):
    return lambda k: (0.0, at_zero if job.settings.synchronous else 0.0)


def test_a_job_begins_synchronous_and_stays_so_where_nobody_waits():
    job = Job(sync=AUTO)
    assert job.settings.synchronous
    for _ in range(5 * CALM_WINDOWS):
        assert job.window(lambda k: (0.02, DELAY_COSTS / 2)) is None


def test_where_ranks_wait_it_goes_on_with_delay():
    job = Job(sync=AUTO)
    change = job.window(no_waits_with_delay(job, WAITS))
    assert (change.delay_bound, job.settings.delay_bound) == (4, 4)
    assert change.reason == "rounds take 0% of a slice, and waits 20%: D = 4, K = 1, q = 0.25"


def test_delay_that_saves_too_little_is_taken_back():
    job = Job(sync=AUTO)
    assert [job.window(lambda k: (0.0, WAITS)).delay_bound for _ in range(2)] == [4, 0]
    for _ in range(RETRY_WINDOWS - 1):
        assert job.window(lambda k: (0.0, WAITS)) is None
    assert job.window(lambda k: (0.0, WAITS)).delay_bound == 4


def test_it_looks_back_ever_more_seldom():
    job, found = Job(sync=AUTO), []
    for window in range(22 * CALM_WINDOWS):
        change = job.window(no_waits_with_delay(job, WAITS))
        if change is not None:
            found.append((window, change.delay_bound))
    once, twice = 4 * CALM_WINDOWS, 16 * CALM_WINDOWS
    assert found == [(0, 4), (once, 0), (once + 1, 4), (once + 1 + twice, 0), (once + 2 + twice, 4)]


def test_what_has_changed_meanwhile_leaves_it_synchronous():
    job = Job(sync=AUTO)
    job.window(no_waits_with_delay(job, WAITS))
    changes = [change for _ in range(9 * CALM_WINDOWS) if (change := job.window(lambda k: (0.0, 0.0)))]
    assert [change.delay_bound for change in changes] == [0]
    assert "to see what they take without delay" in changes[0].reason


def test_rounds_become_fewer_only_with_delay_and_stay_so_over_a_look_back():
    job = Job(sync=SyncConfig(delay_bound="auto", grace=0, fragments=1))
    work = 0.1  # of rounds, more than a greater quorum costs
    first, second = job.window(lambda k: (work, WAITS)), job.window(lambda k: (work, 0.0))
    assert (first.delay_bound, first.quorum, second.quorum) == (4, 0.25, GREATER_QUORUM)
    later = [change for _ in range(5 * CALM_WINDOWS) if (change := job.window(lambda k: (work / 2, 0.0)))]
    assert [(change.delay_bound, change.quorum) for change in later] == [(0, GREATER_QUORUM)]


@pytest.mark.parametrize("delay_bound", [0, 4])
def test_a_delay_bound_that_is_given_stays(delay_bound):
    job = Job(sync=SyncConfig(delay_bound=delay_bound))
    for _ in range(40):
        job.window(lambda k: (0.1, 0.5))
    assert job.settings.delay_bound == delay_bound


@pytest.mark.parametrize("delay_bound", [0, 4])
def test_a_resumed_job_has_the_delay_that_it_had_come_to(delay_bound):
    assert found_before(AUTO, replace(settings_of(AUTO), delay_bound=delay_bound)).delay_bound == delay_bound


@pytest.mark.parametrize("words", [{"accumulation": 4}, {"outer": OuterConfig("nesterov")}])
def test_what_means_another_thing_without_delay_asks_for_it(words):
    assert SyncConfig(**words).delay_bound == 4
    assert SyncConfig(0, **words).delay_bound == 0


def bounds(job, waits):
    """After windows at D = 0 with these waits."""
    for each in waits:
        job.window(no_waits_with_delay(job, each))
        yield job.settings.delay_bound


def test_optimizers_that_lose_by_delay_must_wait_for_longer():
    little, enough = 0.9 * ADAPTIVE_DELAY_COSTS, 1.1 * ADAPTIVE_DELAY_COSTS
    assert set(bounds(Job(sync=AUTO, adaptive=True), [little] * 20)) == {0}
    assert list(bounds(Job(sync=AUTO, adaptive=True), [enough] * LASTING_WINDOWS)) == [0] * (LASTING_WINDOWS - 1) + [4]


@pytest.mark.parametrize("adaptive", [False, True])
def test_where_ranks_have_waited_from_the_start_the_first_window_suffices(adaptive):
    assert list(bounds(Job(sync=AUTO, adaptive=adaptive), [1.2 * ADAPTIVE_DELAY_COSTS])) == [4]


@pytest.mark.parametrize("adaptive", [False, True])
def test_unless_it_was_in_one_task(adaptive):
    job = Job(sync=AUTO, adaptive=adaptive)
    for rank in SHARES:
        for task in range(SETTLING_TASKS + WINDOW_TASKS):
            job.rule.observe(rank, 1.0, 0.0, 20.0 if task == SETTLING_TASKS + 2 else 0.0)
    assert job.rule.decide(job.settings, WINDOW_ROUNDS, SHARES) is None
    job.version = WINDOW_ROUNDS
    assert set(bounds(job, [0.0, *[5.0, 5.0, 0.0] * 4])) == {0}


def test_one_moments_trouble_is_no_reason_for_delay():
    """It is where ranks wait from the start."""
    assert set(bounds(Job(sync=AUTO), [0.0, *[5.0, 5.0, 0.0] * 4])) == {0}
    assert list(bounds(Job(sync=AUTO), [0.0, *[WAITS] * LASTING_WINDOWS]))[-2:] == [0, 4]


def test_delay_that_has_lost_training_does_not_come_again():
    job = Job(sync=AUTO)
    job.window(no_waits_with_delay(job, WAITS))
    change = job.rule.give_up_delay(job.settings, job.version, "delay has lost training")
    assert change.reason == "delay has lost training: D = 0"
    job.settings = change.applied_to(job.settings)
    assert job.settings.synchronous
    assert [job.window(lambda k: (0.0, 5.0)) for _ in range(2 * RETRY_WINDOWS)] == [None] * 2 * RETRY_WINDOWS
    job.rule.restart(job.version)
    assert job.window(lambda k: (0.0, 5.0)) is None


def test_no_bound_is_told_as_such():
    change = RoundsChange(
        round=1,
        delay_bound=NO_BOUND,
        accumulation=2,
        quorum=0.5,
        grace=0,
        fragments=1,
        wire="float32",
        work=0,
        waits=0,
        reason="",
    )
    assert change.told["delay_bound"] is None


def test_a_look_back_and_a_resume_without_delay_have_no_larger_batch():
    sync = SyncConfig(delay_bound="auto", quorum=0.25, accumulation="auto", grace=0, fragments=1)
    job = Job(sync=sync)
    job.window(lambda k: (0.0, WAITS))
    job.settings = replace(job.settings, accumulation=2)
    while not job.settings.synchronous:
        job.window(lambda k: (0.1, 0.0))
    assert job.accumulation == 1
    assert found_before(sync, replace(job.settings, accumulation=2)) == settings_of(sync)


def test_delay_keeps_its_promise_over_other_shares():
    """With delay ranks are cut otherwise, so shares move at once."""
    job = Job(sync=AUTO)
    job.window(lambda k: (0.0, WAITS))
    job.rule.forget_promise()
    assert job.window(lambda k: (0.0, WAITS)).delay_bound == 0


def test_where_ranks_have_changed_it_looks_back_soon():
    job = Job(sync=AUTO)
    job.window(no_waits_with_delay(job, WAITS))
    job.rule.restart(job.version)
    found = [job.window(no_waits_with_delay(job, 0.0)) for _ in range(CALM_WINDOWS)]
    assert [change and change.delay_bound for change in found] == [None] * (CALM_WINDOWS - 1) + [0]


def test_what_a_look_back_costs_it_comes_so_much_later_for():
    """A window in step behind a link of WAITS slices takes about as many times as long."""
    job, slices = Job(sync=AUTO), 20.0
    job.window(no_waits_with_delay(job, slices))
    found = [job.window(no_waits_with_delay(job, slices)) for _ in range(int(4 * CALM_WINDOWS * slices))]
    assert [place for place, change in enumerate(found) if change] == [len(found) - 1]
    job.window(no_waits_with_delay(job, slices))
    job.rule.restart(job.version)  # others are here, behind the same link or another
    found = [job.window(no_waits_with_delay(job, slices)) for _ in range(int(CALM_WINDOWS * PATIENCE_WITH_OTHERS))]
    assert [place for place, change in enumerate(found) if change] == [len(found) - 1]


def test_but_no_link_is_so_slow_that_it_is_never_looked_at_again():
    job = Job(sync=AUTO)
    job.rule = rule_for(AUTO, begun=begun_behind(AUTO, job.settings, 1e9))
    job.settings = replace(job.settings, delay_bound=4)
    found = [job.window(lambda k: (0.0, 0.0)) for _ in range(int(CALM_WINDOWS * MOST_PATIENCE))]
    assert [place for place, change in enumerate(found) if change] == [len(found) - 1]


# Before the first round.


@pytest.mark.parametrize("wire", ["auto", "float32", "int4"])
def test_behind_a_link_that_is_seen_to_be_very_slow_a_job_begins_with_delay(wire):
    sync = replace(AUTO, wire=wire)
    first = settings_of(sync)
    begun = begun_behind(sync, first, 1.01 * OVERWHELMING)
    settings = begun.applied_to(first)
    assert (settings.delay_bound, settings.wire) == (4, "top64" if wire == "auto" else wire)
    assert (begun.round, begun.work, begun.waits) == (0, 0.0, 1.01 * OVERWHELMING)
    assert begun.sentence.startswith("from round 0 on: a sum of all weights takes as long as 2.02 slices: D = 4, K = 1")
    assert begun_behind(sync, first, 0.99 * OVERWHELMING) is None
    # As a job that is gone on with has them; it knows of the link as before.
    assert found_before(sync, settings) == settings
    again = begun_behind(sync, replace(settings, quorum=0.5), 10.0, version=7)
    assert again.applied_to(first) == replace(settings, quorum=0.5)
    assert (again.round, again.waits) == (7, 10.0)


@pytest.mark.parametrize("slices", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_no_time_is_no_reason(slices):
    assert begun_behind(AUTO, settings_of(AUTO), slices) is None


@pytest.mark.parametrize("delay_bound", [0, 1, 4, None])
def test_a_bound_by_hand_is_what_it_begins_with(delay_bound):
    sync = replace(AUTO, delay_bound=delay_bound)
    assert begun_behind(sync, settings_of(sync), 1e9) is None


def test_that_the_link_was_slow_for_a_moment_a_look_back_shows():
    """The longer it would have been, the later; and nothing is promised that a window could miss."""
    begun = begun_behind(AUTO, settings_of(AUTO), 3.0)
    job = Job(sync=AUTO)
    job.rule = rule_for(AUTO, begun=begun)
    job.settings = begun.applied_to(job.settings)
    found = [job.window(lambda k: (0.0, 0.0)) for _ in range(3 * CALM_WINDOWS + 20)]
    assert [(place, change.delay_bound) for place, change in enumerate(found) if change] == [(3 * CALM_WINDOWS - 1, 0)]


# The wire.

WIRE_BY_RULE = SyncConfig(delay_bound=4, quorum=0.25, grace=0, fragments=1, wire="auto")


def test_it_is_coarser_where_ranks_wait_for_rounds():
    job = Job(sync=WIRE_BY_RULE)
    assert job.window(lambda k: (0.5, 0.0)) is None  # which bytes make no less
    change = job.window(lambda k: (0.0, 0.1))
    assert change.wire == "int8"
    assert change.reason == "rounds take 0% of a slice, and waits 10%: D = 4, K = 1, q = 0.25, int8 on the wire"
    assert [job.window(lambda k: (0.0, 0.0)) for _ in range(CALM_WINDOWS)] == [None] * CALM_WINDOWS
    assert job.window(lambda k: (0.0, 5.0)) is None  # nor does one rounding follow another
    assert Job(sync=WIRE_BY_RULE).window(lambda k: (0.0, 1.1)).wire == "top64"


def test_it_is_as_before_where_that_saves_too_little():
    job = Job(sync=WIRE_BY_RULE)
    assert job.window(lambda k: (0.0, 0.1)).wire == "int8"
    assert job.window(lambda k: (0.02, 0.05)).wire == "float32"  # packing takes time, too
    assert job.window(lambda k: (0.0, 0.1)) is None


def test_gradients_travel_as_they_are():
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    assert job.window(lambda k: (0.0, 0.5)).delay_bound == 4
    assert job.window(lambda k: (0.0, 0.1)).wire == "int8"
    assert job.rule.give_up_delay(job.settings, job.version, "lost").wire == "float32"
    assert rule_for(replace(WIRE_BY_RULE, wire="int4")) is None


def test_behind_a_very_slow_link_it_comes_with_delay():
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    change = job.window(lambda k: (0.0, 2.1))
    assert (change.delay_bound, change.wire) == (4, "top64")
    back = job.window(lambda k: (0.0, 2.0))  # it was not the bytes
    assert (back.delay_bound, back.wire) == (4, "float32")
    back = job.window(lambda k: (0.0, 2.0))  # nor that nobody may run ahead
    assert (back.delay_bound, back.wire) == (0, "float32")
    again = next(filter(None, (job.window(lambda k: (0.0, 2.1)) for _ in range(RETRY_WINDOWS + 1))))
    assert again.delay_bound == 4


def test_delay_stays_where_only_what_came_along_was_dear():
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    assert job.window(lambda k: (0.0, 2.1)).wire == "top64"
    assert job.window(lambda k: (2.0, 0.0)).wire == "float32"  # to pack it
    assert [job.window(lambda k: (0.0, 0.0)) for _ in range(3)] == [None] * 3
    assert job.settings.delay_bound == 4


def test_what_came_along_and_was_dear_does_not_come_with_delay_again_soon():
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    job.window(lambda k: (0.0, 2.1))
    job.window(lambda k: (2.0, 0.0))
    job.rule.restart(job.version)  # others, of whom nothing is known
    job.settings = replace(job.settings, delay_bound=0)
    change = job.window(lambda k: (0.0, 2.1))
    assert (change.delay_bound, change.wire) == (4, "float32")


def test_what_came_along_and_was_worth_it_stays():
    """What comes after it is judged by itself."""
    sync = replace(WIRE_BY_RULE, delay_bound="auto", quorum="auto")
    job = Job(sync=sync)
    assert job.window(lambda k: (0.0, 2.1)).wire == "top64"
    assert job.window(lambda k: (0.5, 0.0)).quorum == GREATER_QUORUM
    back = job.window(lambda k: (0.5, 0.0))
    assert (back.quorum, back.wire) == (0.25, "top64")


def test_it_does_not_come_along_where_ranks_wait_for_each_other():
    """In each round one of them for nobody."""
    rule = rule_for(replace(WIRE_BY_RULE, delay_bound="auto"))
    for number in range(SETTLING_TASKS + WINDOW_TASKS):
        for rank in SHARES:
            rule.observe(rank, 1.0, 0.0, 5.0 * (number % len(SHARES) == rank))
    change = rule.decide(Settings(0, 0.25), WINDOW_ROUNDS, SHARES)
    assert (change.delay_bound, change.wire) == (4, "float32")


def looked_back(job):
    """A job in delayed mode, as it is in step to see what ranks would wait for."""
    while not job.settings.synchronous:
        job.window(lambda k: (0.0, 0.0))
    return job


@pytest.mark.parametrize(("waits", "wire"), [(2.5, "top64"), (1.5, "top64"), (0.9, "float32")])
def test_after_a_look_back_it_is_what_it_was_if_ranks_still_wait_for_as_long(waits, wire):
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    assert job.window(lambda k: (0.0, 2.1)).wire == "top64"
    assert looked_back(job).settings.wire == "float32"
    change = next(filter(None, (job.window(lambda k: (0.0, waits)) for _ in range(LASTING_WINDOWS))))
    assert (change.delay_bound, change.wire) == (4, wire)


def test_other_ranks_have_no_wire_from_before_a_look_back():
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    job.window(lambda k: (0.0, 2.1))
    looked_back(job).rule.restart(job.version)
    assert job.window(lambda k: (0.0, 1.5)).wire == "float32"


@pytest.mark.parametrize("waits", [2.5, 0.2])
def test_after_a_look_back_it_is_no_coarser_than_it_was(waits):
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    assert job.window(lambda k: (0.0, 1.9)).wire == "float32"
    assert job.window(lambda k: (0.0, 0.5)).wire == "int8"
    assert looked_back(job).settings.wire == "float32"
    change = next(filter(None, (job.window(lambda k: (0.0, waits)) for _ in range(LASTING_WINDOWS))))
    assert (change.delay_bound, change.wire) == (4, "int8")


def test_small_models_keep_the_wire_that_they_begin_with():
    """Blocks that are filled up would be more bytes."""
    sync = schema.SyncConfig()
    assert [sync.for_model(values).wire for values in (1, SMALL_VALUES - 1, SMALL_VALUES)] == [*2 * ["float32"], "auto"]
    assert schema.SyncConfig(wire="int8").for_model(1).wire == "int8"


def test_a_resumed_job_goes_on_with_its_wire():
    assert found_before(WIRE_BY_RULE, Settings(4, 0.25, wire="int8")).wire == "int8"
    assert found_before(replace(WIRE_BY_RULE, wire="float32"), Settings(4, 0.25, wire="int8")).wire == "float32"


def test_behind_a_very_slow_link_few_rounds_in_step_are_enough():
    def decided(waits, seconds=1.0):
        """`waits` of rank 0 and of the others, over computing, by task after the first: as soon as there is a change,
        which must not be before the last task."""
        rule, changes = rule_for(SyncConfig(quorum=0.25, grace=0, fragments=1)), []
        for of_ranks in [*FIRST_TASKS * [(0.0, 0.0)], *waits]:
            assert not any(changes)
            for rank in SHARES:
                rule.observe(rank, seconds, 0.0, seconds * of_ranks[rank > 0])
            changes.append(rule.decide(Settings(0, 0.25), 1, SHARES))
        return changes[-1]

    change = decided(2 * [(5.0, 4.0)])
    assert (change.delay_bound, change.waits) == (4, pytest.approx(0.75 * 5 + 0.25 * 4))
    assert decided([(5.0, 4.0)]) is None
    assert decided(2 * [(5.0, 0.1)]) is None  # a rank that others wait for
    assert decided([(5.0, 0.1), (0.1, 5.0)]) is None  # each in its turn
    assert decided([(0.0, 0.0), (50.0, 50.0)]) is None  # a moment
    assert decided([(0.2, 0.2), (0.2, 0.2), (50.0, 50.0)]) is None
    assert decided(2 * [(1.9, 1.9)]) is None
    assert decided(19 * [(50.0, 50.0)], 0.001) is None
    assert decided(20 * [(50.0, 50.0)], 0.001).delay_bound == 4


def test_a_moment_later_is_none_either():
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto"))
    assert job.window(lambda k: (0.0, 0.0)) is None
    for _ in range(2 * LASTING_WINDOWS):
        for rank in SHARES:
            job.rule.observe(rank, 1.0, 0.0, 50.0)
        assert job.rule.decide(job.settings, job.version, SHARES) is None


def test_a_look_back_looks_at_rounds_in_step_alone():
    job = Job(sync=replace(WIRE_BY_RULE, delay_bound="auto", wire="float32"))
    assert job.window(lambda k: (0.0, 2.1)).delay_bound == 4
    job.window(lambda k: (0.0, 0.0))
    while not job.settings.synchronous:
        job.window(lambda k: (0.0, 9.0))
    assert job.rule.decide(job.settings, job.version, SHARES) is None
    assert job.window(lambda k: (0.0, 0.0)) is None


def test_what_a_rise_has_promised_is_judged_by_a_whole_window():
    rule, settings = rule_for(SyncConfig(4, 0.25, "auto", 0, fragments=1)), Settings(4, 0.25)
    for rank in SHARES:
        for _ in range(SETTLING_TASKS):
            rule.observe(rank, 1.0, 0.0, 5.0)
    assert rule.decide(settings, WINDOW_ROUNDS, SHARES) is None
