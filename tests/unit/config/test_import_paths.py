"""What a recipe may name by its import path: nothing of Python's own, and it is told before it is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hetsync.config.imports import call_with_options, import_object
from hetsync.errors import UserError

MINE = """
import functools, os, subprocess, sys
print("loaded", file=sys.stderr)
wide = functools.partial(dict, width=3)
shell = functools.partial(os.system, "true")
Popen = subprocess.Popen

def net():
    return 3
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mine_of_paths.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    sys.modules.pop("mine_of_paths", None)


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "subprocess:run",
        "builtins:exec",
        "antigravity:fly",  # it acts when it is loaded
        "mine_of_paths:os.system",
        "mine_of_paths:Popen",
        "mine_of_paths:shell",
        "mine_of_paths:wide",
        "hetsync.files:os.unlink",
        "torch:os.system",
        "mine_of_paths:__loader__.load_module",
    ],
)
def test_python_s_own_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=f"^model.name is {path}, which is of Python's standard library"):
        import_object("model.name", path)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "path", [":", "a:", ":b", ".a:b", "a..b:c", "a:b.", "a:b:c", "a\0b:c", "a\n:c", "a b:c", "x" * 9999]
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=r": give package\.module:name$"):
        import_object("model.name", path)


def test_a_path_is_told_before_it_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert import_object("model.name", "mine_of_paths:net")() == 3
    assert capsys.readouterr().err == "model.name loads mine_of_paths:net\nloaded\n"
    import_object("model.name", "hetsync.models.resnet:resnet18")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    import_object("model.name", "mine_of_paths:net")
    assert capsys.readouterr().err == "", "HetSync's own is no news, and one rank tells"


def test_a_class_of_something_else_is_not_called() -> None:
    class Acts:
        def __init__(self) -> None:
            raise AssertionError("called")

    with pytest.raises(UserError, match=r"model.name is the class .*Acts, which makes no Module: name one that does"):
        call_with_options("model", Acts, {}, torch.nn.Module)
