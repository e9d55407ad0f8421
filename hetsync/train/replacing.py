"""Processes that take the place of ranks that have died (`fault.replace`): who starts them, and what they are told.

The first rank starts one, which gets ready beside the job. Then all come to rest, and save; the newcomer begins from
that checkpoint, as in a resume, and is one of the ranks when the others go on.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from hetsync.balance.profile import RankProfile
from hetsync.errors import UserError, announce, complain
from hetsync.plane.base import LostError, Newcomer, Plane, Summoned
from hetsync.profiling.cores import granted, threads_of
from hetsync.profiling.measure import Place
from hetsync.sync.recovery import Death
from hetsync.train.summary import Join, Rollback
from hetsync.train.terms import Entry

MOST_TRIES = 3  # in a row, for one place
SECONDS_BETWEEN_RESTS = 1.0  # twice as many after each at which nobody could enter
SECONDS_FOR_A_REST = 60.0  # to come, before it is asked for once more


@dataclass(frozen=True)
class Summons:
    """What a newcomer is told at its start: the run folder, the seed, what is known of all ranks, and how the job's
    settings and what it has prepared are described (`alike.py`), as its own must be."""

    folder: str
    settings: Mapping[str, Any]
    seed: int
    prepared: Mapping[str, Any]
    places: Sequence[Place]
    profiles: Sequence[RankProfile]


@dataclass(frozen=True)
class Welcome:
    """What a newcomer is told as it enters."""

    members: Sequence[int]  # itself the last
    checkpoint: str
    shares: Sequence[int]
    profiles: Sequence[RankProfile]
    entry: Entry
    deaths: Sequence[tuple[Death, float]]
    joins: Sequence[Join]
    rollbacks: Sequence[Rollback]


class Arrival(NamedTuple):
    """What all are told of one that enters now."""

    join: Join
    profile: RankProfile
    address: str


def summons_of(newcomer: Newcomer) -> Summons:
    return cast(Summons, newcomer.told)


def places_of(newcomer: Newcomer, rank: int) -> Sequence[Place]:
    """With its own, which may be on another host than that of the rank that it replaces."""
    places, host = list(summons_of(newcomer).places), socket.gethostname()
    if places[rank].host != host:
        places[rank] = Place(host, 0, 1, threads_of(0, [granted()]))
    return places


def check_replacing(plane: Plane, folder: Path | None) -> None:
    """UserError where nobody can take a dead rank's place."""
    remedy = "or give false, and where a rank has died requeue the job and resume with more ranks"
    if not plane.tolerant:
        raise UserError(
            f"fault.replace is true, but a rank's death ends jobs with {plane.described}: start the ranks with mpirun"
            " --with-ft ulfm of Open MPI 5, with run.plane mpi, or on CPUs without MPI, by one torchrun a node without"
            f" restarts or a launcher that leaves the others alone, {remedy}"
        )
    if not plane.replaces:
        raise UserError(
            "fault.replace is true, but Open MPI was told to use shared memory alone, which does not reach a rank that"
            f" starts later: add tcp to its --mca btl (launch/local --replace does), {remedy}"
        )
    if folder is None:
        raise UserError(
            "fault.replace is true, but a rank that joins begins from a checkpoint, and there is no run folder: give"
            " hetsync.join a run, or give false"
        )


class Replacements:
    """On every rank; the first one starts processes."""

    def __init__(self, plane: Plane, summons: Callable[[], Summons]) -> None:
        self._plane = plane
        self._summons = summons
        self._summoned: dict[int, tuple[Summoned, float]] = {}  # and the moment
        self._tries: Counter[int] = Counter()
        # Whoever starts processes by hand may do so as often as it takes.
        self._most_tries: float = MOST_TRIES if plane.asked_at is None else math.inf
        self._entering: int | None = None  # whom the last rest let in
        self._rest_from = 0.0  # the moment
        self._pause_seconds = SECONDS_BETWEEN_RESTS

    def wants_rest(self) -> bool:
        """Between two batches: start what is to be started. True where one is ready, and the job is to come to rest."""
        if not self._plane.leads:
            return False
        for rank in self._plane.members:
            self._tries.pop(rank, None)
        if self._entering is not None:
            self._settle(self._entering in self._plane.members)
        missing = set(range(self._plane.ranks_at_start)).difference(self._plane.members)
        for rank in sorted(missing):
            self._look_after(rank)
        ready = any(summoned.ready is not None for summoned, _ in self._summoned.values())
        if not ready or time.monotonic() < self._rest_from:
            return False
        self._rest_from = time.monotonic() + SECONDS_FOR_A_REST
        return True

    def _settle(self, has_entered: bool) -> None:
        """All have waited for one: soon for the next only where this one has come."""
        self._entering = None
        if has_entered:
            self._rest_from, self._pause_seconds = 0.0, SECONDS_BETWEEN_RESTS
        else:
            self.put_off()

    def put_off(self) -> None:
        """At a rest for that, nobody can enter."""
        self._rest_from = time.monotonic() + self._pause_seconds
        self._pause_seconds *= 2

    def _look_after(self, rank: int) -> None:
        if rank in self._summoned and self._summoned[rank][0].gone:
            del self._summoned[rank]
            if self._tries[rank] == self._most_tries:
                complain(f"no process could take the place of rank {rank}, {self._most_tries} times: the others go on")
        if rank not in self._summoned and self._tries[rank] < self._most_tries:
            self._tries[rank] += 1
            summons = self._summons()
            self._summoned[rank] = self._plane.summon(rank, summons), time.monotonic()
            if self._plane.asked_at is not None:
                announce(f"the place of rank {rank} is free: hetsync join {summons.folder} takes it")

    def invite(
        self, welcome: Callable[[Join, RankProfile], Welcome], version: int, samples: Counter[int]
    ) -> Arrival | None:
        """At rest, on the first rank, with all saved: the next one enters. None where there is none."""
        for rank, (summoned, since) in list(self._summoned.items()):
            if summoned.ready is None or summoned.gone:
                continue
            profile: RankProfile = summoned.ready
            seconds = round(time.monotonic() - since, 6)
            join = Join(rank=rank, host=profile.host, round=version, seconds=seconds, samples=samples[rank])
            try:
                address = summoned.invite(welcome(join, profile))
            except LostError as error:
                complain(str(error))
                continue
            del self._summoned[rank]
            self._entering = rank
            return Arrival(join, profile, address)
        self.put_off()
        return None
