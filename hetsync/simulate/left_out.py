"""Does another card pay? What a recipe reaches with all devices of a cluster, and without some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetsync.balance.profile import RankProfile
from hetsync.config.schema import RULED_DELAY_BOUND, Config, SyncConfig, most_grace
from hetsync.emulation.cluster import Cluster, Link
from hetsync.errors import UserError
from hetsync.profiling.report import ALIKE, RATE_SAMPLES
from hetsync.simulate.gain import LEAST_SLICES, MOST_SLICES, SIMULATED_SLICES, Trials, worth_its_delay
from hetsync.simulate.scenario import Traffic
from hetsync.simulate.simulation import spare_the_collector

MOST_NAMED = 4  # ranks, where they have gaps


@dataclass(frozen=True)
class LeftOut:
    """Those that are left out of a cluster, by their ranks."""

    name: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rates:
    """Samples/s: `in_step` at D = 0, `ruled` at the `delay_bound` that auto comes to."""

    in_step: float
    ruled: float
    delay_bound: int | None

    def over(self, other: Rates) -> tuple[float, float]:
        """How much more than others, as parts of those: in step, and by rule."""
        return self.in_step / other.in_step - 1, self.ruled / other.ruled - 1


@dataclass(frozen=True)
class Prediction:
    """What the other devices reach; `refused` says why they cannot train the recipe, where they have no rates."""

    left_out: LeftOut
    rates: Rates | None
    refused: str | None = None


def predictions(
    config: Config, cluster: Cluster, ranks: Sequence[RankProfile], traffic: Traffic, adaptive: bool = False
) -> list[Prediction]:
    """Simulated, of all devices first, then without some; `adaptive` as in `Scenario`. Of one device alone none.

    UserError where the recipe's shares cannot be given to all ranks.
    """
    if len(ranks) == 1:
        return []
    ways = [LeftOut("nothing"), *ways_to_leave_out(cluster, ranks)]
    slices = max(LEAST_SLICES, min(MOST_SLICES, SIMULATED_SLICES // (2 * len(ranks) * len(ways))))
    spare_the_collector()
    found = []
    for left_out in ways:
        left, profiles = without(cluster, ranks, left_out.ranks)
        sync = replace(by_rule(config.sync), pins=pins_without(config.sync, left_out.ranks))
        try:
            rates = _rates(Trials(config, left, profiles, traffic, adaptive, slices), sync)
            found.append(Prediction(left_out, rates))
        except UserError as error:
            if not left_out.ranks:
                raise
            found.append(Prediction(left_out, None, str(error)))
    return found


def _rates(trials: Trials, sync: SyncConfig) -> Rates:
    in_step, delayed = trials.both(sync)
    if worth_its_delay(in_step, delayed, trials.adaptive):
        return Rates(in_step, delayed, sync.most_delay_bound)
    return Rates(in_step, in_step, 0)


def ways_to_leave_out(cluster: Cluster, ranks: Sequence[RankProfile]) -> list[LeftOut]:
    """One of each kind of devices, the slowest of it, and all of the kind; the host at an end of the slowest link; and
    all but the fastest device."""
    names = [cluster.device_of(rank).name for rank in range(len(ranks))]
    found = []
    for kind in kinds(cluster, ranks):
        name, count = names[kind[0]], len(kind)
        if count > 1:
            found.append(LeftOut(f"1 of the {count} x {name} ({called(kind[:1])})", kind[:1]))
        label = f"the {count} x {name}" if count > 1 else name
        found.append(LeftOut(f"{label} ({called(kind)})", tuple(sorted(kind))))
    found.extend(_host(cluster, len(ranks)))
    fastest = max(range(len(ranks)), key=lambda rank: ranks[rank].time.rate(RATE_SAMPLES))
    rest = tuple(others(len(ranks), [fastest]))
    found.append(LeftOut(f"all but {names[fastest]} ({called([fastest])})", rest))
    some: dict[tuple[int, ...], LeftOut] = {}
    for each in found:
        if len(each.ranks) < len(ranks):
            some.setdefault(each.ranks, each)
    return [*some.values()]


def kinds(cluster: Cluster, ranks: Sequence[RankProfile]) -> list[tuple[int, ...]]:
    """Ranks of like devices, by name and memory, whose rates differ by no more than measuring does. The slowest kind
    is the first, and in each the slowest rank, of equal ones the last."""
    rates = [profile.time.rate(RATE_SAMPLES) for profile in ranks]
    alike: defaultdict[tuple[str, int | None], list[list[int]]] = defaultdict(list)
    for rank in sorted(range(len(ranks)), key=lambda rank: (rates[rank], -rank)):
        group = cluster.device_of(rank)
        known = alike[group.name, group.memory_bytes]
        if not known or rates[rank] > (1 + ALIKE) * rates[known[-1][0]]:
            known.append([])
        known[-1].append(rank)
    found = [tuple(kind) for of_name in alike.values() for kind in of_name]
    return sorted(found, key=lambda kind: rates[kind[0]])


def _host(cluster: Cluster, ranks: int) -> Iterator[LeftOut]:
    """Of the two hosts that the slowest link of the ring joins, the one without which sums are the faster."""
    if not cluster.links:
        return
    ring = pairwise([*range(ranks), 0])
    ends = max(ring, key=lambda pair: _slowness(cluster.link_between(*pair)))
    hosts = {cluster.device_of(rank).host for rank in ends}
    of_host = {
        host: tuple(rank for rank in range(ranks) if cluster.device_of(rank).host == host) for host in hosts if host
    }
    if len(of_host) == len(ends) and max(map(len, of_host.values())) < ranks:
        host = min(sorted(of_host), key=lambda host: _slowness(link_without(cluster, ranks, of_host[host])))
        yield LeftOut(f"host {host} ({called(of_host[host])})", of_host[host])


def _slowness(link: Link) -> tuple[float, float]:
    return 1 / link.bytes_per_second if link.bytes_per_second else 0.0, link.latency_seconds


def called(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    first, *more = ordered = sorted(ranks)
    if not more:
        return f"rank {first}"
    if len(more) > 1 and ordered == list(range(first, ordered[-1] + 1)):
        return f"ranks {first} to {ordered[-1]}"
    if len(ordered) > MOST_NAMED:
        return f"{len(ordered)} ranks from {first} on"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def without(
    cluster: Cluster, ranks: Sequence[RankProfile], left_out: Sequence[int]
) -> tuple[Cluster, Sequence[RankProfile]]:
    """The others, numbered anew, with their events and the link of their sums."""
    if not left_out:
        return cluster, ranks
    kept = others(len(ranks), left_out)
    devices = tuple(replace(cluster.device_of(rank), count=1) for rank in kept)
    numbers = {rank: number for number, rank in enumerate(kept)}
    events = tuple(replace(event, rank=numbers[event.rank]) for event in cluster.events if event.rank in numbers)
    link = link_without(cluster, len(ranks), left_out)
    return replace(cluster, devices=devices, events=events, link=link, links=()), [ranks[rank] for rank in kept]


def others(ranks: int, left_out: Sequence[int]) -> list[int]:
    gone = set(left_out)
    return [rank for rank in range(ranks) if rank not in gone]


def link_without(cluster: Cluster, ranks: int, left_out: Sequence[int]) -> Link:
    """What sums of the others travel on: that of all, as much faster as the slowest link of their ring is. Of what lies
    between two devices a sum of all tells nothing: without `links` theirs is as fast."""
    whole = cluster.ring_link(range(ranks))
    if whole.compute_fraction is not None:
        return whole
    before, after = cluster.slowest_link(range(ranks)), cluster.slowest_link(others(ranks, left_out))
    latency, rate = whole.latency_seconds, whole.bytes_per_second
    if before.latency_seconds:
        latency *= after.latency_seconds / before.latency_seconds
    if rate is not None and before.bytes_per_second is not None:
        rate = None if after.bytes_per_second is None else rate * after.bytes_per_second / before.bytes_per_second
    return Link(latency, rate)


def by_rule(sync: SyncConfig) -> SyncConfig:
    """The same where the rule chooses the delay bound."""
    grace = sync.grace if sync.grace == "auto" else min(sync.grace, most_grace(RULED_DELAY_BOUND))
    return replace(sync, delay_bound="auto", grace=grace)


def pins_without(sync: SyncConfig, left_out: Sequence[int]) -> dict[int, int]:
    """By the numbers that the others have then. Where the first rank's share is set, that of whoever is first then."""
    if sync.shares == "first":
        return sync.pins
    gone = set(left_out)
    return {rank - sum(each < rank for each in gone): share for rank, share in sync.pins.items() if rank not in gone}
