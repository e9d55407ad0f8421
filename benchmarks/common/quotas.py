"""CPU quotas by cgroup (version 1): processes that really are slower, each by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
MOST_PERCENT = 160  # of two cores: what else the machine does needs the rest


def permitted() -> bool:
    return os.access(CGROUPS / "cpu.cfs_quota_us", os.W_OK)


@contextmanager
def quotas(percents: Sequence[int]) -> Iterator[Path]:
    """A folder with a cgroup for each rank, which may use so much of a core."""
    parent = CGROUPS / f"hetsync-ranks-{os.getpid()}"
    groups = [parent / f"rank-{rank}" for rank in range(len(percents))]
    parent.mkdir()
    try:
        for group, percent in zip(groups, percents, strict=True):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD_US * percent // 100))
        yield parent
    finally:
        for group in [*groups, parent]:
            if group.exists():
                group.rmdir()


def join_group(groups: Path, rank: int) -> None:
    """This process enters a rank's cgroup, with all of its threads."""
    (groups / f"rank-{rank}" / "cgroup.procs").write_text(str(os.getpid()))
