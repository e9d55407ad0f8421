"""The best chain of stages, by dynamic programming over consecutive groups and the devices that are left. Pure.

GPipe's time of a chain is Σ + (M − 1) · max over stages and links, forward and backward apart. Of the chains that begin
at a group, with so many devices of each class used, first on one of some class, only those count that no other beats in
sum, greatest forward and greatest backward alike: what comes before adds the same to all of them. So the chain found is
optimal among chains in the order of the groups under GPipe, where the model is a chain itself and micro-batches are
equal. A stage is one device; devices may stay unused, unless every rank must have blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetsync.plan.evaluate import Evaluator
from hetsync.plan.placement import Stage
from hetsync.plan.search.contiguous import contiguous_replica
from hetsync.plan.search.group_figures import crossing_bytes, figures_before
from hetsync.plan.search.search import Problem

_Used = tuple[tuple[int, ...], int]  # devices by class, and the class of a chain's first


class _Chain(NamedTuple):
    """Stages from some group to the last; none at first."""

    total: float = 0.0  # seconds of all stages and links, both ways, and latencies
    forward: float = 0.0  # the greatest of a stage or link
    backward: float = 0.0
    end: int = 0  # where its first stage ends
    rest: _Chain | None = None
    device: int = -1  # class of its first stage


class _Seconds(NamedTuple):
    """What is added to the sum of a chain, and what its greatest are at least."""

    total: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Machines:
    """Devices of a replica by class, and what groups take on them; a micro-batch's."""

    classes: Sequence[Sequence[int]]  # ranks
    forward: Sequence[float]  # sums of parts of a step over the groups before
    backward: Sequence[float]
    step_seconds: Sequence[float]  # of a micro-batch, by class
    crossing: Sequence[float]  # bytes, before each group
    links: Sequence[Sequence[tuple[float, float]]]  # latency, seconds a byte
    fits: Sequence[Sequence[Sequence[Sequence[bool]]]]  # by class, stages behind, begin and end of a stage
    every_rank: bool  # whether no device may stay unused

    def begins(self, device: int, behind: int, end: int, more: bool) -> Iterator[int]:
        """Where a stage may begin that ends there, as far as memory goes; without more devices, only at the start."""
        fits = self.fits[device][behind]
        # A stage that begins earlier may need less: of what it makes itself it receives nothing.
        return (begin for begin in (range(end - 1, -1, -1) if more else (0,)) if fits[begin][end])

    def stage(self, begin: int, end: int, device: int, first: int) -> _Seconds:
        """With the link to the stage behind it, on a device of class `first`; -1 where there is none."""
        step = self.step_seconds[device]
        forward = (self.forward[end] - self.forward[begin]) * step
        backward = (self.backward[end] - self.backward[begin]) * step
        if first < 0:
            return _Seconds(forward + backward, forward, backward)
        latency, byte_seconds = self.links[device][first]
        carrying = self.crossing[end] * byte_seconds
        return _Seconds(forward + backward + 2 * (carrying + latency), max(forward, carrying), max(backward, carrying))

    def bound(self, begin: int, left: Sequence[int]) -> _Seconds:
        """What the groups before `begin` take at least, in all and on the busiest of so many devices of each class."""
        forward, backward = self.forward[begin], self.backward[begin]
        speed = sum(count / seconds for count, seconds in zip(left, self.step_seconds, strict=True))
        busiest = 1 / speed if begin else 0.0
        return _Seconds((forward + backward) * min(self.step_seconds), forward * busiest, backward * busiest)


@dataclass(frozen=True)
class BestChain:
    """`seconds`: of a slice under GPipe."""

    stages: tuple[Stage, ...]
    seconds: float


def best_chain(
    problem: Problem, machines: Machines, micro_batches: int, samples: int, replicas: int, less_than: float = math.inf
) -> BestChain | None:
    """None where no chain fits into memory and takes less than so many seconds. `samples`: of a micro-batch."""
    guess = _first_guess(problem, machines, micro_batches, samples, replicas)
    chain = best = _search(machines, micro_batches, guess, less_than)
    if best is None:
        return None
    stages, begin, bounds = [], 0, problem.groups.bounds
    unused = [list(members) for members in machines.classes]
    while chain is not None and chain.rest is not None:
        stages.append(Stage((unused[chain.device].pop(0),), tuple(range(bounds[begin], bounds[chain.end]))))
        begin, chain = chain.end, chain.rest
    return BestChain(tuple(stages), _seconds(best, micro_batches))


