"""The best partitions of a cluster's ranks into replicas, each a chain of stages. Pure.

Under delayed synchronisation the rates of replicas add up, as long as rounds fit their links. So two programmes find
the partition of the highest sum for each number of replicas: the best chain over so many devices of each class, for all
such numbers; and the best sum of those. What rounds add is the evaluator's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.chains import BestChain, best_chain, classes_of, machines_of
from hetsync.plan.search.search import Problem

SEVERAL = 2  # replicas, as far as memory cares
MOST_REPLICAS_TO_TRY = 128  # different ones, for each of which a chain is searched

Devices = tuple[int, ...]  # numbers of devices, by class


@dataclass(frozen=True)
class _Option:
    """A replica over so many devices, with samples a second."""

    chain: BestChain
    micro_batches: int
    rate: float


@dataclass(frozen=True)
class _Partition:
    rate: float
    replicas: tuple[Devices, ...]


def best_partitions(problem: Problem) -> Iterator[Placement]:
    """One for each number of replicas, from two on, for which there is one that fits into memory; none where too many
    different replicas are possible."""
    classes = classes_of(problem.evaluator, problem.ranks)
    counts = tuple(len(members) for members in classes)
    if math.prod(count + 1 for count in counts) > MOST_REPLICAS_TO_TRY:
        return
    options = {}
    for devices in product(*(range(count + 1) for count in counts)):
        if any(devices) and devices != counts and (option := _option(problem, classes, devices)) is not None:
            options[devices] = option
    none = tuple(0 for _ in counts)
    best = {none: _Partition(0.0, ())}
    for number in range(1, sum(counts) + 1):
        best = _one_more(best, options, counts)
        whole = [best[counts]] if counts in best else []
        found = whole if problem.every_rank else list(best.values())
        if number >= SEVERAL and found:
            yield _placement(classes, options, max(found, key=lambda partition: partition.rate))


def _one_more(
    best: dict[Devices, _Partition], options: dict[Devices, _Option], counts: Devices
) -> dict[Devices, _Partition]:
    """The best partitions with one replica more, by the devices that they use."""
    found: dict[Devices, _Partition] = {}
    for used, partition in best.items():
        for devices, option in options.items():
            using = tuple(a + b for a, b in zip(used, devices, strict=True))
            rate = partition.rate + option.rate
            if all(a <= b for a, b in zip(using, counts, strict=True)) and (
                using not in found or rate > found[using].rate
            ):
                found[using] = _Partition(rate, (*partition.replicas, devices))
    return found


def _option(problem: Problem, classes: Sequence[Sequence[int]], devices: Devices) -> _Option | None:
    """The fastest over numbers of micro-batches, at a share by the devices' speeds; None where nothing fits."""
    evaluator = problem.evaluator
    ranks = [rank for members, count in zip(classes, devices, strict=True) for rank in members[:count]]
    speeds = [1 / time.seconds(1) for time in evaluator.times]
    share = int(evaluator.training.batch_size * sum(speeds[rank] for rank in ranks) / sum(speeds))
    numbers = [number for number in problem.micro_batches if problem.wanted_share(number) <= share]
    best: _Option | None = None
    # A pipeline is mostly faster with more of them, which then rules out others; a lone rank is best left with few.
    for number in numbers if len(ranks) == 1 else reversed(numbers):
        samples = -(-share // number)
        machines = machines_of(problem, ranks, number, samples, SEVERAL, False)
        less_than = share / best.rate * (1 - 1e-9) if best else float("inf")
        chain = best_chain(problem, machines, number, samples, SEVERAL, less_than)
        if chain is not None:
            best = _Option(chain, number, share / chain.seconds)
    return best


def _placement(classes: Sequence[Sequence[int]], options: dict[Devices, _Option], partition: _Partition) -> Placement:
    """Each replica on devices of its own: options are all of the first of each class."""
    left = [list(members) for members in classes]
    class_of = {rank: index for index, members in enumerate(classes) for rank in members}
    replicas = []
    for devices in partition.replicas:
        option = options[devices]
        stages = tuple(Stage((left[class_of[stage.ranks[0]]].pop(0),), stage.blocks) for stage in option.chain.stages)
        replicas.append(Replica(stages, None, option.micro_batches))
    return Placement(tuple(replicas))
