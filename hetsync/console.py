"""What programs show, by rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """Shows text as it is. Rich would take words in brackets for markup, of folders and messages too, and leave them
    out or raise."""
    return Console(highlight=False, markup=False, emoji=False, **options)
