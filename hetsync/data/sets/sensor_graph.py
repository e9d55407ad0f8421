"""Tables that say how sensors are connected and where they stand, as the field distributes them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetsync.errors import UserError, brief

LEAST_WEIGHT = 0.1  # of a road: lighter ones are left out (Li et al. 2018)
PLACE = {"latitude", "longitude"}
ROAD_HEADS, PLACE_HEADS = ["from", "to", "distance"], ["sensor_id", "latitude", "longitude"]
ROAD, LENGTH = {"from", "to"}, {"distance", "cost"}


def heads_of(path: Path) -> list[str]:
    """Of a table; where it has none but three numbers in their place, as files of PEMS-BAY have, those of roads, or of
    places where it is called so."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        heads = [head.strip().lower() for head in next(csv.reader(file), [])]
    return (PLACE_HEADS if "location" in path.name.lower() else ROAD_HEADS) if _is_headless(heads) else heads


def _is_headless(heads: Sequence[str]) -> bool:
    try:
        return len(list(map(float, heads))) == len(ROAD_HEADS)
    except ValueError:
        return False


def adjacency(path: Path, names: Sequence[str]) -> np.ndarray:
    """(S, S) weights of roads. UserError where it names no road between these sensors."""
    if path.suffix == ".npy":
        given = np.load(path, allow_pickle=False)
        if given.shape != (len(names), len(names)) or not np.isfinite(given).all():
            raise UserError(f"{path} holds {given.shape}: give weights of ({len(names)}, {len(names)})")
        return given.astype(np.float64)
    at = {_identity(name): number for number, name in enumerate(names)}
    heads = heads_of(path)
    if not (set(heads) >= ROAD and LENGTH & set(heads)):
        raise UserError(f"{path} has the heads {brief(', '.join(heads))}: give from, to and distance")
    distances = np.full((len(names), len(names)), np.inf)
    for number, row in _rows(path):
        here, there = (at.get(_identity(row[end])) for end in ("from", "to"))
        if here is not None and there is not None:
            told = next(row[head] for head in LENGTH if head in row)
            distances[here, there] = number_in(path, number, "distance", told)
    known = distances[np.isfinite(distances)]
    if not known.size:
        raise UserError(
            f"{path} has no road between sensors of the readings, which are called {brief(', '.join(names))}: call them"
            " the same"
        )
    deviation = known.std() or known.mean() or 1.0
    weights: np.ndarray = np.exp(-np.square(distances / deviation))
    weights[weights < LEAST_WEIGHT] = 0
    np.fill_diagonal(weights, 1)
    return weights


def places_of(path: Path, names: Sequence[str]) -> np.ndarray | None:
    """(S, 2) longitudes and latitudes; None unless all are told."""
    told = {}
    for number, row in _rows(path):
        name = _identity(row.get("sensor_id") or row.get("sensor") or row.get("id") or "")
        told[name] = [number_in(path, number, key, row[key]) for key in ("longitude", "latitude")]
    wanted = [_identity(name) for name in names]
    return np.array([told[name] for name in wanted]) if all(name in told for name in wanted) else None


def _rows(path: Path) -> list[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        heads = heads_of(path)
        rows = csv.DictReader(file, heads)
        read: list[tuple[int, Mapping[str, Any]]] = [
            (rows.line_num, {str(key): value or "" for key, value in row.items()}) for row in rows
        ]
    return read if _is_headless(list(read[0][1].values())) else read[1:]


def _identity(word: str) -> str:
    """Of a sensor: 1201054.0 is 1201054."""
    word = word.strip()
    return word.removesuffix(".0")


def number_in(path: Path, line: int, what: str, word: str) -> float:
    """UserError for what is no finite one."""
    try:
        found = float(word)
    except ValueError:
        found = np.nan
    if not np.isfinite(found):
        raise UserError(f"{path}:{line} has {brief(word)} as {what}: give a number")
    return found
