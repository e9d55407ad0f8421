"""Every backend under the same tests, and a named end for whatever would hang."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hetsync.plane.base import Handle, Plane
from hetsync.plane.emulated_link import EmulatedLink
from hetsync.plane.faulty import FaultyPlane
from hetsync.plane.local import LocalPlane

TEST_SECONDS = 60.0
HANDLE_SECONDS = 20.0

Finish = Callable[..., None]


def _mpi() -> Plane:
    from hetsync.plane.mpi import MpiPlane

    return MpiPlane()


BACKENDS: dict[str, Callable[[], Plane]] = {
    "mpi": _mpi,
    "local": LocalPlane,
    "emulated-link": lambda: EmulatedLink(_mpi(), latency_seconds=1e-3, bytes_per_second=1e10),
    "faulty": lambda: FaultyPlane(_mpi(), ()),
}


@pytest.fixture(params=list(BACKENDS))
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    from mpi4py import MPI

    if request.param == "local" and MPI.COMM_WORLD.Get_size() > 1:
        pytest.skip("one rank only")
    plane = BACKENDS[request.param]()
    yield plane
    plane.close()


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
