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
settings.register_profile("always the same", deadline=None, derandomize=True, max_examples=40)
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
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item not in left_out and item.get_closest_marker("each_value") and hasattr(item, "callspec"):
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for variants in of_test.values():
        left_out |= set(variants) - each_value_once(variants)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def each_value_once(variants: list[pytest.Item]) -> set[pytest.Item]:
    """So many variants of a test that each value of each parameter is in one of them at least ("each choice" of
    combinatorial testing), with those together that have been least often so far; or as many as the mark says."""
    mark = variants[0].get_closest_marker("each_value")
    most = mark.args[0] if mark is not None and mark.args else len(variants)
    values = {item: [(name, id(value)) for name, value in item.callspec.params.items()] for item in variants}
    often = {value: 0 for of_variant in values.values() for value in of_variant}
    chosen: set[pytest.Item] = set()
    while 0 in often.values() and len(chosen) < most:
        new = [item for item in variants if any(often[value] == 0 for value in values[item])]
        chosen.add(best := min(new, key=lambda item: sum(often[value] for value in values[item])))
        for value in values[best]:
            often[value] += 1
    return chosen


@pytest.fixture(scope="session", autouse=True)
def _quick_start() -> Iterator[None]:
    """Of what tests start from here on: these processes themselves are as users' are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        yield
