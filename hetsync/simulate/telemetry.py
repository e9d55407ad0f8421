"""What observers and the run folder are told of a simulation: running totals, and the lines of a real run's telemetry,
with virtual times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetsync.balance.profile import StepTime
from hetsync.files import json_text
from hetsync.simulate.polling import PollTimes
from hetsync.simulate.virtual_rank import VirtualRank
from hetsync.sync.messages import Task, TaskFinished
from hetsync.sync.observation import Totals
from hetsync.sync.rounds_rule import RoundsChange

FLUSH_LINES = 10_000


class Telemetry:
    """Appends to one JSON-lines file a rank, for ranks below `ranks`. Without a folder it keeps totals only."""

    def __init__(self, folder: Path | None = None, ranks: int = 0) -> None:
        self.totals = Totals()
        self.losses: list[tuple[int, float]] = []  # samples and mean loss of each task since they were taken last
        self.rounds_changes: list[RoundsChange] = []
        self._folder = folder
        self._ranks = ranks if folder is not None else 0
        self._lines: dict[int, list[str]] = defaultdict(list)
        self._count = 0

    def record(self, rank: int, kind: str, at: float, **fields: Any) -> None:
        """One line: `kind`, `at` (virtual seconds), and the fields."""
        if rank >= self._ranks:
            return
        self._lines[rank].append(json_text({"kind": kind, "at": round(at, 6), **fields}) + "\n")
        self._count += 1
        if self._count >= FLUSH_LINES:
            self.flush()

    def task_finished(
        self, now: float, rank: VirtualRank, task: Task, finished: TaskFinished, profiled: StepTime, learns: bool
    ) -> None:
        """`profiled` is the rank's time without jitter; `learns` says whether there are losses."""
        self.totals.count(profiled, finished, len(task.slices))
        loss = finished.loss_sum / finished.samples if learns and finished.samples else None
        if loss is not None:
            self.losses.append((finished.samples, loss))
        if rank.number >= self._ranks:
            return
        self.record(
            rank.number,
            "piece",
            now,
            piece=task.number,
            samples=finished.samples,
            slices=len(task.slices),
            version=rank.worker.version,
            compute_seconds=round(rank.task_seconds, 6),
            data_seconds=0.0,
            wait_seconds=round(rank.wait_seconds - rank.waited_before, 6),
            loss=loss,
        )
        rank.waited_before = rank.wait_seconds

    def delayed_round(self, number: int, joins: PollTimes, lands: PollTimes, staleness: Mapping[int, int]) -> None:
        """`staleness` is that of each contributor."""
        for rank in range(self._ranks):
            joined, landed = joins.at(rank), lands.at(rank)
            stale = staleness.get(rank)
            self.record(rank, "round", landed, round=number, seconds=round(landed - joined, 6), staleness=stale)

    def synchronous_round(self, number: int, began: float, now: float) -> None:
        for rank in range(self._ranks):
            self.record(rank, "round", now, round=number, seconds=round(now - began, 6), staleness=0)

    def off_the_clock(self, kind: str, now: float, **fields: Any) -> None:
        """What ranks do beside training takes no virtual time."""
        for rank in range(self._ranks):
            self.record(rank, kind, now, **fields, seconds=0.0)

    def rounds_changed(self, now: float, change: RoundsChange) -> None:
        """By rule, on rank 0."""
        self.rounds_changes.append(change)
        self.record(0, "rounds_change", now, **change.told)

    def flush(self) -> None:
        """Write what has been kept back."""
        assert self._folder is not None or not self._lines
        for rank, lines in self._lines.items():
            assert self._folder is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"rank-{rank:04d}.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(lines)
        self._lines.clear()
        self._count = 0
