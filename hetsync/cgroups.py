"""What Linux grants to this process by control groups, versions 1 and 2: a container's limits, or a job's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CpuQuota:
    """So many cores' time. `group` is that of all processes which share it."""

    cores: float
    group: tuple[int, int]


def groups_of(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[tuple[Path, int]]:
    """The folders of what limits this process so, from its own group upwards, each with its version. Of containers
    some are not seen from inside."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        version, root = (1, cgroups / controllers) if controllers else (2, cgroups)
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder, version
            folder = folder.parent
        yield root, version


def cpu_quotas(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[CpuQuota]:
    """All that hold for this process."""
    found = []
    for folder, version in groups_of("cpu", proc, cgroups):
        with suppress(OSError, ValueError):  # there is none
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())  # "max" where there is none
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                about = folder.stat()
                found.append(CpuQuota(quota / period, (about.st_dev, about.st_ino)))
    return found


def most_processes() -> int | None:
    """How many processes and threads the tightest of its groups may have; None where nothing limits them."""
    found = []
    for folder, _ in groups_of("pids"):
        with suppress(OSError, ValueError):
            found.append(int((folder / "pids.max").read_text()))
    return min(found, default=None)


def memory_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """How many processes of this one's group the kernel has killed so far for want of memory; 0 where none tells."""
    for folder, version in groups_of("memory", proc, cgroups):
        with suppress(OSError, ValueError, KeyError):  # the group is not seen from here, or the system is too old
            text = (folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
            return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    return 0


if __name__ == "__main__":  # for launch/local: memory's kills so far, and whole cores that each quota leaves
    print(memory_kills(), *(math.ceil(one.cores) for one in cpu_quotas()))
