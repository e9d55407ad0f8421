"""Where the threads of a job wait for the GPU: torch's synchronisation warnings, by thread and line of HetSync's.

    mpirun -np 2 python -m benchmarks.gpu.waits --output results/gpu

A job of two ranks at D = 0 and at D = 4, in mid-epoch. Each wait of the main thread runs the GPU dry; each of the
communication thread makes a rank deaf. Rank 0 writes waits.json and waits.md. Processors have nothing to wait for.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import hetsync
from benchmarks.gpu.kept import keep, table, tell_where_it_hangs
from benchmarks.gpu.tasks import SMALL_TASKS
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.profiling.measure import find_place, take_device

OURS = str(Path(hetsync.__file__).parent)
WARMING, WATCHED = 8, 24  # batches
# Waits that torch's warnings do not tell of.
ASKED = ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize"))
BATCH = 32


class Waits:
    """Counted by thread and place."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            for owner, name in ASKED:
                stack.enter_context(patch.object(owner, name, self._counted(getattr(owner, name))))
            warnings.simplefilter("always")
            warnings.showwarning = self._count
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                if torch.cuda.is_available():
                    torch.cuda.set_sync_debug_mode("default")

    def _counted(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self._note()
            return wait(*given, **named)

        return counted

    def _count(self, message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            self._note()

    def _note(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
        place = f"{Path(frames[-1].filename).relative_to(OURS)}:{frames[-1].lineno}" if frames else "the loop"
        self.counts[threading.current_thread().name, place] += 1


def train(plane: Plane, device: torch.device, bound: int) -> list[tuple[str, str, int]]:
    task, waits = SMALL_TASKS["cifar10_resnet18-like"], Waits()
    model = task.model().to(device)
    samples = TensorDataset(*task.data()[: 2 * BATCH])
    with (
        hetsync.join(plane=plane, device=device.type, delay_bound=bound, progress=False, profile_seconds=0.1) as job,
        contextlib.ExitStack() as stack,
    ):
        model, optimizer = job.prepare(model, task.optimizer(model))
        for number, (inputs, labels) in enumerate(job.loader(samples, BATCH, samples=BATCH * (WARMING + WATCHED))):
            if number == WARMING:
                stack.enter_context(waits.watched())
            job.backward(functional.cross_entropy(model(inputs), labels))
            job.step(optimizer)
            if number == WARMING + WATCHED // 2:
                stack.close()
    return [(*where, count) for where, count in waits.counts.most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="on processors")
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder for waits.json and waits.md")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    plane = open_plane("mpi")
    device = take_device("cpu" if options.small else "cuda", find_place(plane))
    tell_where_it_hangs()
    found = {}
    for bound in (0, 4):
        found[bound] = train(plane, device, bound)
        if plane.rank == 0:
            rows = [[str(bound), *map(str, row)] for bound, waits in found.items() for row in waits]
            text = f"Waits in {WATCHED // 2} batches:\n\n{table(['D', 'thread', 'place', 'waits'], rows, words=3)}"
            keep(options.output, "waits", text, waits=found)
    if plane.rank == 0:
        print(f"{sum(count for waits in found.values() for *_, count in waits)} waits")
    plane.close()


if __name__ == "__main__":
    main()
