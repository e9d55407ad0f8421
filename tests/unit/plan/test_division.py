"""Ranks that share stages divide micro-batches by speed, into pieces that fit all of them."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime
from hetsync.balance.shares import speed_shares
from hetsync.plan.division import Division, parts_by_speed


def test_pieces_end_where_a_rank_of_any_stage_ends() -> None:
    division = Division([[2], [0, 3], [4, 1]], [StepTime(0.0, each) for each in (1, 1, 1, 3, 2)])
    assert division.pieces(12) == (4, 5, 3)  # 9 + 3, and 4 + 8
    assert division.owners(0, 12) == (2, 2, 2)
    assert division.owners(1, 12) == (0, 0, 3)
    assert division.owners(2, 12) == (4, 1, 1)
    assert [division.share(2, rank, [12, 1]) for rank in (4, 1)] == [4, 9]  # of one sample, the faster


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=4), st.integers(1, 20))
def test_each_rank_has_what_is_planned(speeds: list[tuple[int, int]], samples: int) -> None:
    times = [StepTime(*each) for each in speeds]
    ranks = [*range(len(times))][::-1]
    division = Division([ranks, [9]], times)
    pieces, owners = division.pieces(samples), division.owners(0, samples)
    assert sum(pieces) == samples
    assert min(pieces) > 0
    assert len(pieces) == len(owners) == len(division.owners(1, samples))
    own = [sum(piece for piece, owner in zip(pieces, owners, strict=True) if owner == rank) for rank in ranks]
    assert own == [*parts_by_speed([times[rank] for rank in ranks], samples)]
    if samples >= len(times):
        assert own == [*speed_shares([times[rank] for rank in ranks], samples)]
    places = [owners.index(rank) for rank in ranks if rank in owners]
    assert places == sorted(places)
    assert [*accumulate(pieces)][-1] == samples


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(12, 30), min_size=1, max_size=2),
    st.integers(2, 30),
)
def test_no_piece_has_one_sample_where_none_of_full_slices_has(
    speeds: list[list[int]], full: list[int], samples: int
) -> None:
    times = [StepTime(0.0, each) for stage in speeds for each in stage]
    ends = [*accumulate(map(len, speeds), initial=0)]
    by_speed = Division([[*range(*each)] for each in pairwise(ends)], times)
    division = by_speed.of_slices(full)
    for each in full:
        assert division.pieces(each) == by_speed.pieces(each)
    if all(piece > 1 for each in full for piece in by_speed.pieces(each)):
        assert min(division.pieces(samples)) > 1
    for stage, ranks in enumerate(division.stages):
        owners = division.owners(stage, samples)
        assert [*owners] == sorted(owners)
        assert sum(division.share(stage, rank, [samples]) for rank in ranks) == samples
        before, after = ([each.share(stage, rank, [samples]) for rank in ranks] for each in (by_speed, division))
        assert all(now <= then + 2 for then, now in zip(before, after, strict=True)), "beyond what fits into memory"
