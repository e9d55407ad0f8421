from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetsync.cgroups import CpuQuota
from hetsync.plane.local import LocalPlane
from hetsync.profiling.cores import Grant, bound_to_one_core, granted, threads_of
from hetsync.profiling.measure import find_places

ALL = frozenset(range(4))
HALF = CpuQuota(2.0, (1, 7))


def grant(
    cpus: set[int] | frozenset[int] = ALL,
    *quotas: CpuQuota,
    host: str = "here",
    starters: frozenset[int] = ALL,
    boot: str = "1",
) -> Grant:
    return Grant(host, frozenset(cpus), starters, len(cpus) == 1, quotas, boot)


@pytest.mark.parametrize(
    ("grants", "threads"),
    [
        ([grant(), grant()], 2),
        ([grant(), grant(host="there")], 4),
        ([grant(), grant(boot="2")], 4),  # two hosts of one name
        ([grant({0, 1}), grant({2, 3})], 2),
        ([grant(ALL, HALF), grant(ALL, HALF)], 1),  # a container's, which they share
        ([grant(ALL, HALF), grant(ALL, CpuQuota(2.0, (1, 8)))], 2),  # one each
        ([grant(ALL, CpuQuota(1.5, (1, 7)))], 2),
        ([grant(ALL, CpuQuota(0.4, (1, 7)), CpuQuota(3.0, (1, 1)))], 1),
        ([grant()] * 9, 1),
    ],
)
def test_a_rank_has_as_many_threads_as_find_cores(grants: list[Grant], threads: int) -> None:
    assert threads_of(0, grants) == threads


def test_ranks_that_mpirun_has_bound_to_a_core_each_are_named() -> None:
    told = bound_to_one_core([grant({0}), grant({1})])
    assert told is not None
    assert "rank 0 is bound to one core of here" in told
    assert "--bind-to none" in told
    assert bound_to_one_core([grant(), grant({1})]) is not None
    assert bound_to_one_core([grant({0})]) is not None, "its launcher has more"


def test_ranks_that_have_more_or_whose_host_has_no_more_are_not() -> None:
    assert bound_to_one_core([grant(), grant()]) is None
    only = frozenset({0})
    assert bound_to_one_core([grant(only, starters=only)] * 2) is None
    assert bound_to_one_core([grant({0, 1}), grant({2, 3})]) is None


def test_hardware_threads_of_one_core_are_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 66})
    assert not granted(tmp_path).one_core
    (tmp_path / "cpu2" / "topology").mkdir(parents=True)
    (tmp_path / "cpu2" / "topology" / "thread_siblings_list").write_text("2,66\n")
    assert granted(tmp_path).one_core


def test_this_host_is_told_by_when_it_has_started() -> None:
    assert granted().machine == (os.uname().nodename, Path("/proc/sys/kernel/random/boot_id").read_text().strip())


class TwoHosts(LocalPlane):
    """Rank 0's, and another host of its name."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, replace(value, boot="another"), value]


def test_ranks_of_two_hosts_of_one_name_are_not_together() -> None:
    places = find_places(TwoHosts())
    assert [(place.local_rank, place.ranks_on_host) for place in places] == [(0, 2), (0, 1), (1, 2)]
