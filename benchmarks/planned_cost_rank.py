"""One rank of planned_cost.py's job: python -m benchmarks.planned_cost_rank FOLDER ARGUMENTS, under mpirun.

hetsync-train with these arguments, whose parts are timed by CPU time while it trains. Writes FOLDER/parts-RANK.json.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common.parts_meter import Parts, PartsMeter
from benchmarks.common.processes import launched_as
from hetsync.cli import train
from hetsync.files import write_atomically
from hetsync.plan.parts import Pass
from hetsync.plane.mpi import MpiChannels, MpiMessages, MpiSums
from hetsync.replica.exchange import Exchange
from hetsync.replica.segments import SegmentSums
from hetsync.replica.staged import StagedReplica
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.deltas import Deltas
from hetsync.sync.follower import Follower
from hetsync.sync.log import Followers
from hetsync.threads import cpu_seconds
from hetsync.train.accounts import TrainingClock

PARTS: Parts = {
    "model": [
        *((Pass, name) for name in ("__init__", "backward")),
        (StagedReplica, "_loss_of"),
        (torch.optim.SGD, "step"),
        (torch.optim.Optimizer, "zero_grad"),
    ],
    "executor": [(StagedReplica, "run"), (StagedReplica, "clip_grad_norm")],
    "handing over": [
        *((Exchange, name) for name in ("send", "receive", "send_gradients", "receive_gradients")),
        *((MpiChannels, name) for name in ("send", "receive", "flush")),
    ],
    "log": [
        *((Followers, name) for name in ("tell", "send", "receive", "have_summed")),
        *((Follower, name) for name in ("_receive", "_send", "_come", "_proceed")),
    ],
    "sums": [
        *((SegmentSums, name) for name in ("begin", "finish")),
        *((Deltas, name) for name in ("pack", "apply_sum", "finish", "apply")),
        *((MpiSums, name) for name in ("allreduce", "_progress")),
    ],
    "messages": [(MpiMessages, "receive"), (MpiMessages, "send")],
    "coordinator": [(Coordinator, "handle")],
}
COMMUNICATION = "hetsync-communication"  # name of the thread


class Account:
    """CPU seconds while the job trains: between a start of its clock and the next stop."""

    def __init__(self, meter: PartsMeter) -> None:
        self.spent: Counter[str] = Counter()
        self._meter = meter
        self._before: Counter[str] | None = None

    def start(self, clock: TrainingClock, start: Callable[[TrainingClock], float]) -> float:
        self._before = self._now()
        return start(clock)

    def stop(self, clock: TrainingClock, stop: Callable[[TrainingClock], float]) -> float:
        if self._before is not None:
            now = self._now()
            now.subtract(self._before)
            self.spent.update(now)
            self._before = None
        return stop(clock)

    def _now(self) -> Counter[str]:
        parts, main, seconds = dict(self._meter.seconds), sum(self._meter.of_main.values()), time.thread_time()
        communicating = sum(cpu_seconds(each) for each in threading.enumerate() if each.name == COMMUNICATION)
        beside = sum(parts.values()) - main
        return Counter(
            {
                **parts,
                "polling": communicating - beside,
                "books": seconds - main,
                "loading": time.process_time() - seconds - communicating,
                "seconds": time.monotonic(),
            }
        )


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    account = Account(PartsMeter(PARTS))
    start, stop = TrainingClock.start, TrainingClock.stop
    TrainingClock.start = lambda clock: account.start(clock, start)  # type: ignore[method-assign]
    TrainingClock.stop = lambda clock: account.stop(clock, stop)  # type: ignore[method-assign]
    try:
        train.main(words)
    finally:
        write_atomically(folder / f"parts-{launched_as()[0]}.json", json.dumps(account.spent))


if __name__ == "__main__":
    main()
