"""Puts this folder on the path, for what several folders' tests share (`jobs`). Imports no MPI."""

from __future__ import annotations

import signal

from hypothesis import settings

# A busy machine is no defect.
settings.register_profile("hetsync", deadline=None)
settings.load_profile("hetsync")

# A shell has what it puts in the background ignore SIGINT, and so would the jobs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
