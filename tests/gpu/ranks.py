"""One rank of the jobs of these tests: python ranks.py JOB DEVICE [WORDS], under mpirun. Ranks share the device.

Each ends with a line of JSON on rank 0. They run on processors, too, where what is to be seen of a GPU is left out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import hetsync
from hetsync.data.loader import EpochOrder
from hetsync.plane import open_plane
from hetsync.plane.base import Plane, Sums
from hetsync.plane.groups import GatedLane, NcclLane, open_gloo
from hetsync.plane.polled import PolledSums
from hetsync.profiling.device import memory_cap
from hetsync.profiling.measure import autocast

SAMPLES, BATCH, EPOCHS, SEED = 240, 24, 8, 3
BUSY_CYCLES = 20_000_000  # of the GPU's clock: some ten milliseconds
BRIEF_CYCLES = 4_000_000
HANGING_SECONDS = 52.0  # before whoever has started a job ends it
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


def busy(device: str, cycles: int = BUSY_CYCLES) -> None:
    """Work that keeps the calling thread's stream behind: what is not ordered runs ahead of it."""
    if device == "cuda":
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A stream of the script's own, around all of it."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def train(
    plane: Plane,
    device: str,
    *,
    stream: str = "default",
    compiled: str | None = None,
    dawdles: bool = False,
    dies_at: int | None = None,
    epochs: int = EPOCHS,
    **settings: Any,
) -> Script:
    """A job with unequal shares; what came of it, on every rank. `stream`: default, or the script's own, around all of
    it (own) or around each batch, which waits for nothing then (batch). `compiled`: torch's mode. `dawdles`: the device
    is kept busy for random times. The last rank `dies_at` a batch."""
    model = network(device)
    optimizer = optimizer_of(model)
    first = BATCH * 2 // 3 if plane.size > 1 else BATCH
    losses: list[torch.Tensor] = []  # to read one would wait for its stream
    summaries: list[dict[str, Any]] = []
    drawn = random.Random(plane.rank)
    last = plane.rank == plane.size - 1  # before one has died
    own = torch.cuda.Stream() if stream != "default" and torch.cuda.is_available() else None
    with (
        on(own if stream == "own" else None),
        hetsync.join(
            plane=plane, device=device, seed=SEED, pins={0: first}, rebalance=False, progress=False, **settings
        ) as job,
    ):
        model, optimizer = job.prepare(model, optimizer)
        compute = model if compiled is None else torch.compile(model, mode=compiled)
        job.on("end", summaries.append)

        def pause() -> None:
            busy(device, int(2 * BRIEF_CYCLES * drawn.random()) if dawdles else BUSY_CYCLES)

        for number, (points, labels) in enumerate(job.loader(data(), BATCH, samples=epochs * SAMPLES)):
            if number == dies_at and last:
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.cuda.stream(own if stream == "batch" else None):
                pause()
                assert points.device.type == device
                with job.autocast():
                    loss = nn.functional.cross_entropy(compute(points), labels)
                job.backward(loss)
                pause()
                job.step(optimizer)
                losses.append(loss.detach().clone())  # a graph writes there again
    summary = plane.broadcast_object(summaries[0] if summaries else None)
    weights = [weight.detach().float().cpu() for weight in model.parameters()]
    return {"weights": weights, "losses": [float(loss) for loss in losses], "summary": summary}


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


def sums_in_every_wire(sums: Sums, rank: int, size: int, device: str) -> dict[str, float]:
    """Several under way, of tensors that the device is still working on: the worst relative errors."""
    worst = {}
    expected = size * (size + 1) / 2
    for wire in WIRES:
        tensors = []
        for _ in range(4):
            busy(device)
            tensors.append(torch.full((100_003,), float(rank + 1), device=device))
        handles = [sums.allreduce(tensor, wire) for tensor in tensors]
        while not all([handle.done() for handle in handles]):
            time.sleep(1e-4)
        worst[wire] = max(float((tensor - expected).abs().max()) / expected for tensor in tensors)
    return worst


def contract(plane: Plane, device: str) -> dict[str, Any]:
    return sums_in_every_wire(plane, plane.rank, plane.size, device)


def through_lane(plane: Plane, device: str) -> dict[str, Any]:
    """By NCCL, or Gloo in its place."""
    with tempfile.TemporaryDirectory() as folder:
        path = plane.broadcast_object(f"{folder}/store" if plane.leads else None)
        return _through_lane(plane, dist.FileStore(path, plane.size), device)


def _through_lane(plane: Plane, store: dist.Store, device: str) -> dict[str, Any]:
    rank, size = plane.rank, plane.size
    if device == "cuda":
        lane: GatedLane = NcclLane(store, "lane", rank, size, torch.device("cuda", 0), 60.0)
    else:
        lane = GatedLane(*(open_gloo(store, name, rank, size, 60.0) for name in ("sums", "gate")))
    worst = sums_in_every_wire(PolledSums("this lane", rank, size, lane, lane, lane.reads), rank, size, device)
    plane.barrier()
    lane.close()
    return worst


