"""Replicas that make each step together: every rank has the batch, the schedule and the books, so that only
activations, their gradients and a note a slice travel."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetsync.balance.shares import whole_parts
from hetsync.data.ledger import Span
from hetsync.errors import UserError
from hetsync.replica.base import MicroBatch
from hetsync.replica.segments import SegmentSums, segments_of
from hetsync.stop_signal import StopSignal
from hetsync.sync.milestones import Marks, Milestone
from hetsync.sync.steps import set_rates
from hetsync.train.planned_terms import STAGE, PlannedTerms, Replicas, Rest, memory_of_plans


@dataclass(frozen=True)
class PlannedSlice:
    """A slice of all replicas: `samples` from the stream's position `number`, and what the loader is to load of them.

    `slices`: the spans of this rank's replica; none where it has no sample of a short slice. `rest` follows it.
    """

    number: int
    samples: int
    slices: Sequence[Sequence[Span]]
    rest: Milestone | None

    @property
    def own_samples(self) -> int:
        return sum(stop - start for spans in self.slices for start, stop in spans)


class Note(NamedTuple):
    """What a rank tells the others after a slice. `loss` is its replica's mean; `signal` asks for the end."""

    loss: float
    signal: signal.Signals | None
    save: bool  # it is time to


class ReplicasInStep(Replicas):
    def __init__(self, terms: PlannedTerms, evaluations: Marks) -> None:
        """Collective. All ranks hold the same weights. `evaluations`: where they rest besides."""
        self._terms, self._evaluations = terms, evaluations
        self._plane, self._books, self._replica = terms.at.plane, terms.books, terms.replica
        self._index = terms.assignment.place_of(self._plane.rank)[0]
        self._sums = self._make_sums()

    def _make_sums(self) -> SegmentSums | None:
        assignment, channels = self._terms.assignment, self._terms.channels
        if len(assignment.placement.replicas) == 1:
            return None
        assert channels is not None
        segments = segments_of(assignment.placement, assignment.cut.graph)
        return SegmentSums(segments, self._replica.model, self._plane.rank, channels)

    def _slices(self) -> Iterator[PlannedSlice]:
        """From where the run stands, up to its end."""
        terms, batch, applied = self._terms, self._terms.at.config.data.batch_size, self._books.applied
        while applied < terms.total:
            rest = terms.milestones(applied)
            samples = min(batch, rest.position - applied)
            parts = self._parts_of(samples)
            first = applied + sum(parts[: self._index])
            own = [[(first, first + parts[self._index])]] if parts[self._index] else []
            yield PlannedSlice(applied, samples, own, rest if applied + samples == rest.position else None)
            applied += samples

    def _parts_of(self, samples: int) -> list[int]:
        """Of a slice, by replica."""
        least = self._terms.at.config.sync.least_slice
        return list(whole_parts(dict(enumerate(self._books.shares)), samples, least).values())

    def rests(self, stop: StopSignal | None) -> Iterator[Rest]:
        if stop is not None:
            stop.listen(lambda: None)  # who has caught one says so after each slice
        slices = self._slices()
        coming = self._prefetched(slices)
        while coming is not None:
            current, coming = coming, self._prefetched(slices)
            notes = self._run(current, stop)
            rest = self._rest_after(current, notes)
            if rest is not None:
                yield rest

    def close(self) -> None:
        """Nothing runs beside the loop."""

    def _prefetched(self, slices: Iterator[PlannedSlice]) -> PlannedSlice | None:
        """The next one, on its way to the device: what no worker loads, ranks would draw apart."""
        if (coming := next(slices, None)) is not None:
            self._terms.loader.prefetch(coming)
        return coming

    def _rest_after(self, done: PlannedSlice, notes: Sequence[Note]) -> Rest | None:
        caught = next((note.signal for note in notes if note.signal is not None), None)
        save, mark = any(note.save for note in notes), self._evaluations(done.number)
        evaluate = mark is not None and self._books.applied >= mark
        if done.rest is None and caught is None and not save and not evaluate:
            return None
        reason = "" if done.rest is None else done.rest.reason
        return Rest(done.number, self._books.applied, reason, caught, save)

    def _run(self, current: PlannedSlice, stop: StopSignal | None) -> list[Note]:
        """One slice, and one step of all."""
        terms, books, passes = self._terms, self._books, self._replica.passes
        began, computed, through = time.monotonic(), passes.seconds, passes.samples
        batches = list(terms.loader.slices(current))
        loaded = time.monotonic()
        [rate, *_] = rates = terms.rates.at(current.number)
        set_rates(terms.optimizer, rates)
        with memory_of_plans(STAGE):
            loss = self._step(batches[0] if batches else [], current)
        note = Note(loss, None if stop is None else stop.caught, terms.save_due())
        notes: list[Note] = self._plane.gather_objects(note)
        computed = passes.seconds - computed
        seconds = {"compute": computed, "data": loaded - began}
        seconds["wait"] = max(0.0, time.monotonic() - began - sum(seconds.values()))
        mean = self._mean_loss(notes, current)
        books.slice_done(current.samples, passes.samples - through, mean, rate, seconds)
        return notes

    def _step(self, micro_batches: Sequence[MicroBatch], current: PlannedSlice) -> float:
        """Returns the mean loss of this rank's replica."""
        terms = self._terms
        if self._sums is not None:
            self._sums.begin()
        loss = 0.0
        if micro_batches:
            self._replica.passes.begin_slice(current.own_samples)
            loss = self._replica.run(micro_batches)
        if self._sums is not None:
            # Each rank of a stage has the gradient of the whole replica.
            alike = terms.assignment.ranks_of_stage(self._plane.rank)  # have made the same of this
            self._sums.finish(current.own_samples / current.samples / alike, of_added=1 / alike)
        self._replica.update(terms.optimizer, terms.at.config.optimizer.max_grad_norm)
        return loss

    def _mean_loss(self, notes: Sequence[Note], current: PlannedSlice) -> float:
        """Of all replicas. UserError where it is none any more."""
        leaders = [replica.leader for replica in self._terms.assignment.placement.replicas]
        for leader in leaders:
            if not math.isfinite(notes[leader].loss):
                raise UserError(
                    f"the loss became {notes[leader].loss} on rank {leader} after {self._books.applied} samples: lower"
                    " optimizer.learning_rate or look at the data"
                )
        parts = zip(leaders, self._parts_of(current.samples), strict=True)
        return sum(notes[leader].loss * part for leader, part in parts) / current.samples
