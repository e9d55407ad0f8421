"""`hetsync-train` without a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetsync.cli import train as cli


def train(*words: str | Path | float) -> int:
    """Its exit status."""
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        cli.main(["--run.profile_seconds", "0.05", *map(str, words)])
    torch.set_num_threads(threads)
    return int(ended.value.code or 0)
