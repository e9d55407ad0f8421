"""One rank of runtime_cost.py's job: python -m benchmarks.runtime_cost_rank MODE SECONDS FOLDER, under mpirun.

The weights of ResNet-50 on emulated devices: slices are slept, so that what remains is the runtime's own work. Twice
SECONDS of training, of which the first half warms up and the second one is taken apart by CPU time; then, at rest,
buffers of several sizes are summed by the engine and by a bare blocking Allreduce in turn. Rank 0 writes
FOLDER/result.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch.utils.data import TensorDataset

import hetsync
from benchmarks.common.parts_meter import Parts, PartsMeter
from hetsync.api import JoinedSession
from hetsync.files import write_atomically
from hetsync.models.resnet import resnet50
from hetsync.plane.mpi import MpiMessages, MpiPlane, MpiSums
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.deltas import Deltas
from hetsync.sync.gradients import Gradients

ROUNDS_PER_SECOND = 2.0
SUM_BYTES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
LONGEST_LOOP = 20  # sums of one size, by the engine and bare each
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


def books(session: JoinedSession, meter: PartsMeter) -> Counter[str]:
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


def train(mode: str, seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Collective: CPU seconds of each rank's runtime per second of training, by purpose; and the times of sums."""
    meter, plane = PartsMeter(PARTS), MpiPlane()
    half = round(seconds * ROUNDS_PER_SECOND) * plane.size
    model = Weights()
    session = hetsync.join(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-6),
        TensorDataset(torch.zeros(2 * half)),
        batch_size=plane.size,
        evaluate_every=half,
        emulate="homogeneous",
        samples_per_second=plane.size * ROUNDS_PER_SECOND,
        plane=plane,
        **SETTINGS[mode],
    )
    taken: list[Counter[str]] = []
    sums: list[dict[str, Any]] = []

    def at_rest() -> None:
        taken.append(books(session, meter))
        if len(taken) == 2:
            sums.extend(time_sums(session, plane))

    with session:
        for _ in session.slices(at_rest):
            loss = model()
            loss.backward()
            session.step(loss)
        return plane.gather_objects(per_second(*taken)), sums


def time_sums(session: JoinedSession, plane: MpiPlane) -> list[dict[str, Any]]:
    """Collective, at rest: seconds of a sum, from the call to the result on the last rank."""
    comm = MPI.COMM_WORLD.Dup()
    rows = []
    for size in SUM_BYTES:
        values, ours = torch.zeros(size // 4), plane.allocate(size // 4, torch.device("cpu")).zero_()
        memory = MPI.buffer.fromaddress(values.data_ptr(), values.nbytes)
        ways = {
            "bare": lambda memory=memory: comm.Allreduce(MPI.IN_PLACE, [memory, MPI.FLOAT]),
            "engine": lambda values=ours: session.engine.allreduce(values),
        }
        row: dict[str, Any] = {"bytes": size, **{way: [] for way in ways}}
        for _ in range(min(LONGEST_LOOP, 3 + 200_000_000 // size)):
            for way, add in ways.items():
                comm.Barrier()
                began = time.monotonic()
                add()
                row[way].append(comm.allreduce(time.monotonic() - began, MPI.MAX))
        rows.append(row)
    comm.Free()
    return rows


def main() -> None:
    mode, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    costs, sums = train(mode, seconds)
    if MPI.COMM_WORLD.Get_rank() == 0:
        values = sum(weight.numel() for weight in Weights().parameters())
        kept = {"mode": mode, "values": values, "per_rank": costs, "sums": sums}
        write_atomically(folder / "result.json", json.dumps(kept))


if __name__ == "__main__":
    main()