def classes_of(evaluator: Evaluator, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks whose devices are equal in time, memory and links."""
    found: dict[object, list[int]] = {}
    for rank in ranks:
        group = evaluator.cluster.device_of(rank)
        found.setdefault((evaluator.times[rank], group.memory_bytes, group.name, group.host), []).append(rank)
    return list(found.values())


def machines_of(
    problem: Problem, ranks: Sequence[int], micro_batches: int, samples: int, replicas: int, gpipe: bool
) -> Machines:
    evaluator = problem.evaluator
    classes = classes_of(evaluator, ranks)
    forward, backward, _, weights = figures_before(evaluator, problem.groups).T
    held = evaluator.held_bytes(weights[None, :] - weights[:, None], replicas)
    fits = []
    for members in classes:
        room = evaluator.limit_bytes[members[0]] + 1  # the evaluator counts whole bytes
        behind = [micro_batches if gpipe else min(left, micro_batches) for left in range(1, len(ranks) + 1)]
        by_number = {
            in_flight: (held + problem.run_saved_bytes(in_flight, samples) < room).tolist() for in_flight in set(behind)
        }
        fits.append([by_number[in_flight] for in_flight in behind])
    links = [[evaluator.link(one[0], other[-1]) for other in classes] for one in classes]
    return Machines(
        classes,
        forward.tolist(),
        backward.tolist(),
        [evaluator.times[members[0]].seconds(samples) for members in classes],
        (crossing_bytes(evaluator, problem.groups) * samples).tolist(),
        links,
        fits,
        problem.every_rank,
    )


def _first_guess(
    problem: Problem, machines: Machines, micro_batches: int, samples: int, replicas: int
) -> _Chain | None:
    """The best of the contiguous cuts over the fastest one, two and more devices: what is worse need not be kept."""
    device_of = {rank: device for device, members in enumerate(machines.classes) for rank in members}
    ranks = sorted(device_of, key=lambda rank: (machines.step_seconds[device_of[rank]], rank))
    place_of = {bound: place for place, bound in enumerate(problem.groups.bounds)}
    best = None
    for count in range(len(ranks) if problem.every_rank else 1, min(len(ranks), len(problem.groups)) + 1):
        cut = contiguous_replica(problem, ranks[:count], micro_batches, samples, replicas)
        chain = _Chain()
        for stages_left, stage in enumerate(reversed(cut.stages)):
            device = device_of[stage.ranks[0]]
            begin, end = place_of[stage.blocks[0]], place_of[stage.blocks[-1] + 1]
            if not machines.fits[device][stages_left][begin][end]:
                break
            chain = _extended(chain, machines.stage(begin, end, device, chain.device), end, device)
        else:
            if best is None or _seconds(chain, micro_batches) < _seconds(best, micro_batches):
                best = chain
    return best


def _seconds(chain: _Chain, micro_batches: int) -> float:
    return chain.total + (micro_batches - 1) * (chain.forward + chain.backward)


def _search(machines: Machines, micro_batches: int, guess: _Chain | None, less_than: float) -> _Chain | None:
    """Chains are built from the end, so that it is known how many stages follow one. `guess`: one that is known."""
    groups, counts = len(machines.forward) - 1, tuple(len(members) for members in machines.classes)
    best, best_seconds = None, less_than
    if guess is not None and _seconds(guess, micro_batches) < less_than:
        best, best_seconds = guess, _seconds(guess, micro_batches)
    # By where they begin: used devices and the first one's class, with the undominated chains.
    fronts: list[dict[_Used, list[_Chain]]] = [defaultdict(list) for _ in range(groups)]
    none: dict[_Used, list[_Chain]] = {(tuple(0 for _ in counts), -1): [_Chain()]}
    more = micro_batches - 1
    for end in range(groups, 0, -1):
        for (used, first), chains in (fronts[end] if end < groups else none).items():
            for device in (device for device, count in enumerate(counts) if used[device] < count):
                using = (*used[:device], used[device] + 1, *used[device + 1 :])
                left = tuple(count - n for count, n in zip(counts, using, strict=True))
                for begin in machines.begins(device, sum(used), end, any(left)):
                    if begin == 0 and machines.every_rank and any(left):
                        continue
                    stage, bound = machines.stage(begin, end, device, first), machines.bound(begin, left)
                    total = stage.total + bound.total
                    forward, backward = max(stage.forward, bound.forward), max(stage.backward, bound.backward)
                    for rest in chains:
                        greatest = max(rest.forward, forward) + max(rest.backward, backward)
                        least = rest.total + total + more * greatest
                        if least >= best_seconds:
                            continue
                        chain = _extended(rest, stage, end, device)
                        if begin == 0:
                            best, best_seconds = chain, least
                        else:
                            _keep(fronts[begin][using, device], chain)
        if end < groups:
            fronts[end].clear()
    return best


def _extended(rest: _Chain, stage: _Seconds, end: int, device: int) -> _Chain:
    """A stage that ends there before a chain."""
    return _Chain(
        rest.total + stage.total,
        max(rest.forward, stage.forward),
        max(rest.backward, stage.backward),
        end,
        rest,
        device,
    )


def _keep(front: list[_Chain], chain: _Chain) -> None:
    """Add a chain unless another is as good in all three; remove those that it beats."""
    total, forward, backward, *_ = chain
    for other in front:
        if other.total <= total and other.forward <= forward and other.backward <= backward:
            return
    front[:] = [c for c in front if c.total < total or c.forward < forward or c.backward < backward]
    front.append(chain)
