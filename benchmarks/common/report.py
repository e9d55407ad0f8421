"""From jobs to the cells of a table, and where a result comes from."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
import torch

from hetsync.files import write_atomically
from hetsync.version import version_with_commit

Record = Mapping[str, Any]


def command(module: str) -> str:
    """The line that repeats this run of `python -m benchmarks.MODULE`."""
    return shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """What a result was measured on, with the commit."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor()
    versions = {"hetsync": version_with_commit(), "python": platform.python_version(), "torch": torch.__version__}
    return {"processor": processor, "cores": os.cpu_count(), **versions, "mpi4py": mpi4py.__version__}


def source(module: str) -> str:
    """Command and machine in a line, for the head of a table."""
    told = ", ".join(f"{name} {value}" for name, value in machine().items())
    return f"`{command(module)}` on {told}"


def keep(output: Path, module: str, **content: Any) -> None:
    """What a run of `benchmarks.MODULE` has found so far, with its command and machine: OUTPUT/MODULE.json."""
    told = {"command": command(module), "machine": machine(), **content}
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / f"{module.replace('_', '-')}.json", json.dumps(told, indent=1) + "\n")


def publish(output: Path, module: str, *parts: str) -> None:
    """Its tables and verdicts, printed and as OUTPUT/MODULE.md."""
    text = "\n\n".join([source(module), *(part.rstrip("\n") for part in parts)]) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / f"{module.replace('_', '-')}.md", text)
    print(text)


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """By the values of these keys, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def spread(values: Sequence[float | None], form: str) -> str:
    """Median and range; a dash where no job has the figure, and how many have it where some have not."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle = f"{statistics.median(known):{form}}"
    if len(known) < len(values):
        middle += f" ({len(known)} of {len(values)})"
    return middle if len(known) == 1 else f"{middle} [{min(known):{form}}, {max(known):{form}}]"


def evaluations(telemetry: Iterable[Record]) -> list[dict[str, float]]:
    """Metrics over samples and over seconds of training, from rank 0's telemetry."""
    names = {"samples_applied": "samples", "train_seconds": "seconds"}
    kept = [line for line in telemetry if line["kind"] == "evaluation"]
    return [{names.get(key, key): float(line[key]) for key in line if key not in ("kind", "at")} for line in kept]


def until_target(
    points: Iterable[Mapping[str, float]], metric: str, target: float, falling: bool, axis: str = "seconds"
) -> float | None:
    """`seconds` of training or `samples` until the target was first reached, on straight lines between evaluations.

    None where it never was. `falling`: less is better.
    """
    before: Mapping[str, float] | None = None
    for point in points:
        value = point[metric]
        if (value <= target) if falling else (value >= target):
            if before is None:
                return float(point[axis])
            part = (target - before[metric]) / (value - before[metric])
            return float(before[axis] + part * (point[axis] - before[axis]))
        before = point
    return None


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of theirs."""

    def ranks(values: Sequence[float]) -> Any:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])
