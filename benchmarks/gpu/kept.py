"""What a part of the visit has found, kept as soon as it is known; and what it was at where it hangs."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import command, machine
from hetsync.files import write_atomically

LIMIT = "HETSYNC_GPU_PART_ENDS"  # of time.monotonic, in the environment of a part's processes
LAST_SECONDS = 8.0  # in which they say what they are at


def seconds_left() -> float:
    """Before the part is ended."""
    return float(os.environ.get(LIMIT, "inf")) - time.monotonic()


def tell_where_it_hangs() -> None:
    """By the stacks of all threads, shortly before."""
    if math.isfinite(seconds_left()):
        faulthandler.dump_traceback_later(max(1.0, seconds_left() - LAST_SECONDS))


def keep(output: Path, part: str, markdown: str, **found: Any) -> None:
    """OUTPUT/PART.json, with command and machine, and OUTPUT/PART.md."""
    told = {"command": command(f"gpu.{part}"), "machine": machine(), **found}
    write_atomically(output / f"{part}.json", json.dumps(told, indent=1) + "\n")
    write_atomically(output / f"{part}.md", markdown.rstrip("\n") + "\n")


def table(heads: list[str], rows: list[list[str]], words: int = 1) -> str:
    """Markdown; all columns but the first `words` are of numbers."""
    rule = ["---" if place < words else "---:" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, rule, *rows])
