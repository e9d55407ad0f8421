"""Which samples are where: handed out, applied, or still to come. Pure: no tensors, no clock, no ranks' code.

The samples of all epochs form one stream: position `p` is sample `p mod N` of epoch `p // N`, in that
epoch's seeded order. A span is a half-open range of positions. Spans are handed out to tasks and
booked when the contribution that used them is applied; what a dead rank held comes back and goes out again.
So every sample counts exactly once an epoch by construction, and `check` proves it at every drain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Span = tuple[int, int]


def total_samples(samples: int | None, epochs: float, epoch_samples: int) -> int:
    """Positions to train on: so many samples, or else epochs, of one position at least."""
    return samples or max(1, round(epochs * epoch_samples))


def batches_in(samples: int, batch: int, epoch_samples: int) -> int:
    """Of a stream's first samples, where each epoch is cut anew, and its last batch may be short; the one that is under
    way counts."""
    epochs, within = divmod(samples, epoch_samples)
    return epochs * -(-epoch_samples // batch) + -(-within // batch)


def samples_in(batches: int, batch: int, epoch_samples: int) -> int:
    """Of so many first batches, cut so."""
    epochs, within = divmod(batches, -(-epoch_samples // batch))
    return epochs * epoch_samples + min(within * batch, epoch_samples)


def length(spans: Iterable[Span]) -> int:
    """Number of positions in some spans."""
    total = 0
    for start, stop in spans:
        total += stop - start
    return total


def cut(spans: Sequence[Span], count: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Split spans into the first `count` positions and the rest."""
    if not spans:
        return (), ()
    head: list[Span] = []
    tail = list(spans)
    while count and tail:
        start, stop = tail.pop(0)
        middle = min(stop, start + count)
        head.append((start, middle))
        count -= middle - start
        if middle < stop:
            tail.insert(0, (middle, stop))
    return tuple(head), tuple(tail)


def split(spans: tuple[Span, ...], samples: int, slices: int) -> tuple[tuple[Span, ...], ...]:
    """Cut spans into slices of as equal size as possible, in order."""
    out = []
    for index in range(slices - 1):
        head, spans = cut(spans, samples // slices + (index < samples % slices))
        out.append(head)
    return tuple([part for part in (*out, spans) if part])


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same positions in as few spans as possible, in order."""
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        elif start < stop:
            out.append((start, stop))
    return out


def common(spans: Iterable[Span], others: Sequence[Span]) -> list[Span]:
    """Positions that are in both."""
    pairs = [(max(a, c), min(b, d)) for a, b in spans for c, d in others]
    return merged([(start, stop) for start, stop in pairs if start < stop])


def gaps(spans: Sequence[Span]) -> list[Span]:
    """What lies between spans in order, and before the first."""
    before = [0, *(stop for _, stop in spans)]
    return [(stop, start) for stop, (start, _) in zip(before, spans, strict=False) if stop < start]


class Ledger:
    """Books of one training run over stream positions [0, total)."""

    def __init__(self, total: int, applied: int = 0) -> None:
        """`applied`: positions [0, applied) were applied before (a resumed run)."""
        if not 0 <= applied <= total:
            raise ValueError(f"applied {applied} lies outside [0, {total}]")
        self.total = total
        self.applied = applied
        self._cursor = applied
        self._returned: list[Span] = []
        self._held: dict[int, tuple[Span, ...]] = {}

    @classmethod
    def restored(cls, total: int, applied: Iterable[Span], held: Mapping[int, tuple[Span, ...]]) -> Ledger:
        """Books made anew of what was applied and what tasks hold: the rest below the frontier goes out again.

        Raises ValueError where a position would count twice.
        """
        ledger = cls(total)
        known = [*applied, *(span for spans in held.values() for span in spans)]
        whole = merged(known)
        if length(whole) != length(known):
            raise ValueError(f"positions count twice: applied {list(applied)}, held {dict(held)}")
        ledger.applied = length(applied)
        ledger._held = dict(held)
        ledger._cursor = whole[-1][1] if whole else 0
        ledger._returned = gaps(whole)
        return ledger

    @property
    def frontier(self) -> int:
        """First position that was never handed out."""
        return self._cursor

    def available(self, limit: int) -> int:
        """Positions below `limit` that nobody holds and that are not applied."""
        return length(self._returned) + max(0, limit - self._cursor)

    def take(self, task: int, count: int, limit: int) -> tuple[Span, ...]:
        """Hand out up to `count` positions below `limit` to a task; returned ones go first."""
        if task in self._held:
            raise ValueError(f"task {task} holds samples already")
        spans, self._returned = self._take_returned(count)
        missing = min(count - length(spans), max(0, limit - self._cursor))
        if missing > 0:
            spans += ((self._cursor, self._cursor + missing),)
            self._cursor += missing
        self._held[task] = spans
        return spans

    def _take_returned(self, count: int) -> tuple[tuple[Span, ...], list[Span]]:
        head, tail = cut(self._returned, count)
        return head, list(tail)

    def book(self, task: int) -> int:
        """The task's samples were applied; returns how many."""
        count = length(self._held.pop(task))
        self.applied += count
        return count

    def give_back(self, task: int) -> None:
        """The task died with its rank: its samples go out again."""
        self._returned = sorted([*self._returned, *self._held.pop(task)])

    def abandon(self) -> None:
        """Nobody will take what came back: the job ends with what is applied."""
        self._returned, self._cursor = [], self.applied

    def go_back(self, applied: int) -> None:
        """Positions from `applied` on, of which nobody holds any, are to be applied again."""
        assert not self._held
        assert applied <= self.applied
        self.applied = self._cursor = applied
        self._returned = []

    def outstanding(self) -> int:
        """Positions handed out and not yet applied."""
        return sum(length(spans) for spans in self._held.values())

    def check(self, limit: int) -> None:
        """Every position below `limit` was applied exactly once and none above it was touched."""
        if self.applied != limit or self._cursor != limit or self._held or self._returned:
            raise AssertionError(
                f"sample ledger is off: limit {limit}, handed out {self._cursor}, applied {self.applied}, "
                f"held {dict(self._held)}, returned {self._returned}"
            )
