"""Slow-downs and changes of membership at given moments of virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from hetsync.errors import UserError

What = Literal["slow_by", "recover", "leave", "join"]


@dataclass(frozen=True)
class Change:
    """From `at_seconds` on, for slices that begin then: the rank takes `factor` times as long (slow_by), or as long as
    its profile says (recover). Or all ranks drain, and the rank leaves, or comes back (join)."""

    at_seconds: float
    rank: int
    what: What
    factor: float = 1.0


def load_script(path: Path, ranks: int) -> list[Change]:
    """A YAML list of {at_seconds: 10, rank: 3, slow_by: 2.5} or {at_seconds: 20, rank: 3, recover: true}, with leave
    and join like recover. UserError where it says something else."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--script {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list):
        raise UserError(f"--script {path} holds {type(entries).__name__}: give a list of changes")
    changes = [_change(entry, f"--script {path}, entry {number}") for number, entry in enumerate(entries, 1)]
    check_script(changes, ranks)
    return changes


def _change(entry: Any, where: str) -> Change:
    kinds = get_args(What)
    named = [key for key in entry if key in kinds] if isinstance(entry, dict) else []
    if len(named) != 1 or set(entry) != {"at_seconds", "rank", *named}:
        raise UserError(f"{where} is {entry}: give at_seconds, rank, and one of {', '.join(kinds)}")
    what = named[0]
    at, rank, value = entry["at_seconds"], entry["rank"], entry[what]
    if not _number(at) or at < 0 or not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise UserError(f"{where} has at_seconds {at} and rank {rank}: give numbers of at least 0")
    if what == "slow_by":
        if not _number(value) or value <= 0:
            raise UserError(f"{where} has slow_by {value}: give a number above 0")
        return Change(float(at), rank, what, float(value))
    if value is not True:
        raise UserError(f"{where} has {what} {value}: write {what}: true")
    return Change(float(at), rank, what)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_script(changes: Sequence[Change], ranks: int) -> None:
    """Every change must be possible when its time comes."""
    gone: set[int] = set()
    for change in sorted(changes, key=lambda change: change.at_seconds):
        rank, what = change.rank, change.what
        if rank >= ranks:
            raise UserError(f"the script names rank {rank}, but the last is {ranks - 1}: remove it")
        if what == "leave" and rank == 0:
            raise UserError("the script lets rank 0 leave, which hosts the coordinator: take another rank")
        if (rank in gone) != (what == "join"):
            state = "away" if rank in gone else "there"
            raise UserError(f"the script says {what} of rank {rank}, which is {state} at {change.at_seconds:g} s")
        if what == "leave":
            gone.add(rank)
        elif what == "join":
            gone.discard(rank)
