"""What programs show: by rich, and times in words."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """Shows text as it is. Rich would take words in brackets for markup, of folders and messages too, and leave them
    out or raise."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def duration(seconds: float) -> str:
    """To a tenth of a second, a minute or an hour."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
