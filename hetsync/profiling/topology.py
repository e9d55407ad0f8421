"""Latency and bandwidth between hosts and within them, by tensors that one rank sends to another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from hetsync.emulation.cluster import PairLink
from hetsync.plane.base import Channels, Plane

ROUND_TRIPS = 9  # of the smallest message, of which the median tells the latency
REPETITIONS = 3  # of the largest
FIRST_BYTES = 64 * 1024
MOST_BYTES = 16 * 1024 * 1024
LONG_ENOUGH_SECONDS = 0.05  # for a transfer whose latency hardly counts

Clock = Callable[[], float]
Pair = tuple[int, int]


def measure_links(plane: Plane, hosts: Sequence[str], clock: Clock = time.perf_counter) -> tuple[PairLink, ...]:
    """Collective: what lies between each two hosts, and within those of several ranks; nothing to tell of one host.

    Of each host the first rank takes part, and for what is within it the second. Pairs of different hosts measure at
    the same time, as they would all send in training: so `hosts` hosts take their number of turns, of a fraction of a
    second each. `hosts` has one for each rank. LateError where a rank does not answer.
    """
    if len(set(hosts)) == 1:
        return ()
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    names = list(ranks)
    within = [(members[0], members[1]) for members in ranks.values() if len(members) > 1]
    between = [[(ranks[names[one]][0], ranks[names[other]][0]) for one, other in turn] for turn in turns(len(names))]
    channels = plane.open_channels()
    found: dict[Pair, PairLink] = {}
    for turn in [within, *between]:
        plane.barrier()
        for first, second in turn:
            if plane.rank == first:
                latency, rate = measure_pair(channels, second, clock)
                found[first, second] = PairLink((hosts[first], hosts[second]), round(latency, 7), round(rate, -3))
            elif plane.rank == second:
                answer(channels, first)
    channels.close()
    everyones = plane.gather_objects(found)
    return tuple(link for _, link in sorted(pair for theirs in everyones for pair in theirs.items()))


def turns(count: int) -> list[list[Pair]]:
    """All pairs of so many, in as few turns as can be: nobody is in two pairs of one turn (the circle method)."""
    seats = [*range(count), *([-1] if count % 2 else [])]
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def measure_pair(channels: Channels, other: int, clock: Clock) -> tuple[float, float]:
    """Latency in seconds, bytes/s to the other rank, which must `answer`."""

    def seconds(values: torch.Tensor) -> float:
        began = clock()
        channels.send(True, [values], other)
        channels.receive(other)
        return max(clock() - began, 1e-9)

    smallest = torch.zeros(1, dtype=torch.float32)
    seconds(smallest)  # which may open a connection
    round_trip = median(seconds(smallest) for _ in range(ROUND_TRIPS))
    size = FIRST_BYTES
    while seconds(torch.zeros(size // 4, dtype=torch.float32)) < LONG_ENOUGH_SECONDS and size < MOST_BYTES:
        size *= 4
    values = torch.zeros(size // 4, dtype=torch.float32)
    whole = median(seconds(values) for _ in range(REPETITIONS))
    channels.send(False, [], other)
    channels.flush()
    return round_trip / 2, size / max(whole - round_trip, 1e-9)


def answer(channels: Channels, leader: int) -> None:
    """A few bytes back for each message, until there are no more."""
    while channels.receive(leader)[0]:
        channels.send(True, [torch.zeros(1)], leader)
    channels.flush()
