"""Where a script stands in its loops over a job's batches, and the one table of what leads where."""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    BEFORE_LOOP = auto()  # all ranks are at rest, or training has not begun: a loop over batches may come
    LINES_DUE = auto()  # as well, and it is to be empty: a run goes on from an interval's end, whose lines come next
    IN_LOOP = auto()  # between two batches, or on the way to the rest after the last
    IN_BATCH = auto()  # a batch is out
    LOOKED = auto()  # a loop has ended at its first batch, and done nothing with it: the next begins with it
    UNASKED = auto()  # a loop has ended after as many batches as an interval has, and asked for no other
    LEAVING = auto()  # a loop has ended early: this rank takes part in rounds only, on the way to the next rest
    AFTER_LOOP = auto()  # all ranks are at rest, and the interval's loop is over
    OVER = auto()  # training is, at rest


class Cause(Enum):
    TURNED = auto()  # the script goes on to the next interval
    BEGAN = auto()  # a loop over batches
    BEGAN_EMPTY = auto()  # one that has no batches here
    BEGAN_OUTSIDE = auto()  # one of a rank that has left the job
    GOT_BATCH = auto()
    ASKED = auto()  # for the next batch
    LOOKED = auto()  # and ended its loop
    TOOK_ALL = auto()  # and ended its loop
    BROKE_OFF = auto()  # its loop
    RESTED = auto()  # at an interval's end
    ENDED = auto()  # training, by its last sample, a stop or all ranks' leaving


TRANSITIONS: dict[tuple[Stage, Cause], Stage] = {
    (Stage.BEFORE_LOOP, Cause.TURNED): Stage.BEFORE_LOOP,
    (Stage.LINES_DUE, Cause.TURNED): Stage.LINES_DUE,
    (Stage.LOOKED, Cause.TURNED): Stage.LOOKED,
    (Stage.AFTER_LOOP, Cause.TURNED): Stage.BEFORE_LOOP,
    (Stage.BEFORE_LOOP, Cause.BEGAN): Stage.IN_LOOP,
    (Stage.LOOKED, Cause.BEGAN): Stage.IN_LOOP,
    (Stage.BEFORE_LOOP, Cause.BEGAN_EMPTY): Stage.AFTER_LOOP,
    (Stage.LINES_DUE, Cause.BEGAN_EMPTY): Stage.AFTER_LOOP,
    (Stage.BEFORE_LOOP, Cause.BEGAN_OUTSIDE): Stage.LEAVING,
    (Stage.IN_LOOP, Cause.GOT_BATCH): Stage.IN_BATCH,
    (Stage.IN_BATCH, Cause.ASKED): Stage.IN_LOOP,
    (Stage.UNASKED, Cause.ASKED): Stage.IN_LOOP,
    (Stage.IN_BATCH, Cause.LOOKED): Stage.LOOKED,
    (Stage.IN_BATCH, Cause.TOOK_ALL): Stage.UNASKED,
    (Stage.IN_BATCH, Cause.BROKE_OFF): Stage.LEAVING,
    (Stage.LOOKED, Cause.BROKE_OFF): Stage.LEAVING,
    **{(stage, Cause.RESTED): Stage.AFTER_LOOP for stage in Stage if stage is not Stage.OVER},
    **{(stage, Cause.ENDED): Stage.OVER for stage in Stage},
}

MAY_LOOP = (Stage.BEFORE_LOOP, Stage.LINES_DUE, Stage.LOOKED)
"""Where a loop over batches may begin."""