def synchronous(plane: Plane, device: str, precision: str, stream: str) -> dict[str, Any]:
    found = train(plane, device, delay_bound=0, precision=precision, stream=stream)
    return {"furthest": furthest(found["weights"], plain(device, precision))}


def delayed(plane: Plane, device: str, kind: str) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "own stream": {"stream": "own"},
        "stream a batch": {"stream": "batch"},
        "wire": {"wire": "bfloat16"},
        "scaler": {"precision": "float16"},
        "compile": {"compiled": "default"},
        "graphs": {"compiled": "reduce-overhead"},
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


def bits(plane: Plane, device: str, bound: str, stream: str) -> dict[str, Any]:
    """Of the weights after training that is the same whatever the device is late with."""
    found = train(plane, device, delay_bound=int(bound), stream=stream, dawdles=True, epochs=2)
    digest = hashlib.sha256()
    for weight in found["weights"]:
        digest.update(weight.numpy().tobytes())
    return {"sha256": digest.hexdigest()}


@contextlib.contextmanager
def sanitizer_in_all_threads() -> Iterator[None]:
    """Torch's, in all threads of Python's; autograd's take over that of who calls backward. It is imported here alone:
    it traces every event and allocation from then on. It is told of marks that the host has looked at and found
    passed, as staged copies are, and is called by one thread at a time."""
    from torch.cuda import _sanitizer

    lock, run, query = threading.RLock(), threading.Thread.run, torch.cuda.Event.query

    def one_at_a_time(handle: Any) -> Any:
        def handled(*given: Any, **named: Any) -> Any:
            with lock:
                return handle(*given, **named)

        return handled

    for name, handle in list(vars(_sanitizer.EventHandler).items()):
        if name.startswith("_handle_"):
            setattr(_sanitizer.EventHandler, name, one_at_a_time(handle))
    mode = _sanitizer.CUDASanitizerDispatchMode()

    def queried(event: torch.cuda.Event) -> bool:
        passed = query(event)
        if passed:
            mode.event_handler._handle_event_synchronization(event.cuda_event)
        return passed

    def sanitized(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    with mode, patch.object(torch.cuda.Event, "query", queried), patch.object(threading.Thread, "run", sanitized):
        yield


def sanitized(plane: Plane, device: str, bound: str, stream: str) -> dict[str, Any]:
    """Torch's sanitizer ends a job in which two streams race."""
    with sanitizer_in_all_threads():
        found = train(plane, device, delay_bound=int(bound), stream=stream, epochs=2)
    return {"applied": found["summary"]["samples_applied"]}


def killed(plane: Plane, device: str, bound: str) -> dict[str, Any]:
    """The last rank dies in mid-training."""
    found = train(plane, device, delay_bound=int(bound), dies_at=9, tolerate=True, least_ranks=1)
    summary = found["summary"]
    return {"applied": summary["samples_applied"], "failures": [each["rank"] for each in summary["failures"]]}


def full(plane: Plane, device: str) -> dict[str, Any]:
    """Eight steps on 0.95 of the batch that is told to fit."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 16384), nn.ReLU(), nn.Linear(16384, 4)).to(device)

    def loss(samples: int) -> torch.Tensor:
        made: torch.Tensor = model(torch.randn(samples, 64, device=device)).square().mean()
        return made

    cap = memory_cap(model, loss, torch.device(device), plane.size, optimizer_state_buffers=1)
    own = int(0.95 * cap) if device == "cuda" and cap is not None else 64
    batch = own * plane.size
    summaries: list[dict[str, Any]] = []
    # Equal shares of what is measured anew, so that they are of this size.
    with hetsync.join(
        plane=plane, device=device, seed=SEED, delay_bound=4, shares="equal", rebalance=False, progress=False
    ) as job:
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
        job.on("end", summaries.append)
        for (points,) in job.loader(TensorDataset(torch.randn(batch, 64)), batch, samples=8 * batch):
            job.backward(model(points).square().mean())
            job.step(optimizer)
    summary = plane.broadcast_object(summaries[0] if summaries else None)
    return {"cap": cap, "steps": summary["samples_applied"] / batch}


JOBS = {
    job.__name__: job for job in (contract, through_lane, synchronous, delayed, mixed, bits, sanitized, killed, full)
}


def main() -> None:
    name, device, *words = sys.argv[1:]
    faulthandler.dump_traceback_later(HANGING_SECONDS, exit=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    plane = open_plane("mpi")
    found = JOBS[name](plane, device, *words)  # type: ignore[operator]
    if plane.rank == 0:
        print(json.dumps(found), flush=True)
    plane.close()


if __name__ == "__main__":
    main()
