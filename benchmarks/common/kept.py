"""What a benchmark keeps between two runs, the second of which goes on where the first has ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetsync.files import write_atomically


def require_same(output: Path, settings: Mapping[str, Any]) -> None:
    """Ends the program where `output` holds what was found with other settings; else they are kept there."""
    path, told = output / "settings.json", json.loads(json.dumps(settings))
    if path.exists() and (before := json.loads(path.read_text())) != told:
        other = sorted(name for name in before.keys() | told.keys() if before.get(name) != told.get(name))
        sys.exit(f"--output {output} holds what was found with another {', '.join(other)}: name another folder")
    write_atomically(path, json.dumps(told, indent=1) + "\n")
