"""Who gets how much: from step times to each rank's samples of a batch. Pure: no tensors, no MPI, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError

IN_STEP_PATIENCE = 4 / 3  # a rank is left out of batches where these are then a quarter shorter, or more


@dataclass(frozen=True)
class SliceRule:
    """How small a slice may be, and how long it may last where that makes it long.

    Args:
        least: Samples of a slice; fewer only where the batch, or a rank's memory, has no more.
        patience: A rank whose least slice lasts longer than so many slices of the others gets none, since they would
            wait for it: IN_STEP_PATIENCE where all wait in each round, D where they run ahead by D rounds.
        in_step: A batch is what all compute at once. Else ranks' slices are their own.
    """

    least: int = 1
    patience: float = math.inf
    in_step: bool = False

    @classmethod
    def of(cls, least: int, delay_bound: int | None, quorum: float) -> SliceRule:
        if delay_bound == 0 or quorum >= 1:
            return cls(least, IN_STEP_PATIENCE, in_step=True)
        return cls(least, math.inf if delay_bound is None else max(IN_STEP_PATIENCE, float(delay_bound)))


ANY_SLICE = SliceRule()


def makespan(shares: Sequence[int], times: Sequence[StepTime]) -> float:
    """Seconds until the slowest rank has worked off its share."""
    return max(time.seconds(n) for n, time in zip(shares, times, strict=True))


def speed_shares(
    times: Sequence[StepTime],
    batch: int,
    caps: Sequence[int | None] | None = None,
    pins: Mapping[int, int] | None = None,
    rule: SliceRule = ANY_SLICE,
) -> tuple[int, ...]:
    """Whole shares that add up to `batch` and end together: they minimise the largest `seconds(share)`.

    `caps` are the most samples that fit into each rank's memory (None: any number), `pins` the shares set by
    hand. Every rank that is neither pinned nor capped at 0 gets a slice of the rule's least, or none where the others
    would wait for it. Where all wait in each round and the batch has no room for all ranks, the slowest get none;
    where ranks' slices are their own, shares then add up to more than `batch`. UserError where that cannot be done.

    Among the ranks that get some the shares are optimal: everything that ends by the best fractional finishing time is
    handed out first, and each sample left over by rounding goes where it ends earliest (for times that grow with the
    share this greedy rule is exact: Federgruen and Groenevelt 1986). Ties go to the smaller share, then the lower rank.
    """
    return _allot(times, batch, _bounds(len(times), batch, caps, pins or {}, rule), rule, pins or {})


def _allot(
    times: Sequence[StepTime],
    batch: int,
    bounds: Sequence[tuple[int, int]],
    rule: SliceRule,
    pins: Mapping[int, int],
    at_best: Sequence[StepTime] | None = None,
) -> tuple[int, ...]:
    bounds, total = _room(times, batch, bounds, rule, pins, at_best or times)
    deadlines = _Deadlines(times, bounds)
    shares = [int(share) for share in deadlines.shares(deadlines.latest(total))]
    heap = [(times[i].seconds(n + 1), n, i) for i, n in enumerate(shares) if n < bounds[i][1]]
    heapify(heap)
    for _ in range(total - sum(shares)):
        _, n, i = heap[0]
        shares[i] = n + 1
        more = times[i].seconds(n + 2) if n + 1 < bounds[i][1] else math.inf
        heapreplace(heap, (more, n + 1, i))
    return tuple(shares)


def equal_shares(
    ranks: int,
    batch: int,
    caps: Sequence[int | None] | None = None,
    pins: Mapping[int, int] | None = None,
    rule: SliceRule = ANY_SLICE,
) -> tuple[int, ...]:
    """Shares as equal as caps and pins allow; what rounding leaves goes one by one to the lowest ranks."""
    return speed_shares([StepTime(0.0, 1.0)] * ranks, batch, caps, pins, rule)


def first_pinned_shares(ranks: int, batch: int, first: int, rule: SliceRule = ANY_SLICE) -> tuple[int, ...]:
    """The slices of DeepTTE in parallel (Qingdao, 2021): rank 0's by hand, the rest split evenly.

    What rounding lost goes one by one to the others, never to the first: 1024 on 8 ranks with 70 gives
    70, 137, 137, 136, 136, 136, 136, 136.
    """
    return equal_shares(ranks, batch, pins={0: first}, rule=rule)


def rebalanced(
    shares: Sequence[int],
    times: Sequence[StepTime],
    batch: int,
    caps: Sequence[int | None] | None = None,
    pins: Mapping[int, int] | None = None,
    least_gain: float = 0.05,
    rule: SliceRule = ANY_SLICE,
    at_best: Sequence[StepTime] | None = None,
) -> tuple[int, ...]:
    """New shares where they shorten the predicted makespan by more than `least_gain` of it, else the old. A slice of
    the rule's least may last for its patience. A rank gets none only where it would be waited for even `at_best`: what
    its times may be at least.

    Old shares that break the batch, a cap, a pin or the rule are always replaced: they may belong to another
    membership.
    """
    pins = pins or {}
    bounds = _bounds(len(times), batch, caps, pins, rule)
    if len(shares) != len(times) or not _stand(shares, bounds, batch, pins, rule):
        return _allot(times, batch, bounds, rule, pins, at_best)
    free = _free(bounds, pins)
    if len(shares) == 1 or not free:
        return tuple(shares)
    soon = (1 - least_gain) * _pace(shares, times, bounds, rule)
    paces = _Paces(times, at_best or times, free, bounds, rule)
    if paces.shares(soon).sum() < batch - sum(pins.values()):  # none end by then: no need to look for the best
        return tuple(shares)
    best = _allot(times, batch, bounds, rule, pins, at_best)
    return tuple(shares) if _pace(best, times, bounds, rule) >= soon else best


def may_stay(
    shares: Sequence[int], batch: int, caps: Sequence[int | None], pins: Mapping[int, int], rule: SliceRule
) -> bool:
    """Can ranks with these caps and pins go on with these shares?"""
    return len(shares) == len(caps) and _stand(shares, _bounds(len(caps), batch, caps, pins, rule), batch, pins, rule)


def _stand(
    shares: Sequence[int], bounds: Sequence[tuple[int, int]], batch: int, pins: Mapping[int, int], rule: SliceRule
) -> bool:
    """Do they keep to the batch, the bounds and the rule? A rank without samples is one that was waited for."""
    free = _free(bounds, pins)
    sizes = {rank: shares[rank] for rank in free if shares[rank] or rule.patience == math.inf}
    within = all(bounds[rank][0] <= n <= bounds[rank][1] for rank, n in sizes.items())
    others = all(shares[rank] == pins.get(rank, 0) for rank in range(len(shares)) if rank not in free)
    least = sum(bounds[rank][0] for rank in sizes) + sum(pins.values())
    return within and others and sum(shares) == (batch if rule.in_step else max(batch, least))


def _free(bounds: Sequence[tuple[int, int]], pins: Mapping[int, int]) -> list[int]:
    """Ranks whose shares can be chosen."""
    return [rank for rank, (_, most) in enumerate(bounds) if most and rank not in pins]


def _pace(
    shares: Sequence[int], times: Sequence[StepTime], bounds: Sequence[tuple[int, int]], rule: SliceRule
) -> float:
    """Seconds of a batch: of the longest slice, or a part of it where it is of the least samples."""
    patience = [rule.patience if n == low else 1.0 for n, (low, _) in zip(shares, bounds, strict=True)]
    return max(time.seconds(n) / wait for n, time, wait in zip(shares, times, patience, strict=True))


def equal_share_ceiling(rates: Sequence[float]) -> float:
    """The share of Σ rates that synchronous training with equal shares can reach at most: n·min/Σ."""
    return len(rates) * min(rates) / sum(rates)


class _Deadlines:
    """How many samples each rank ends by a deadline: arrays over ranks, since there may be ten thousand of them."""

    def __init__(self, times: Sequence[StepTime], bounds: Sequence[tuple[int, int]]) -> None:
        self._fixed, self._each = np.array([(time.fixed_seconds, time.seconds_per_sample) for time in times]).T
        self._least, self._most = np.array(bounds, dtype=float).T
        self._all_seconds = self._fixed + self._each * self._most

    def shares(self, deadline: float) -> npt.NDArray[np.float64]:
        """The most whole samples that each rank ends by then, within its bounds."""
        with np.errstate(divide="ignore", invalid="ignore"):  # samples that take no time: all or none
            some = np.floor(np.clip((deadline - self._fixed) / self._each, self._least, self._most))
        return np.where(self._all_seconds <= deadline, self._most, some)

    def latest(self, batch: int) -> float:
        """The latest deadline by which no more than the batch is done, to float precision."""
        # Before 0, because a rank whose samples cost nothing has done any number of them at 0.
        early, late = -1.0, float(self._all_seconds.max())
        if self.shares(late).sum() <= batch:
            return late
        for _ in range(200):
            middle = (early + late) / 2
            early, late = (middle, late) if self.shares(middle).sum() <= batch else (early, middle)
            if not early < (early + late) / 2 < late:
                break
        return early

    def earliest(self, batch: int) -> float:
        """The earliest deadline by which the batch is done, to float precision."""
        early, late = -1.0, float(self._all_seconds.max())
        for _ in range(200):
            middle = (early + late) / 2
            early, late = (middle, late) if self.shares(middle).sum() < batch else (early, middle)
            if not early < (early + late) / 2 < late:
                break
        return late


class _Paces(_Deadlines):
    """The same of the ranks that are free, but in slices of the least samples, or none; such a slice is in time that at
    best ends within the rule's patience."""

    def __init__(
        self,
        times: Sequence[StepTime],
        at_best: Sequence[StepTime],
        free: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        rule: SliceRule,
    ) -> None:
        super().__init__([times[rank] for rank in free], [(0, bounds[rank][1]) for rank in free])
        least = [bounds[rank][0] for rank in free]
        self._low = np.array(least, dtype=float)
        self.least_seconds = self._fixed + self._each * self._low
        self._at_best = np.array([at_best[rank].seconds(low) for rank, low in zip(free, least, strict=True)])
        self._patience = rule.patience
        self._quickest = float(self.least_seconds.min())  # nobody's slice is shorter

    def shares(self, deadline: float) -> npt.NDArray[np.float64]:
        some = super().shares(deadline)
        return np.where(some >= self._low, some, np.where(self.in_time(deadline), self._low, 0.0))

    def in_time(self, deadline: float) -> npt.NDArray[np.bool_]:
        """Whose least slices are, where others' take so long?"""
        return self._at_best <= min(self._patience, 1e12) * max(self._quickest, deadline)


