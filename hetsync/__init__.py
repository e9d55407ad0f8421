"""HetSync trains PyTorch models on clusters whose devices differ."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetsync.start import STARTED_IN as STARTED_IN  # before a script changes its folder
from hetsync.version import __version__ as __version__

if TYPE_CHECKING:
    from hetsync import metrics as metrics
    from hetsync.api import join as join


def __getattr__(name: str) -> Any:
    """`hetsync.join` and `hetsync.metrics`, without making every command line wait for torch."""
    if name == "join":
        from hetsync.api import join

        return join
    if name == "metrics":
        return import_module("hetsync.metrics")
    raise AttributeError(f"module 'hetsync' has no attribute {name!r}")
