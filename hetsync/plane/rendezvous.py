"""Where ranks find each other for torch.distributed: a store of key and value that all of them reach."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from hetsync.errors import USER_ERROR, OwnMistakeError, UserError, brief, cause
from hetsync.launchers import ASKS
from hetsync.plane.base import Messages, decided_by_first
from hetsync.plane.ending import leave, within

# Waiting in earnest is bounded elsewhere, by run.timeout_seconds. torch counts milliseconds in 32 bits.
ENDLESS = timedelta(days=20)
SECONDS_TO_ASK = 20.0  # that a job's store may take to answer first
WORD = "the job's word"  # the key of what no other job answers


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
    found = Rendezvous(host, port, rank, size, prefix, timeout_seconds, server)
    # As does a script's second job. All ranks open their planes in the same order.
    return replace(found, prefix=f"{prefix}/{found.connect().add(f'opened by {rank}', 1)}")


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
    """Collective: a store that rank 0 opens at a port that is free, and tells by messages."""
    server: dist.TCPStore | None = None

    def opened() -> tuple[str, int]:
        nonlocal server
        server = _open_at("127.0.0.1", 0, timeout_seconds)
        return socket.gethostname(), server.port

    host, port = decided_by_first(messages, opened)
    if host == socket.gethostname():
        host = "127.0.0.1"  # also where the host's name is not known to itself
    return Rendezvous(host, port, messages.rank, messages.size, "hetsync", timeout_seconds, server)


def rendezvous_with_job(timeout_seconds: float, rank: int = -1, size: int = 0) -> Rendezvous:
    """The store of the job that this process has been told to ask (`hetsync join`)."""
    told = _asked_at()
    return Rendezvous(told["host"], told["port"], rank, size, told["prefix"], timeout_seconds)


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
