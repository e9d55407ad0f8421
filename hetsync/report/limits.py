"""What limited a run, in plain words with a remedy. Pure: figures in, sentences out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetsync.config.schema import RULED_DELAY_BOUND

NOTABLE = 0.05  # part of the time from which on something is told
NOTABLE_ROUNDS = 0.3  # part of a slice: their work beside it costs cores and bandwidth, also where nobody waits
NOTABLE_OVERRUNS = 0.01
GOOD = 0.95  # efficiency

SLOW = 0.8  # of the speed before
LASTING_BINS = 5  # that a change must last, and that must have been before
USUAL = 0.05  # quantile of the speeds before, below which jitter seldom goes
MOST_SLOWDOWNS = 3  # told one by one

SHORTER_STEPS = "a faster link or sync.wire bfloat16"  # at D = 0
SHORTER = "a faster link, sync.fragments or a smaller sync.wire"


@dataclass(frozen=True)
class Slowdown:
    """A rank's device became slower and stayed so.

    Args:
        rank: Whose.
        when: The moment, as it is told.
        speed: Its speed then, as a part of that before.
    """

    rank: int
    when: str
    speed: float


@dataclass(frozen=True)
class RankTime:
    """Where a rank's time of training went, in parts of it.

    Args:
        rank: Whose.
        waiting: For other ranks.
        loading: Waiting for data.
        runtime: CPU of the communication thread and of copies, in parts of a core; None where it is not known yet.
    """

    rank: int
    waiting: float
    loading: float
    runtime: float | None = None


@dataclass(frozen=True)
class Facts:
    """What sentences are made of.

    Args:
        ranks: Of the run.
        slowdowns: In the order of time.
        round_in_slices: Seconds of a round, from joining to the result, in slices (medians); None where none completed.
        delay_bound: D at the start; None: no bound.
        accumulation: K at the end.
        taken_back: K that the rule has tried and taken back.
        resting: Part of the job's time at rest or in evaluations, and of which: by reason.
        overruns: Part of the emulated slices that took longer than they should.
        efficiency: Of the run; None where it is not known.
        failed: What ended it, or None.
    """

    ranks: Sequence[RankTime]
    slowdowns: Sequence[Slowdown] = ()
    round_in_slices: float | None = None
    delay_bound: int | None = RULED_DELAY_BOUND
    accumulation: int = 1
    taken_back: frozenset[int] = frozenset()
    resting: tuple[tuple[str, float], ...] = ()
    overruns: float = 0.0
    efficiency: float | None = None
    failed: str | None = None

    @property
    def doubled(self) -> int:
        """K that would make half as many rounds."""
        return 2 * self.accumulation


def limits_of(facts: Facts) -> list[str]:
    """Sentences, the greatest loss first; one that says so where nothing was found."""
    found = [*_loading(facts), *_waiting(facts), *_rounds(facts), *_resting(facts), *_runtime(facts), *_slow(facts)]
    sentences = [sentence for _, sentence in sorted(found, key=lambda loss: -loss[0])]
    if facts.failed is not None:
        sentences.insert(0, f"The run ended by a failure: {facts.failed}.")
    if facts.overruns > NOTABLE_OVERRUNS:
        sentences.append(
            f"{facts.overruns:.1%} of the emulated slices took longer than they should, so this machine was measured,"
            " not the program: lower emulation.samples_per_second."
        )
    return sentences or [_nothing(facts)]


def slowed(speeds: Sequence[float]) -> list[tuple[int, float]]:
    """Bins from which on a device was slower than before, with the part of its speed that was left.

    `speeds` is samples a second of computing by bin, nan where it computed nothing.
    """
    known = [(number, speed) for number, speed in enumerate(speeds) if np.isfinite(speed) and speed > 0]
    found, first = [], 0
    for place in range(LASTING_BINS, len(known) - LASTING_BINS + 1):
        if place - first < LASTING_BINS:
            continue
        earlier = [speed for _, speed in known[first:place]]
        before, lowest = float(np.median(earlier)), float(np.quantile(earlier, USUAL))
        after = [speed for _, speed in known[place : place + LASTING_BINS]]
        if max(after) < min(SLOW * before, lowest):
            found.append((known[place][0], float(np.median(after)) / before))
            first = place
    return found


def _loading(facts: Facts) -> Iterator[tuple[float, str]]:
    late = [rank for rank in facts.ranks if rank.loading >= NOTABLE]
    if late:
        most = max(rank.loading for rank in late)
        yield most, f"{_who(late, 'waits', 'wait')} {_up_to(late, most)} of the time for data: more data.workers."


def _waiting(facts: Facts) -> Iterator[tuple[float, str]]:
    late = [rank for rank in facts.ranks if rank.waiting >= NOTABLE]
    if not late:
        return
    most = max(rank.waiting for rank in late)
    told = f"{_who(late, 'waits', 'wait')} {_up_to(late, most)} of the time for other ranks"
    if facts.delay_bound == 0:
        yield most, f"{told}, in lockstep (D = 0): sync.delay_bound auto lets them go on meanwhile where that pays."
    elif facts.delay_bound is None:
        yield most, f"{told}: at rests and at the end, as there is no delay bound."
    elif (facts.round_in_slices or 0.0) >= 1:
        tried = facts.doubled in facts.taken_back
        remedy = f"{SHORTER} makes them shorter" if tried else f"K = {facts.doubled} makes fewer"
        yield most, f"{told}, as rounds take longer than slices: {remedy}."
    else:
        wider = 2 * facts.delay_bound
        yield most, f"{told}, at the delay bound (D = {facts.delay_bound}): sync.delay_bound {wider} if that goes on."


def _rounds(facts: Facts) -> Iterator[tuple[float, str]]:
    part = facts.round_in_slices
    if part is None or part < NOTABLE_ROUNDS:
        return
    length = f"{part:.0%} of a slice" if part < 2 else f"{part:.1f} slices"
    if facts.delay_bound == 0:
        remedy = f"sync.delay_bound auto hides them behind computing, {SHORTER_STEPS} shorter ones."
    elif facts.doubled in facts.taken_back:
        remedy = f"{SHORTER} makes them shorter. {_refused(facts, 'for fewer')}"
    else:
        remedy = f"K = {facts.doubled} (sync.accumulation {facts.doubled}) makes fewer, {SHORTER} shorter ones."
    yield part / 100, f"Rounds take {length}: {remedy}"


def _refused(facts: Facts, aim: str) -> str:
    return f"sync.accumulation auto has tried K = {facts.doubled} {aim}, and taken it back."


def _resting(facts: Facts) -> Iterator[tuple[float, str]]:
    remedies = {
        "evaluation": "a larger run.evaluate_every",
        "checkpoint": "a larger run.checkpoint_seconds or run.checkpoint_every",
    }
    for reason, part in facts.resting:
        if part >= NOTABLE:
            remedy = f": {remedies[reason]}" if reason in remedies else ""
            yield part, f"Rests for {reason} take {part:.0%} of the job's time{remedy}."


def _runtime(facts: Facts) -> Iterator[tuple[float, str]]:
    busy = [rank for rank in facts.ranks if (rank.runtime or 0.0) >= NOTABLE]
    if busy:
        most = max(rank.runtime or 0.0 for rank in busy)
        told = f"HetSync itself takes {_up_to(busy, most)} of a core on {_named(busy)}"
        if facts.doubled in facts.taken_back:
            yield most, f"{told}. {_refused(facts, 'for fewer rounds')}"
        else:
            yield most, f"{told}: K = {facts.doubled} makes fewer rounds."


def _slow(facts: Facts) -> Iterator[tuple[float, str]]:
    by_rank: dict[str, dict[int, Slowdown]] = defaultdict(dict)  # in each minute the lowest speed
    for slowdown in facts.slowdowns:
        known = by_rank[slowdown.when].get(slowdown.rank, slowdown)
        by_rank[slowdown.when][slowdown.rank] = min(known, slowdown, key=lambda each: each.speed)
    together = [(when, list(ranks.values())) for when, ranks in by_rank.items()]
    for when, those in together[:MOST_SLOWDOWNS]:
        left = min(slowdown.speed for slowdown in those)
        who = f"Rank {those[0].rank}" if len(those) == 1 else f"{_count(len(those))} ranks ({_numbers(those)})"
        yield (
            (1 - left) * len(those) / max(1, len(facts.ranks)),
            (f"{who} slowed at {when}, to {left:.0%} of the speed before: look at what else runs there, and at heat."),
        )
    if more := together[MOST_SLOWDOWNS:]:
        yield 0.0, f"There were {sum(len(those) for _, those in more)} more such slowdowns: the speeds below show them."


def _nothing(facts: Facts) -> str:
    if facts.efficiency is None:
        return "Nothing that takes 5 % of a rank's time was found."
    if facts.efficiency >= GOOD:
        return f"Nothing: efficiency is {facts.efficiency:.3f}."
    return (
        f"Efficiency is {facts.efficiency:.3f}, and nothing that takes 5 % of a rank's time was found: waits, loading"
        " and the runtime took less each."
    )


def _who(ranks: Sequence[RankTime], one: str, several: str) -> str:
    name = _named(ranks)
    return f"{name[0].upper()}{name[1:]} {one if len(ranks) == 1 else several}"


def _named(ranks: Sequence[RankTime]) -> str:
    return f"rank {ranks[0].rank}" if len(ranks) == 1 else f"ranks {_numbers(ranks)}"


def _numbers(ranks: Iterable[RankTime | Slowdown]) -> str:
    """Three and more neighbours as FIRST to LAST."""
    groups: list[list[int]] = []
    for number in sorted({each.rank for each in ranks}):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    told: list[str] = []
    for group in groups:
        told += [f"{group[0]} to {group[-1]}"] if len(group) > 2 else map(str, group)
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"


def _up_to(ranks: Sequence[RankTime], most: float) -> str:
    return f"{'up to ' if len(ranks) > 1 else ''}{most:.0%}"


def _count(number: int) -> str:
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    return words[number] if number < len(words) else str(number)
