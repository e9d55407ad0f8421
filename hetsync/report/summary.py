"""What a run folder's summary says, as far as it is shown; a broken disk, or somebody else, may have written it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetsync.config.checks import expected, fits, wrong
from hetsync.errors import UserError
from hetsync.files import SUMMARY, TEST

LARGEST = 2**63
SPELLED = ("nan", "inf", "-inf")  # by files.json_text

OF_RUN = {
    "status": str,
    "ranks": int,
    "ranks_at_start": int,
    "plane": str | None,
    "emulate": str | None,
    "samples_applied": int,
    "samples_expected": int | None,
    "samples_per_second": float,
    "efficiency": float | None,
    "solo_fraction": float | None,
    "delay_bound": int | None,
    "accumulation": int,
    "overrun_fraction": float,
}
OF_TEST = {"part": str, "samples": int, "weights": str, "samples_applied": int, "rows": int | None}
OF_STALENESS = {"mean": float, "max": int}
OF_RANK = {"rank": int}
PERHAPS_OF_RANK = {
    "compute_fraction": float,
    "wait_fraction": float,
    "data_fraction": float,
    "host": str | None,
    "device": str | None,
    "share": int | None,
    "solo_samples_per_second": float | None,
    "solo_uncertainty": float | None,
    "runtime_cpu_fraction": float | None,
    "left_at_round": int | None,
}


def read_summary(folder: Path) -> dict[str, Any]:
    """{} where there is none. UserError where it cannot be read, or something that is shown is not what it must be."""
    return _read(folder / SUMMARY, _checked)


def read_test(folder: Path) -> dict[str, Any]:
    """What the run came to on other samples than it was trained on; as `read_summary`."""
    return _read(folder / TEST, _checked_test)


def _read(path: Path, checked: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        return checked(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; remove it to look at the rest") from error


def _checked(found: Any) -> dict[str, Any]:
    found = _mapping("it", found)
    if "efficiency_while_training" in found:  # written when `efficiency` was the fraction of the solo rates
        names = {"efficiency": "solo_fraction", "efficiency_interval": "solo_fraction_interval"}
        found = {names.get(key, key): value for key, value in found.items()}
        found["efficiency"] = found.pop("efficiency_while_training")
    found |= _of_kinds("", found, OF_RUN)
    if (staleness := found.get("staleness")) is not None:
        told = _mapping("staleness", staleness)
        histogram = _numbers("staleness.histogram", told.get("histogram", {}))
        found["staleness"] = {**_of_kinds("staleness.", told, OF_STALENESS, all_of_them=True), "histogram": histogram}
    if (interval := found.get("solo_fraction_interval")) is not None:
        pair = _numbers("solo_fraction_interval", dict(enumerate(_list("solo_fraction_interval", interval))))
        if len(pair) != 2:
            raise wrong("solo_fraction_interval", interval, "two numbers")
        found["solo_fraction_interval"] = list(pair.values())
    found["metrics"] = _numbers("metrics", found.get("metrics", {}))
    found["per_rank"] = [
        _of_rank(f"per_rank[{n}].", row) for n, row in enumerate(_list("per_rank", found.get("per_rank", [])))
    ]
    return found


def _checked_test(found: Any) -> dict[str, Any]:
    told = _of_kinds("", _mapping("it", found), OF_TEST, all_of_them=True)
    metrics = _mapping("metrics", found.get("metrics"))
    return {**told, "metrics": {who: _numbers(f"metrics.{who}", values) for who, values in metrics.items()}}


def _of_rank(where: str, row: Any) -> dict[str, Any]:
    told = _mapping(where.rstrip("."), row)
    return {**_of_kinds(where, told, OF_RANK, all_of_them=True), **_of_kinds(where, told, PERHAPS_OF_RANK)}


def _of_kinds(
    where: str, told: Mapping[str, Any], kinds: Mapping[str, Any], all_of_them: bool = False
) -> dict[str, Any]:
    return {key: _taken(where + key, told.get(key), kind) for key, kind in kinds.items() if all_of_them or key in told}


def _numbers(where: str, value: Any) -> dict[Any, float]:
    return {key: _taken(f"{where}.{key}", number, float) for key, number in _mapping(where, value).items()}


def _taken(key: str, value: Any, kind: Any) -> Any:
    if value in SPELLED and fits(0.0, kind):
        return float(value)
    large = isinstance(value, int) and abs(value) >= LARGEST
    if large or not fits(value, kind):
        raise wrong(key, value, expected(kind))
    return value


def _mapping(key: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise wrong(key, value, "a mapping")
    return value


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(key, value, "a list")
    return value
