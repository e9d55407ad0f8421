"""Whether a plain value is of an annotated type, and what a sentence calls the type."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hetsync.errors import UserError, brief

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Any: "values",
}


def fits(value: Any, kind: Any) -> bool:
    """Whether a plain value is of a plain type; of other types their own code decides."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind not in (bool, int, float, str, NoneType):
        return True
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def expected(kind: Any) -> str:
    """The type in words: a whole number or null."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(expected(option) for option in options)
    if origin is Literal:
        return listed([str(option) for option in options])
    if origin in (dict, Mapping):
        return f"a mapping of {expected(options[0])} to {expected(options[1])}"
    if origin in (list, tuple):
        return "a list"
    return WORDS.get(kind) or str(getattr(kind, "__name__", kind))


def listed(options: list[str]) -> str:
    """a, b or c."""
    return " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)


def wrong(key: str, value: Any, what: str) -> UserError:
    """Of a value that must be something else."""
    return UserError(f"{key} is {'null' if value is None else brief(value)}: it must be {what}")


def at_least(key: str, value: float | None, least: float, above: bool = False, most: float = sys.maxsize) -> None:
    """Raise unless the value is a number >= least (> least if `above`) and <= most; None passes."""
    if value is None:
        return
    if not least <= value or (above and value == least):
        relation = "greater than" if above else "at least"
        raise UserError(f"{key} is {value}: it must be {relation} {least:g}")
    if value > most:
        raise UserError(f"{key} is {brief(value)}: it must be at most {most:,}")
