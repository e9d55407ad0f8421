"""The version of this package."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"


def version_with_commit(root: Path = Path(__file__).parents[1]) -> str:
    """With the commit as a local version, as far as it is known: that of a clone, or that which pip has installed from
    a repository. Changes that are not committed do not show."""
    commit = _of_clone(root) or _of_pip()
    return f"{__version__}+g{commit[:9]}" if re.fullmatch("[0-9a-f]{40,64}", commit) else __version__


def _of_clone(root: Path) -> str:
    try:
        git = root / ".git"
        if git.is_file():  # a worktree's
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        shared = git / "commondir"
        common = git / shared.read_text().strip() if shared.exists() else git
        if (common / name).exists():
            return (common / name).read_text().strip()
        packed = (line.split() for line in (common / "packed-refs").read_text().splitlines())
        return next((commit for commit, *names in packed if names == [name]), "")
    except (OSError, ValueError):
        return ""


def _of_pip() -> str:
    try:
        told = json.loads(metadata.distribution("hetsync").read_text("direct_url.json") or "{}")
        return str(told["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, ValueError, KeyError):
        return ""
