"""What a benchmark keeps between two runs, the second of which goes on where the first has ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from benchmarks.common.report import command, machine
from hetsync.files import write_atomically


def require_same(output: Path, settings: Mapping[str, Any]) -> None:
    """Ends the program where `output` holds what was found with other settings; else they are kept there."""
    path, told = output / "settings.json", json.loads(json.dumps(settings))
    if path.exists() and (before := json.loads(path.read_text())) != told:
        other = sorted(name for name in before.keys() | told.keys() if before.get(name) != told.get(name))
        sys.exit(f"--output {output} holds what was found with another {', '.join(other)}: name another folder")
    write_atomically(path, json.dumps(told, indent=1) + "\n")


def results_of(
    output: Path, name: str, cells: Iterable[Any], job: Callable[[Any], dict[str, Any]], processes: int | None
) -> list[dict[str, Any]]:
    """What `job` finds for each cell, in the order of cells. A cell is a dataclass; its result has the same fields, and
    more. Results are kept in OUTPUT/NAME.json, and not found again."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.json"
    named = {"command": command(f"studies.{name}"), "machine": machine()}
    kept = json.loads(path.read_text()) if path.exists() else named
    found: list[dict[str, Any]] = kept.setdefault("jobs", [])
    cells = list(cells)
    order = {astuple(cell): place for place, cell in enumerate(cells)}
    names = [field.name for field in fields(cells[0])]

    def cell_of(result: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(result[name] for name in names)

    done = set(map(cell_of, found))
    missing = [cell for cell in cells if astuple(cell) not in done]
    with ProcessPoolExecutor(processes) as pool:
        for future in as_completed([pool.submit(job, cell) for cell in missing]):
            found.append(future.result())
            write_atomically(path, json.dumps(kept))
    found.sort(key=lambda result: order[cell_of(result)])
    write_atomically(path, json.dumps(kept))
    return found
