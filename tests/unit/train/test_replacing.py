"""Processes in dead ranks' places, without MPI: when they are started, and when ranks come to rest for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hetsync.plane import codec
from hetsync.plane.base import LostError
from hetsync.profiling.measure import Place
from hetsync.train import checkpoint, replacing
from hetsync.train.evaluation import by_rank
from hetsync.train.replacing import (
    MOST_TRIES,
    SECONDS_BETWEEN_RESTS,
    SECONDS_FOR_A_REST,
    Replacements,
    Welcome,
    places_of,
)
from hetsync.train.running import Running
from hetsync.train.summary import Join, Rollback


class Process:
    """One that has been started; `enters` where its invitation reaches it."""

    def __init__(self) -> None:
        self.ready: Any = None
        self.gone = False
        self.enters = True

    def invite(self, told: Any) -> str:
        if not self.enters:
            self.gone = True
            raise LostError("it has gone")
        return "address"


class Job:
    """The first rank of three, of which the last has died."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asked_at: Any = None) -> None:
        self.now = 100.0
        monkeypatch.setattr(replacing.time, "monotonic", lambda: self.now)
        self.started: list[Process] = []
        self.plane: Any = SimpleNamespace(
            leads=True, ranks_at_start=3, members=(0, 1), summon=self.summon, asked_at=asked_at
        )
        self.replacements = Replacements(self.plane, lambda: SimpleNamespace(folder="run"))  # type: ignore[arg-type, return-value]

    def summon(self, rank: int, told: Any) -> Process:
        self.started.append(Process())
        return self.started[-1]

    def invite(self) -> Any:
        return self.replacements.invite(lambda join, profile: (join, profile), 7, Counter())  # type: ignore[arg-type, return-value]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def get_ready(job: Job) -> None:
    job.started[-1].ready = SimpleNamespace(host="there")


def test_one_is_started_and_enters_once_it_is_ready(job: Job) -> None:
    assert not job.replacements.wants_rest()
    assert len(job.started) == 1
    get_ready(job)
    job.now += 3
    assert job.replacements.wants_rest()
    assert not job.replacements.wants_rest(), "the rest is on its way"
    arrival = job.invite()
    assert (arrival.join.rank, arrival.join.host, arrival.join.round, arrival.join.seconds) == (2, "there", 7, 3.0)
    job.plane.members = (0, 1, 2)
    assert not job.replacements.wants_rest()
    assert len(job.started) == 1


def test_a_rest_that_does_not_come_is_asked_for_once_more(job: Job) -> None:
    job.replacements.wants_rest()
    get_ready(job)
    assert job.replacements.wants_rest()
    job.now += SECONDS_FOR_A_REST
    assert job.replacements.wants_rest()


def test_rests_at_which_nobody_can_enter_become_ever_more_seldom(job: Job) -> None:
    """As where the disk is full: there is no checkpoint to begin from."""
    job.replacements.wants_rest()
    get_ready(job)
    for pause in (SECONDS_BETWEEN_RESTS, 2 * SECONDS_BETWEEN_RESTS, 4 * SECONDS_BETWEEN_RESTS):
        assert job.replacements.wants_rest()
        job.replacements.put_off()
        job.now += pause - 0.1
        assert not job.replacements.wants_rest()
        job.now += 0.1


def test_after_one_that_did_not_come_the_next_rest_is_later(job: Job) -> None:
    """All have waited for it; whoever starts processes by hand may try for ever."""
    job.replacements.wants_rest()
    get_ready(job)
    for pause in (SECONDS_BETWEEN_RESTS, 2 * SECONDS_BETWEEN_RESTS):
        assert job.replacements.wants_rest()
        assert job.invite() is not None
        assert not job.replacements.wants_rest(), "it is no member: another is started"
        get_ready(job)
        job.now += pause - 0.1
        assert not job.replacements.wants_rest()
        job.now += 0.1
    assert job.replacements.wants_rest()
    assert job.invite() is not None
    job.plane.members = (0, 1, 2)
    assert not job.replacements.wants_rest()
    job.plane.members = (0, 1)
    job.replacements.wants_rest()
    get_ready(job)
    assert job.replacements.wants_rest(), "at once"


