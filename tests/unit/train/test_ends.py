"""A loop that was left comes to the job's last rest: also where a rank dies there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hetsync.plane.base import MembersLost
from hetsync.sync.messages import StartRound
from hetsync.train.loop import Loop
from hetsync.train.session import AtRest, Session
from hetsync.train.stage import Stage


def session() -> Session:
    """As far as it is asked for here: all its work is the last drain; whoever recovers comes to it once more."""
    made = Session.__new__(Session)
    last = StartRound(5, frozenset(), 100, True, "end", True, True)
    order = SimpleNamespace(follow_script=lambda: None)
    engine = SimpleNamespace(next_work=lambda: last, recover=lambda: True, end_rest=lambda: False, order=order)
    fields: dict[str, Any] = {"engine": engine, "plane": SimpleNamespace(tolerant=False), "stopping": False}
    fields |= {"_under_way": True, "_again": False, "rest_reason": "end", "evaluation_due": True}
    fields |= {"_stop_clock": lambda: 0.0, "_come_to_rest": lambda work: None}
    vars(made).update(fields)
    return made


def test_the_last_rest_is_come_to_once_more() -> None:
    session_, done = session(), []

    def rest(at: AtRest) -> bool:
        def work() -> None:
            done.append(at)
            if len(done) == 1:
                raise MembersLost("rank 2 has gone")

        return session_.at_rest(work)

    loop = Loop.__new__(Loop)
    running = SimpleNamespace(session=session_, leaving=session_._tasks())
    vars(loop).update(_begin=lambda: running, rest=rest, stage=Stage.IN_LOOP)
    loop.come_to_an_end()
    assert len(done) == 2
    assert not session_.under_way
