"""Memory that ranks share."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shared import collectively

from hetsync.plane.shared_memory import Address, SharedMemory

PAGE_VALUES = mmap.PAGESIZE // 4


def open_all(ranks: int) -> list[SharedMemory]:
    memories = collectively(ranks, SharedMemory.open)
    assert all(memory is not None for memory in memories)
    return memories  # type: ignore[return-value]


def tensor(memory: SharedMemory, values: int) -> torch.Tensor:
    made = memory.allocate(values)
    assert made is not None
    return made


def test_each_rank_sees_what_the_others_write() -> None:
    memories = open_all(3)
    tensors = [tensor(memory, 5) for memory in memories]
    for rank, memory in enumerate(memories):
        tensors[rank][:] = rank
        memory.own.words[1] = 10 * rank
    for memory in memories:
        assert [area.words[1] for area in memory.areas] == [0, 10, 20]
        assert [area.values[PAGE_VALUES:][:5].tolist() for area in memory.areas] == [[rank] * 5 for rank in range(3)]


def test_tensors_lie_apart_and_each_where_it_is_told_to_lie() -> None:
    (memory,) = open_all(1)
    tensors = [tensor(memory, values) for values in (1, PAGE_VALUES, PAGE_VALUES + 1, 7)]
    for number, each in enumerate(tensors):
        each.fill_(number)
    for number, each in enumerate(tensors):
        offset = memory.offset(each)
        assert offset is not None
        assert offset >= PAGE_VALUES, "the first page has words"
        assert memory.own.values[offset : offset + each.numel()].tolist() == [number] * each.numel()
    assert memory.offset(tensors[1][5:]) == memory.offset(tensors[1]) + 5
    assert memory.offset(torch.zeros(4)) is None


def test_core_dumps_leave_it_out() -> None:
    """Or one of each rank's would take room for the areas of all."""
    memories = open_all(2)
    _, *mappings = Path("/proc/self/smaps").read_text().split("memfd:hetsync")
    flags = [mapping.partition("VmFlags:")[2].partition("\n")[0].split() for mapping in mappings]
    assert len(flags) >= len(memories) * 2, "each maps its own and the other's"
    assert all("dd" in each for each in flags)


def test_memory_is_used_again_once_the_last_view_has_gone() -> None:
    (memory,) = open_all(1)
    first = tensor(memory, 100)
    offset, view = memory.offset(first), first[3:5]
    del first
    gc.collect()
    assert memory.offset(tensor(memory, 100)) != offset
    del view
    gc.collect()
    assert memory.offset(tensor(memory, 80)) == offset, "as many pages"


def test_tensors_outlive_the_memory_and_others_areas_do_not() -> None:
    memories = open_all(2)
    kept, theirs = tensor(memories[0], 3).fill_(7), weakref.ref(memories[0].areas[1])
    for memory in memories:
        memory.close()
    del memories, memory
    gc.collect()
    assert theirs() is None
    assert (kept + 1).tolist() == [8, 8, 8]


def test_those_who_are_left_share_anew_what_they_have() -> None:
    memories = open_all(3)
    kept = [tensor(memory, 5).fill_(rank) for rank, memory in enumerate(memories)]
    for memory in memories:
        memory.own.words[0] = 9
    left = [memories[0], memories[2]]
    again = collectively(2, lambda rank, ranks, gather: SharedMemory.open(rank, ranks, gather, left[rank]))
    assert again == left
    for memory in left:
        assert [area.words[0] for area in memory.areas] == [0, 0], "they begin anew"
        assert [area.values[PAGE_VALUES:][:5].tolist() for area in memory.areas] == [[0] * 5, [2] * 5]
    assert left[1].offset(kept[2]) == PAGE_VALUES


def test_no_more_memory_than_the_area_has() -> None:
    memory = SharedMemory(3 * mmap.PAGESIZE)
    assert memory.allocate(0) is None
    assert memory.allocate(2 * PAGE_VALUES + 1) is None
    assert memory.allocate(2 * PAGE_VALUES) is not None
    assert memory.allocate(1) is None


def resident(memory: SharedMemory) -> int:
    return os.fstat(memory._file.fileno()).st_blocks * 512


def test_memory_is_the_system_s_again_once_its_tensor_has_gone() -> None:
    (memory,) = open_all(1)
    before, n = resident(memory), 40 << 20
    large = tensor(memory, n // 4).fill_(1)
    assert resident(memory) == before + n
    del large
    gc.collect()
    assert resident(memory) == before
    again = tensor(memory, n // 4)
    assert resident(memory) == before + n
    assert not again.any()


def test_a_child_does_not_give_back_what_its_parent_has(monkeypatch: pytest.MonkeyPatch) -> None:
    (memory,) = open_all(1)
    kept = tensor(memory, 1000)
    before = resident(memory)
    with monkeypatch.context() as patched:  # as in a process that was forked
        patched.setattr(os, "getpid", lambda: -1)
        del kept
        gc.collect()
    assert resident(memory) == before


def test_memory_that_the_system_does_not_have_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (memory,) = open_all(1)

    def full(*_: object) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert memory.allocate(5) is None
    assert memory.allocate(5) is not None


def only_the_second(instead: Callable[[Address], Address], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those who tell where their areas are is found at another address."""
    told: list[Address] = []
    true = SharedMemory._begin_anew

    def begin_anew(self: SharedMemory) -> Address:
        told.append(true(self))
        return instead(told[-1]) if len(told) == 2 else told[-1]

    monkeypatch.setattr(SharedMemory, "_begin_anew", begin_anew)


def of_no_process(address: Address) -> Address:
    return address._replace(process=2**22 + 1)  # beyond all


def by_another_name(address: Address) -> Address:
    return address._replace(name=address.name + 1)


def of_another_size(address: Address) -> Address:
    return address._replace(size=2 * address.size)


def of_another_network(address: Address) -> Address:
    return address._replace(network=address.network + 1)


@pytest.mark.parametrize("instead", [of_no_process, by_another_name, of_another_size, of_another_network])
def test_none_shares_where_one_is_not_seen(
    instead: Callable[[Address], Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_second(instead, monkeypatch)
    assert collectively(3, SharedMemory.open) == [None] * 3


def test_a_process_of_that_number_may_have_another_file_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w+b") as other:
        only_the_second(lambda address: address._replace(descriptor=other.fileno()), monkeypatch)
        assert collectively(2, SharedMemory.open) == [None] * 2
        assert not other.read(), "not touched"


def no_memory(*_: object) -> int:
    raise OSError("none of it")


def limited(_: int) -> tuple[int, int]:
    return 2**40, 2**40


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (os, "memfd_create", no_memory),
        (os, "posix_fallocate", no_memory),
        (os, "stat", no_memory),
        (resource, "getrlimit", limited),
    ],
)
def test_none_shares_where_the_system_has_none(
    where: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    assert collectively(2, SharedMemory.open) == [None] * 2


def test_none_shares_where_the_system_knows_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert collectively(2, SharedMemory.open) == [None] * 2
