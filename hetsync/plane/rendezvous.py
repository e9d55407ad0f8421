"""Where ranks find each other for torch.distributed: a store of key and value that all of them reach."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from hetsync.errors import USER_ERROR, OwnMistakeError, UserError, announce, brief, cause
from hetsync.launchers import ASKS
from hetsync.plane.base import Messages, decided_by_first, made_by_all
from hetsync.plane.ending import leave, within
from hetsync.plane.greeting import CONNECTING_SECONDS, NOTICE_SECONDS, Post, first_address, greet, own_hello
from hetsync.threads import LivedSeconds

# Waiting in earnest is bounded elsewhere, by run.timeout_seconds. torch counts milliseconds in 32 bits.
ENDLESS = timedelta(days=20)
ABSENT = "has it been started, is the name right, and are the ports open between the hosts?"
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # of Linux: an interface's address
SECONDS_TO_CONNECT, SECONDS_TO_RETRY = 5.0, 0.2
SECONDS_TO_HEAR = timedelta(seconds=10)  # that the job ends
SECONDS_TO_ASK = 20.0  # that a job's store may take to answer first
WORD = "the job's word"  # the key of what no other job answers
ADDRESS = "the first host's address"


@dataclass(frozen=True)
class Rendezvous:
    """A store that is open at `host` and `port`, for this rank of so many.

    Where this rank holds it (`server`), it ends with this object and its copies.
    """

    host: str
    port: int
    rank: int
    size: int
    prefix: str  # of the keys: others may use the store, too
    timeout_seconds: float
    server: Any = None
    address: str = ""  # of this rank, at which others are to reach it; empty where its libraries are to find it

    def connect(self) -> dist.Store:
        """A connection of its own: each thread that waits in one needs its own."""
        try:
            store = _tcp_store(self.host, self.port, self.timeout_seconds, is_master=False)
        except RuntimeError as error:
            raise OwnMistakeError(
                f"rank {self.rank} does not reach the store of torch at {self.host}, port {self.port}"
                f" ({cause(error)}): is the name right, and the port open between the hosts?"
            ) from error
        store.set_timeout(ENDLESS)
        return dist.PrefixStore(self.prefix, store)


def rendezvous_by_environment(timeout_seconds: float, environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """As torchrun, or a launcher like it, tells: torchrun's own store, or one that rank 0 opens at MASTER_PORT."""
    rank, size, port = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks count from 0")
    host = environ.get("MASTER_ADDR", "")
    if not host:
        raise UserError("MASTER_ADDR is not set: start the ranks with torchrun, or give the host of rank 0")
    # A job that torchrun starts again finds the keys of the one before.
    prefix = f"hetsync/{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    opens = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    server = _open_at(host, port, timeout_seconds) if opens else None
    reached([host], port, rank, timeout_seconds)  # torch would say in its own way that it is not
    found = Rendezvous(host, port, rank, size, prefix, timeout_seconds, server)
    # As does a script's second job. All ranks open their planes in the same order.
    return replace(found, prefix=f"{prefix}/{found.connect().add(f'opened by {rank}', 1)}")


class Way(NamedTuple):
    """From a rank to a store: `host` is what it was called, `own` this end's address, and `other` that of the store's.

    Beside the store both are of one host, which knows names for itself that mean nothing to others, or themselves: the
    loopback, or the bridge of a container engine.
    """

    host: str
    own: str
    other: str

    @property
    def beside(self) -> bool:
        return self.own == self.other or is_loopback(self.other)

    @property
    def hosts_address(self) -> str | None:
        """That of the store's host, as others have reached it."""
        return None if self.beside else self.other


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reached(hosts: Sequence[str], port: int, rank: int, seconds: float) -> Way:
    """To the first of these hosts that answers there. OwnMistakeError where none does in time."""
    lived, told, error = LivedSeconds(), False, OSError("no address")
    while (waited := lived.look()) < seconds:
        for host in hosts:
            try:
                with socket.create_connection((host, port), min(SECONDS_TO_CONNECT, seconds)) as connection:
                    return Way(host, connection.getsockname()[0], connection.getpeername()[0])
            except OSError as failure:
                error = failure
        if waited > NOTICE_SECONDS and rank == 1 and not told:
            told = True
            announce(f"hetsync: ranks wait for rank 0, which is to answer at {hosts[0]}, port {port} ({error})")
        time.sleep(SECONDS_TO_RETRY)
    raise OwnMistakeError(
        f"rank {rank} does not reach the store of torch at {' or '.join(hosts)}, port {port} ({error}): {ABSENT}"
    )


