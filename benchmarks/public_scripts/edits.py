"""What a user changes in a script, kept as an editor's commands: where, and the new lines, and nothing of the script.

Written by `diff -e ORIGINAL CONVERTED > edits/NAME.ed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

COMMAND = re.compile(r"(?P<first>\d+)(,(?P<last>\d+))?(?P<verb>[acd])")


def edited(text: str, commands: str) -> str:
    """The text after the commands, of which each names lines after those of the next one.

    Raises:
        ValueError: A command is none of ed's `a`, `c` and `d`.
    """
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    rest = iter(commands.splitlines())
    for line in rest:
        found = COMMAND.fullmatch(line)
        if found is None:
            raise ValueError(f"{line!r} is no command of ed's that diff -e writes")
        first, last, verb = int(found["first"]), int(found["last"] or found["first"]), found["verb"]
        begin = first if verb == "a" else first - 1
        lines[begin : first if verb == "a" else last] = [] if verb == "d" else list(_given(rest))
    return "".join(lines)


def _given(rest: Iterator[str]) -> Iterator[str]:
    for line in rest:
        if line == ".":
            return
        yield f"{line}\n"
