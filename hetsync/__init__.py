"""HetSync trains PyTorch models on clusters whose devices differ."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hetsync.version import __version__ as __version__

if TYPE_CHECKING:
    from hetsync.api import join as join


STARTED_IN = "."
with suppress(OSError):  # a folder may be gone
    STARTED_IN = os.getcwd()  # scripts change it, and the words of their commands may be paths from here


def __getattr__(name: str) -> Any:
    """`hetsync.join`, without making every command line wait for torch."""
    if name == "join":
        from hetsync.api import join

        return join
    raise AttributeError(f"module 'hetsync' has no attribute {name!r}")
