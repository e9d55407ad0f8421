"""Puts this folder on the path, for what several folders' tests share (`jobs`), and leaves out what only `--thorough`
runs. Imports no MPI."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from jobs import environment

# A busy machine is no defect. A change is not refused for a rare case that has nothing to do with it: other examples
# are for `--thorough`.
settings.register_profile("always the same", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None)

# A shell has what it puts in the background ignore SIGINT, and nohup SIGHUP; and so would the jobs that tests start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run variants, too, and draw new examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("thorough") else "always the same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("thorough"):
        return
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _quick_start() -> Iterator[None]:
    """Of what tests start from here on: these processes themselves are as users' are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        yield
