"""The rule of imports (setup.cfg): which package may know which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The package as it is installed, models and profiles in their places."""
    skipped = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "hetsync", tmp_path / "hetsync", ignore=skipped)
    for package in ("models", "cluster_profiles"):
        shutil.copytree(ROOT / package, tmp_path / "hetsync" / package, ignore=skipped)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    words = ["--config", str(ROOT / "setup.cfg"), "--no-cache"]
    code = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command(sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tree, env=env, capture_output=True, text=True, timeout=60
    )


def test_the_rule_of_imports_is_kept(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("sync/messages.py", "from hetsync.train.session import Session", "A package imports from those below"),
        ("control/live.py", "def late():\n    from hetsync.simulate.clock import Clock", "never reaches the simulator"),
        ("errors.py", "if TYPE_CHECKING:\n    from hetsync.config.schema import Config", "from those below"),
        ("sync/messages.py", "from hetsync.sync.members import RankState", "No circles"),
        ("models/limits.py", "from hetsync.sync.deltas import Deltas", "from those below"),
        ("models/limits.py", "from hetsync.plane.base import Plane", "know nothing of ranks"),
        ("cli/train.py", "def late():\n    from hetsync.simulate.clock import Clock", "never reaches the simulator"),
        ("control/live.py", "from hetsync.control.learning import imitation", "never reaches the simulator"),
        ("cli/train.py", "def late():\n    from hetsync.report.run import read_run", "nor reports"),
    ],
)
def test_who_breaks_it_is_told(tree: Path, module: str, line: str, contract: str) -> None:
    with (tree / "hetsync" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = lint(tree)
    assert done.returncode == 1
    broken = [told for told in done.stdout.splitlines() if told.endswith("BROKEN")]
    assert any(contract in told for told in broken), done.stdout
