"""Who writes that a run has failed, where others may go on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetsync.errors import UserError
from hetsync.files import SUMMARY
from hetsync.plane.base import CutOffError, LateError, LostError, StalledError
from hetsync.train.running import Running


def may_go_on_elsewhere(failure: Exception, leading: bool, tolerant: bool = True, outlives_first: bool = True) -> bool:
    running = Running.__new__(Running)
    vars(running).update(plane=SimpleNamespace(tolerant=tolerant, outlives_first=outlives_first), _leading=leading)
    return running._may_go_on_elsewhere(failure)


@pytest.mark.parametrize("failure", [LostError("gone"), LateError("late"), StalledError("no word from rank 0")])
def test_who_does_not_reach_the_first_rank_leaves_the_summary_to_it(failure: Exception) -> None:
    assert may_go_on_elsewhere(failure, leading=False)
    assert not may_go_on_elsewhere(failure, leading=True)
    assert not may_go_on_elsewhere(failure, leading=False, tolerant=False)
    assert not may_go_on_elsewhere(failure, leading=False, outlives_first=False)


def test_so_does_the_first_rank_where_it_is_cut_off() -> None:
    assert may_go_on_elsewhere(CutOffError("the others may live"), leading=True)


def test_what_ends_all_ranks_is_told_by_whom_it_befalls() -> None:
    assert not may_go_on_elsewhere(UserError("a mistake"), leading=False)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_the_summary_is_left_to_those_who_may_go_on(tmp_path: Path, elsewhere: bool) -> None:
    (tmp_path / SUMMARY).write_text(json.dumps({"status": "running"}))
    one: Any = SimpleNamespace(
        _saver=None,
        is_open=True,
        at=SimpleNamespace(folder=tmp_path),
        telling=SimpleNamespace(display=SimpleNamespace(close=lambda summary: None)),
        _held=SimpleNamespace(close=lambda: None),
        _may_go_on_elsewhere=lambda failure: elsewhere,
    )
    Running.give_up(one, LostError("gone"), release=False)
    assert json.loads((tmp_path / SUMMARY).read_text())["status"] == ("running" if elsewhere else "failed")
