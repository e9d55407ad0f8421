"""Parts of a visit to a machine that is lent for minutes: each in processes of its own, with a limit and files of its
own. Whatever one does, the next begins, and what it has found is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.common.local_job import ROOT
from benchmarks.gpu.kept import LIMIT

MARK = "HETSYNC_GPU_PART"  # in the environment of all that a part starts
GRACE_SECONDS = 4.0  # from TERM to KILL
LEAST_SECONDS = 5.0  # in which a part is worth beginning


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    LATE = "LATE"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Part:
    """`shows`: what for; `command` may be shown anywhere. It writes NAME.json and NAME.md, if it has something to keep,
    into the folder that it is told."""

    name: str
    shows: str
    limit_seconds: float
    command: Sequence[object]


@dataclass(frozen=True)
class Outcome:
    name: str
    verdict: Verdict
    seconds: float
    last_line: str = ""


def run(part: Part, folder: Path, env: Mapping[str, str], deadline: float, spare_seconds: float = 0.0) -> Outcome:
    """All that it says is in NAME.log. Nothing of it is left when this returns, which it does by the `deadline` of
    time.monotonic, however the part behaves. It may have what parts before have spared of their time, too."""
    began = time.monotonic()
    limit = min(part.limit_seconds + spare_seconds, deadline - began - GRACE_SECONDS)
    if limit < LEAST_SECONDS:
        return Outcome(part.name, Verdict.LEFT_OUT, 0.0)
    log, mark = folder / f"{part.name}.log", f"{os.getpid()} {part.name}"
    words = [str(word) for word in part.command]
    with log.open("w") as said:
        try:
            process = subprocess.Popen(
                words,
                env={**env, MARK: mark, LIMIT: str(began + limit)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            said.write(f"{words[0]} cannot be started: {error.strerror}\n")
            verdict = Verdict.FAILED
        else:
            verdict = _ended(process, limit, mark)
    return Outcome(part.name, verdict, time.monotonic() - began, last_line(log))


def _ended(process: subprocess.Popen[bytes], limit_seconds: float, mark: str) -> Verdict:
    try:
        return Verdict.FAILED if process.wait(limit_seconds) else Verdict.PASSED
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        return Verdict.LATE
    finally:
        end_all(f"{MARK}={mark}")
        process.wait()


def end_all(mark: str) -> None:
    """Processes with this in their environment, whoever started them, daemons among them; and those that they start
    meanwhile. Returns once they are gone."""
    until = time.monotonic() + GRACE_SECONDS
    while (found := list(marked(mark))) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def marked(mark: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip(" =-")]
    return lines[-1].strip("= ")[:160] if lines else ""
