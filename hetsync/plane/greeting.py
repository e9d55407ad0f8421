"""The first word of ranks, before there is a plane: is everybody there, of the same versions and settings, and without
a mistake? It is JSON whose keys only ever grow in number, so that ranks of other versions understand it. Who joins the
job later compares its own with that of one of them.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hetsync.errors import CommonMistakeError, UserError, announce, brief
from hetsync.plane.base import named, wait_limit
from hetsync.threads import LivedSeconds
from hetsync.version import version_with_commit

Hello = Mapping[str, Any]

NOTICE_SECONDS = 10.0  # until people hear for whom the ranks wait
CONNECTING_SECONDS = 120.0  # at most, once all ranks are there; it takes milliseconds
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1e-3, 2e-2
VERSIONS = {"hetsync": "HetSync", "torch": "torch", "python": "Python"}
SETTINGS = ("run.plane", "run.timeout_seconds", "fault.tolerate")


class Post(ABC):
    """What carries the first words; none of its calls blocks."""

    rank: int
    size: int

    @abstractmethod
    def tell(self, hello: str) -> None:
        """This rank's."""

    @abstractmethod
    def heard(self) -> Mapping[int, str]:
        """On rank 0: what ranks have told so far, its own too."""

    @abstractmethod
    def here(self) -> set[int]:
        """The ranks that have told something, as far as this one can know."""

    @abstractmethod
    def answer(self, word: str) -> None:
        """On rank 0: to all. Returns once those who are there have it."""

    @abstractmethod
    def answered(self) -> str | None:
        """Rank 0's answer, once it has come."""


def own_hello(settings: Mapping[str, Any] | None, mistake: str | None) -> dict[str, Any]:
    """`settings`: to be compared, and so are versions; None where that is left to others. `mistake`: what keeps this
    rank from opening its plane."""
    hello = {"host": socket.gethostname(), "mistake": mistake}
    if settings is None:
        return hello
    import torch

    return {
        **hello,
        "hetsync": version_with_commit(),
        "torch": torch.__version__.partition("+")[0],  # its builds for other devices belong together
        "python": ".".join(platform.python_version_tuple()[:2]),
        "settings": dict(settings),
    }


def refusal(hellos: Mapping[int, Hello]) -> str | None:
    """Why these ranks cannot train together; None where they can, as far as they have come. Rank 0 is one of them."""
    first = hellos[0]
    for rank, hello in sorted(hellos.items()):
        if (mistake := hello.get("mistake")) is not None:
            alone = any(other.get("mistake") != mistake for other in hellos.values())
            return f"rank {rank}: {mistake}" if alone and rank > 0 else str(mistake)
        if (differs := _versions_differ(f"rank {rank}", hello, "rank 0", first)) is not None:
            return differs
        for key in SETTINGS:
            other, own = (each.get("settings", {}).get(key) for each in (hello, first))
            if other != own:
                return f"{key} is {brief(other)} on rank {rank}, but {brief(own)} on rank 0: give all ranks the same"
    return None


def require_versions_of_job(first: str) -> None:
    """On a process that joins a job under way. `first`: the word of one of its ranks. UserError where versions differ:
    before it takes a place, and reads anything that is written otherwise."""
    mine = own_hello({}, None)
    if (differs := _versions_differ("this process", mine, "the job", json.loads(first))) is not None:
        raise UserError(differs)


def _versions_differ(who: str, hello: Hello, whom: str, first: Hello) -> str | None:
    for key, program in VERSIONS.items():
        if not _alike(hello.get(key), first.get(key)):
            return (
                f"{who} on {hello.get('host')} has {program} {hello.get(key)}, but {whom} on {first.get('host')} has"
                f" {first.get(key)}: install the same on all hosts"
            )
    return None


def _alike(one: Any, other: Any) -> bool:
    """Versions, of which some know their commit: a copy without its history may be of the same."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return bool(one == other)
    known = "+" in one and "+" in other
    return one == other if known else one.partition("+")[0] == other.partition("+")[0]


def first_address(hellos: Mapping[int, Hello]) -> str | None:
    """At which ranks of other hosts have reached the store's, as they tell; None where there are none."""
    return next((hello["reached"] for _, hello in sorted(hellos.items()) if hello.get("reached")), None)


def greet(post: Post, mine: Hello, timeout_seconds: float, hint: str) -> str | None:
    """Collective: `first_address`. CommonMistakeError, on all ranks alike, where they cannot train together, or one
    does not come in time; `hint`: what may be the cause of that, beside its absence."""
    post.tell(json.dumps(mine))
    if post.rank == 0:
        post.answer(json.dumps(_answer(post, timeout_seconds, hint)))
    limit = wait_limit(post.rank, timeout_seconds)
    late = f"rank {post.rank} waited {limit:.0f} s for rank 0, which has not answered: {hint}"
    if not _waited(lambda: post.answered() is not None, post, limit):
        raise CommonMistakeError(late)
    told = json.loads(post.answered() or "")
    if told["refusal"] is not None:
        raise CommonMistakeError(told["refusal"])
    address: str | None = told["address"]
    return address


def _answer(post: Post, timeout_seconds: float, hint: str) -> Hello:
    hellos: dict[int, Hello] = {}
    refused: str | None = None

    def enough() -> bool:
        nonlocal refused
        come = post.heard()
        if len(come) > len(hellos):
            hellos.update({rank: json.loads(word) for rank, word in come.items() if rank not in hellos})
            refused = refusal(hellos)
        return refused is not None or len(hellos) == post.size

    if not _waited(enough, post, timeout_seconds):
        missing = named(rank for rank in range(post.size) if rank not in hellos)
        refused = f"rank 0 waited {timeout_seconds:.0f} s for {missing} to come: {hint}"
    return {"refusal": refused, "address": first_address(hellos)}


def _waited(done: Callable[[], bool], post: Post, limit_seconds: float) -> bool:
    """False where the limit is over. The first rank that is there says for whom it waits."""
    lived, told, look_seconds = LivedSeconds(), False, FIRST_LOOK_SECONDS
    while not done():
        seconds = lived.look()
        if seconds > limit_seconds:
            return False
        if seconds > NOTICE_SECONDS and not told:
            told, here = True, post.here()
            missing = [rank for rank in range(post.size) if rank not in here]
            if missing and post.rank == min(here):
                announce(f"hetsync: {len(here)} of {post.size} ranks are there; waiting for {named(missing)}")
        time.sleep(look_seconds)
        look_seconds = min(2 * look_seconds, LONGEST_LOOK_SECONDS)
    return True
