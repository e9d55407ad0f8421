"""A script's loop over a job's batches: batches come, and between them the moments at which all ranks are at rest."""

from __future__ import annotations

import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from hetsync.errors import STOPPED, TOO_FEW_LEFT, UserError
from hetsync.stop_signal import STATUSES, StopSignal
from hetsync.sync.milestones import ALL_LEFT, ROLLBACK, TOO_FEW
from hetsync.train.preparation import Preparation
from hetsync.train.resumption import Standing
from hetsync.train.running import Running
from hetsync.train.session import AtRest, counted_out
from hetsync.train.stage import MAY_LOOP, TRANSITIONS, Cause, Stage

_OVER = object()

SECOND_LOOP = (
    "a second loop over the job's batches, which come once an epoch, to be trained on: loop over them once in each turn"
    " of 'for epoch in job.epochs(N)', and over a plain DataLoader of the training data for anything else (accuracy,"
    " update_bn)"
)

ALL_BROKE_OFF = (
    "all ranks have left a loop over the job's batches by break, which ends training, and the script begins another:"
    " leave the loop over epochs, too, or loop in 'for epoch in job.epochs(N)', which ends then; for fewer batches an"
    " epoch give job.intervals their samples"
)
COUNTED_ALREADY = (
    "job.epochs was called after a loop over the job's batches, and counts from the first on: call it around all of"
    " them, with all epochs, or count them all by a loop of your own"
)


class StoppedByRequest(SystemExit):
    """The job has saved and stopped, as a signal asked it to, or since too few ranks are left."""

    def __init__(self, status: int) -> None:
        """`status`: the process's."""
        super().__init__(status)
        self.status = status


