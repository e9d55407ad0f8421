"""Reads recipes: YAML with known keys. What a value may be is jsonargparse's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from hetsync.config.records import check_keys, dotted
from hetsync.config.schema import Config
from hetsync.config.yaml_files import read_yaml
from hetsync.errors import UserError, did_you_mean

# Keys that recipes of older run folders have.
RENAMED = {
    "emulate": "emulation.profile",
    "control.least_accumulation": "control.min_accumulation",
    "control.greatest_accumulation": "control.max_accumulation",
    "control.least_delay_bound": "control.min_delay_bound",
    "control.greatest_delay_bound": "control.max_delay_bound",
}


def settings(kind: Any = Config, where: str = "") -> Iterator[tuple[str, Any]]:
    """All keys that hold a value, dotted, with their types."""
    for key, of_key in get_type_hints(kind).items():
        if dataclasses.is_dataclass(of_key):
            yield from settings(of_key, dotted(where, key))
        else:
            yield dotted(where, key), of_key


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with HetSync, by name. Their package is not imported: its models would load torch."""
    spec = find_spec("hetsync.models")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return {path.stem: path for folder in folders for path in sorted((Path(folder) / "recipes").glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """A shipped recipe by name; any other by its path, which has a suffix or a separator, or is there."""
    path = Path(name_or_path)
    if path.suffix or path.name != name_or_path or path.is_file():
        return path
    shipped = shipped_recipes()
    if name_or_path not in shipped:
        near = did_you_mean(name_or_path, shipped)
        raise UserError(
            f"there is no recipe {name_or_path}{near}: give the path of a .yaml file, or one of {', '.join(shipped)}"
        )
    return shipped[name_or_path]


def read_content(path: Path) -> dict[str, Any]:
    """What a recipe holds, by today's names. UserError where it cannot be read or has keys that there are not."""
    if not path.is_file():
        raise UserError(f"recipe {path} does not exist: give a path to a YAML file")
    content = read_yaml(path, f"recipe {path}")
    try:
        if isinstance(content, dict):
            _rename_keys(content)
        _check_sections(Config, content, "")
    except UserError as mistake:
        raise UserError(f"recipe {path}: {mistake}") from None
    checked: dict[str, Any] = content
    return checked


def _rename_keys(content: dict[str, Any]) -> None:
    for old, new in RENAMED.items():
        section, key = _place(content, old)
        if not isinstance(section, dict) or key not in section:
            continue
        value = section.pop(key)
        section, key = _place(content, new)
        if isinstance(section, dict):  # else it is the mistake that the user hears of
            if key in section:
                raise UserError(f"{old} is now called {new}, and both are there: remove {old}")
            section[key] = value


def _place(content: dict[str, Any], name: str) -> tuple[Any, str]:
    """The section of a dotted key, and its name there."""
    section, _, key = name.rpartition(".")
    return content.setdefault(section, {}) if section else content, key


def _check_sections(kind: Any, content: Any, where: str) -> None:
    hints = get_type_hints(kind)
    check_keys(content, hints, where)
    for key, value in content.items():
        if dataclasses.is_dataclass(hints[key]):
            _check_sections(hints[key], value, dotted(where, key))
