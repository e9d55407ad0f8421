"""Fetches files as their publishers distribute them: goes on where it was broken off, and keeps only what is right."""

from __future__ import annotations

import http.client
import ssl
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from hetsync.data.catalogue import Download
from hetsync.errors import UserError
from hetsync.files import sha256_of

# Not pooch (1.9): it begins a broken download anew, tries again after "no such file" and after a wrong checksum, and
# unpacks without tarfile's filter before Python 3.12.
ATTEMPTS = 5  # without a new byte, before giving up
PAUSE_SECONDS = 1.0  # after the first failed attempt; then twice as long each time
SILENCE_SECONDS = 60.0  # of a server before an attempt counts as failed
CHUNK_BYTES = 1 << 18

Progress = Callable[[str, int, int | None], None]  # file, bytes there, bytes in all


def download(
    files: Sequence[Download],
    folder: Path,
    progress: Progress = lambda file, done, total: None,
    pause_seconds: float = PAUSE_SECONDS,
) -> None:
    """Fetch files, compare their checksums, unpack archives; the folder appears when all is done.

    Until then all lies in a hidden folder beside it, where the next attempt finds what has come already.

    Raises:
        UserError: The server cannot be reached or breaks off again and again, a checksum is wrong, the folder
            holds something already or cannot be written.
    """
    folder = folder.resolve()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not empty: give another folder by --to, or move it away")
        work = folder.with_name(f".{folder.name}.download")
        work.mkdir(parents=True, exist_ok=True)
        for file in files:
            _fetch(file, work, progress, pause_seconds)
        work.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}): free space, or give another by --to") from error


def _fetch(file: Download, work: Path, progress: Progress, pause_seconds: float) -> None:
    """The whole file with the right checksum, or its content where it is an archive."""
    name = PurePosixPath(urlsplit(file.url).path).name
    if (work / name).exists():
        return
    part = work / f"{name}.part"
    most, failures = _size(part), 0
    while trouble := _attempt(file.url, part, lambda done, total: progress(name, done, total)):
        failures = 1 if _size(part) > most else failures + 1
        most = max(most, _size(part))
        if failures == ATTEMPTS:
            raise UserError(f"{file.url}: {trouble}; the same command goes on from there, so try it again later")
        time.sleep(pause_seconds * 2 ** (failures - 1))
    if (found := sha256_of(part)) != file.sha256:
        part.unlink()
        raise UserError(
            f"{file.url} has the SHA-256 checksum {found} instead of {file.sha256}, so nothing of it was kept: "
            "try again, and get the file elsewhere if it stays so"
        )
    if file.unpack:
        _unpack(part, work)
        part.unlink()
    else:
        part.rename(work / name)


def _attempt(url: str, part: Path, progress: Callable[[int, int | None], None]) -> str:
    """Go on with a file; returns what went wrong, if anything did."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as reply:
            goes_on = reply.status == http.HTTPStatus.PARTIAL_CONTENT
            done = done if goes_on else 0
            length = reply.headers["Content-Length"]
            total = done + int(length) if length else None
            with part.open("ab" if goes_on else "wb") as file:
                while chunk := reply.read(CHUNK_BYTES):
                    file.write(chunk)
                    done += len(chunk)
                    progress(done, total)
        return "" if total in (done, None) else f"broken off after {done:,} of {total:,} bytes"
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return ""  # all bytes are there; the checksum will tell
        if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UserError(f"{url} cannot be fetched ({error}): get the file elsewhere") from error
        return str(error)
    except urllib.error.URLError as error:
        return f"cannot be reached ({error.reason})"
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        return f"broken off ({error or type(error).__name__})"


def _unpack(archive: Path, folder: Path) -> None:
    """Files and folders, and nothing outside the folder."""
    # tarfile's filter does more, but is not there before Python 3.10.12 and 3.11.4.
    by_filter: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    try:
        with tarfile.open(archive) as content:
            for member in content.getmembers():
                inside = (folder / member.name).resolve().is_relative_to(folder)
                if not inside or not (member.isreg() or member.isdir()):
                    raise tarfile.TarError(f"{member.name} is no file or folder inside")
            content.extractall(folder, **by_filter)
    except tarfile.TarError as error:
        raise UserError(f"{archive} cannot be unpacked ({error}): remove it and try again") from error


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
