"""How a process loads torch."""

from __future__ import annotations

import contextlib
import gc

import pytest

from hetsync.start import loading


@pytest.mark.parametrize("wanted", [True, False])
def test_nobody_collects_garbage_while_modules_are_loaded(wanted: bool) -> None:
    (gc.enable if wanted else gc.disable)()
    try:
        with contextlib.suppress(ImportError), loading():  # what goes wrong ends it, too
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == wanted
    finally:
        gc.enable()
