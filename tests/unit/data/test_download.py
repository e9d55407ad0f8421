"""Downloads against a server of our own, which breaks off, lies and fails as asked."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetsync.data.catalogue import CATALOGUE, Download
from hetsync.data.download import ATTEMPTS, download
from hetsync.errors import UserError

CONTENT = bytes(range(256)) * 4000


class Server(http.server.ThreadingHTTPServer):
    """Gives `content` for every path; breaks off after `cuts` bytes of each reply in turn."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.cuts: list[int] = []
        self.failures: list[int] = []
        self.ranges_known = True
        self.asked: list[str | None] = []

    def file(self, name: str = "data.bin", unpack: bool = False, sha256: str | None = None) -> Download:
        url = f"http://127.0.0.1:{self.server_address[1]}/some/{name}?download=1"
        return Download(url, sha256 or hashlib.sha256(self.content).hexdigest(), unpack)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        if self.server.failures:
            self.send_error(self.server.failures.pop(0))
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges_known else 0
        if start and start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def fetch(server: Server, folder: Path, *files: Download) -> None:
    download(files or [server.file()], folder, pause_seconds=0)


def test_the_folder_appears_with_the_file(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    download([server.file()], tmp_path / "set", lambda *words: told.append(words), pause_seconds=0)
    assert (tmp_path / "set" / "data.bin").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["data.bin"]
    assert told[-1] == ("data.bin", len(CONTENT), len(CONTENT))


def test_goes_on_where_it_was_broken_off(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 0, 5]
    fetch(server, tmp_path / "set")
    assert (tmp_path / "set" / "data.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=300000-", "bytes=300005-"]


def test_the_next_command_goes_on_too(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, *[0] * ATTEMPTS]
    with pytest.raises(UserError, match=r"broken off after 300,000 of 1,024,000 bytes; the same command goes on"):
        fetch(server, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    server.cuts, server.asked = [], []
    fetch(server, tmp_path / "set")
    assert server.asked == ["bytes=300000-"]
    assert (tmp_path / "set" / "data.bin").read_bytes() == CONTENT


def test_starts_anew_where_the_server_knows_no_ranges(server: Server, tmp_path: Path) -> None:
    server.ranges_known = False
    server.cuts = [300_000]
    fetch(server, tmp_path / "set")
    assert len(server.asked) == 2
    assert (tmp_path / "set" / "data.bin").read_bytes() == CONTENT


def test_a_file_that_was_whole_already_is_only_compared(server: Server, tmp_path: Path) -> None:
    work = tmp_path / ".set.download"
    work.mkdir()
    (work / "data.bin.part").write_bytes(CONTENT)
    fetch(server, tmp_path / "set")
    assert server.asked == [f"bytes={len(CONTENT)}-"]
    assert (tmp_path / "set" / "data.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_keeps_no_file(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"SHA-256 checksum [0-9a-f]{64} instead of 0{64}, so nothing of it was kept"):
        fetch(server, tmp_path / "set", server.file(sha256="0" * 64))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not (tmp_path / "set").exists()


def test_a_busy_server_is_asked_again_and_a_plain_no_is_not(server: Server, tmp_path: Path) -> None:
    server.failures = [503, 500]
    fetch(server, tmp_path / "set")
    assert len(server.asked) == 3
    server.failures = [404]
    with pytest.raises(UserError, match=r"cannot be fetched \(HTTP Error 404"):
        fetch(server, tmp_path / "other")
    assert len(server.asked) == 4
    server.failures = [503] * ATTEMPTS
    with pytest.raises(UserError, match="HTTP Error 503"):
        fetch(server, tmp_path / "other")


def test_no_server(server: Server, tmp_path: Path) -> None:
    file = server.file()
    server.server_close()
    server.shutdown()
    with pytest.raises(UserError, match="cannot be reached"):
        download([file], tmp_path / "set", pause_seconds=0)


def packed(names: list[str], last: bytes = tarfile.REGTYPE) -> bytes:
    """An archive of files; the last one is of this kind."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type = last if name == names[-1] else tarfile.REGTYPE
            member.linkname = "inside"
            member.size = 3 if member.isreg() else 0
            archive.addfile(member, io.BytesIO(b"abc"))
    return out.getvalue()


def test_archives_are_unpacked(server: Server, tmp_path: Path) -> None:
    server.content = packed(["batches/one.bin", "batches/two.bin"])
    fetch(server, tmp_path / "set", server.file("set.tar.gz", unpack=True))
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["set/batches/one.bin", "set/batches/two.bin"]


@pytest.mark.parametrize("filtered", [True, False], ids=["filter", "no filter"])
@pytest.mark.parametrize("name", ["../outside", "/tmp/../outside/../../outside"])
def test_archives_write_nothing_outside(
    name: str, filtered: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not filtered:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    server.content = packed(["inside", name])
    below = tmp_path / "below"
    with pytest.raises(UserError, match="cannot be unpacked"):
        fetch(server, below / "set", server.file("set.tar.gz", unpack=True))
    assert not (below / "set").exists()
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_archives_hold_files_and_folders_only(
    kind: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    server.content = packed(["inside", "link"], last=kind)
    with pytest.raises(UserError, match=r"cannot be unpacked \(link is no file or folder inside"):
        fetch(server, tmp_path / "set", server.file("set.tar.gz", unpack=True))


def test_what_is_there_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    fetch(server, tmp_path / "set")  # an empty folder is as good as none
    with pytest.raises(UserError, match="set is not empty: give another folder by --to"):
        fetch(server, tmp_path / "set")
    assert len(server.asked) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not empty"):
        fetch(server, tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written"):
        fetch(server, tmp_path / "file" / "set")


def test_what_is_offered_is_fetched_safely() -> None:
    for entry in CATALOGUE.values():
        for file in entry.downloads:
            assert file.url.startswith("https://")
            assert len(bytes.fromhex(file.sha256)) == 32
        assert entry.terms
        assert entry.layout or entry.check is None
