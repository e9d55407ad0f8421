"""Memory that ranks share."""

from __future__ import annotations

import gc
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shared import collectively, opened

from hetsync.plane.shared_memory import NAME, SharedMemory

PAGE_VALUES = mmap.PAGESIZE // 4


def tensor(memory: SharedMemory, values: int) -> torch.Tensor:
    made = memory.tensor(values)
    assert made is not None
    return made


def test_each_rank_sees_what_the_others_write() -> None:
    memories = opened(3)
    for rank, memory in enumerate(memories):
        tensor(memory, 5)[:] = rank
        memory.own.words[1] = 10 * rank
    for memory in memories:
        assert [area.words[1] for area in memory.areas] == [0, 10, 20]
        assert [area.values[PAGE_VALUES:][:5].tolist() for area in memory.areas] == [[rank] * 5 for rank in range(3)]


def test_tensors_lie_apart_and_each_where_it_is_told_to_lie() -> None:
    (memory,) = opened(1)
    tensors = [tensor(memory, values) for values in (1, PAGE_VALUES, PAGE_VALUES + 1, 7)]
    for number, each in enumerate(tensors):
        each.fill_(number)
    for number, each in enumerate(tensors):
        place = memory.place(each)
        assert place is not None
        assert place >= PAGE_VALUES, "the first page has words"
        assert memory.own.values[place : place + each.numel()].tolist() == [number] * each.numel()
    assert memory.place(tensors[1][5:]) == memory.place(tensors[1]) + 5
    assert memory.place(torch.zeros(4)) is None


def test_memory_is_used_again_once_the_last_view_has_gone() -> None:
    (memory,) = opened(1)
    first = tensor(memory, 100)
    place, view = memory.place(first), first[3:5]
    del first
    gc.collect()
    assert memory.place(tensor(memory, 100)) != place
    del view
    gc.collect()
    assert memory.place(tensor(memory, 80)) == place, "as many pages"


def test_tensors_outlive_the_memory() -> None:
    memories = opened(2)
    kept = tensor(memories[0], 3).fill_(7)
    for memory in memories:
        memory.close()
    del memories, memory
    gc.collect()
    assert (kept + 1).tolist() == [8, 8, 8]


def test_no_more_memory_than_the_area_has() -> None:
    memory = SharedMemory(3 * mmap.PAGESIZE)
    assert memory.tensor(0) is None
    assert memory.tensor(2 * PAGE_VALUES + 1) is None
    assert memory.tensor(2 * PAGE_VALUES) is not None
    assert memory.tensor(1) is None


def test_memory_that_the_system_does_not_have_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (memory,) = opened(1)

    def full(*_: object) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert memory.tensor(5) is None
    assert memory.tensor(5) is not None


def only_rank_1(instead: Callable[[SharedMemory], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Told of by another address."""
    made: list[SharedMemory] = []
    true = SharedMemory._address

    def address(self: SharedMemory) -> tuple[int, ...]:
        made.append(self)
        return instead(self) if len(made) == 2 else true(self)

    monkeypatch.setattr(SharedMemory, "_address", address)


def of_no_process(memory: SharedMemory) -> tuple[int, ...]:
    beyond_all = 2**22 + 1
    return beyond_all, memory._file.fileno(), memory._size, memory.own.words[NAME]


def by_another_name(memory: SharedMemory) -> tuple[int, ...]:
    return os.getpid(), memory._file.fileno(), memory._size, memory.own.words[NAME] + 1


@pytest.mark.parametrize("instead", [of_no_process, by_another_name])
def test_none_shares_where_one_is_not_seen(
    instead: Callable[[SharedMemory], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_rank_1(instead, monkeypatch)
    assert collectively(3, SharedMemory.open) == [None] * 3


def test_a_process_of_that_number_may_have_another_file_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w+b") as other:
        only_rank_1(lambda memory: (os.getpid(), other.fileno(), memory._size, 5), monkeypatch)
        assert collectively(2, SharedMemory.open) == [None] * 2
        assert not other.read(), "not touched"


def no_memory(*_: object) -> int:
    raise OSError("none of it")


def limited(_: int) -> tuple[int, int]:
    return 2**40, 2**40


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [(os, "memfd_create", no_memory), (os, "posix_fallocate", no_memory), (resource, "getrlimit", limited)],
)
def test_none_shares_where_the_system_has_none(
    where: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    assert collectively(2, SharedMemory.open) == [None] * 2


def test_none_shares_where_the_system_knows_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert collectively(2, SharedMemory.open) == [None] * 2
