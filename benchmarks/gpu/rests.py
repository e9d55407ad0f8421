"""Where a rest's seconds go: averages, hashes, a checkpoint; and what is summed, hashed and written in it.

    mpirun -np 2 python -m benchmarks.gpu.rests --output results/gpu [--model adapter]

`gpt`: 124 M weights, all trained by AdamW. `adapter`: low-rank adapters of float32 on a frozen base of 1.0 B weights in
bfloat16, which are random. Three epochs of a few batches at D = 4 (or `--delay-bound`), with a rest and a checkpoint
after each. Rank 0 writes rests.json and rests.md.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hetsync
from benchmarks.gpu.kept import keep, table, tell_where_it_hangs
from benchmarks.gpu.rounds import STRETCHES, RoundTimes
from benchmarks.gpu.tasks import Gpt, sentences
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.profiling.measure import find_place, take_device
from hetsync.sync import digests
from hetsync.sync.engine import Engine
from hetsync.train import checkpoint
from hetsync.train.rest import CommonState

EPOCHS, BATCHES = 3, 3
RANK_OF_ADAPTERS = 8


class Adapted(nn.Module):
    """A frozen layer and a low-rank change of it (Hu et al. 2022), trained in float32."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False).to(torch.bfloat16)
        self.down = nn.Linear(base.in_features, RANK_OF_ADAPTERS, bias=False)
        self.up = nn.Linear(RANK_OF_ADAPTERS, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.base(x) + self.up(self.down(x.float())).to(x.dtype)
        return changed


def adapted(model: Gpt) -> Gpt:
    """All is frozen, in bfloat16, but for adapters of attention."""
    model.requires_grad_(False).to(torch.bfloat16)
    for block in model.blocks:
        base = block.queries_keys_values
        assert isinstance(base, nn.Linear)
        block.queries_keys_values = Adapted(base)
    return model


@dataclass(frozen=True)
class Shape:
    """Of a model, and of what it trains on."""

    vocabulary: int
    length: int
    width: int
    heads: int
    blocks: int
    batch: int

    def model(self, adapter: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Gpt(self.vocabulary, self.length, self.width, self.heads, self.blocks)
        return adapted(model) if adapter else model

    def data(self) -> TensorDataset:
        return sentences(BATCHES * self.batch, self.length, self.vocabulary)


SHAPES = {"gpt": Shape(50304, 128, 768, 12, 12, 8), "adapter": Shape(50304, 16, 2048, 16, 18, 4)}
SMALL = Shape(64, 8, 16, 2, 2, 8)


class Meter:
    """Seconds inside some functions, and bytes that pass them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: Counter[str] = Counter()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            places: list[tuple[str, Any, str]] = [
                ("average", CommonState, "average"),
                ("agree", CommonState, "agree"),
                ("hash", digests.Digests, "of"),
                ("save", checkpoint, "save"),
            ]
            for name, owner, function in places:
                stack.enter_context(patch.object(owner, function, self._timed(name, getattr(owner, function))))
            sizes: list[tuple[str, Any, str, Callable[[Any], int]]] = [
                ("hashed", digests, "weights_sha256", lambda given: sum(tensor.nbytes for tensor in given[0])),
                ("summed", Engine, "allreduce", lambda given: given[1].nbytes),
            ]
            for name, owner, function, size in sizes:
                stack.enter_context(patch.object(owner, function, self._counted(name, size, getattr(owner, function))))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*given, **named)
            finally:
                self.seconds[name] += time.monotonic() - began

        return timed

    def _counted(self, name: str, size: Callable[[Any], int], function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.bytes[name] += size(given)
            return function(*given, **named)

        return counted


def train(plane: Plane, device: torch.device, shape: Shape, adapter: bool, bound: int) -> Iterator[dict[str, Any]]:
    """What each rest so far took on this rank, and its rounds; collective."""
    model, meter, times = shape.model(adapter).to(device), Meter(), RoundTimes()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    run = Path(plane.broadcast_object(tempfile.mkdtemp(prefix="hetsync-rests-") if plane.leads else None))
    rests = list[dict[str, Any]]()
    counts = {"weights": sum(w.numel() for w in model.parameters()), "trained": sum(w.numel() for w in trained)}
    with (
        times.watching(),
        hetsync.join(
            plane=plane,
            device=device.type,
            run=run,
            delay_bound=bound,
            progress=False,
            shares="equal",
            rebalance=False,
            checkpoint_every=BATCHES * shape.batch,
        ) as job,
    ):
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        model, optimizer = job.prepare(model, optimizer)
        loader = job.loader(shape.data(), shape.batch)
        for _ in job.epochs(EPOCHS):
            with meter.watching():
                seconds_before, bytes_before = dict(meter.seconds), Counter(meter.bytes)
                for tokens, following in loader:
                    with job.autocast():
                        scores = model(tokens).float()
                    loss = functional.cross_entropy(scores.flatten(0, 1), following.flatten())
                    job.backward(loss)
                    job.step(optimizer)
                    trained_until = time.monotonic()
                seconds = {name: value - seconds_before.get(name, 0.0) for name, value in meter.seconds.items()}
                seconds["in all"] = time.monotonic() - trained_until
                rests.append({"seconds": seconds, "bytes": dict(meter.bytes - bytes_before)})
            yield {**counts, "rests": rests, "round_milliseconds": times.medians()}
    if plane.leads:
        shutil.rmtree(run, ignore_errors=True)


def markdown(found: dict[str, Any], ranks: int) -> str:
    heads = ["rest", "in all, s", "average, s", "agree, s", "of this hashes, s", "save, s", "summed, MB", "hashed, MB"]
    rows = []
    for number, rest in enumerate(found["rests"]):
        seconds = [f"{rest['seconds'].get(key, 0):.2f}" for key in ("in all", "average", "agree", "hash", "save")]
        rows.append(
            [str(number + 1), *seconds, *(f"{rest['bytes'].get(k, 0) / 1e6:.1f}" for k in ("summed", "hashed"))]
        )
    rounds = ", ".join(f"{name} {ms:.1f} ms" for name, ms in zip(STRETCHES, found["round_milliseconds"], strict=False))
    head = f"{found['weights'] / 1e6:.0f} M weights, {found['trained'] / 1e6:.1f} M of them trained, {ranks} ranks."
    return f"{head} Rank 0's rests:\n\n{table(heads, rows)}\n\nA round: {rounds or 'none was seen'}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model, on processors")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="gpt", choices=SHAPES)
    parser.add_argument("--delay-bound", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder for rests.json and rests.md")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    plane = open_plane("mpi")
    device = take_device("cpu" if options.small else options.device, find_place(plane))
    shape = SMALL if options.small else SHAPES[options.model]
    tell_where_it_hangs()
    for found in train(plane, device, shape, options.model == "adapter", options.delay_bound):
        if plane.rank == 0:
            keep(options.output, "rests", markdown(found, plane.size), **found)
    if plane.rank == 0:
        print(markdown(found, plane.size), flush=True)
    plane.close()


if __name__ == "__main__":
    main()
