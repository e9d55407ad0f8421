"""What a script's own loop costs under HetSync: a lone rank against the same loop in plain PyTorch, and a loop of
Lightning's or Fabric's against the same on one device; or, on several ranks in step, against DistributedDataParallel.

    python -m benchmarks.own_loop [--launches 7] [--turns 30] [--milliseconds 5] [--ranks 1]

An MLP whose step takes about so many milliseconds on one thread. A launch starts a process of each way; these take
turns, in random order, a quarter of a second each, while the others wait: what else the machine does changes over
seconds, and would hide a few per cent between processes that run one after the other. The ratio of a turn is that of
the seconds of the same steps, without HetSync to this way: 1 costs nothing. That of a launch is the median over its
turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from benchmarks.common.processes import end_groups, environment, launched_as
from benchmarks.common.report import command, machine, spread
from hetsync.files import write_atomically

DOORS = ("plain", "Lightning", "Fabric")  # whose loop it is; each also without HetSync
BOUNDS = (0, 4)
WAYS = {door: (door, None) for door in DOORS} | {
    f"{door}, D = {bound}": (door, bound) for door in DOORS for bound in BOUNDS
}
BATCH, FEATURES, WIDTH = 64, 64, 256  # a batch is a rank's
STEPS = 50  # of a turn
WARM_UP = 2  # turns


def layers(count: int) -> nn.Sequential:
    hidden = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 10))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def material(steps: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(BATCH * steps, FEATURES, generator=generator)
    return points, torch.randint(10, (len(points),), generator=generator)


class Indexed(TensorDataset):
    """For the plain loop: a batch by one index of each tensor, as `job.prepare` has it of a TensorDataset. Of that a
    DataLoader makes a batch sample by sample: what this takes would be set against the runtime's cost."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        index = torch.tensor(indices)
        return [tensor[index] for tensor in self.tensors]


def as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return batch


def plain_loader(steps: int) -> DataLoader[Any]:
    """Of this rank's samples."""
    return DataLoader(Indexed(*material(steps)), BATCH, shuffle=True, collate_fn=as_it_is)


class Turns:
    """A loop's turns: each begins when a line is read, and ends with a line of its seconds. Only the first rank reads:
    the others wait for its gradients."""

    def __init__(self) -> None:
        self._began: float | None = None

    def next(self) -> None:
        if launched_as()[0] > 0:
            return
        if self._began is not None:
            print(time.perf_counter() - self._began, flush=True)
        sys.stdin.readline()
        self._began = time.perf_counter()


def train(
    batches: Iterable[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], None],
    next_turn: Callable[[], None],
) -> None:
    for number, (points, labels) in enumerate(batches):
        if number % STEPS == 0:
            next_turn()
        optimizer.zero_grad()
        backward(cross_entropy(model(points), labels))
        optimizer.step()


def take_turns(way: str, depth: int, turns: int) -> None:
    """A job in this process; one more step ends its last turn."""
    torch.set_num_threads(1)
    door, bound = WAYS[way]
    {"plain": own_loop, "Lightning": by_lightning, "Fabric": by_fabric}[door](layers(depth), STEPS * turns + 1, bound)


def loader_of(steps: int) -> DataLoader[Any]:
    """Of all ranks' samples."""
    _, ranks = launched_as()
    return DataLoader(TensorDataset(*material(steps * ranks)), BATCH * ranks, shuffle=True)


def own_loop(model: nn.Module, steps: int, bound: int | None) -> None:
    optimizer = optimizer_of(model)
    if bound is None:
        if grouped := launched_as()[1] > 1:
            torch.distributed.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model)
        train(plain_loader(steps), model, optimizer, torch.Tensor.backward, Turns().next)
        if grouped:
            end_groups()
        return
    with hetsync.join(delay_bound=bound, progress=False) as job:
        model, optimizer, batches = job.prepare(model, optimizer, loader_of(steps))
        for _ in job.epochs(1):
            train(batches, model, optimizer, job.backward, Turns().next)


def by_fabric(model: nn.Module, steps: int, bound: int | None) -> None:
    from lightning.fabric import Fabric

    from hetsync.neighbours.fabric import FabricStrategy

    fabric = Fabric(**(without_hetsync() if bound is None else {"strategy": FabricStrategy(delay_bound=bound)}))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    batches = (
        fabric.setup_dataloaders(plain_loader(steps), use_distributed_sampler=False)
        if bound is None
        else fabric.setup_dataloaders(loader_of(steps))
    )
    train(batches, model, optimizer, fabric.backward, Turns().next)


