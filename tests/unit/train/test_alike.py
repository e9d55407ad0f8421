"""What differs between ranks, or between a job and who joins it, is one sentence."""

from __future__ import annotations

import pytest

from hetsync.errors import UserError
from hetsync.train.alike import require_as_told

JOB = {"optimizer.lr": 0.1, "resume": False, "fault.inject": [{"kind": "die"}], "data": "48 samples"}


def test_who_joins_has_what_the_job_has() -> None:
    require_as_told(JOB, dict(JOB))
    require_as_told(JOB, {**JOB, "resume": True, "fault.inject": []})


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        ({**JOB, "optimizer.lr": 0.2}, "optimizer.lr is 0.2 in the process that joins, but 0.1 in the job"),
        ({**JOB, "more": 1}, "more is 1 in the process that joins, but missing in the job"),
        ({"optimizer.lr": 0.1}, "data is missing in the process that joins, but 48 samples in the job"),
    ],
)
def test_what_differs_is_named(mine: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        require_as_told(JOB, mine)
