"""Slow-downs and changes of membership at given moments of virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hetsync.config.yaml_files import read_yaml
from hetsync.errors import UserError, brief

Kind = Literal["slow_by", "recover", "leave", "join"]
OF_LINK = ("slow_by", "recover")


@dataclass(frozen=True)
class Change:
    """From `at_seconds` on, for slices and sums that begin then: the rank, or, where that is None, the link takes
    `factor` times as long (slow_by), or as long as its profile says (recover). Or all ranks drain, and the rank leaves,
    or comes back (join)."""

    at_seconds: float
    rank: int | None
    kind: Kind
    factor: float = 1.0


def load_script(path: Path, ranks: int) -> list[Change]:
    """A YAML list of {at_seconds: 10, rank: 3, slow_by: 2.5} or {at_seconds: 20, rank: 3, recover: true}, with leave
    and join like recover; or slow_by and recover of the link, with `link: true` in place of a rank. UserError where it
    says something else."""
    entries = read_yaml(path, f"--script {path}")
    if not isinstance(entries, list):
        raise UserError(f"--script {path} holds {type(entries).__name__}: give a list of changes")
    changes = [_change(entry, f"--script {path}, entry {number}") for number, entry in enumerate(entries, 1)]
    check_script(changes, ranks)
    return changes


def _change(entry: Any, where: str) -> Change:
    kinds = get_args(Kind)
    named = [key for key in entry if key in kinds] if isinstance(entry, dict) else []
    of_link = isinstance(entry, dict) and "link" in entry
    if len(named) != 1 or set(entry) != {"at_seconds", "link" if of_link else "rank", *named}:
        raise UserError(f"{where} is {brief(entry)}: give at_seconds, rank or link, and one of {', '.join(kinds)}")
    kind = named[0]
    at, rank, value = entry["at_seconds"], entry.get("rank"), entry[kind]
    if not _number(at) or at < 0:
        raise UserError(f"{where} has at_seconds {brief(at)}: give a number of at least 0")
    if of_link and (entry["link"] is not True or kind not in OF_LINK):
        raise UserError(f"{where} is {brief(entry)}: write link: true, with {' or '.join(OF_LINK)}")
    if not of_link and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
        raise UserError(f"{where} has rank {brief(rank)}: give a whole number of at least 0")
    if kind == "slow_by":
        if not _number(value) or value <= 0:
            raise UserError(f"{where} has slow_by {brief(value)}: give a number above 0")
        return Change(float(at), rank, kind, float(value))
    if value is not True:
        raise UserError(f"{where} has {kind} {brief(value)}: write {kind}: true")
    return Change(float(at), rank, kind)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_script(changes: Sequence[Change], ranks: int) -> None:
    """Every change must be possible when its time comes."""
    gone: set[int] = set()
    for change in sorted(changes, key=lambda change: change.at_seconds):
        rank, kind = change.rank, change.kind
        if rank is None:
            continue
        if rank >= ranks:
            raise UserError(f"the script names rank {rank}, but the last is {ranks - 1}: remove it")
        if kind == "leave" and rank == 0:
            raise UserError("the script lets rank 0 leave, which hosts the coordinator: take another rank")
        if (rank in gone) != (kind == "join"):
            state = "away" if rank in gone else "there"
            raise UserError(f"the script says {kind} of rank {rank}, which is {state} at {change.at_seconds:g} s")
        if kind == "leave":
            gone.add(rank)
        elif kind == "join":
            gone.discard(rank)
