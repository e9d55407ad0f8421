"""Run folders of known figures, without a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOLO = 100.0  # samples/s of each rank
Record = dict[str, Any]


def write_lines(folder: Path, rank: int, records: Sequence[Record], torn: str = "") -> Path:
    """Appends to a rank's telemetry; `torn` is what of a last line is there."""
    path = folder / "telemetry" / f"rank-{rank:04d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) + torn)
    return path


def start(wall_clock: str = "2026-11-02T14:00:00+00:00", **fields: Any) -> list[Record]:
    """As a process begins its lines."""
    profile = {
        "host": "node",
        "device": "cpu",
        "share": 10,
        "solo_samples_per_second": SOLO,
        "solo_uncertainty": 0.02,
        "samples_applied": 0,
        "delay_bound": 4,
        "accumulation": 1,
        **fields,
    }
    begun = {"kind": "start", "at": 0.0, "wall_clock": wall_clock, "format": 2}
    return [begun, {"kind": "profile", "at": 0.0, **profile}]


def task(at: float, compute: float = 0.1, wait: float = 0.0, data: float = 0.0, **fields: Any) -> Record:
    told = {"samples": 10, "slices": 1, "version": 0, "loss": 1.0, **fields}
    seconds = {"compute_seconds": compute, "data_seconds": data, "wait_seconds": wait}
    return {"kind": "piece", "at": round(at, 6), "piece": 0, **told, **seconds}


def tasks(count: int, begin: float = 0.0, compute: float = 0.1, wait: float = 0.0, data: float = 0.0) -> list[Record]:
    """One after the other from `begin` on."""
    each = compute + wait + data
    return [task(begin + (number + 1) * each, compute, wait, data) for number in range(count)]


def round_of(at: float, seconds: float = 0.02, staleness: int | None = 1, **fields: Any) -> Record:
    return {"kind": "round", "at": at, "round": 0, "seconds": seconds, "staleness": staleness, **fields}


def death(at: float, rank: int, **fields: Any) -> Record:
    told = {"rank": rank, "round": 40, "activity": "computing", "noticed_seconds": 0.1, "recovered_seconds": 0.2}
    return {"kind": "death", "at": at, **told, "samples_returned": 16, "cause": "died", **fields}


def write_summary(folder: Path, **keys: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    summary: Mapping[str, Any] = {
        "status": "running",
        "ranks": 1,
        "samples_expected": 1000,
        "samples_applied": 0,
        **keys,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