def without_hetsync() -> dict[str, Any]:
    """Where a trainer runs."""
    _, ranks = launched_as()
    return {"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}


def by_lightning(model: nn.Module, steps: int, bound: int | None) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from hetsync.neighbours.lightning import HetSyncStrategy

    class Learner(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.turns = model, Turns()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number % STEPS == 0:
                self.turns.next()
            return cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    silent: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    if bound is None:
        trainer = Trainer(max_epochs=1, use_distributed_sampler=False, **silent, **without_hetsync())
        trainer.fit(Learner(), plain_loader(steps))
    else:
        Trainer(max_epochs=1, **silent, strategy=HetSyncStrategy(delay_bound=bound)).fit(Learner(), loader_of(steps))


def depth_for(milliseconds: float) -> int:
    """Hidden layers of which a plain step takes about so long."""
    torch.set_num_threads(1)
    seconds = {depth: step_seconds(depth) for depth in (4, 20)}
    layer = (seconds[20] - seconds[4]) / 16
    return max(1, round(4 + (milliseconds / 1000 - seconds[4]) / layer))


def step_seconds(depth: int) -> float:
    """Of the fastest of some turns of the plain loop, in this process."""
    model, moments = layers(depth), list[float]()
    loader = plain_loader(STEPS * 5 + 1)
    train(loader, model, optimizer_of(model), torch.Tensor.backward, lambda: moments.append(time.perf_counter()))
    return min(later - sooner for sooner, later in pairwise(moments)) / STEPS


def launched(stack: ExitStack, way: str, depth: int, turns: int, ranks: int) -> subprocess.Popen[str]:
    words = ["-m", "benchmarks.own_loop", "--way", way, "--depth", str(depth), "--turns", str(turns)]
    env, pipe = environment(), subprocess.PIPE
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", env["MASTER_PORT"]]
        words = torchrun + words
    return stack.enter_context(subprocess.Popen([sys.executable, *words], env=env, stdin=pipe, stdout=pipe, text=True))


def turn(way: str, job: subprocess.Popen[str]) -> float:
    """Seconds of the way's next turn; a job that fails ends the benchmark."""
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdin.write("\n")
    job.stdin.flush()
    if not (said := job.stdout.readline()):
        sys.exit(f"{way} failed with status {job.wait()}")
    return float(said)


def launch(ways: list[str], depth: int, turns: int, ranks: int) -> dict[str, list[float]]:
    """Seconds of a job of every way, by turn. Jobs of several ranks run one after the other: those that wait for their
    first rank would take the cores."""
    if ranks > 1 and len(ways) > 1:
        alone = [launch([way], depth, turns, ranks) for way in random.sample(ways, len(ways))]
        return {way: found for each in alone for way, found in each.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        jobs = {way: launched(stack, way, depth, WARM_UP + turns, ranks) for way in ways}
        for _ in range(WARM_UP + turns):
            for way in random.sample(ways, len(ways)):
                seconds[way].append(turn(way, jobs[way]))
        for job in jobs.values():
            job.communicate("\n")
    return {way: found[WARM_UP:] for way, found in seconds.items()}


def ratios(launches: list[dict[str, list[float]]], way: str) -> list[float]:
    """Of every launch: the median over its turns."""
    return [
        statistics.median(bare / mine for bare, mine in zip(found[WAYS[way][0]], found[way], strict=True))
        for found in launches
    ]


def table(launches: list[dict[str, list[float]]]) -> str:
    """Medians and ranges over launches."""
    lines = ["| | ms a step | ratio to the same loop without HetSync |", "| --- " * 3 + "|"]
    for way in (way for way in WAYS if way in launches[0]):
        steps = [1000 * statistics.median(found[way]) / STEPS for found in launches]
        lines.append(f"| {way} | {spread(steps, '.2f')} | {spread(ratios(launches, way), '.3f')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/own_loop"), help="folder for JSON and Markdown")
    parser.add_argument("--launches", type=int, default=7, help="of a process of every way")
    parser.add_argument("--turns", type=int, default=30, help=f"of {STEPS} steps in a launch")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="that a plain step takes, about")
    parser.add_argument("--ranks", type=int, default=1, help="of torchrun; several are measured in step only")
    parser.add_argument("--way", choices=list(WAYS), help="take turns here, each on a line of standard input")
    parser.add_argument("--depth", type=int, help="hidden layers, instead of --milliseconds")
    options = parser.parse_args()
    depth = options.depth or depth_for(options.milliseconds)
    if options.way is not None:
        take_turns(options.way, depth, options.turns)
        return
    ways = [way for way, (_, bound) in WAYS.items() if not bound or options.ranks == 1]
    launches = [launch(ways, depth, options.turns, options.ranks) for _ in range(options.launches)]
    kept = {"command": command("own_loop"), "machine": machine(), "depth": depth, "launches": launches}
    write_atomically(options.output / "own_loop.json", json.dumps(kept))
    write_atomically(options.output / "own_loop.md", table(launches))
    print(table(launches))


if __name__ == "__main__":
    main()