def hello_key(rank: int) -> str:
    """Of its first word, which stays."""
    return f"hello/{rank}"


class StorePost(Post):
    """The first words by keys of the store."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._store = rendezvous.connect()
        self._heard: dict[int, str] = {}
        self._arrivals = 0  # seen so far
        self._unread: list[int] = []  # of these
        self._answer: str | None = None

    def tell(self, hello: str) -> None:
        self._store.set(hello_key(self.rank), hello)
        self._store.set(f"arrival/{self._store.add('arrivals', 1)}", str(self.rank))

    def heard(self) -> Mapping[int, str]:
        """Each arrival is looked at once, but where its rank is about to be written."""
        arrivals = self._store.add("arrivals", 0)
        self._unread += range(self._arrivals + 1, arrivals + 1)
        self._arrivals = arrivals
        for number in list(self._unread):
            if self._store.check([f"arrival/{number}"]):
                rank = int(self._store.get(f"arrival/{number}"))
                self._heard[rank] = self._store.get(hello_key(rank)).decode()
                self._unread.remove(number)
        return self._heard

    def here(self) -> set[int]:
        if self.rank == 0:
            return {0, *self._heard}
        if self._store.check([hello_key(0)]):  # which speaks for all
            return {0, self.rank}
        return {rank for rank in range(self.size) if self._store.check([hello_key(rank)])}

    def answer(self, word: str) -> None:
        self._store.set("answer", word)
        if json.loads(word)["refusal"] is not None:  # whoever comes later would wait for a store that has ended
            with suppress(RuntimeError):
                self._store.wait([f"heard/{rank}" for rank in range(1, self.size)], SECONDS_TO_HEAR)

    def answered(self) -> str | None:
        if self._answer is None and self._store.check(["answer"]):
            self._answer = self._store.get("answer").decode()
            self._store.set(f"heard/{self.rank}", "")
        return self._answer


def met(rendezvous: Rendezvous, settings: Mapping[str, Any] | None, mistake: str | None) -> Rendezvous:
    """Collective: the ranks have greeted each other at the store; see `greet`. Their addresses are those of the
    interfaces by which they have reached it: what a host calls itself may mean nothing to others, or themselves."""
    way = reached([rendezvous.host], rendezvous.port, rendezvous.rank, rendezvous.timeout_seconds)
    hello = {**own_hello(settings, mistake), "reached": way.hosts_address}
    others = greet(StorePost(rendezvous), hello, rendezvous.timeout_seconds, ABSENT)
    return replace(rendezvous, address=address_for(way, others))


def address_for(way: Way, others: str | None) -> str:
    """Where a rank is to be reached: beside the store at the address where ranks of `others` have reached its host."""
    if "GLOO_SOCKET_IFNAME" in os.environ:  # the user has said
        return ""
    return others if others is not None and way.beside else way.own


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        told = f"{name} is {text}" if text else f"{name} is not set"
        raise UserError(
            f"{told}: start the ranks with torchrun, or give each RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
        )
    return int(text)


def _open_at(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    try:
        return _tcp_store(host, port, timeout_seconds, is_master=True)
    except RuntimeError as error:
        raise UserError(
            f"MASTER_PORT is {port}, but rank 0 cannot open it ({cause(error)}): give a free port of"
            f" MASTER_ADDR ({host}), which must be rank 0's host"
        ) from error


def rendezvous_by_messages(messages: Messages, timeout_seconds: float) -> Rendezvous:
    """Collective: a store that rank 0 opens at a port that is free, and tells by messages. UserError, on every rank,
    where one does not reach it."""
    server: dist.TCPStore | None = None

    def opened() -> tuple[str, list[str], int]:
        nonlocal server
        server = _open_at(LOOPBACK, 0, timeout_seconds)
        return network(), own_addresses(), server.port

    where, addresses, port = decided_by_first(messages, opened)
    hosts = [LOOPBACK] if where == network() else addresses
    seconds = min(CONNECTING_SECONDS, timeout_seconds)
    way = made_by_all(messages, lambda: reached(hosts, port, messages.rank, seconds))
    hellos = dict(enumerate({"reached": address} for address in messages.gather_objects(way.hosts_address)))
    address = address_for(way, first_address(hellos))
    return Rendezvous(way.host, port, messages.rank, messages.size, "hetsync", timeout_seconds, server, address)


def network() -> str:
    """The same for processes that reach each other by the loopback; hosts may have the same name."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def own_addresses() -> list[str]:
    """This host's, as others may reach it, by any of its interfaces. Not all of them mean this host elsewhere."""
    found = [*_by_interface(), *_by_name()]
    return [address for address in dict.fromkeys(found) if not is_loopback(address)]


