"""Finding a job that runs, as a process does that is to take a dead rank's place (`hetsync join`)."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from hetsync.errors import UserError
from hetsync.plane import rendezvous
from hetsync.plane.rendezvous import WORD, Rendezvous, StorePost, Way, address_for, first_connection, reached


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ask(monkeypatch, store.port)
    return store


class CountingStore:
    """Of this process; `looks` are what others would go over the network for."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        self.looks += name in ("check", "get")
        return getattr(self._store, name)


def posts_of(store: Any, size: int) -> list[StorePost]:
    told = [SimpleNamespace(rank=rank, size=size, connect=lambda: store) for rank in range(size)]
    return [StorePost(cast(Rendezvous, each)) for each in told]


def test_the_first_rank_looks_once_at_each_that_has_come() -> None:
    """However many looks it takes until all are there."""
    size, store = 50, CountingStore()
    posts = posts_of(store, size)
    for number, post in enumerate(reversed(posts)):
        post.tell(f"rank {post.rank}")
        assert len(posts[0].heard()) == number + 1
        posts[0].heard()
    assert posts[0].heard() == {rank: f"rank {rank}" for rank in range(size)}
    assert store.looks == 3 * size
    assert posts[0].here() == set(range(size))
    assert posts[7].here() == {0, 7}


def test_one_that_has_yet_to_say_who_it_is_holds_up_nobody() -> None:
    store = dist.HashStore()
    posts = posts_of(store, 3)
    store.add("arrivals", 1)  # and then it has died
    posts[2].tell("here")
    assert posts[0].heard() == {2: "here"}
    assert posts[1].here() == {2}
    store.set("hello/1", "late")
    store.set("arrival/1", "1")
    assert posts[0].heard() == {1: "late", 2: "here"}


def ask(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    told = {"host": "127.0.0.1", "port": port, "prefix": "job", "word": "ours"}
    monkeypatch.setenv("HETSYNC_ASKS", json.dumps(told))


@pytest.mark.parametrize("word", ["theirs", None])
def test_another_job_is_not_joined(server: dist.TCPStore, word: str | None) -> None:
    if word is not None:
        dist.PrefixStore("job", server).set(WORD, word)
    with pytest.raises(UserError, match="another job answers"):
        first_connection()
    dist.PrefixStore("job", server).set(WORD, "ours")
    assert first_connection().check([WORD])


@pytest.mark.parametrize("answer", [None, b"HTTP/1.0 400 Bad Request\r\n\r\n"])
def test_what_is_no_store_does_not_hold_up_for_long(monkeypatch: pytest.MonkeyPatch, answer: bytes | None) -> None:
    """A port that a job had may be that of anything now."""
    held: list[socket.socket] = []
    said: list[str] = []
    ended = threading.Event()

    def serve() -> None:
        with suppress(OSError):
            while True:
                held.append(server.accept()[0])
                if answer is not None:
                    held[-1].sendall(answer)
                if answer is not None or ended.is_set():
                    held[-1].close()

    def leave(status: int, sentence: str) -> None:
        said.append(sentence)
        ended.set()
        for each in held:
            each.close()

    monkeypatch.setattr(rendezvous, "leave", leave)
    monkeypatch.setattr(rendezvous, "SECONDS_TO_ASK", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        ask(monkeypatch, server.getsockname()[1])
        with pytest.raises(UserError, match="another job answers"):
            first_connection()
        server.shutdown(socket.SHUT_RDWR)
    if answer is None:
        assert "another job answers" in said[0]


ELSEWHERE = Way("h0", "10.77.0.2", "10.77.0.1")


@pytest.mark.parametrize(
    ("own", "other"),
    [("127.0.0.1", "127.0.1.1"), ("::1", "::1"), ("172.17.0.1", "172.17.0.1"), ("fe80::1%0", "fe80::1%0")],
)
def test_what_a_host_calls_itself_is_no_address_for_others(
    monkeypatch: pytest.MonkeyPatch, own: str, other: str
) -> None:
    """Its loopback, as Debian has it, or any of its interfaces."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    beside = Way("h0", own, other)
    assert beside.hosts_address is None
    assert address_for(beside, ELSEWHERE.hosts_address) == "10.77.0.1"
    assert address_for(beside, None) == own, "of one host all"


def test_who_is_elsewhere_is_reached_by_the_interface_that_has_reached_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert address_for(ELSEWHERE, "10.9.9.9") == "10.77.0.2"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert address_for(ELSEWHERE, "10.9.9.9") == "", "as the user has said"


def test_a_host_that_reaches_itself_by_name_is_beside_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    named = {"debian": "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *words, **keys: real(named.get(host, host), *words, **keys))
    with socket.create_server(("", 0)) as server:
        way = reached(["debian"], server.getsockname()[1], 0, 5.0)
    assert (way.host, way.other, way.beside) == ("debian", "127.0.1.1", True)
