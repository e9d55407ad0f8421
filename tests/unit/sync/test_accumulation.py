"""K by rule: rounds become fewer where they are dear, and no fewer than that pays."""

import random

import pytest

from hetsync.sync.accumulation import CALM_WINDOWS, MOST, RETRY_WINDOWS, WINDOW_ROUNDS, WINDOW_TASKS, AccumulationRule

SHARES = {0: 30, 1: 10}


class Job:
    """Feeds a rule with windows; `costs` tells the work and the waits at a K, over a second of computing."""

    def __init__(self, accumulation=1):
        self.rule, self.accumulation, self.version = AccumulationRule(), accumulation, 0

    def window(self, costs):
        for rank in SHARES:
            for _ in range(WINDOW_TASKS):
                self.rule.observe(rank, 1.0, *costs(self.accumulation))
        self.version += WINDOW_ROUNDS
        change = self.rule.decide(self.accumulation, self.version, SHARES)
        if change is not None:
            self.accumulation = change.accumulation
        return change

    def windows(self, costs, count):
        """K after each."""
        return [self.accumulation for _ in range(count) if self.window(costs) or True]


def work(at_one):
    return lambda k: (at_one / k, 0.0)


def test_k_doubles_where_rounds_are_a_notable_part_of_a_slice():
    change = Job().window(work(0.5))
    assert (change.accumulation, change.round, change.work, change.waits) == (2, WINDOW_ROUNDS, 0.5, 0.0)
    assert change.reason == "rounds take 50% of a slice, and waits 0%: K = 2"


def test_k_stays_where_a_doubling_would_cost_more_than_it_saves():
    assert Job().windows(work(0.35), 5) == [1] * 5


def test_waits_count_twice_since_a_doubling_may_end_them():
    assert Job().windows(lambda k: (0.0, 0.15), 5) == [1] * 5
    assert Job().window(lambda k: (0.0, 0.25)).accumulation == 2


def test_a_second_doubling_must_save_more():
    assert Job().windows(work(1.2), 4) == [2] * 4
    assert Job().windows(work(2.0), 4) == [2, 4, 4, 4]


def test_k_is_bounded():
    assert max(Job().windows(work(100.0), 10)) == MOST


def test_a_doubling_that_saves_too_little_is_taken_back_and_tried_again_ever_more_seldom():
    job = Job()
    assert job.window(lambda k: (0.0, 0.5)).accumulation == 2
    back = job.window(lambda k: (0.0, 0.4))
    assert (back.accumulation, back.reason) == (
        1,
        "rounds take 0% of a slice, and waits 40%, so fewer of them save too little: K = 1",
    )
    assert job.windows(lambda k: (0.0, 0.5), RETRY_WINDOWS - 1) == [1] * (RETRY_WINDOWS - 1)
    assert job.windows(lambda k: (0.0, 0.4), 2) == [2, 1]
    assert job.windows(lambda k: (0.0, 0.5), 4 * RETRY_WINDOWS) == [1] * (4 * RETRY_WINDOWS - 1) + [2]


def test_a_window_is_long_enough_to_be_more_than_a_moment_and_ends_where_shares_change():
    rule = AccumulationRule()
    for _ in range(99):
        for rank in SHARES:
            rule.observe(rank, 0.01, 0.01, 0.01)
    assert rule.decide(1, WINDOW_ROUNDS, SHARES) is None
    for rank in SHARES:
        rule.observe(rank, 0.0101, 0.01, 0.01)
    rule.restart(WINDOW_ROUNDS)
    assert rule.decide(1, 2 * WINDOW_ROUNDS, SHARES) is None
    for rank in SHARES:
        for _ in range(WINDOW_TASKS):
            rule.observe(rank, 1.0, 1.0, 0.0)
    assert rule.decide(1, 2 * WINDOW_ROUNDS, SHARES).accumulation == 2


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
    rule = AccumulationRule()
    for rank, part in ((0, 0.2), (1, 1.6)):
        for _ in range(WINDOW_TASKS):
            rule.observe(rank, 1.0, part, part)
    change = rule.decide(1, WINDOW_ROUNDS, SHARES)
    assert change.work == change.waits == pytest.approx(0.75 * 0.2 + 0.25 * 1.6)


def test_a_window_has_tasks_of_every_rank_and_enough_rounds():
    rule = AccumulationRule(version=100)
    for _ in range(WINDOW_TASKS):
        rule.observe(0, 1.0, 1.0, 0.0)
    assert rule.decide(1, 100 + WINDOW_ROUNDS, SHARES) is None  # nothing of rank 1
    for _ in range(WINDOW_TASKS):
        rule.observe(1, 1.0, 1.0, 0.0)
    assert rule.decide(1, 100 + WINDOW_ROUNDS - 1, SHARES) is None
    assert rule.decide(1, 100 + WINDOW_ROUNDS, {}) is None
    assert rule.decide(1, 100 + WINDOW_ROUNDS, SHARES).accumulation == 2