def _by_interface() -> Iterator[str]:
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, *_ = line.split()
            if int(scope, 16) == 0:  # global
                yield str(ipaddress.IPv6Address(int(address, 16)))


def _by_name() -> Iterator[str]:
    with suppress(OSError):
        yield from (str(where[4][0]) for where in socket.getaddrinfo(socket.gethostname(), None))


def rendezvous_with_job(timeout_seconds: float, rank: int = -1, size: int = 0) -> Rendezvous:
    """The store of the job that this process has been told to ask (`hetsync join`)."""
    told = _asked_at()
    return Rendezvous(told["host"], told["port"], rank, size, told["prefix"], timeout_seconds)


def placed_in_job(rendezvous: Rendezvous, store: dist.Store) -> Rendezvous:
    """That of a newcomer, once it has reached it."""
    way = reached([rendezvous.host], rendezvous.port, rendezvous.rank, SECONDS_TO_ASK)
    return replace(rendezvous, address=address_for(way, store.get(ADDRESS).decode() or None))


def _asked_at() -> Mapping[str, Any]:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        told = json.loads(os.environ[ASKS])
        if [type(told[key]) for key in ("host", "port", "prefix", "word")] == [str, int, str, str]:
            return cast(Mapping[str, Any], told)
    raise UserError(f"{ASKS} is {brief(os.environ[ASKS])}, but hetsync join sets it: unset it, or use hetsync join RUN")


def first_connection() -> dist.Store:
    """To that store. UserError where nobody answers: torch would wait, and say so in its own way."""
    at = rendezvous_with_job(SECONDS_TO_ASK / 2)
    try:
        socket.create_connection((at.host, at.port), SECONDS_TO_ASK).close()
    except OSError as error:
        raise UserError(
            f"the job does not answer at {at.host}, port {at.port} ({error}): it has ended, or that port of"
            " rank 0's host is not open to this one; requeue the job, and resume with more ranks"
        ) from error
    other = (
        f"another job answers at {at.host}, port {at.port}: that of the run folder has ended; resume it with as many"
        " ranks as you like"
    )

    def is_no_store() -> None:
        leave(USER_ERROR, other)

    with within(SECONDS_TO_ASK, is_no_store):
        try:
            store = at.connect()
            answers = store.check([WORD]) and store.get(WORD).decode() == _asked_at()["word"]
        except (UserError, RuntimeError) as error:
            raise UserError(other) from error
    if not answers:
        raise UserError(other)
    return store


def _tcp_store(host: str, port: int, timeout_seconds: float, is_master: bool) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_seconds)
    # multi_tenant: a script's own init_process_group may open the same port.
    return dist.TCPStore(
        host, port, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=is_master
    )
