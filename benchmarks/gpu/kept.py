"""What a part of the visit has found, kept as soon as it is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.report import command, machine
from hetsync.files import write_atomically


def keep(output: Path, part: str, markdown: str, **found: Any) -> None:
    """OUTPUT/PART.json, with command and machine, and OUTPUT/PART.md."""
    told = {"command": command(f"gpu.{part}"), "machine": machine(), **found}
    write_atomically(output / f"{part}.json", json.dumps(told, indent=1) + "\n")
    write_atomically(output / f"{part}.md", markdown.rstrip("\n") + "\n")


def table(heads: list[str], rows: list[list[str]], words: int = 1) -> str:
    """Markdown; all columns but the first `words` are of numbers."""
    rule = ["---" if place < words else "---:" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, rule, *rows])
