"""Puts this folder on the path, for what several folders' tests share (`jobs`). Imports no MPI."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no defect.
settings.register_profile("hetsync", deadline=None)
settings.load_profile("hetsync")
