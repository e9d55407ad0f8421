"""Frozen dataclasses from plain YAML values and back. Each mistake is a UserError that names the key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hetsync.config.checks import expected, fits, listed, wrong
from hetsync.errors import UserError, brief, did_you_mean

T = TypeVar("T")


def check_keys(content: Any, known: Collection[str], where: str = "") -> None:
    """Raise unless `content`, found at the dotted key `where`, maps some of the known keys."""
    if not isinstance(content, dict):
        raise UserError(f"{where or 'it'} holds {brief(repr(content))} instead of keys with values")
    for key in content:
        if key not in known:
            near = did_you_mean(str(key), known)
            raise UserError(f"there is no key {dotted(where, brief(key))}{near}; remove it, or use {listed([*known])}")


def dotted(where: str, key: str) -> str:
    """A key's full name."""
    return f"{where}.{key}" if where else key


def record(kind: type[T], content: Any, where: str = "") -> T:
    """A dataclass from a mapping. Whole numbers become float where that is wanted, lists become tuples."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    check_keys(content, fields, where)
    hints = get_type_hints(kind)
    # Before what is missing: a name that is spelled wrongly further in is what to mend first.
    arguments = {key: _build(hints[key], value, dotted(where, key)) for key, value in content.items()}
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in content:
            raise UserError(f"{dotted(where, name)} is missing: add it")
    try:
        return kind(**arguments)
    except UserError as error:
        raise UserError(dotted(where, str(error))) from None


def plain(value: Any) -> Any:
    """Dataclasses as mappings, without the keys that have their default; tuples as lists."""
    if dataclasses.is_dataclass(value):
        pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        hints = get_type_hints(type(value))
        return {f.name: plain(v) for f, v in pairs if get_origin(hints[f.name]) is Literal or not _default(f, v)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _default(field: dataclasses.Field[Any], value: Any) -> bool:
    factory = field.default_factory
    return bool(value == (field.default if factory is dataclasses.MISSING else factory()))


def _build(kind: Any, value: Any, where: str) -> Any:
    """A value of the annotated type."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in options:
            return None
        kinds = [option for option in options if option is not NoneType]
        return _build(kinds[0] if len(kinds) == 1 else _named(kinds, value, where), value, where)
    if dataclasses.is_dataclass(kind):
        return record(kind, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong(where, value, expected(kind))
        return tuple(_build(options[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise wrong(where, value, expected(kind))
        return {_key(options[0], key, where): _build(options[1], item, f"{where}.{key}") for key, item in value.items()}
    if not fits(value, kind) or (kind is float and not math.isfinite(value)):
        raise wrong(where, value, expected(kind))
    return float(value) if kind is float else value


def _key(kind: Any, key: Any, where: str) -> Any:
    """Of a mapping; text may be written without quotes."""
    if kind is str:
        return str(key)
    if not fits(key, kind):
        raise wrong(f"a key of {where}", key, expected(kind))
    return key


def _named(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """Which of several dataclasses is meant: each has a key with one literal value of its own."""
    tag = next(key for key, hint in get_type_hints(kinds[0]).items() if get_origin(hint) is Literal)
    known = {get_args(get_type_hints(kind)[tag])[0]: kind for kind in kinds}
    if not isinstance(value, dict):
        check_keys(value, (), where)
    chosen = value.get(tag)
    if not isinstance(chosen, str) or chosen not in known:
        raise wrong(dotted(where, tag), chosen, listed([*known]))
    return known[chosen]