def test_a_newcomer_on_another_host_has_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [Place("a", number, 2) for number in range(2)]
    newcomer: Any = SimpleNamespace(told=SimpleNamespace(places=there))
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    assert places_of(newcomer, 1) == there
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    first, own = places_of(newcomer, 1)
    assert first == there[0]
    assert (own.host, own.local_rank, own.ranks_on_host) == ("b", 0, 1)


@pytest.mark.parametrize("fails", ["while it comes up", "when it is invited", "while it enters"])
def test_after_some_tries_in_a_row_nobody_is_started_any_more(job: Job, fails: str) -> None:
    for _ in range(2 * MOST_TRIES):
        job.replacements.wants_rest()
        if fails == "while it comes up":
            job.started[-1].gone = True
        else:
            get_ready(job)
            job.started[-1].enters = fails == "while it enters"
            job.invite()
        job.now += 1000
    assert len(job.started) == MOST_TRIES


def test_by_hand_they_may_be_started_as_often_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(monkeypatch, asked_at={"port": 1})
    for number in range(2 * MOST_TRIES):
        job.replacements.wants_rest()
        assert len(job.started) == number + 1
        job.started[-1].gone = True
    assert capsys.readouterr().err.count("the place of rank 2 is free: hetsync join run takes it") == 2 * MOST_TRIES


def test_whoever_is_a_member_again_may_be_replaced_as_often(job: Job) -> None:
    for number in range(2 * MOST_TRIES):
        job.plane.members = (0, 1)
        job.replacements.wants_rest()
        assert len(job.started) == number + 1
        get_ready(job)
        assert job.invite() is not None
        job.plane.members = (0, 1, 2)
        job.replacements.wants_rest()


def test_parts_are_in_the_order_of_ranks_whoever_came_last() -> None:
    found = [f"of {rank}" for rank in (1, 3, 0)]
    assert by_rank((1, 3, 0), found) == ["of 0", "of 1", "of 3"]


@dataclass(frozen=True)
class At:
    loaded: Any = None


def test_one_that_enters_knows_how_often_all_have_gone_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the first rank one day, which counts that, and tells it at the end."""
    monkeypatch.setattr(checkpoint, "load", lambda path: SimpleNamespace(state={}))
    monkeypatch.setattr(checkpoint, "check_model", lambda loaded, model: None)
    rollback = Rollback(
        cause="not_finite", rank=0, host="here", round=3, next_round=5, samples=32, checkpoint_samples=64
    )
    join = Join(rank=1, host="there", round=9, seconds=1.0, samples=0)
    sent: list[bytes | bytearray] = []

    def invite(welcome: Any, version: int, samples: Any) -> None:
        sent.append(codec.dumps(welcome(join, None)))

    machine = SimpleNamespace(samples_by_rank=Counter[int]())
    first: Any = SimpleNamespace(
        _replacements=SimpleNamespace(invite=invite),
        _saver=SimpleNamespace(newest="checkpoints/64"),
        _rollbacks=SimpleNamespace(known=[rollback]),
        joins=[],
        profiles=[None, None],
        plane=SimpleNamespace(members=(0,), broadcast_object=lambda told: told),
        session=SimpleNamespace(
            coordinator=SimpleNamespace(machine=machine), shares=(8, 0), entry=None, deaths=[], version=9
        ),
    )
    Running._admit(first)
    welcome = codec.loads(sent[0])
    assert isinstance(welcome, Welcome)
    entered: Any = SimpleNamespace(
        plane=SimpleNamespace(rank=1, enter=lambda members, address: None),
        prepared=SimpleNamespace(parts=SimpleNamespace(restore_roles=lambda state: None)),
        profiles=[None, None],
        model=None,
        at=At(),
        _restore=lambda: None,
        _rollbacks=SimpleNamespace(known=[]),
    )
    Running._enter(entered, SimpleNamespace(knock=lambda profile: ("address", welcome)))  # type: ignore[arg-type]
    assert entered._rollbacks.known == [rollback]
