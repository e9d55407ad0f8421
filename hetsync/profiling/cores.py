"""Which cores of a host are a rank's: by the mask of its launcher, by quotas, and by who else is there."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetsync.cgroups import CpuQuota, cpu_quotas
from hetsync.processes import boot_id

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Grant:
    """What a rank may use of its host.

    Attributes:
        cpus: The hardware threads of its mask, and those of the process that started it.
        one_core: Whether all of its mask are of one core.
        boot: What tells hosts of one name apart.
    """

    host: str
    cpus: frozenset[int]
    starters: frozenset[int]
    one_core: bool
    quotas: tuple[CpuQuota, ...] = ()
    boot: str = ""

    @property
    def machine(self) -> tuple[str, str]:
        """The same for ranks of one host; containers of one count as several, as their names say."""
        return self.host, self.boot


def granted(topology: Path = TOPOLOGY) -> Grant:
    """To this process."""
    cpus = starters = frozenset(os.sched_getaffinity(0))
    with suppress(OSError):  # it may have ended
        starters = frozenset(os.sched_getaffinity(os.getppid()))
    siblings = f"cpu{min(cpus)}/topology/thread_siblings_list"
    together = {min(cpus)}
    with suppress(OSError, ValueError):
        together = _numbers((topology / siblings).read_text())
    return Grant(socket.gethostname(), cpus, starters, cpus <= together, tuple(cpu_quotas()), boot_id())


def _numbers(text: str) -> set[int]:
    """Of a list as Linux writes it: 0,4-6."""
    ends = [part.split("-") for part in text.strip().split(",")]
    return {number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)}


def threads_of(rank: int, grants: Sequence[Grant]) -> int:
    """How many of its threads find a core: those of its mask and of each quota are shared by all who have them."""
    mine = grants[rank]
    here = [grant for grant in grants if grant.machine == mine.machine]
    shares = [len(mine.cpus) // sum(not mine.cpus.isdisjoint(grant.cpus) for grant in here)]
    for quota in mine.quotas:
        sharing = sum(quota.group in (theirs.group for theirs in grant.quotas) for grant in here)
        shares.append(math.ceil(quota.cores) // sharing)
    return max(1, min(shares))


def bound_to_one_core(grants: Sequence[Grant]) -> str | None:
    """What to say where a launcher has bound ranks to a core each, as mpirun does, though the host has more."""
    for rank, mine in enumerate(grants):
        others = {cpu for grant in grants if grant.machine == mine.machine for cpu in grant.cpus | grant.starters}
        if mine.one_core and others > mine.cpus:
            return (
                f"rank {rank} is bound to one core of {mine.host}, which its compute and its communication share, so"
                " that both are slow: start with mpirun --bind-to none (launch/local does), or srun with"
                " --cpus-per-task 2 or more"
            )
    return None