class Loop:
    """Attributes:
    stage: Where the script stands.
    has_left: A loop was left early: this rank takes part in rounds and rests only.
    """

    def __init__(self, prepared: Preparation, begin: Callable[[], Running], stop: StopSignal | None) -> None:
        """`begin` is collective, and does anything once only."""
        self.stage = Stage.BEFORE_LOOP
        self.has_left = False
        self._prepared = prepared
        self._begin_job = begin
        self._began: Running | None = None
        self._stop = stop
        self._course: Iterator[Any] | None = None
        self._newest: Callable[[], Generator[Any] | None] = lambda: None  # loop over batches
        self._counts = False  # does the script loop over intervals that the job counts?
        self._item: Any = None  # the batch that is out, or has been looked at
        self._slices = 0  # that have come to this loop over batches
        self._counted_out = False  # has it stopped at as many as the loader is long, and had more?
        self._lines_at = -1  # samples applied at the interval's end after which the script's lines came last

    @property
    def has_begun(self) -> bool:
        """Has a batch been asked for?"""
        return self._course is not None

    @property
    def in_batch(self) -> bool:
        return self.stage is Stage.IN_BATCH

    @property
    def is_over(self) -> bool:
        return self.stage is Stage.OVER

    def _come(self, cause: Cause) -> None:
        self.stage = TRANSITIONS[self.stage, cause]

    def _leave(self) -> None:
        """The script wants no more batches: the other ranks do the rest of this one's samples."""
        self.has_left = True
        self._come(Cause.BROKE_OFF)

    def slices_so_far(self) -> int | None:
        return self._slices if self.in_batch else None

    def _begin(self) -> Running:
        if self._began is None:
            self._began = self._begin_job()
            if self._began.has_joined:
                self._lines_at = self._began.session.applied
            elif self._began.lines_due:
                self.stage = Stage.LINES_DUE
        return self._began

    def collect(self, optimizer: torch.optim.Optimizer, *, holds: bool = False) -> bool:
        if self._began is None:
            raise UserError("no batch is out: call this within the loop over the job's batches")
        tasks = self._began.session.tasks
        tasks.was_stepped = True
        return tasks.collect(self._prepared.parts.number_of(optimizer), holds=holds)

    def hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        self._begin().session.tasks.hand_over(self._prepared.parts.number_of(optimizer))

    # Intervals.

    def intervals(self, samples: int) -> Iterator[int]:
        """Numbers of intervals of so many samples, from where the run stands; all ranks rest at the end of each."""
        running, total, self._counts = self._begin(), self._prepared.total, True
        if running.finished:
            if self.stage in MAY_LOOP:
                self._come(Cause.BEGAN_EMPTY)
            return
        self._end_held_look(running)
        if self.in_batch:
            raise UserError("job.epochs was called within a loop over the job's batches: call it around that loop")
        self.settle()
        if running.told is None and running.session.applied:
            raise UserError(COUNTED_ALREADY)
        position = running.session.applied - (self.stage is Stage.LINES_DUE)
        while position < total and not self.is_over:
            self._come(Cause.TURNED)
            yield position // samples
            if self.stage is Stage.LOOKED:
                running.session.tasks.go_on()
                self._leave()
            if self.stage in MAY_LOOP:
                raise UserError(
                    f"epoch {position // samples} used none of the job's batches: loop over the loader that job.prepare"
                    " or job.loader returned"
                )
            if self.in_batch and (loop := self._newest()) is not None:
                loop.close()  # a variable of the script holds it
            self.come_to_rest()
            before, position = position, running.session.applied
            if (before // samples + 1) * samples < total:
                self._refuse_counting(running)

    def _refuse_counting(self, running: Running) -> None:
        """The script asks for another interval: UserError where this rank has left the job in the last one, by as many
        batches as the loader is long."""
        if not self._counted_out:
            return
        if not self.is_over:
            running.session.counted_out = True  # the others go on, and all are told
        elif running.session.rest_reason == ALL_LEFT:
            raise counted_out(running.plane.rank, running.session.applied)

    def _took_all(self) -> bool:
        """Whether the newest loop has stepped on as many batches as an interval has on one device: by `next`, zip or
        islice, which ask for no other then."""
        loader, every = self._prepared.training_data, self._prepared.interval_samples
        tasks = self._begin().session.tasks
        stepped = tasks.work is not None and len(tasks.work.stepped) == len(tasks.steps)
        return stepped and self._slices * loader.batch_size >= (every or loader.source.epoch_samples)

    def _ask(self) -> None:
        """In place of such a loop."""
        if self.stage is not Stage.UNASKED:
            return
        running, course = self._begin(), self._course
        assert course is not None
        self._end_batch(running)
        if next(self._until_lines(running, course), _OVER) is not _OVER:
            self._counted_out = True
            self._leave()

    # Batches.

    def batches(self) -> Iterator[Any]:
        loop = self._over_batches()
        if not self.in_batch:
            self._newest = weakref.ref(loop)  # so that a break closes it
        return loop

    def _over_batches(self) -> Generator[Any]:
        running = self._begin()
        self._end_held_look(running)
        if running.told is None and not self._counts:
            self._turn(running)
            if self.is_over:
                return
        if self.in_batch:
            raise UserError("two loops over the job's batches at once: begin the second when the first is over")
        if self.stage not in MAY_LOOP:
            raise UserError(SECOND_LOOP)
        if self._is_empty(running):
            return
        course = self._begin_loop(running)
        try:
            yield from self._until_lines(running, course)
        except GeneratorExit:
            if not self.in_batch:
                pass  # the job has ended before the iterator
            elif self._has_looked(running):
                self._come(Cause.LOOKED)  # the next loop begins with this batch
                running.session.tasks.end_look()
            elif self._took_all():
                self._come(Cause.TOOK_ALL)
            else:
                self._leave()
            raise

    def _is_empty(self, running: Running) -> bool:
        """Whether the loop that begins has no batches here."""
        if self.has_left:
            self._come(Cause.BEGAN_OUTSIDE)
            return True
        if not running.finished and self.stage is not Stage.LINES_DUE:
            return False
        self._come(Cause.BEGAN_EMPTY)
        if not running.finished:
            self._lines_at = running.session.applied
            running.session.begin_lines()
        return True

    def _begin_loop(self, running: Running) -> Iterator[Any]:
        """What comes in it: first the batch that the script has looked at."""
        running.session.engine.order.follow_script()
        looked_at = self.stage is Stage.LOOKED
        self._come(Cause.BEGAN)
        if self._course is None:
            self._course = running.session.course()
        self._slices = 0
        every, applied = self._prepared.interval_samples, running.session.applied
        running.session.begin_loop(math.inf if every is None else (applied // every + 1) * every)
        self._prepared.parts.begin_loop(applied)
        running.looped_from = applied
        if not looked_at:
            return self._course
        running.session.tasks.go_on()
        return itertools.chain([self._item], self._course)

    def _end_held_look(self, running: Running) -> None:
        """A variable of the script holds the loop that has only looked at a batch."""
        loop = self._newest() if self.in_batch and self._has_looked(running) else None
        if loop is not None and inspect.getgeneratorstate(loop) is not inspect.GEN_RUNNING:
            loop.close()

    def _turn(self, running: Running) -> None:
        """To the next interval, where each loop over batches is one, and is what ends the one before."""
        if self.in_batch and self._took_all() and (loop := self._newest()) is not None:
            loop.close()  # a variable of the script holds it
        if self.stage in (Stage.IN_BATCH, Stage.LOOKED):
            return
        self.come_to_rest()
        self._refuse_counting(running)
        if not self.is_over:
            self._come(Cause.TURNED)
        elif running.session.rest_reason == ALL_LEFT:
            raise UserError(ALL_BROKE_OFF)

    def _has_looked(self, running: Running) -> bool:
        return self._slices == 1 and running.session.tasks.has_only_looked

    def _until_lines(self, running: Running, course: Iterator[Any]) -> Generator[Any]:
        """Batches up to the rest at which the script's own lines come."""
        for item in course:
            if isinstance(item, AtRest):
                if self.rest(item):
                    if not self.is_over:
                        self._prepared.parts.end_loop(self._slices)
                    return
                continue
            self._come(Cause.GOT_BATCH)
            self._item = item
            self._slices += 1
            running.carried.begin_batch()
            if self._slices == 1:
                running.session.tasks.begin_look()
            running.session.engine.order.lead_script()
            yield item
            self._end_batch(running)

    def _end_batch(self, running: Running) -> None:
        self._come(Cause.ASKED)
        self._item = None
        running.session.engine.order.follow_script()
        scaler = self._prepared.parts.scaler
        if scaler is not None:
            scaler.update()  # once a batch, however many optimizers have been stepped
        running.between_batches()

    # Rests.

    def rest(self, rest: AtRest) -> bool:
        """All ranks are at rest: save, evaluate. True where the script's own lines come next; False also where a rank
        has died, and the course comes to this rest once more."""
        running, every = self._begin(), self._prepared.interval_samples
        applied = running.session.applied
        at_intervals_end = (
            every is not None
            and rest.reason != ROLLBACK
            and (rest.final or applied % every == 0)
            and applied != self._lines_at
        )
        ended = rest.final and applied < running.total  # all loops have
        status = STOPPED

        def work() -> None:
            nonlocal status
            if at_intervals_end or rest.final:
                running.check_steps()
            running.rest(rest, Standing(ended, lines_due=at_intervals_end))
            if running.session.stopping:
                status = self._status(running)
            elif not at_intervals_end and not rest.final and rest.reason != ROLLBACK:
                running.call(rest.reason)

        if not running.session.at_rest(work):
            running.break_off_rest()
            return False
        if rest.final or running.session.stopping:
            self._come(Cause.ENDED)
        elif at_intervals_end:
            self._come(Cause.RESTED)
        if running.session.stopping:
            running.status = status
            raise StoppedByRequest(status)
        if at_intervals_end:
            self._lines_at = applied
        running.session.engine.order.lead_script()
        return self.is_over or at_intervals_end

    def _status(self, running: Running) -> int:
        """Collective: the exit status of a job that was asked to stop, by a signal to any of its ranks or otherwise."""
        if running.session.rest_reason == TOO_FEW:
            return TOO_FEW_LEFT
        mine = self._stop.caught if self._stop is not None else None
        caught = [number for number in running.plane.gather_objects(mine) if number is not None]
        return STATUSES[caught[0]] if caught else STOPPED

    def come_to_rest(self) -> None:
        """After a loop over batches: at the rest that ended it, or on the way there where the loop was left."""
        if self.stage in (Stage.IN_BATCH, Stage.LOOKED):
            raise UserError(
                "a batch is out, and what was called needs all ranks at rest: call it before the first look at a batch,"
                " or after the loop over an epoch's batches (job.evaluate_every evaluates while training goes on)"
            )
        running = self._begin()
        if running.session.is_carrying_out:
            return
        running.session.engine.order.follow_script()
        self._ask()
        while self.stage is Stage.LEAVING:
            self.rest(next(running.leaving))

    def settle(self) -> None:
        """Where the loop has been left, what the script does next is done at the rest to come."""
        if self.stage in (Stage.LEAVING, Stage.UNASKED):
            self.come_to_rest()

    def stop(self) -> None:
        """Collective: training is over at the rest to come, as if all its samples had been used."""
        self.come_to_rest()
        self._begin().session.meet("job.stop")
        self.has_left = True
        self._come(Cause.ENDED)

    def come_to_an_end(self) -> None:
        """Collective: through all rests, where the loop has not come there."""
        running = self._begin()
        running.session.engine.order.follow_script()
        if self.stage is Stage.LOOKED:
            running.session.tasks.go_on()
        self._ask()
        while running.session.under_way and (rest := next(running.leaving, None)) is not None:
            self.rest(rest)
