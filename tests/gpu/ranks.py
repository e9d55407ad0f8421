"""One rank of the jobs of these tests: python ranks.py JOB DEVICE [WORDS], under mpirun. Ranks share the device.

Each ends with a line of JSON on rank 0. They run on processors, too, where what is to be seen of a GPU is left out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hetsync
from hetsync.data.loader import EpochOrder
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.profiling.measure import autocast

SAMPLES, BATCH, EPOCHS, SEED = 240, 24, 8, 3
BUSY_CYCLES = 20_000_000  # of the GPU's clock: some ten milliseconds
WIRES: tuple[Any, ...] = ("float32", "bfloat16", "int8")
Script = dict[str, Any]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(SAMPLES, 16, generator=generator)
    return TensorDataset(points, (points[:, :4] * 3).argmax(1))


def network(device: str) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def busy(device: str) -> None:
    """Work that keeps the calling thread's stream behind: what is not ordered runs ahead of it."""
    if device == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


@contextlib.contextmanager
def on_stream(own: bool) -> Iterator[None]:
    """A stream of the loop's own, as some scripts have it."""
    if not own or not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def train(plane: Plane, device: str, *, own_stream: bool = False, compiled: bool = False, **settings: Any) -> Script:
    """A job with unequal shares; what came of it, on every rank."""
    model = network(device)
    optimizer = optimizer_of(model)
    first = BATCH * 2 // 3 if plane.size > 1 else BATCH
    losses: list[float] = []
    summaries: list[dict[str, Any]] = []
    with (
        on_stream(own_stream),
        hetsync.join(
            plane=plane, device=device, seed=SEED, pins={0: first}, rebalance=False, progress=False, **settings
        ) as job,
    ):
        model, optimizer = job.prepare(model, optimizer)
        compute = torch.compile(model) if compiled else model
        job.on("end", summaries.append)
        for points, labels in job.loader(data(), BATCH, samples=EPOCHS * SAMPLES):
            busy(device)
            assert points.device.type == device
            with job.autocast():
                loss = nn.functional.cross_entropy(compute(points), labels)
            job.backward(loss)
            job.step(optimizer)
            losses.append(float(loss.detach()))
    summary = plane.broadcast_object(summaries[0] if summaries else None)
    weights = [weight.detach().float().cpu() for weight in model.parameters()]
    return {"weights": weights, "losses": losses, "summary": summary}


def plain(device: str, precision: str) -> list[torch.Tensor]:
    """The weights of one process on nothing but PyTorch."""
    model, samples, order = network(device), data(), EpochOrder(SAMPLES, SEED)
    optimizer = optimizer_of(model)
    for start in range(0, EPOCHS * SAMPLES, BATCH):
        points, labels = (t[order.indices([(start, start + BATCH)])].to(device) for t in samples.tensors)
        with autocast(precision, torch.device(device)):
            loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().float().cpu() for weight in model.parameters()]


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, in parts of a tensor's largest value."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def contract(plane: Plane, device: str) -> dict[str, Any]:
    """Sums in every wire format, several under way, of tensors that the device is still working on."""
    worst = {}
    expected = plane.size * (plane.size + 1) / 2
    for wire in WIRES:
        tensors = []
        for _ in range(4):
            busy(device)
            tensors.append(torch.full((100_003,), float(plane.rank + 1), device=device))
        handles = [plane.allreduce(tensor, wire) for tensor in tensors]
        while not all([handle.done() for handle in handles]):
            time.sleep(1e-4)
        worst[wire] = max(float((tensor - expected).abs().max()) / expected for tensor in tensors)
    return worst


def synchronous(plane: Plane, device: str, precision: str, stream: str) -> dict[str, Any]:
    found = train(plane, device, delay_bound=0, precision=precision, own_stream=stream == "own")
    return {"furthest": furthest(found["weights"], plain(device, precision))}


def delayed(plane: Plane, device: str, kind: str) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "own stream": {"own_stream": True},
        "wire": {"wire": "bfloat16"},
        "scaler": {"precision": "float16"},
        "compile": {"compiled": True},
    }
    found = train(plane, device, delay_bound=4, **settings[kind])
    summary, losses = found["summary"], found["losses"]
    return {
        "same": all(found["weights"][0].equal(theirs) for theirs in plane.gather_objects(found["weights"][0])),
        "applied": summary["samples_applied"],
        "booked": sum(row["samples"] for row in summary["per_rank"]),
        "learned": sum(losses[-10:]) < 0.6 * sum(losses[:10]),
    }


def mixed(plane: Plane, device: str, bound: str) -> dict[str, Any]:
    """Rank 0 on the device, the others on processors."""
    found = train(plane, device if plane.rank == 0 else "cpu", delay_bound=int(bound))
    return {"applied": found["summary"]["samples_applied"]}


JOBS = {job.__name__: job for job in (contract, synchronous, delayed, mixed)}


def main() -> None:
    name, device, *words = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = False
    plane = open_plane("mpi")
    found = JOBS[name](plane, device, *words)  # type: ignore[operator]
    if plane.rank == 0:
        print(json.dumps(found), flush=True)
    plane.close()


if __name__ == "__main__":
    main()
