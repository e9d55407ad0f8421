"""What a communication thread's calls cost where caches are warm, and where the model has computed since the last one.

    python -m benchmarks.cold_calls [--repetitions 200]

One thread, one process: CPU time of each call in a loop, after a slice of the model (forward, backward, step), and
after a slice and a pause, in which a processor that has nothing to do goes to sleep. Medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.common.report import source
from hetsync.models.digits_cnn import DigitsCNN
from hetsync.plane import codec
from hetsync.sync.deltas import Deltas
from hetsync.sync.messages import EventBatch, TaskFinished

CHANNELS, SHARE = 64, 32  # as benchmarks.quotas trains digits
BATCH = 4 * SHARE  # samples
PAUSE_SECONDS = 0.02

Call = Callable[[], Any]


def slice_of(model: torch.nn.Module) -> Call:
    images, labels = torch.randn(SHARE, 1, 8, 8), torch.randint(0, 10, (SHARE,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def compute() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return compute


def calls_of(model: torch.nn.Module) -> dict[str, Call]:
    deltas = Deltas(list(model.parameters()), ranks_counted=BATCH // SHARE, one_sum=True)
    event = EventBatch([TaskFinished(1, 7, SHARE, 0.06, 1.2, 0.001, 0.002)])
    message = codec.dumps(event)

    def pack() -> None:
        deltas.pack(True, BATCH, "float32")
        deltas.apply_sum()

    return {
        "an event is encoded": lambda: codec.dumps(event),
        "an event is decoded": lambda: codec.loads(message),
        "a task is finished": lambda: deltas.finish(SHARE, 1),
        "a round is packed": pack,
    }


def cpu_microseconds(call: Call, before: Call, repetitions: int) -> float:
    """Median of this call's CPU time, where another one always comes before."""
    taken = []
    for _ in range(repetitions):
        before()
        began = time.thread_time()
        call()
        taken.append(1e6 * (time.thread_time() - began))
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200, help="of each call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = DigitsCNN(channels=CHANNELS)
    compute = slice_of(model)

    def compute_and_pause() -> None:
        compute()
        time.sleep(PAUSE_SECONDS)

    ways: list[Call] = [lambda: None, compute, compute_and_pause]
    compute()
    print(f"{source('cold_calls')}\n\n| µs of CPU time | in a loop | after a slice | after a slice and a pause |")
    print("| --- | ---: | ---: | ---: |")
    for name, call in calls_of(model).items():
        taken = [cpu_microseconds(call, before, options.repetitions) for before in ways]
        print(f"| {name} | {' | '.join(f'{value:.0f}' for value in taken)} |")


if __name__ == "__main__":
    main()