def _room(
    times: Sequence[StepTime],
    batch: int,
    bounds: Sequence[tuple[int, int]],
    rule: SliceRule,
    pins: Mapping[int, int],
    at_best: Sequence[StepTime],
) -> tuple[Sequence[tuple[int, int]], int]:
    """The bounds, at 0 where a rank is to get none; and what shares are to add up to."""
    free = _free(bounds, pins)
    room = batch - sum(pins.values())
    if rule.patience < math.inf and free:
        paces = _Paces(times, at_best, free, bounds, rule)
        order = np.argsort(paces.least_seconds, kind="stable")
        in_time = paces.in_time(paces.earliest(room))
        chosen, taken = set(pins), 0
        for place in order[in_time[order]]:
            taken += bounds[free[place]][0]
            if rule.in_step and taken > room and chosen.difference(pins):
                break
            chosen.add(free[place])
        most = sum(bounds[rank][1] for rank in chosen)
        # Where memory leaves no other way, more ranks get some, and fewer samples than the least.
        bounds = [
            bound if rank in chosen else (0, bound[1] if most < batch else 0) for rank, bound in enumerate(bounds)
        ]
    return bounds, max(batch, sum(low for low, _ in bounds))


def _bounds(
    ranks: int, batch: int, caps: Sequence[int | None] | None, pins: Mapping[int, int], rule: SliceRule
) -> list[tuple[int, int]]:
    """(fewest, most) samples of each rank, after every reason why no shares exist has been ruled out."""
    limits = list(caps) if caps is not None else [None] * ranks
    if len(limits) != ranks:
        raise ValueError(f"{len(limits)} caps for {ranks} ranks")
    _check_pins(pins, limits, batch)
    most = [batch if cap is None else max(0, min(cap, batch)) for cap in limits]
    bounds = [(pins[i], pins[i]) if i in pins else (min(rule.least, most[i]), most[i]) for i in range(ranks)]
    unpinned = [bound for i, bound in enumerate(bounds) if i not in pins]
    needed, possible = sum(1 for _, high in unpinned if high), sum(high for _, high in unpinned)
    left = batch - sum(pins.values())
    if left < needed and not pins:
        raise UserError(
            f"batch_size {batch} is smaller than the {needed} ranks: "
            f"raise it to at least {needed}, or start fewer ranks"
        )
    if left < needed or (pins and 0 < left < rule.least):
        raise UserError(
            f"sync.pins {dict(pins)} leaves {left} of batch_size {batch} for the {needed} ranks that are not pinned, "
            f"which need at least {max(needed, rule.least)} together (sync.least_slice): lower the pins or raise the "
            f"batch size"
        )
    if left > possible and not unpinned:
        raise UserError(
            f"sync.pins {dict(pins)} adds up to {batch - left}, but batch_size is {batch}: "
            f"make them equal, or leave a rank unpinned"
        )
    if left > possible:
        raise UserError(
            f"batch_size {batch} is larger than the {batch - left + possible} samples that the ranks' "
            f"memory limits {limits} and sync.pins {dict(pins)} allow: "
            f"lower it, and accumulate more slices instead"
        )
    return bounds


