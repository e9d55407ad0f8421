"""Telemetry of a simulated run: the lines of a real one, with virtual times."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetsync.simulate.clock import Looks
from hetsync.simulate.node import Node
from hetsync.sync.messages import Piece

FLUSH_LINES = 10_000


class Records:
    """Appends to one JSON-lines file a rank, for ranks below `ranks`. Without a folder it keeps nothing."""

    def __init__(self, folder: Path | None = None, ranks: int = 0) -> None:
        self._folder = folder
        self._ranks = ranks if folder is not None else 0
        self._lines: dict[int, list[str]] = defaultdict(list)
        self._count = 0

    def record(self, rank: int, kind: str, at: float, **fields: Any) -> None:
        """One line: `kind`, `at` (virtual seconds), and the fields."""
        if rank >= self._ranks:
            return
        self._lines[rank].append(json.dumps({"kind": kind, "at": round(at, 6), **fields}) + "\n")
        self._count += 1
        if self._count >= FLUSH_LINES:
            self.flush()

    def piece(self, now: float, node: Node, piece: Piece, learns: bool) -> None:
        if node.rank >= self._ranks:
            return
        self.record(
            node.rank,
            "piece",
            now,
            piece=piece.number,
            samples=piece.samples,
            slices=len(piece.slices),
            version=node.worker.version,
            compute_seconds=round(node.piece_seconds, 6),
            data_seconds=0.0,
            wait_seconds=round(node.wait_seconds - node.waited_before, 6),
            loss=node.piece_loss / piece.samples if learns and piece.samples else None,
        )
        node.waited_before = node.wait_seconds

    def delayed_round(self, number: int, joins: Looks, lands: Looks, staleness: Mapping[int, int]) -> None:
        """`staleness` is that of each contributor."""
        for rank in range(self._ranks):
            joined, landed = joins.at(rank), lands.at(rank)
            stale = staleness.get(rank)
            self.record(rank, "round", landed, round=number, seconds=round(landed - joined, 6), staleness=stale)

    def synchronous_round(self, number: int, began: float, now: float) -> None:
        for rank in range(self._ranks):
            self.record(rank, "round", now, round=number, seconds=round(now - began, 6), staleness=0)

    def not_training(self, kind: str, now: float, **fields: Any) -> None:
        """What ranks do off the clock takes no virtual time."""
        for rank in range(self._ranks):
            self.record(rank, kind, now, **fields, seconds=0.0)

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
