"""The live members and the sums over them that decisions ask for, kept up to date with every change.

So an event costs the policy as much with 10,000 ranks as with 8; only starting and landing a round visit all.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetsync.sync.members import WORKING, Activity, Member


class Roster:
    """`members` by rank; change what the sums depend on (share, activity, ready) through the methods only."""

    def __init__(self, shares: Mapping[int, int], version: int, accumulation: int) -> None:
        self.members: dict[int, Member] = {}
        self.batch = 0  # B, samples in one slice of every live rank
        self.ready: set[int] = set()  # ranks that have something for the next round
        self.ready_samples = 0
        self.quorum_samples = 0  # of those, nobody counting for more than its own part of a full set
        self.hungry: set[int] = set()  # ranks that may lack work
        self._accumulation = accumulation
        self._counted: dict[int, tuple[int, int]] = {}  # of ready_samples and quorum_samples
        self._resting = 0
        self._working = 0
        self._late: list[int] = []  # ranks whose work may be applied too late if the next round starts now
        for rank, share in sorted(shares.items()):
            self.add(rank, share, version)

    def add(self, rank: int, share: int, version: int) -> None:
        self.members[rank] = Member(share, version)
        self.batch += share
        self._resting += 1
        self.hungry.add(rank)

    def remove(self, rank: int) -> None:
        member = self.members.pop(rank)
        self.batch -= member.share
        self._resting -= member.activity is Activity.RESTING
        self._working -= member.working
        self.ready.discard(rank)
        self._recount(rank, 0, 0)
        self.all_hungry()

    def reshare(self, rank: int, share: int) -> None:
        self.batch += share - self.members[rank].share
        self.members[rank].share = share
        self.count(rank)
        self.hungry.add(rank)

    def accumulate(self, accumulation: int) -> None:
        """A full part is so many slices from now on."""
        self._accumulation = accumulation
        for rank in self.ready:
            self.count(rank)
        self.all_hungry()

    def count(self, rank: int) -> None:
        """The rank's `ready` work has changed."""
        member = self.members[rank]
        samples = sum([work.piece.samples for work in member.ready])
        self._recount(rank, samples, min(samples, self._accumulation * member.share))
        (self.ready.add if member.ready else self.ready.discard)(rank)

    def _recount(self, rank: int, ready: int, quorum: int) -> None:
        ready_before, quorum_before = self._counted.get(rank, (0, 0))
        self.ready_samples += ready - ready_before
        self.quorum_samples += quorum - quorum_before
        self._counted[rank] = ready, quorum

    def all_hungry(self) -> None:
        """There may be samples again for ranks that got none."""
        self.hungry = set(self.members)

    def move(self, member: Member, to: Activity) -> None:
        self._resting += (to is Activity.RESTING) - (member.activity is Activity.RESTING)
        self._working += (to in WORKING) - (member.activity in WORKING)
        member.activity = to

    # Staleness: a piece of work that is under way must still find a round within its bound.

    def round_starts(self, number: int) -> None:
        """Look at everybody anew: whose work would be too late if round `number + 1` started now?"""
        self._late = [rank for rank, member in self.members.items() if not in_bound(member, number + 1)]

    def look_at(self, rank: int, number: int) -> None:
        """New work: is it late, if round `number` comes next?"""
        if not in_bound(self.members[rank], number):
            self._late.append(rank)

    def all_in_bound(self, number: int) -> bool:
        """If round `number` starts now, what is under way can still be applied in the one after it.

        Between two rounds only a new piece of work makes a rank late: `_late` holds all that were when the last round
        started or a piece was given, until they are found to be late no more.
        """
        while self._late:
            member = self.members.get(self._late[-1])
            if member is not None and not in_bound(member, number):
                return False
            self._late.pop()
        return True

    @property
    def resting(self) -> bool:
        """Do all hold no work?"""
        return self._resting == len(self.members)

    @property
    def working(self) -> bool:
        """Will any rank speak without another round?"""
        return self._working > 0


def in_bound(member: Member, number: int) -> bool:
    """Can all that the rank works on still be applied in the round after `number`?"""
    if not member.working:
        return True
    staleness, current = number + 1 - member.floor, member.current
    if current is not None and current.piece.delay_bound < staleness:
        return False
    # The rank may have begun the next of what it holds, and not have said so yet.
    return all([work.piece.delay_bound >= staleness for work in member.held])
