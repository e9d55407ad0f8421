"""Messages without MPI: small ones by a store of torch, the blocking calls by Gloo.

A message is a key of the store, which its receiver deletes when it is read. A thread of each rank waits in the store
for the next one, so that nothing is polled over the network.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hetsync.errors import cause
from hetsync.plane import codec
from hetsync.plane.base import Channels, DamagedError, LostError, Messages, Sums, named, wait_limit
from hetsync.plane.blocking import wait_until
from hetsync.plane.gloo_channels import GlooChannels
from hetsync.plane.groups import completion_of, gloo_sums, open_gloo
from hetsync.plane.rendezvous import Rendezvous

SECONDS_TO_TELL = 0.2


@dataclass(frozen=True)
class _End:
    """To a rank's listener: of the job, with its status; None where the rank itself closes."""

    status: int | None


class StoreMessages(Messages):
    """Among the ranks of a rendezvous; building it is collective."""

    messages_by = "torch's store"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.members = rendezvous.rank, tuple(range(rendezvous.size))
        self._store = rendezvous.connect()
        self._rendezvous = rendezvous  # its server lives as long as the messages
        self._last_sent: dict[int, str] = {}
        self._arrived: deque[tuple[int, str, Any]] = deque()
        self._meetings = _Meetings(self._store, self.rank, self.size, rendezvous.timeout_seconds)
        self._lost: LostError | DamagedError | None = None
        self._closed = False
        self._opened: Counter[str] = Counter()  # so far, by name: a group's keys in the store are its own
        self._listener = threading.Thread(None, self._listen, "hetsync-messages", (rendezvous.connect(),), daemon=True)
        self._listener.start()

    def send(self, message: Any, to: int) -> None:
        with _store_errors():
            key = f"message/{to}/{self._store.add(f'sent/{to}', 1)}"
            whole = message if isinstance(message, codec.Encoded) else (self.rank, key, message)
            self._store.set(key, codec.dumps(whole))  # type: ignore[arg-type]
        self._last_sent[to] = key

    def unread(self, to: int) -> bool:
        with _store_errors():
            # They are read in order.
            return to in self._last_sent and self._store.check([self._last_sent[to]])

    def receive(self) -> Sequence[tuple[int, Any]]:
        if self._lost is not None:
            raise self._lost
        arrived: list[tuple[int, Any]] = []
        while self._arrived:
            sender, key, message = self._arrived.popleft()
            with _store_errors():
                self._store.delete_key(key)
            arrived.append((sender, message))
        return arrived

    def _listen(self, store: dist.Store) -> None:
        number = 0
        while True:
            number += 1
            try:
                sender, key, message = codec.loads(store.get(f"message/{self.rank}/{number}"))
            except DamagedError as damaged:
                self._lost = damaged
                return
            except RuntimeError as error:
                self._lost = _lost(error)
                return
            if not isinstance(message, _End):
                self._arrived.append((sender, key, message))
            elif message.status is None:
                return
            else:
                _exit(message.status)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._meetings.gather(value)

    def broadcast_object(self, value: Any) -> Any:
        return self._meetings.broadcast(value)

    def open_channels(self) -> Channels:
        timeout = self._rendezvous.timeout_seconds
        return GlooChannels(open_gloo(self._store, self._name("channels"), self.rank, self.size, timeout), timeout)

    def open_sums(self, ranks: Sequence[int]) -> Sums:
        name = self._name(f"sums of {','.join(map(str, ranks))}")
        return gloo_sums(self._store, f"{name} ", self.rank, ranks, self._rendezvous.timeout_seconds)

    def _name(self, kind: str) -> str:
        self._opened[kind] += 1
        return f"{kind} {self._opened[kind]}"

    def abort(self, code: int) -> NoReturn:
        with contextlib.suppress(LostError):
            for rank in range(self.size):
                if rank != self.rank:
                    self.send(_End(code), rank)
        if self._rendezvous.server is not None:
            time.sleep(SECONDS_TO_TELL)  # the store ends with this process
        _exit(code)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.barrier()
        self.send(_End(None), self.rank)
        self._listener.join()
        self._meetings.end()


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Meetings:
    """The main thread's blocking calls, over a group of their own: they sleep while they wait, end in time, and say who
    is late, as the store knows who has come."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._limit_seconds = wait_limit(rank, timeout_seconds)
        self._number = 0
        with _store_errors():
            self._store.set(f"came/{rank}", "0")
        self._group = open_gloo(store, "meetings", rank, size, timeout_seconds)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        self._come()
        data, own = codec.dumps_own(value)
        lengths = self._all_gather(torch.tensor([len(data)]))
        sent = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self._all_gather(sent).view(self._size, -1)
        return [codec.loads(bytes(part[:length].numpy()), own) for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        self._come()
        data = bytearray(codec.dumps(value) if self._rank == 0 else b"")
        length = torch.tensor([len(data)])
        self._wait(self._group.broadcast([length]))
        told = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(int(length), dtype=torch.uint8)
        self._wait(self._group.broadcast([told]))
        return codec.loads(bytes(told.numpy()))

    def end(self) -> None:
        """The last meeting. Nobody asks the store after it, which ends with rank 0's process or with torchrun."""
        self._all_gather(torch.zeros(1))

    def _come(self) -> None:
        self._number += 1
        with _store_errors():
            self._store.set(f"came/{self._rank}", str(self._number))

    def _all_gather(self, own: torch.Tensor) -> torch.Tensor:
        gathered = own.new_empty(self._size * own.numel())
        self._wait(self._group._allgather_base(gathered, own))
        return gathered

    def _wait(self, work: dist.Work) -> None:
        wait_until(completion_of(work), self._limit_seconds, lambda: named(self._late()))

    def _late(self) -> list[int]:
        with _store_errors():
            return [rank for rank in range(self._size) if int(self._store.get(f"came/{rank}")) < self._number]


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> LostError:
    return LostError(f"lost the store of the job, which torchrun or rank 0 holds ({cause(error)})")
