"""What a script's own loop costs under HetSync: a lone rank against the same loop in plain PyTorch.

    python -m benchmarks.own_loop [--repetitions 7] [--milliseconds 5]

One process, an MLP whose step takes about so many milliseconds on one thread. Ways take turns within a repetition, each
in a process of its own. The ratio is that of samples a second, with its range over repetitions: 1 costs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from benchmarks.common.processes import environment
from benchmarks.common.report import command, machine, spread
from hetsync.files import write_atomically

WAYS = {"plain": None, "D = 0": 0, "D = 4": 4}
BATCH, FEATURES, WIDTH = 64, 64, 256
WARM_UP = 50  # steps
JOB_SECONDS = 600  # bound on one process


def layers(count: int) -> nn.Sequential:
    hidden = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 10))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def material(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    samples = BATCH * (WARM_UP + steps)
    points = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(points, torch.randint(10, (samples,), generator=generator))


def train(
    batches: Iterable[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], None],
) -> float:
    """Samples a second, once warm."""
    samples, began = 0, 0.0
    for number, (points, labels) in enumerate(batches):
        if number == WARM_UP:
            samples, began = 0, time.perf_counter()
        optimizer.zero_grad()
        backward(cross_entropy(model(points), labels))
        optimizer.step()
        samples += len(points)
    return samples / (time.perf_counter() - began)


def rate(way: str, depth: int, steps: int) -> float:
    """Of one job, in this process."""
    torch.set_num_threads(1)
    model, bound = layers(depth), WAYS[way]
    optimizer = optimizer_of(model)
    loader = DataLoader(material(steps), BATCH, shuffle=True)
    if bound is None:
        return train(loader, model, optimizer, torch.Tensor.backward)
    with hetsync.join(delay_bound=bound, progress=False) as job:
        model, optimizer, batches = job.prepare(model, optimizer, loader)
        found = [train(batches, model, optimizer, job.backward) for _ in job.epochs(1)]
    return found[0]


def depth_for(milliseconds: float) -> int:
    """Hidden layers of which a plain step takes about so long."""
    torch.set_num_threads(1)
    seconds = {}
    for depth in (4, 20):
        model = layers(depth)
        loader = DataLoader(material(WARM_UP), BATCH)
        seconds[depth] = BATCH / train(loader, model, optimizer_of(model), torch.Tensor.backward)
    layer = (seconds[20] - seconds[4]) / 16
    return max(1, round(4 + (milliseconds / 1000 - seconds[4]) / layer))


def run(way: str, depth: int, steps: int) -> float:
    """The rate of a job in a process of its own; one that fails ends the benchmark."""
    words = [sys.executable, "-m", "benchmarks.own_loop", "--way", way, "--depth", str(depth), "--steps", str(steps)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=JOB_SECONDS, check=False)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def table(rates: dict[str, list[float]]) -> str:
    """Medians and ranges; ratios are within a repetition."""
    lines = ["| | ms a step | samples/s | ratio to plain |", "| --- " * 4 + "|"]
    for way, found in rates.items():
        ratios = [mine / plain for mine, plain in zip(found, rates["plain"], strict=True)]
        step = 1000 * BATCH / statistics.median(found)
        lines.append(f"| {way} | {step:.2f} | {spread(found, '.0f')} | {spread(ratios, '.3f')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/own_loop"), help="folder for JSON and Markdown")
    parser.add_argument("--repetitions", type=int, default=7, help="of every way")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="that a plain step takes, about")
    parser.add_argument("--steps", type=int, default=1000, help="that are timed in a job")
    parser.add_argument("--way", choices=list(WAYS), help="run one job here, and print its samples/s")
    parser.add_argument("--depth", type=int, help="hidden layers, instead of --milliseconds")
    options = parser.parse_args()
    depth = options.depth or depth_for(options.milliseconds)
    if options.way is not None:
        print(rate(options.way, depth, options.steps))
        return
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.repetitions):
        for way, found in rates.items():
            found.append(run(way, depth, options.steps))
    kept = {"command": command("own_loop"), "machine": machine(), "depth": depth, "rates": rates}
    write_atomically(options.output / "own_loop.json", json.dumps(kept))
    write_atomically(options.output / "own_loop.md", table(rates))
    print(table(rates))


if __name__ == "__main__":
    main()
