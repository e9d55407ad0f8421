"""One rank of planes.py's job: python -m benchmarks.planes_rank PLANE WAYS LARGEST_BYTES SECONDS FOLDER, under mpirun.

Tensors of several sizes are summed in turn by each way. WAYS is `library`: the library's own calls, and the plane's
sums without an engine; or `engine`: a job trains a model of one weight and comes to rest, and there its engine sums.
Each has a job of its own: a communication thread, which looks for news every now and then, would take its time from the
library's calls where there are no more cores than ranks. Rank 0 writes FOLDER/result.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.data import TensorDataset

import hetsync
from benchmarks.planes import LIBRARY
from hetsync.errors import UserError
from hetsync.files import write_atomically
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.train.session import Session

SUM_BYTES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
ELSEWHERE = "engine, any tensor"
FEWEST_ROUNDS, MOST_ROUNDS = 3, 50  # of one size, in which each way sums once

Add = Callable[[torch.Tensor], Any]  # sums in place
Allocate = Callable[[int], torch.Tensor]  # so many values


def bare_ways(plane: str) -> dict[str, Add]:
    """What a program would call that uses the plane's library itself; the first is the one to compare with."""
    if plane == "mpi":
        comm = MPI.COMM_WORLD.Dup()
        return {
            "Allreduce": lambda values: comm.Allreduce(MPI.IN_PLACE, memory(values)),
            "Iallreduce, Wait": lambda values: comm.Iallreduce(MPI.IN_PLACE, memory(values)).Wait(),
        }
    if plane == "torch":
        dist.init_process_group("gloo", rank=MPI.COMM_WORLD.Get_rank(), world_size=MPI.COMM_WORLD.Get_size())
        return {"all_reduce, wait": lambda values: dist.all_reduce(values, async_op=True).wait()}
    return {}


def memory(values: torch.Tensor) -> Any:
    return [MPI.buffer.fromaddress(values.data_ptr(), values.nbytes), MPI.FLOAT]


def polled(plane: Plane) -> Add:
    """As fast as the plane can: polled without a break."""

    def add(values: torch.Tensor) -> None:
        handle = plane.allreduce(values)
        while not handle.done():
            os.sched_yield()

    return add


def at_rest(plane: Plane, work: Callable[[Session], None]) -> None:
    """Collective: `work` while a job rests, whose communication thread then waits for nothing but its requests."""
    model = torch.nn.Linear(1, 1)
    speed = 100.0 * plane.size
    with hetsync.join(
        plane=plane, emulate="homogeneous", samples_per_second=speed, delay_bound=0, progress=False
    ) as job:
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        batches = job.loader(TensorDataset(torch.zeros(2 * plane.size)), plane.size, samples=2 * plane.size)
        for number in job.intervals(plane.size):
            for _ in batches:
                job.backward(model.weight.sum())
                job.step()
            if number == 0:
                work(job.session)


def time_sums(ways: dict[str, tuple[Add, Allocate]], largest: int, seconds: float) -> list[dict[str, Any]]:
    """Collective: of each sum the seconds from the call to the result on the last rank, and the CPU seconds that a rank
    took meanwhile, all of its threads together; the mean of all ranks."""
    comm = MPI.COMM_WORLD.Dup()
    rows: list[dict[str, Any]] = []
    for size in filter(lambda size: size <= largest, SUM_BYTES):
        tensors = {allocate: allocate(size // 4).zero_() for _, allocate in ways.values()}
        taken: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "cpu_seconds": []} for way in ways}
        began = time.monotonic()
        for count in range(MOST_ROUNDS + 1):
            for way, (add, allocate) in ways.items():
                comm.Barrier()
                started, cpu = time.monotonic(), time.process_time()
                add(tensors[allocate])
                took, cpu = time.monotonic() - started, time.process_time() - cpu
                told = comm.allgather((took, cpu))
                if count:  # the first warms up
                    taken[way]["seconds"].append(max(took for took, _ in told))
                    taken[way]["cpu_seconds"].append(sum(cpu for _, cpu in told) / comm.Get_size())
            if count >= FEWEST_ROUNDS and comm.bcast(time.monotonic() - began) > seconds:
                break
        rows.append({"bytes": size, "ways": taken})
    return rows


def measured(name: str, ways: str, largest: int, seconds: float) -> dict[str, Any]:
    try:
        plane = open_plane(name)
    except UserError as reason:
        return {"left_out": str(reason)}

    def of_plane(count: int) -> torch.Tensor:
        """As the engine's buffers are."""
        return plane.allocate(count, torch.device("cpu"))

    if ways == LIBRARY:
        bare: dict[str, tuple[Add, Allocate]] = {way: (add, torch.empty) for way, add in bare_ways(name).items()}
        sums = time_sums({**bare, "polled": (polled(plane), of_plane)}, largest, seconds)
        plane.close()
        return {"sums": sums}
    found: dict[str, Any] = {}

    def work(session: Session) -> None:
        add = session.engine.allreduce
        found["sums"] = time_sums({"engine": (add, of_plane), ELSEWHERE: (add, torch.empty)}, largest, seconds)

    at_rest(plane, work)
    return found


def main() -> None:
    name, ways, largest, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    found = measured(name, ways, largest, seconds)
    if MPI.COMM_WORLD.Get_rank() == 0:
        write_atomically(Path(sys.argv[5]) / "result.json", json.dumps(found))


if __name__ == "__main__":
    main()
