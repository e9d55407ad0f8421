"""The laws of the table of stages."""

from __future__ import annotations

import pytest

from hetsync.train.stage import MAY_LOOP, TRANSITIONS, Cause, Stage


@pytest.mark.parametrize("stage", Stage)
def test_each_stage_is_come_to_and_leads_to_the_end(stage: Stage) -> None:
    assert TRANSITIONS[stage, Cause.ENDED] is Stage.OVER
    assert stage in {Stage.BEFORE_LOOP, Stage.LINES_DUE, *TRANSITIONS.values()}


def test_what_is_over_stays_over() -> None:
    assert {to for (stage, _), to in TRANSITIONS.items() if stage is Stage.OVER} == {Stage.OVER}


@pytest.mark.parametrize("stage", MAY_LOOP)
def test_a_loop_may_begin_where_it_may(stage: Stage) -> None:
    begins = {Cause.BEGAN, Cause.BEGAN_EMPTY, Cause.BEGAN_OUTSIDE}
    assert {why for where, why in TRANSITIONS if where is stage} & begins


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage not in MAY_LOOP])
def test_and_nowhere_else(stage: Stage) -> None:
    begins = {Cause.BEGAN, Cause.BEGAN_EMPTY, Cause.BEGAN_OUTSIDE}
    assert not {why for where, why in TRANSITIONS if where is stage} & begins


def test_a_batch_is_out_between_two_stages_of_a_loop() -> None:
    assert {stage for (stage, why) in TRANSITIONS if why is Cause.GOT_BATCH} == {Stage.IN_LOOP}
    leads = {to for (stage, why), to in TRANSITIONS.items() if stage is Stage.IN_BATCH}
    assert leads == {Stage.IN_LOOP, Stage.LOOKED, Stage.UNASKED, Stage.LEAVING, Stage.AFTER_LOOP, Stage.OVER}
