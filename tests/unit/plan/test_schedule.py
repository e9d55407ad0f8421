"""Schedules end, whatever the stages and their figures; and they keep to what may be in flight."""

from __future__ import annotations

from graphlib import CycleError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetsync.plan.schedule import bounded_in_flight, micro_batch_sizes, schedule, schedules, stages_left

CHAIN = {(0, 1), (1, 2), (2, 3)}


@st.composite
def pipelines(draw):
    stages = draw(st.integers(1, 7))
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    edges = set(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else set()
    names = draw(st.permutations(range(stages)))  # stages may be listed in any order
    micro_batches = draw(st.integers(1, 9))
    in_flight = draw(st.lists(st.none() | st.integers(1, 12), min_size=stages, max_size=stages))
    return stages, {(names[a], names[b]) for a, b in edges}, micro_batches, in_flight


def run(lists, edges):
    """Each stage goes on as far as it can, until none can; what is left of the lists."""
    done, places, moved = set(), [0] * len(lists), True
    while moved:
        moved = False
        for stage, work in enumerate(lists):
            while places[stage] < len(work):
                kind, index = work[places[stage]]
                needs = [a if kind == "forward" else b for a, b in edges if stage == (b if kind == "forward" else a)]
                if any((kind, index, other) not in done for other in needs):
                    break
                assert kind == "forward" or ("forward", index, stage) in done
                done.add((kind, index, stage))
                places[stage] += 1
                moved = True
    return [work[place:] for work, place in zip(lists, places, strict=True)]


@given(pipelines())
def test_no_stage_waits_for_ever(pipeline):
    _, edges, *_ = pipeline
    assert run(schedules(*pipeline), edges) == [()] * pipeline[0]


@given(pipelines())
def test_no_more_is_in_flight_than_was_said(pipeline):
    stages, edges, micro_batches, in_flight = pipeline
    most = [left if said is None else said for said, left in zip(in_flight, stages_left(stages, edges), strict=True)]
    for work, said in zip(schedules(*pipeline), most, strict=True):
        under_way = 0
        for kind, _ in work:
            under_way += 1 if kind == "forward" else -1
            assert 0 <= under_way <= said
        assert sorted(work) == sorted((kind, i) for kind in ("forward", "backward") for i in range(micro_batches))


def test_lists_without_the_bound_by_earlier_stages_wait_for_ever():
    """What `bounded_in_flight` is for; and that `run` sees it."""
    lists = [schedule(4, 1), schedule(4, 3)]
    assert run(lists, {(0, 1)}) == [lists[0][1:], lists[1][1:]]
    assert bounded_in_flight(2, {(0, 1)}, 4, [1, 3]) == (1, 1)


def test_one_forward_one_backward_by_default():
    first, *_, last = schedules(4, CHAIN, 5, [None] * 4)
    assert " ".join(kind[0] + str(index) for kind, index in first) == "f0 f1 f2 f3 b0 f4 b1 b2 b3 b4"
    assert " ".join(kind[0] + str(index) for kind, index in last) == "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4"


def test_all_in_flight_is_gpipe():
    assert [kind for kind, _ in schedule(3, 3)] == ["forward"] * 3 + ["backward"] * 3


def test_stages_left_of_components_side_by_side():
    assert stages_left(5, {(0, 2), (1, 2), (2, 3), (2, 4), (1, 4)}) == (3, 3, 2, 1, 1)


def test_stages_that_wait_for_each_other_are_an_error():
    with pytest.raises(CycleError):
        stages_left(2, {(0, 1), (1, 0)})


@given(st.integers(1, 500), st.integers(1, 40))
def test_micro_batches_are_as_equal_as_can_be(share, micro_batches):
    sizes = micro_batch_sizes(share, micro_batches)
    assert sum(sizes) == share
    assert len(sizes) == micro_batches
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
