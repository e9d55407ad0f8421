"""The policy's spokesman: speeds, rebalancing, bad losses, and one letter a rank in the order of the decisions."""

from __future__ import annotations

import math

import pytest
from virtual import make_policy

from hetsync.errors import UserError
from hetsync.slicing import StepTime
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.messages import Began, Completed, Finished, Give, Settings, StartRound, Took
from hetsync.sync.policy import Policy
from hetsync.sync.speeds import LEAST_OBSERVATIONS, SHIFT_PIECES, Speeds


def speeds(*seconds_per_sample, fixed=0.0):
    return Speeds({rank: StepTime(fixed, seconds) for rank, seconds in enumerate(seconds_per_sample)})


# A coordinator with a postman.


class Office:
    """A coordinator of two ranks, and what it has sent."""

    def __init__(self, shares=(8, 8), settings=None, rebalance=True, total=100_000):
        self.letters = []
        self.policy: Policy = make_policy(list(shares), settings or Settings(8, 0.1), total)
        self.coordinator = Coordinator(
            self.policy, speeds(*[1.0] * len(shares)), lambda letters: self.letters.extend(letters.items()), rebalance
        )
        self.coordinator.begin()
        self.version = dict.fromkeys(range(len(shares)), 0)

    def work(self, rank, seconds_per_sample=1.0, loss_sum=0.0):
        """The rank does its next piece; whatever rounds result are complete at once."""
        number, samples = self._next(rank)
        self.coordinator.on([Began(rank, number, self.policy.version)])
        sent = len(self.letters)
        self.coordinator.on([Finished(rank, number, samples, samples * seconds_per_sample, loss_sum)])
        for started in [i for to, letter in self.letters[sent:] if to == 0 for i in letter]:
            if isinstance(started, StartRound):
                self._complete(started)

    def _next(self, rank):
        piece = self.policy.members[rank].held[0].piece
        return piece.number, piece.samples

    def next_samples(self, rank):
        return self._next(rank)[1]

    def _complete(self, started):
        for rank in started.contributors:
            self.coordinator.on([Took(rank, started.number, self.policy.members[rank].ready[-1].piece.number)])
        self.coordinator.on([Completed(started.number)])

    @property
    def shares(self):
        return [member.share for member in self.policy.members.values()]


@pytest.mark.parametrize(("ratio", "moves"), [(1.0, False), (1.05, False), (1.3, True), (3.0, True)])
def test_shares_follow_speeds_only_where_it_pays(ratio, moves):
    """Two ranks of 8: at 5 % difference the best shares gain less than 5 %; at 30 % and more they gain more."""
    office = Office((40, 40))
    for _ in range(3 * LEAST_OBSERVATIONS):
        office.work(0)
        office.work(1, ratio)
    assert sum(office.shares) == 80
    assert (office.shares != [40, 40]) == moves
    if moves:
        assert office.shares[0] / office.shares[1] == pytest.approx(ratio, rel=0.1)


def test_a_gain_of_just_under_five_percent_is_let_be():
    for percent, moves in ((9, False), (12, True)):  # equal shares lose about half of the difference
        office = Office((400, 400))
        for _ in range(3 * LEAST_OBSERVATIONS):
            office.work(0)
            office.work(1, 1 + percent / 100)
        assert (office.shares != [400, 400]) == moves, percent


def test_a_jump_in_speed_moves_shares_after_three_pieces():
    office = Office((40, 40))
    for _ in range(3 * LEAST_OBSERVATIONS + 1):
        office.work(0)
        office.work(1)
    assert office.shares == [40, 40]
    for _ in range(SHIFT_PIECES):
        assert office.shares == [40, 40]
        office.work(0)
        office.work(1, 3.0)
    assert office.shares == [60, 20]


def test_small_pieces_before_a_rest_tell_nothing_of_a_ranks_speed():
    office = Office((40, 40), total=4 * 80 + 60)
    small = 0
    while not office.policy.ended:
        rank = next(rank for rank in (0, 1) if office.policy.members[rank].held)
        full = office.next_samples(rank) == 40
        small += not full
        office.work(rank, 1.0 if full else 9.0)
        if not any(member.held for member in office.policy.members.values()):
            break
    assert small >= 2
    assert [time.seconds_per_sample for time in office.coordinator.speeds.times([0, 1])] == [1.0, 1.0]


def test_shares_stay_where_rebalancing_is_off():
    office = Office((40, 40), rebalance=False)
    for _ in range(3 * LEAST_OBSERVATIONS):
        office.work(0)
        office.work(1, 5.0)
    assert office.shares == [40, 40]


def test_no_share_moves_before_speeds_are_known():
    office = Office((40, 40))
    for _ in range(LEAST_OBSERVATIONS - 1):
        office.work(0)
        office.work(1, 5.0)
    assert office.shares == [40, 40]


def test_new_shares_reach_the_work_that_is_handed_out_next():
    office = Office((40, 40))
    for _ in range(3 * LEAST_OBSERVATIONS):
        office.work(0)
        office.work(1, 4.0)
    sizes = {to: i.piece.samples for to, letter in office.letters for i in letter if isinstance(i, Give)}
    assert sizes == dict(enumerate(office.shares)) == {0: 64, 1: 16}


# Losses.


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_names_the_rank_and_the_remedy(loss):
    office = Office()
    office.work(0, loss_sum=4.0)
    with pytest.raises(UserError, match=r"on rank 1 after \d+ samples: lower optimizer.learning_rate"):
        office.work(1, loss_sum=loss)


def test_the_loss_is_the_mean_over_samples_since_the_last_look():
    office = Office((12, 4))
    assert office.coordinator.take_loss() is None
    office.work(0, loss_sum=12.0)
    office.work(1, loss_sum=20.0)
    assert office.coordinator.take_loss() == pytest.approx(2.0)
    assert office.coordinator.take_loss() is None
    office.work(1, loss_sum=8.0)
    assert office.coordinator.take_loss() == pytest.approx(2.0)


def test_device_seconds_add_up_by_rank():
    office = Office((12, 4))
    for _ in range(3):
        office.work(0, 2.0)
        office.work(1, 0.5)
    assert dict(office.coordinator.device_seconds) == {0: 72.0, 1: 6.0}


# Letters.


def test_every_rank_gets_one_letter_with_all_that_was_decided_in_order():
    office = Office((4, 4, 4), Settings(0, 1.0), total=16)
    assert [to for to, _ in office.letters] == [0, 1, 2]
    for rank, letter in office.letters:
        assert [type(i) for i in letter] == [Give, StartRound, Give, StartRound]
        assert all(i.rank == rank for i in letter if isinstance(i, Give))
        numbers = [i.piece.synchronous_round if isinstance(i, Give) else i.number for i in letter]
        assert numbers == [0, 0, 1, 1]


def test_all_events_of_a_letter_are_answered_in_one():
    office = Office((4, 4))
    office.letters.clear()
    number, samples = office._next(0)
    after = office.policy.members[0].held[1].piece.number
    office.coordinator.on([Began(0, number, 0), Finished(0, number, samples, 1.0), Began(0, after, 0)])
    assert len({to for to, _ in office.letters}) == len(office.letters)
    to_first = dict(office.letters)[0]
    assert [type(i) for i in to_first] == [Give, StartRound]


def test_who_has_nothing_to_hear_gets_no_letter():
    office = Office((4, 4))
    office.letters.clear()
    office.coordinator.on([Began(0, office._next(0)[0], 0)])
    assert office.letters == []
