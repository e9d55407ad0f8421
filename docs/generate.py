"""Writes what docs/reference.md tells of recipe keys, from the docstrings of hetsync.config.schema.

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hetsync.config.schema import Config

REFERENCE = Path(__file__).parent / "reference.md"
BEGIN, END = "<!-- made by docs/generate.py -->", "<!-- end -->"


def explained(kind: type) -> dict[str, str]:
    """What a docstring's `Args:` say of each field."""
    arguments = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def words(kind: Any) -> str:
    """A type as a reader of recipes knows it."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(words(option) for option in options)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in options)
    if origin in (dict, list):
        return "mapping" if origin is dict else "list"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "null"}[kind]


def default_of(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def tables(kind: type = Config, where: str = "") -> Iterator[str]:
    """A table for each section that holds keys, top down."""
    hints, told = get_type_hints(kind), explained(kind)
    sections, rows = [], []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            sections.append((hints[field.name], f"{where}{field.name}."))
        else:
            meaning = told[field.name].replace("|", "\\|")
            rows.append(
                f"| `{where}{field.name}` | {words(hints[field.name])} | {shown(default_of(field))} | {meaning} |"
            )
    if rows:
        title = f"### {where.rstrip('.')}" if where else "### Top level"
        yield "\n".join([title, "", "| key | values | default | |", "| --- | --- | --- | --- |", *rows])
    for section, name in sections:
        yield from tables(section, name)


def with_keys(page: str) -> str:
    """The page with its tables of recipe keys made anew."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n" + "\n\n".join(tables()) + f"\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    REFERENCE.write_text(with_keys(REFERENCE.read_text(encoding="utf-8")), encoding="utf-8")
