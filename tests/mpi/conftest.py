"""A plane over the ranks that were started, and a named end for whatever would hang; what tests share, on the path."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetsync.launchers import ranks_started
from hetsync.plane.base import Handle, Plane

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "support"))

RANKS = ranks_started()
TEST_SECONDS = 60.0
HANDLE_SECONDS = 20.0

Finish = Callable[..., None]

# Their marks `ranks` say so, but their imports take seconds.
FOR_TWO = [
    "test_lightning.py",
    "test_fabric.py",
    "test_trainers.py",
    *(["test_lightning_parity.py"] if RANKS != 4 else []),
]
collect_ignore = [] if RANKS <= 2 else FOR_TWO


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what says by its mark `ranks` that as many ranks as these show nothing new."""
    left_out = {item for item in items if (mark := item.get_closest_marker("ranks")) and RANKS not in mark.args}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def plane() -> Iterator[Plane]:
    from hetsync.plane.mpi import MpiPlane

    plane = MpiPlane()
    yield plane
    plane.close()


@pytest.fixture
def folder(plane: Plane) -> Iterator[Path]:
    """The same on all ranks, and gone afterwards."""
    scratch = tempfile.TemporaryDirectory() if plane.rank == 0 else None
    yield Path(plane.broadcast_object(scratch.name if scratch else None))
    plane.barrier()
    if scratch:
        scratch.cleanup()


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """As scientific code has it."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def finish() -> Finish:
    """Poll handles until all are done, or raise `TimeoutError` with the name given."""

    def poll(*handles: Handle, name: str = "collective", seconds: float = HANDLE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not all([handle.done() for handle in handles]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: not done after {seconds} s")
            time.sleep(1e-4)

    return poll


@pytest.fixture(autouse=True)
def _bounded(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the job, with the test's name and all stacks, when a blocking call hangs."""

    def end() -> None:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        print(f"{request.node.nodeid} hangs: over {TEST_SECONDS} s", file=sys.__stderr__, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__)
        os._exit(70)

    timer = threading.Timer(TEST_SECONDS, end)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()
