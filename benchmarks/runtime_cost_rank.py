"""One rank of runtime_cost.py's job: python -m benchmarks.runtime_cost_rank MODE SECONDS FOLDER, under mpirun.

The weights of ResNet-50 on emulated devices: slices are slept, so that what remains is the runtime's own work. Twice
SECONDS of training, of which the first half warms up and the second one is taken apart by CPU time. Rank 0 writes
FOLDER/result.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch.utils.data import TensorDataset

import hetsync
from benchmarks.common.parts_meter import Parts, PartsMeter
from hetsync.files import write_atomically
from hetsync.models.resnet import resnet50
from hetsync.plane.mpi import MpiMessages, MpiPlane, MpiSums
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.deltas import Deltas
from hetsync.sync.gradients import Gradients
from hetsync.train.session import Session

ROUNDS_PER_SECOND = 2.0
# With such a q every rank gives to every round, so that a slice is a round.
SETTINGS: dict[str, dict[str, Any]] = {
    "delayed": {"quorum": 0.99, "fragments": 1},
    # So that fragments are as they are by default; with equal shares it takes all ranks, too.
    "delayed, fragments by rule": {"quorum": 0.99},
    "synchronous": {"delay_bound": 0},
}

# What the runtime does, by purpose; all else of the communication thread is polling.
PARTS: Parts = {
    "main thread's copies": [
        *((Deltas, name) for name in ("finish", "apply")),
        *((Gradients, name) for name in ("_arrive", "close_slice", "flush", "collect")),
    ],
    "communication thread's copies": [*((Deltas, name) for name in ("pack", "apply_sum")), (Gradients, "pack")],
    "sums": [(MpiSums, "allreduce"), (MpiSums, "_progress")],
    "messages": [(MpiMessages, "receive"), (MpiMessages, "send")],
    "coordinator": [(Coordinator, "handle")],
}
OF_MAIN_THREAD = ("main thread's copies",)


class Weights(torch.nn.Module):
    """ResNet-50's weights and buffers without its computation, whose gradients are cheap and of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.held = resnet50()

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.sum() for weight in self.held.parameters()]).mean()


def books(session: Session, meter: PartsMeter) -> Counter[str]:
    """CPU seconds by purpose so far; and what summary.json would count of them, rounds, and seconds of training."""
    engine, ours = session.engine, Counter(meter.seconds)
    thread = engine.cpu_seconds() - engine.timer.cpu_seconds
    ours["polling"] = thread - sum(ours[purpose] for purpose in PARTS if purpose not in OF_MAIN_THREAD)
    totals = {"counted": engine.cpu_seconds(), "rounds": session.version, "seconds": session.totals.train_seconds}
    return Counter({**ours, **totals})


def per_second(before: Counter[str], after: Counter[str]) -> dict[str, Any]:
    """What the second half took, a second."""
    grown = {name: after[name] - before[name] for name in after}
    span = grown.pop("seconds")
    rates = {name: amount / span for name, amount in grown.items()}
    counted, rounds = rates.pop("counted"), rates.pop("rounds")
    parts = {purpose: rates.get(purpose, 0.0) for purpose in (*PARTS, "polling")}
    return {"rounds_per_second": rounds, "counted": counted, "parts": parts}


def train(mode: str, seconds: float) -> list[dict[str, Any]]:
    """Collective: CPU seconds of each rank's runtime per second of training, by purpose."""
    meter, plane = PartsMeter(PARTS), MpiPlane()
    half = round(seconds * ROUNDS_PER_SECOND) * plane.size
    model = Weights()
    speed = plane.size * ROUNDS_PER_SECOND
    taken: list[Counter[str]] = []
    with hetsync.join(
        plane=plane, emulate="homogeneous", samples_per_second=speed, progress=False, **SETTINGS[mode]
    ) as job:
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        batches = job.loader(TensorDataset(torch.zeros(2 * half)), plane.size, samples=2 * half)
        for _ in job.intervals(half):
            for _ in batches:
                job.backward(model())
                job.step()
            taken.append(books(job.session, meter))
        return plane.gather_objects(per_second(*taken))


def main() -> None:
    mode, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    costs = train(mode, seconds)
    if MPI.COMM_WORLD.Get_rank() == 0:
        values = sum(weight.numel() for weight in Weights().parameters())
        kept = {"mode": mode, "values": values, "per_rank": costs}
        write_atomically(folder / "result.json", json.dumps(kept))


if __name__ == "__main__":
    main()
