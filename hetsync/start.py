"""Where this process was started: scripts change their folder, and words of their commands may be paths from there."""

from __future__ import annotations

import os
from contextlib import suppress

STARTED_IN = "."
with suppress(OSError):  # a folder may be gone
    STARTED_IN = os.getcwd()
