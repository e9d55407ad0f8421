"""How even slices of trips of unequal length are: largest over mean cost (points) of eight slices of a batch.

    python -m benchmarks.slices --data data/deeptte [--batch 256]

Sorted, as DeepTTE's loader hands batches on: cut into equal runs; cut by the rule of the DeepTTE paper's parallel
version (the first share set, the rest even); dealt out in turn. Shuffled, with no regard to cost. And HetSync's
order, cut into runs wherever shares put the cuts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean

import torch

from hetsync.balance.shares import equal_shares, first_pinned_shares
from hetsync.data import build
from hetsync.data.loader import EpochOrder

SLICES = 8
EPOCHS = 20
Slices = Callable[[list[float]], list[list[float]]]


def runs(shares: tuple[int, ...]) -> Slices:
    """Neighbouring samples."""
    cuts = [0, *accumulate(shares)]
    return lambda costs: [costs[start:stop] for start, stop in pairwise(cuts)]


def longest_first(cut: Slices) -> Slices:
    return lambda costs: cut(sorted(costs, reverse=True))


def dealt(costs: list[float]) -> list[list[float]]:
    return [costs[slot::SLICES] for slot in range(SLICES)]


def unevenness(order: EpochOrder, costs: torch.Tensor, batch: int, cut: Slices) -> float:
    """Largest over mean cost of a slice, mean over all whole batches of some epochs."""
    ratios = []
    for start in range(0, EPOCHS * len(costs) - batch, batch):
        slices = [sum(part) for part in cut(costs[order.indices([(start, start + batch)])].tolist())]
        ratios.append(max(slices) / mean(slices))
    return mean(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data/deeptte"), help="folder of DeepTTE's JSON lines")
    parser.add_argument("--batch", type=int, default=256, help="trips of eight slices together")
    options = parser.parse_args()
    costs = torch.tensor(build("deeptte", {"path": str(options.data)}).costs, dtype=torch.float64)
    samples, batch = len(costs), options.batch
    shuffled, balanced = EpochOrder(samples, 0), EpochOrder(samples, 0, costs.tolist())
    equal = equal_shares(SLICES, batch, [None] * SLICES, {})
    pinned = first_pinned_shares(SLICES, batch, round(0.55 * batch / SLICES))  # 70 of 1,024 on 8, as in the paper
    arms = {
        "sorted, equal runs": (shuffled, longest_first(runs(equal))),
        "sorted, the paper's runs": (shuffled, longest_first(runs(pinned))),
        "sorted, dealt out in turn": (shuffled, longest_first(dealt)),
        "shuffled, equal runs": (shuffled, runs(equal)),
        "HetSync's order, equal runs": (balanced, runs(equal)),
    }
    print(f"| slices of {samples} trips in batches of {batch} | max / mean points |\n| --- | --- |")
    for name, (order, cut) in arms.items():
        print(f"| {name} | {unevenness(order, costs, batch, cut):.3f} |")


if __name__ == "__main__":
    main()
