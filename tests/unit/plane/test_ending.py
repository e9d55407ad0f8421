"""How a failure ends a job of several ranks; with real processes: tests/fault."""

from __future__ import annotations

import io
import os
import sys

import pytest

from hetsync.plane import ending
from hetsync.plane.ending import end_job
from hetsync.plane.local import LocalPlane


class Ended(Exception):
    pass


class OneOfTwo(LocalPlane):
    """Rank 1, whose abort does not end this process."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.members = 1, (0, 1)

    def abort(self, code: int) -> None:
        raise Ended(code)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (256, 1, ""),  # eight bits are kept, and a failure is none that looks like success
        (2**40 + 7, 7, ""),
        ("no more data", 1, ": no more data"),
    ],
)
def test_an_exit_on_one_rank_is_that_of_the_job(
    capsys: pytest.CaptureFixture[str], code: object, status: int, said: str
) -> None:
    with pytest.raises(Ended) as ended:
        end_job(OneOfTwo(), SystemExit(code))
    assert ended.value.args == (status,)
    sentence = f"hetsync: rank 1: sys.exit was called{said}, so the job ends with status {status}\n"
    assert capsys.readouterr().err == sentence


def test_leaving_in_the_middle_of_a_sentence_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler leaves, while the thread that it has interrupted is about to write."""
    statuses: list[int] = []

    class Interrupted(io.StringIO):
        def flush(self) -> None:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    monkeypatch.setattr(sys, "stderr", Interrupted())
    monkeypatch.setattr(os, "_exit", statuses.append)
    ending.leave(85)
    assert statuses == [85]
