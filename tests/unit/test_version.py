"""The version tells commits apart."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hetsync.version import __version__, version_with_commit


def git(folder: Path, *words: str) -> str:
    told = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *words]
    return subprocess.run(told, check=True, capture_output=True, text=True).stdout.strip()


def test_a_clone_a_worktree_and_packed_refs_tell_their_commit(tmp_path: Path) -> None:
    clone, tree = tmp_path / "clone", tmp_path / "tree"
    clone.mkdir()
    git(clone, "init", "-q")
    told = []
    for number in range(2):
        git(clone, "commit", "-q", "--allow-empty", "-m", str(number))
        expected = f"{__version__}+g{git(clone, 'rev-parse', 'HEAD')[:9]}"
        told.append(version_with_commit(clone))
        assert told[-1] == expected
    assert told[0] != told[1]
    git(clone, "worktree", "add", "-q", str(tree))
    git(clone, "pack-refs", "--all")
    assert version_with_commit(clone) == version_with_commit(tree) == told[1]
    git(clone, "checkout", "-q", "--detach", "HEAD~1")
    assert version_with_commit(clone) == told[0]


def test_without_a_repository_it_is_plain(tmp_path: Path) -> None:
    assert version_with_commit(tmp_path) == __version__
