"""The ranks of a job without MPI that are left, and Gloo's groups among them, from one death to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hetsync.errors import UserError, cause
from hetsync.plane.base import LostError, MembersLost, PlaneError, named, wait_limit
from hetsync.plane.groups import GlooGroup, Watch, gloo_sums, open_gloo
from hetsync.plane.lifelines import Lifeline
from hetsync.plane.polled import PolledSums
from hetsync.plane.shared_memory import SharedMemory

SECONDS_TO_LOOK = 0.01
SECONDS_TO_ENTER = 20.0  # which takes milliseconds
SECONDS_TO_HEAR = 1.0  # of a death that a library has noticed before


class StoreMembers(Watch):
    """Their keys in the store and their groups are never used again after a death, so nothing that was sent or posted
    before it reaches what is sent or posted after it.

    `tolerant`: a death is `MembersLost`, unless it is rank 0's.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        lifeline: Lifeline,
        rank: int,
        timeout_seconds: float,
        tolerant: bool,
        newest: int | None = None,
        address: str = "",
    ) -> None:
        """Those who are left by now. `connect` makes connections to the job's store: a thread that was left to itself
        may hold its own until its time limit. `newest`: who has just been let in, and is not waited for for long.
        `address` as in a `Rendezvous`."""
        self.rank, self.ranks, self.tolerant = rank, lifeline.ranks, tolerant
        self.timeout_seconds, self.address = timeout_seconds, address
        self._epoch = lifeline.epoch
        self._connect = connect
        self.job_store = connect()
        self.store = self.keys(self.job_store)
        self._lifeline = lifeline
        self._newest = newest
        self._revoked = False
        self._groups: list[GlooGroup] = []

    def keys(self, store: dist.Store) -> dist.Store:
        """Theirs, over any connection to the store."""
        return dist.PrefixStore(f"epoch {self._epoch}", store)

    def require(self, rank: int) -> None:
        """PlaneError where this is no member."""
        if rank not in self.ranks:
            raise PlaneError(f"rank {rank} is not, or no more, a member: {named(self.ranks)} are")

    # What they open.

    def group(self, name: str, among: Sequence[int] | None = None) -> GlooGroup:
        """Of Gloo's: all members or these; collective among them, and each under a name of its own."""
        ranks = self.ranks if among is None else among
        place = ranks.index(self.rank), len(ranks), self.timeout_seconds, self.address
        opened = _Opened(self.keys(self._connect()), name, *place)
        expected = time.monotonic() + min(SECONDS_TO_ENTER, self.timeout_seconds / 2)
        while opened.is_alive():  # as long as the time limit lets it: Gloo would wait for a dead rank as well
            self.look()
            if self._newest is not None and self._newest in ranks and time.monotonic() > expected:
                self._lifeline.expel(self._newest)
            opened.join(SECONDS_TO_LOOK)
        if opened.mistake is not None:
            raise opened.mistake
        assert opened.group is not None
        self._groups.append(opened.group)
        return opened.group

    def sums(self, name: str = "", among: Sequence[int] | None = None, own: SharedMemory | None = None) -> PolledSums:
        """By two such groups. `own` as in `gloo_sums`."""
        ranks = self.ranks if among is None else among
        rank, size = ranks.index(self.rank), len(ranks)
        return gloo_sums(lambda lane: self.group(f"{name}{lane}", among), rank, size, self.timeout_seconds, self, own)

    # A death.

    def look(self) -> None:
        if self._revoked or self._lifeline.over(self._epoch):
            raise self._gone()

    def failure(self, error: RuntimeError) -> LostError:
        heard = self._lifeline.await_word(self._epoch, SECONDS_TO_HEAR)
        return self._gone() if heard else self._lost(f"lost another rank, which has most likely ended ({cause(error)})")

    def failure_of_store(self, error: RuntimeError) -> LostError:
        self._lifeline.await_word(self._epoch, SECONDS_TO_HEAR)
        if self._lifeline.cut:
            return self._gone()
        return LostError(f"lost the store of the job, which torchrun or rank 0 holds ({cause(error)})")

    def _gone(self) -> LostError:
        return self._lost(self._lifeline.why or "another rank has gone")

    def _lost(self, why: str) -> LostError:
        return MembersLost(why) if self.tolerant and not self._lifeline.cut else LostError(why)

    def revoke(self) -> None:
        """They are members no more: whoever looks raises."""
        self._revoked = True

    def mended(self) -> StoreMembers:
        """Those who are left; collective among them, once no other thread of this rank is in a call. Another death
        meanwhile shows in what they do next."""
        for group in self._groups:
            group.abort()
        self._lifeline.next_epoch(wait_limit(self.rank, self.timeout_seconds))
        return self._anew()

    def joined_by(self, newcomer: int) -> StoreMembers:
        """These and one more, the last; collective among them, while that one enters. MembersLost where it does not
        come, or somebody goes meanwhile."""
        if not self._lifeline.let_in(newcomer, SECONDS_TO_ENTER):
            raise self._lost(self._lifeline.why or f"the process that was to be rank {newcomer} has not come")
        return self._anew(newcomer)

    def _anew(self, newest: int | None = None) -> StoreMembers:
        told = self.rank, self.timeout_seconds, self.tolerant, newest, self.address
        return StoreMembers(self._connect, self._lifeline, *told)


class _Opened(threading.Thread):
    """Opens a group of Gloo; left to itself where a rank dies meanwhile."""

    def __init__(self, *place: Any) -> None:
        super().__init__(name="hetsync-connecting", daemon=True)
        self._place = place
        self.group: GlooGroup | None = None
        self.mistake: UserError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.group = open_gloo(*self._place)
        except UserError as mistake:
            self.mistake = mistake
