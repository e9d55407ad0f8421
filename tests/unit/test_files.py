"""What is on disk is whole or not there, and what cannot be a file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetsync.files import DiskError, write_atomically


@pytest.mark.parametrize("path", [".", "", "/", "folder"])
def test_a_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DiskError, match="it is a folder; give the name of a file"):
        write_atomically(Path(path), "text")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_atomically(tmp_path / "new" / "file", text)
    assert (tmp_path / "new" / "file").read_text() == "second"