def _check_pins(pins: Mapping[int, int], caps: Sequence[int | None], batch: int) -> None:
    for rank, share in pins.items():
        if not 0 <= rank < len(caps):
            raise UserError(f"sync.pins names rank {rank}, but the last is {len(caps) - 1}: remove it")
        if not 0 <= share <= batch:
            raise UserError(f"sync.pins gives rank {rank} {share} samples: give it 0 to {batch}")
        cap = caps[rank]
        if cap is not None and share > cap:
            raise UserError(
                f"sync.pins gives rank {rank} {share} samples, but only {max(0, cap)} samples "
                f"fit into its memory: lower the pin"
            )


def apportion(total: int, shares: Mapping[int, int]) -> dict[int, int]:
    """Split `total` in proportion to the shares, by largest remainder; exact where it divides evenly."""
    whole = sum(shares.values())
    parts = {rank: total * share // whole for rank, share in shares.items()}
    by_remainder = sorted(shares, key=lambda rank: (-(total * shares[rank] % whole), rank))
    for rank in by_remainder[: total - sum(parts.values())]:
        parts[rank] += 1
    return parts


def slices_of(samples: int, share: int, least: int, cap: int | None = None) -> int:
    """How many slices these samples make: of the share, but of `least` rather than fewer, as far as memory lets them.
    Where the share is hardly more than that, a slice may be longer than it."""
    least = min(least, share)
    count = max(1, min(-(-samples // max(1, share)), samples // max(1, least)))
    return count if cap is None else max(count, -(-samples // max(1, cap)))


def whole_parts(
    shares: Mapping[int, int], total: int, least: int, caps: Mapping[int, int | None] | None = None
) -> dict[int, int]:
    """Split `total`, of a batch or some, in proportion to the shares, so that no slice has fewer samples than `least`
    where that can be helped: then some ranks get none, and slices may be longer."""
    parts = apportion(total, shares)
    if all(not part or part >= min(least, shares[rank]) for rank, part in parts.items()):
        return parts
    batches, longest = -(-total // sum(shares.values())), 2 * least - 1
    bounds = []
    for rank, share in shares.items():
        cap = (caps or {}).get(rank)
        most = max(share, longest if cap is None else min(longest, cap)) if share >= least else share
        bounds.append((min(least, share, total), batches * most))
    times = [StepTime(0.0, 1 / max(1, share)) for share in shares.values()]
    return dict(zip(shares, _allot(times, total, bounds, SliceRule(least, 1.0, in_step=True), {}), strict=True))


def choose_shares(sync: SyncConfig, batch_size: int, ranks: Sequence[RankProfile]) -> tuple[int, ...]:
    """Samples of each rank in a slice of all."""
    caps, rule = [profile.cap for profile in ranks], slice_rule(sync)
    if sync.shares == "equal":
        return equal_shares(len(ranks), batch_size, caps, sync.pins, rule)
    if sync.shares == "first":
        return first_pinned_shares(len(ranks), batch_size, sync.pins[0], rule)
    return speed_shares([profile.time for profile in ranks], batch_size, caps, sync.pins, rule)


def slice_rule(sync: SyncConfig) -> SliceRule:
    """As a job begins."""
    return SliceRule.of(sync.least_slice, sync.first_delay_bound, sync.first_quorum)


def solo_rates(batch_size: int, ranks: Sequence[RankProfile], least_slice: int = 1) -> list[float]:
    """Samples/s of each rank with nobody to wait for, at its share of the batch by speed: the same whatever shares a
    job begins or ends with."""
    times = [profile.time for profile in ranks]
    caps = [profile.cap for profile in ranks]
    shares = speed_shares(times, batch_size, caps, rule=SliceRule(min(least_slice, batch_size)))
    return [time.rate(max(1, share)) for time, share in zip(times, shares, strict=True)]
