"""The first words of ranks, over a post of this process's threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hetsync.errors import CommonMistakeError, UserError
from hetsync.plane import greeting
from hetsync.plane.greeting import Post, first_address, greet, own_hello, refusal, require_versions_of_job

SECONDS = 20.0
SETTINGS = {"run.plane": "auto", "run.timeout_seconds": 600.0, "fault.tolerate": True}


class Board(Post):
    """What all ranks of this process see."""

    def __init__(self, rank: int, size: int, hellos: dict[int, str], answers: list[str]) -> None:
        self.rank, self.size = rank, size
        self._hellos, self._answers = hellos, answers

    def tell(self, hello: str) -> None:
        self._hellos[self.rank] = hello

    def heard(self) -> Mapping[int, str]:
        return dict(self._hellos)

    def here(self) -> set[int]:
        return set(self._hellos)

    def answer(self, word: str) -> None:
        self._answers.append(word)

    def answered(self) -> str | None:
        return self._answers[0] if self._answers else None


def boards(size: int) -> list[Board]:
    hellos, answers = dict[int, str](), list[str]()
    return [Board(rank, size, hellos, answers) for rank in range(size)]


def hello(**changes: Any) -> dict[str, Any]:
    return {**own_hello(SETTINGS, None), "host": "here", **changes}


def outcomes(hellos: Sequence[Mapping[str, Any]], seconds: float = SECONDS) -> list[str | None]:
    """What `greet` returns, or says, on each rank."""

    def outcome(board: Board) -> str | None:
        try:
            return greet(board, hellos[board.rank], seconds, "is it there?")
        except CommonMistakeError as mistake:
            return str(mistake)

    with ThreadPoolExecutor(len(hellos)) as threads:
        return list(threads.map(outcome, boards(len(hellos))))


def test_ranks_that_fit_hear_where_others_have_reached_the_first() -> None:
    told = [hello(reached=None), hello(reached=None), hello(reached="10.0.0.5")]
    assert outcomes(told) == ["10.0.0.5"] * 3
    assert outcomes(told[:2]) == [None] * 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hetsync": "0.0.9"}, r"rank 1 on here has HetSync 0\.0\.9, but rank 0 on here has .*: install the same"),
        ({"torch": "1.0.0"}, r"rank 1 on here has torch 1\.0\.0"),
        ({"python": "2.7"}, r"rank 1 on here has Python 2\.7"),
        ({"settings": {**SETTINGS, "run.plane": "mpi"}}, r"run\.plane is mpi on rank 1, but auto on rank 0: give all"),
        ({"settings": {**SETTINGS, "fault.tolerate": False}}, r"fault\.tolerate is False on rank 1, but True on"),
        ({"mistake": "there is no Gloo"}, r"^rank 1: there is no Gloo$"),
        ({"settings": None, "hetsync": None}, r"rank 1 on here has HetSync None"),  # of a later version, say
    ],
)
def test_all_hear_why_one_does_not_fit(change: dict[str, Any], sentence: str) -> None:
    first, *others = outcomes([hello(), hello(**change), hello()])
    assert others == [first] * 2
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(first)


def test_a_mistake_that_all_have_made_is_nobodys() -> None:
    assert outcomes([hello(mistake="no such plane")] * 2) == ["no such plane"] * 2
    assert refusal({0: hello(mistake="no port"), 1: hello()}) == "no port"


def test_builds_of_torch_for_other_devices_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for version in ("2.13.0+cpu", "2.13.0+cu130", "2.13.0"):
        monkeypatch.setattr("torch.__version__", version)
        told.append(hello())
    assert outcomes(told) == [None] * 3


def test_one_that_does_not_fit_is_refused_before_all_have_come() -> None:
    first, second, _ = boards(3)
    second.tell('{"mistake": "broken"}')
    with pytest.raises(CommonMistakeError, match=r"^rank 1: broken$"):
        greet(first, hello(), SECONDS, "")


def test_who_does_not_come_in_time_is_named() -> None:
    first, second, *_ = boards(4)
    told: list[str] = []

    def other() -> None:
        with pytest.raises(CommonMistakeError) as refused:
            greet(second, hello(), 0.2, "")
        told.append(str(refused.value))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(
        CommonMistakeError, match=r"^rank 0 waited 0 s for rank 2, 3 to come: are they there\?$"
    ) as late:
        greet(first, hello(), 0.2, "are they there?")
    thread.join()
    assert told == [str(late.value)]


def test_a_first_rank_that_does_not_come_is_missed() -> None:
    with pytest.raises(
        CommonMistakeError, match=r"rank 1 waited 0 s for rank 0, which has not answered: is it there\?"
    ):
        greet(boards(2)[1], hello(), 0.1, "is it there?")


@pytest.mark.parametrize(("here", "said"), [([0, 2], "rank 1, 3"), ([1, 3], "rank 0, 2"), ([0, 1, 2, 3], None)])
def test_the_first_that_is_there_says_for_whom_all_wait(
    here: list[int], said: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(greeting, "NOTICE_SECONDS", 0.1)
    posts = boards(4)
    for rank in here:
        posts[rank].tell("{}")

    def wait(rank: int) -> None:
        assert not greeting._waited(lambda: False, posts[rank], 0.5)

    with ThreadPoolExecutor(len(here)) as threads:
        list(threads.map(wait, here))
    expected = "" if said is None else f"hetsync: {len(here)} of 4 ranks are there; waiting for {said}\n"
    assert capfd.readouterr().err == expected


def test_the_address_of_the_stores_host_is_what_the_first_who_is_elsewhere_tells() -> None:
    assert first_address({0: hello(), 1: hello(reached=None)}) is None
    assert first_address({2: hello(reached="10.0.0.9"), 1: hello(reached="fe80::1%eth0"), 0: hello()}) == "fe80::1%eth0"


def test_commits_are_compared_where_both_are_known() -> None:
    """A copy of a clone without its history does not know its own."""
    plain, one, other = (hello(hetsync=version) for version in ("0.1.0", "0.1.0+gaaa", "0.1.0+gbbb"))
    assert refusal({0: plain, 1: one}) is None
    assert refusal({0: one, 1: plain}) is None
    assert "0.1.0+gbbb, but rank 0" in str(refusal({0: one, 1: other}))
    assert "has HetSync 0.2.0" in str(refusal({0: one, 1: hello(hetsync="0.2.0")}))


@pytest.mark.parametrize(("key", "program"), [("hetsync", "HetSync"), ("torch", "torch"), ("python", "Python")])
def test_who_joins_later_has_the_jobs_versions(key: str, program: str) -> None:
    require_versions_of_job(json.dumps(hello()))
    with pytest.raises(UserError, match=rf"this process on .* has {program} .*, but the job on here has 0\.0: install"):
        require_versions_of_job(json.dumps(hello(**{key: "0.0"})))
