"""How this process starts: where, as scripts change their folder, and words of their commands may be paths from there;
and how it loads torch."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

STARTED_IN = "."
with contextlib.suppress(OSError):  # a folder may be gone
    STARTED_IN = os.getcwd()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside, modules are loaded: of what torch's are made of nothing is garbage, and to look for it would take a third
    of the time."""
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()
