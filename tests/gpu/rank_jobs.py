"""Jobs of ranks.py, started as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs import environment, mpirun

SECONDS = 60  # of a job, which says before what it is at
HERE = Path(__file__).resolve().parent


def job(name: str, device: str, *words: object, ranks: int = 2, flags: tuple[str, ...] = (), **env: str) -> Any:
    """What rank 0 tells at the end of one of the jobs of ranks.py."""
    start = [*mpirun(ranks), *flags] if ranks > 1 else []
    line = [*start, sys.executable, HERE / "ranks.py", name, device, *words]
    done = subprocess.run(
        list(map(str, line)), capture_output=True, text=True, timeout=SECONDS, env=environment(**env), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(text for text in done.stdout.splitlines() if text.startswith("{")))
