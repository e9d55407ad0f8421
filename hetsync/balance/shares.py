"""Who gets how much: from step times to each rank's samples of a batch. Pure: no tensors, no MPI, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError


def makespan(shares: Sequence[int], times: Sequence[StepTime]) -> float:
    """Seconds until the slowest rank has worked off its share."""
    return max(time.seconds(n) for n, time in zip(shares, times, strict=True))


def speed_shares(
    times: Sequence[StepTime],
    batch: int,
    caps: Sequence[int | None] | None = None,
    pins: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """Whole shares that add up to `batch` and end together: they minimise the largest `seconds(share)`.

    `caps` are the most samples that fit into each rank's memory (None: any number), `pins` the shares set by
    hand. Every rank that is neither pinned nor capped at 0 gets at least one sample. UserError where that
    cannot be done.

    The shares are optimal: everything that ends by the best fractional finishing time is handed out first,
    and each sample left over by rounding goes where it ends earliest (for times that grow with the share
    this greedy rule is exact: Federgruen and Groenevelt 1986). Ties go to the smaller share, then the
    lower rank.
    """
    bounds = _bounds(len(times), batch, caps, pins or {})
    deadlines = _Deadlines(times, bounds)
    shares = [int(share) for share in deadlines.shares(deadlines.latest(batch))]
    heap = [(times[i].seconds(n + 1), n, i) for i, n in enumerate(shares) if n < bounds[i][1]]
    heapify(heap)
    for _ in range(batch - sum(shares)):
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
) -> tuple[int, ...]:
    """Shares as equal as caps and pins allow; what rounding leaves goes one by one to the lowest ranks."""
    return speed_shares([StepTime(0.0, 1.0)] * ranks, batch, caps, pins)


def first_pinned_shares(ranks: int, batch: int, first: int) -> tuple[int, ...]:
    """The slices of DeepTTE in parallel (Qingdao, 2021): rank 0's by hand, the rest split evenly.

    What rounding lost goes one by one to the others, never to the first: 1024 on 8 ranks with 70 gives
    70, 137, 137, 136, 136, 136, 136, 136.
    """
    return equal_shares(ranks, batch, pins={0: first})


def rebalanced(
    shares: Sequence[int],
    times: Sequence[StepTime],
    batch: int,
    caps: Sequence[int | None] | None = None,
    pins: Mapping[int, int] | None = None,
    least_gain: float = 0.05,
) -> tuple[int, ...]:
    """New shares where they shorten the predicted makespan by more than `least_gain` of it, else the old.

    Old shares that break the batch, a cap or a pin are always replaced: they may belong to another
    membership.
    """
    bounds = _bounds(len(times), batch, caps, pins or {})
    valid = len(shares) == len(times) and sum(shares) == batch
    valid = valid and all(low <= n <= high for n, (low, high) in zip(shares, bounds, strict=True))
    if not valid:
        return speed_shares(times, batch, caps, pins)
    if len(shares) == 1:
        return tuple(shares)
    soon = (1 - least_gain) * makespan(shares, times)
    if _Deadlines(times, bounds).shares(soon).sum() < batch:  # no shares end by then: no need to look for the best
        return tuple(shares)
    best = speed_shares(times, batch, caps, pins)
    return tuple(shares) if makespan(best, times) >= soon else best


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


def _bounds(
    ranks: int, batch: int, caps: Sequence[int | None] | None, pins: Mapping[int, int]
) -> list[tuple[int, int]]:
    """(fewest, most) samples of each rank, after every reason why no shares exist has been ruled out."""
    limits = list(caps) if caps is not None else [None] * ranks
    if len(limits) != ranks:
        raise ValueError(f"{len(limits)} caps for {ranks} ranks")
    _check_pins(pins, limits, batch)
    most = [batch if cap is None else max(0, min(cap, batch)) for cap in limits]
    bounds = [(pins[i], pins[i]) if i in pins else (min(1, most[i]), most[i]) for i in range(ranks)]
    unpinned = [bound for i, bound in enumerate(bounds) if i not in pins]
    needed, possible = sum(low for low, _ in unpinned), sum(high for _, high in unpinned)
    left = batch - sum(pins.values())
    if left < needed and not pins:
        raise UserError(
            f"batch_size {batch} is smaller than the {needed} ranks: "
            f"raise it to at least {needed}, or start fewer ranks"
        )
    if left < needed:
        raise UserError(
            f"sync.pins {dict(pins)} leaves {left} of batch_size {batch} for the {needed} ranks that "
            f"are not pinned, which need at least one sample each: lower the pins or raise the batch size"
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


def without_single(shares: Mapping[int, int], total: int) -> dict[int, int]:
    """`apportion`, but no part is one sample where that can be helped: batch norm does not train on one."""
    if total == sum(shares.values()):
        return dict(shares)
    parts = apportion(total, shares)
    if total > sum(shares.values()):
        return parts
    for rank in [rank for rank, part in parts.items() if part == 1 and shares[rank] > 1]:
        if parts[rank] != 1:  # another has given it one
            continue
        others = [other for other in parts if other != rank]
        takers = [other for other in others if 0 < parts[other] < shares[other]]
        givers = [other for other in others if parts[other] > 2]
        if takers:
            other, change = min(takers, key=lambda other: parts[other]), -1
        elif givers:
            other, change = max(givers, key=lambda other: parts[other]), 1
        else:
            continue
        parts[rank] += change
        parts[other] -= change
    return parts


def choose_shares(sync: SyncConfig, batch_size: int, ranks: Sequence[RankProfile]) -> tuple[int, ...]:
    """Samples of each rank in a slice of all."""
    caps = [profile.cap for profile in ranks]
    if sync.shares == "equal":
        return equal_shares(len(ranks), batch_size, caps, sync.pins)
    if sync.shares == "first":
        return first_pinned_shares(len(ranks), batch_size, sync.pins[0])
    return speed_shares([profile.time for profile in ranks], batch_size, caps, sync.pins)


def solo_rates(batch_size: int, ranks: Sequence[RankProfile]) -> list[float]:
    """Samples/s of each rank with nobody to wait for, at its share of the batch by speed: the same whatever shares a
    job begins or ends with."""
    times = [profile.time for profile in ranks]
    shares = speed_shares(times, batch_size, [profile.cap for profile in ranks])
    return [time.rate(max(1, share)) for time, share in zip(times, shares, strict=True)]
