"""What jsonargparse says of mistakes, in our words: key, value, and what it must be."""

from __future__ import annotations

import re
from collections.abc import Collection

from hetsync.config.checks import expected
from hetsync.config.recipe_file import RENAMED, settings
from hetsync.errors import brief, did_you_mean

RESTRICTED = {
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number, at least 0",
    "PositiveFloat": "a number above 0",
}


def explain(message: str, short_forms: Collection[str] = ()) -> str:
    """One sentence. `short_forms`: options beside those of keys."""
    if found := re.match(r'Parser key "([\w.]+)":', message):
        return _wrong_value(found[1], message)
    if found := re.match(r"Group '(\w+)' does not accept option '(\w+)'", message):
        name = ".".join(found.groups())
        if name in RENAMED:
            return f"there is no key {name}: it is called {RENAMED[name]}"
        return f"there is no key {name}{did_you_mean(name, [key for key, _ in settings()])}"
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        option = found[1].partition("=")[0]
        if not option.startswith("-"):
            return f"{brief(found[1])} is one word too many: give one recipe, and settings as --section.key VALUE"
        if (name := option.removeprefix("--")) in RENAMED:
            return f"there is no option {option}: it is called --{RENAMED[name]}"
        near = did_you_mean(option, [*(f"--{key}" for key, _ in settings()), *short_forms])
        return f"there is no option {brief(option)}{near}; see --help"
    if found := re.match(r"argument --([\w.]+): expected one argument", message):
        kind = dict(settings()).get(found[1])
        return f"--{found[1]} needs a value" + (f": {expected(kind)}" if kind else "")
    return message


def _wrong_value(key: str, message: str) -> str:
    kinds = dict(settings())
    kind = kinds.get(key)
    value = re.search(r"(?:Given|Got) value: (.*)", message)
    if kind is None:
        inside = [name for name in kinds if name.startswith(f"{key}.")]
        return f"{key} holds keys of its own: give these, such as {inside[0]}" if inside else _own_option(key, message)
    if value is None:
        return f"{key} must be {expected(kind)} ({brief(message.partition(':')[2].strip())})"
    return f"{key} is {brief(value[1].strip()) or 'empty'}: it must be {expected(kind)}"


def _own_option(name: str, message: str) -> str:
    """Of a command, with a number of a restricted type."""
    found = re.search(r"Not of type (\w+): (?:(\S+) does not|.*: '(.*)')", message)
    if found is None or found[1] not in RESTRICTED:
        return message
    return f"--{name.replace('_', '-')} is {brief(found[2] or found[3])}: give {RESTRICTED[found[1]]}"
