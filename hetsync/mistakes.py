"""Mistakes in recipes and on command lines, said in one sentence: key, value, and what it must be."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from hetsync.config import Config
from hetsync.errors import UserError

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Any: "values",
}


def check_recipe(path: Path) -> None:
    """Raise unless the file holds YAML with known keys (their values are jsonargparse's business)."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read recipe {path}: {error}; it must be a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise UserError(f"recipe {path} is no YAML: {line}{getattr(error, 'problem', error)}") from error
    try:
        _check_keys(Config, content, "")
    except UserError as mistake:
        raise UserError(f"recipe {path}: {mistake}") from None


def explain(message: str) -> str:
    """What jsonargparse has to say, in our words."""
    if found := re.match(r'Parser key "([\w.]+)":', message):
        return _wrong_value(found[1], message)
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        option = found[1].partition("=")[0]
        if not option.startswith("-"):
            return f"{found[1]} is one word too many: give one recipe, and settings as --section.key VALUE"
        return f"there is no option {option}{_near(option, [f'--{key}' for key, _ in settings()])}; see --help"
    if found := re.match(r"argument --([\w.]+): expected one argument", message):
        kind = dict(settings()).get(found[1])
        return f"--{found[1]} needs a value" + (f": {_expected(kind)}" if kind else "")
    return message


def settings(kind: Any = Config, where: str = "") -> Iterator[tuple[str, Any]]:
    """All keys that hold a value, dotted, with their types."""
    for key, of_key in get_type_hints(kind).items():
        if dataclasses.is_dataclass(of_key):
            yield from settings(of_key, f"{where}{key}.")
        else:
            yield where + key, of_key


def _wrong_value(key: str, message: str) -> str:
    kind = dict(settings()).get(key)
    value = re.search(r"(?:Given|Got) value: (.*)", message, re.DOTALL)
    if kind is None:
        return message
    if value is None:
        return f"{key} must be {_expected(kind)} ({message.partition(':')[2].strip()})"
    return f"{key} is {value[1].strip() or 'empty'}: it must be {_expected(kind)}"


def _check_keys(kind: Any, content: Any, where: str) -> None:
    if not isinstance(content, dict):
        raise UserError(f"{where.rstrip('.') or 'it'} holds {content!r} instead of keys with values")
    hints = get_type_hints(kind)
    for key, value in content.items():
        if key not in hints:
            raise UserError(f"there is no key {where}{key}{_near(str(key), hints)}; remove it, or see --help")
        if dataclasses.is_dataclass(hints[key]):
            _check_keys(hints[key], value, f"{where}{key}.")


def _near(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _expected(kind: Any) -> str:
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_expected(option) for option in options)
    if origin is Literal:
        return f"{', '.join(options[:-1])} or {options[-1]}"
    if origin is dict:
        return f"a mapping of {_expected(options[0])} to {_expected(options[1])}"
    return WORDS[kind]
