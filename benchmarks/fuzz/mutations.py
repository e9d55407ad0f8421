"""A file as it may be after a slip of the hand, a broken disk, or on purpose."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

MUTATIONS = (1, 1, 1, 2, 3)  # in one file
SLIPS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        " ",
        "x",
        "0",
        "null",
        "../..",
        "/dev/null",
        "os:system",
        "a:b",
        ":",
    ),
    *(
        "\0",
        "\n",
        "\ud800",
        "é" * 300,
        "x" * 70_000,
        "[[[[",
        "%s{0}",
        [],
        {},
        [[]],
        [None],
        [1, -1],
        [[[[[[[[[]]]]]]]]],
    ),
    *({"": 0}, {0: 0}, {"a": {"b": {}}}, list(range(1000))),
)


def mutate(path: Path, source: random.Random) -> None:
    """Change a file in place: its values, where it is YAML, JSON or JSON lines, or its bytes."""
    structured = _STRUCTURED.get(path.suffix)
    content = path.read_bytes()
    for _ in range(source.choice(MUTATIONS)):
        if structured is not None and source.random() < 0.8:
            content = structured(content, source)
        else:
            content = source.choice(_OF_BYTES)(content, source)
    path.write_bytes(content)


# Bytes.


def _flip(content: bytes, source: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(source.randint(1, 8)):
        if changed:
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    return bytes(changed)


def _cut(content: bytes, source: random.Random) -> bytes:
    return content[: source.randint(0, len(content))]


def _remove(content: bytes, source: random.Random) -> bytes:
    begin, end = sorted(source.randint(0, len(content)) for _ in range(2))
    return content[:begin] + content[end:]


def _insert(content: bytes, source: random.Random) -> bytes:
    what = source.choice(
        [source.randbytes(source.randint(1, 40)), b"\n", b"\0", b"{", b"}", b":", b"- ", b"&a *a", b"\xff"]
    )
    at = source.randint(0, len(content))
    return content[:at] + what * source.choice([1, 1, 50]) + content[at:]


def _repeat(content: bytes, source: random.Random) -> bytes:
    begin, end = sorted(source.randint(0, len(content)) for _ in range(2))
    return content[:end] + content[begin:end] + content[end:]


def _renumber(content: bytes, source: random.Random) -> bytes:
    found = list(re.finditer(rb"-?\d+(\.\d+)?", content[:100_000]))
    if not found:
        return content
    number = source.choice(found)
    with_ = source.choice(
        [b"-1", b"0", b"1e999", b"nan", b"inf", b"-inf", b"9" * 30, b"9" * 5000, b"1e-400", b"", b"x", b"\xd9\xa3"]
    )
    return content[: number.start()] + with_ + content[number.end() :]


_OF_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_flip, _cut, _remove, _insert, _repeat, _renumber)


# Values.


def slipped(value: Any, source: random.Random) -> Any:
    """A copy of nested values with one place changed."""
    changed = copy.deepcopy(value)
    places = list(_places(changed))
    if not places:
        return source.choice(SLIPS)
    holder, key = source.choice(places)
    slip = source.randrange(6)
    if slip == 0:
        del holder[key]
    elif slip == 1:
        other, where = source.choice(places)
        holder[key] = copy.deepcopy(other[where])
    elif slip == 2 and isinstance(holder, dict):
        holder[source.choice(["", "x", 0, None, f"{key}x", f"x{key}"])] = holder.pop(key)
    elif slip == 3 and isinstance(holder[key], int | float):
        holder[key] = source.choice(
            [-holder[key], holder[key] * 1000, holder[key] / 1000, str(holder[key]), [holder[key]]]
        )
    else:
        holder[key] = source.choice(SLIPS)
    return changed


def _places(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _yaml(content: bytes, source: random.Random) -> bytes:
    try:
        changed = yaml.safe_dump(slipped(yaml.safe_load(content), source))
    except (yaml.YAMLError, ValueError, RecursionError, TypeError):  # an earlier mutation, or a slip that YAML has not
        return _flip(content, source)
    return changed.encode(errors="surrogatepass")


def _json(content: bytes, source: random.Random) -> bytes:
    try:
        changed = slipped(json.loads(content), source)
        return json.dumps(changed, default=str, skipkeys=True).encode(errors="surrogatepass")
    except (ValueError, RecursionError, TypeError):
        return _flip(content, source)


def _json_lines(content: bytes, source: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = source.randrange(len(lines))
    slip = source.randrange(8)
    if slip == 0:
        lines.pop(at)
    elif slip == 1:
        lines.insert(source.randrange(len(lines) + 1), lines[at])
    else:
        lines[at] = _json(lines[at], source)
    return b"\n".join(lines)


_STRUCTURED = {".yaml": _yaml, ".json": _json, ".jsonl": _json_lines}
