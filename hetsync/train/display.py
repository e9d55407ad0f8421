"""How a job's progress and summary are told."""

from __future__ import annotations

from typing import Literal

from hetsync.train.json_lines import JsonLines
from hetsync.train.terminal import Display, Silence, Terminal

Shows = Literal["text", "json", "nothing"]


def make_display(shows: Shows, total: int | None, already: int) -> Display:
    """`total` and `already`: samples to train on, if that is known, and those applied by earlier parts of the run."""
    match shows:
        case "text":
            return Terminal(total, already)
        case "json":
            return JsonLines()
        case "nothing":
            return Silence()
