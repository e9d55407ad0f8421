"""Jobs whose ranks are threads of one process: what a plane promises is played, deaths among it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hetsync.plane import codec
from hetsync.plane.base import MembersLost, Messages, Plane, Sums
from hetsync.plane.local import LocalMessages
from hetsync.plane.polled import Lane, PolledSums, Post
from hetsync.plane.unclosed import Unclosed

Told = TypeVar("Told")
SECONDS = 30.0  # to wait for other ranks, at most


def sleep_for_ever() -> NoReturn:
    """A dead rank's thread."""
    threading.Event().wait()
    raise AssertionError


def read(message: bytes) -> Any:
    """What it holds lies in the host's memory, whatever streams the reading thread is on."""
    with _disable_current_modes():
        return codec.loads(message)


class World:
    """What ranks share: who lives, what is sent, and what is given to meetings."""

    def __init__(self, ranks: int) -> None:
        self.changed = threading.Condition()
        self.alive = tuple(range(ranks))
        self.inboxes: dict[Any, deque[tuple[int, bytes]]] = {}  # by (members, rank)
        self.given: dict[Any, dict[int, Any]] = {}  # by a meeting's name, and rank

    def give(self, name: Any, rank: int, value: Any) -> dict[int, Any]:
        """Returns what all have given there so far."""
        with self.changed:
            given = self.given.setdefault(name, {})
            given[rank] = value
            self.changed.notify_all()
            return given

    def die(self, rank: int) -> NoReturn:
        with self.changed:
            self.alive = tuple(other for other in self.alive if other != rank)
            self.changed.notify_all()
        sleep_for_ever()


class ThreadMessages(LocalMessages):
    tolerant = True
    messages_by = "threads"

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.members = rank, world.alive
        self._ranks_at_start = len(self.members)
        self._world = world
        self._heeded = self.members
        self._met = 0

    @property
    def ranks_at_start(self) -> int:
        return self._ranks_at_start

    def look(self) -> None:
        if self.rank not in self._world.alive:
            sleep_for_ever()
        if self.members != self._world.alive:
            raise MembersLost("a rank has gone")

    def _inbox(self, rank: int) -> deque[tuple[int, bytes]]:
        return self._world.inboxes.setdefault((self.members, rank), deque())

    def send(self, message: Any, to: int) -> None:
        self.look()
        self._inbox(to).append((self.rank, codec.dumps(message)))

    def unread(self, to: int) -> bool:
        return bool(self._inbox(to))

    def receive(self) -> Sequence[tuple[int, Any]]:
        self.look()
        inbox = self._inbox(self.rank)
        arrived = [inbox.popleft() for _ in range(len(inbox))]
        return [(sender, read(message)) for sender, message in arrived]

    def gather_objects(self, value: Any) -> list[Any]:
        members, self._met = self._heeded, self._met + 1
        given = self._world.give(("gather", members, self._met), self.rank, codec.dumps(value))
        with self._world.changed:
            while len(given) < len(members):
                if self._world.alive != members:
                    raise MembersLost("a rank has gone")
                assert self._world.changed.wait(SECONDS)
        return [read(given[rank]) for rank in members]

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]

    def mend(self) -> None:
        given = self._world.give(("mend", self._world.alive), self.rank, None)
        with self._world.changed:
            assert self._world.changed.wait_for(lambda: len(given) == len(self._world.alive), SECONDS)
            self.members = self._world.alive

    def heed(self) -> None:
        self._heeded, self._met = self.members, 0

    def abort(self, code: int) -> NoReturn:
        raise AssertionError(f"rank {self.rank} has ended the job with status {code}")

    def close(self) -> None:
        pass


class ThreadLane(Lane):
    """Sums what all ranks have posted, by a library that finds it where it is: inside `context`."""

    segment_values = 64

    def __init__(
        self, world: World, messages: ThreadMessages, name: str, context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self._world, self._messages, self._context = world, messages, context
        self._name, self._begun = (name, messages.members), 0

    def _meet(self, value: torch.Tensor, end: Callable[[list[torch.Tensor]], object]) -> Post:
        def post() -> Callable[[], bool]:
            self._begun += 1
            with self._context():
                given = self._world.give((*self._name, self._begun), self._messages.rank, value.clone().numpy())
            ended = False

            def test() -> bool:
                nonlocal ended
                self._messages.look()
                if not ended and len(given) == self._messages.size:
                    with self._context():
                        end([torch.from_numpy(given[rank]) for rank in self._messages.members])
                    ended = True
                return ended

            return test

        return post

    def sum_in_place(self, values: torch.Tensor) -> Post:
        return self._meet(values, lambda given: torch.sum(torch.stack(given), 0, out=values))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        mine = self._messages.members.index(self._messages.rank)
        size = self._messages.size
        return self._meet(sent, lambda given: received.copy_(torch.cat([each.chunk(size)[mine] for each in given])))

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        return self._meet(own, lambda given: all_ranks.copy_(torch.cat(given)))


class ThreadSums(PolledSums):
    tolerant = True

    def __init__(self, world: World, messages: ThreadMessages, context: Any) -> None:
        first, second = (ThreadLane(world, messages, name, context) for name in ("first", "second"))
        super().__init__("threads", messages.members.index(messages.rank), messages.size, first, second)
        self._of = world, messages, context

    def among(self, messages: Messages) -> Sums:
        return ThreadSums(*self._of)


def thread_plane(world: World, rank: int, context: Callable[[], AbstractContextManager[object]] = nullcontext) -> Plane:
    """That of one rank."""
    messages = ThreadMessages(world, rank)
    return Plane(messages, ThreadSums(world, messages, context))


def run_ranks(ranks: int, job: Callable[[World, int], Told]) -> dict[int, Told]:
    """What each rank's thread returns, by rank: those that live. Raises what one has raised."""
    world, told, failures = World(ranks), dict[int, Told](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            told[rank] = job(world, rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    with patch.object(Unclosed, "watch"):  # or a dead rank would complain when this process ends
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + SECONDS
        while any(threads[rank].is_alive() for rank in world.alive) and not failures and time.monotonic() < deadline:
            time.sleep(0.01)
    for failure in failures:
        raise failure
    assert set(told) == set(world.alive), f"after {SECONDS:.0f} s ranks {sorted(told)} of {world.alive} have ended"
    return told
