"""The live members and the sums over them that decisions ask for, kept up to date with every change.

So an event costs the policy as much with 10,000 ranks as with 8; only starting and landing a round visit all.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetsync.sync.members import Activity, Member

WORKING = (Activity.STARTING, Activity.COMPUTING)  # will speak without another round


class Roster:
    """`members` by rank; change what the sums depend on (share, activity, ready) through the methods only."""

    def __init__(self, shares: Mapping[int, int], version: int, accumulation: int) -> None:
        self.members: dict[int, Member] = {}
        self.batch = 0  # B, samples in one slice of every live rank
        self.ready: set[int] = set()  # ranks that have something for the next round
        self.quorum_samples = 0  # what is ready, nobody counting for more than its own part of a full set
        self.hungry: set[int] = set()  # ranks that may lack work
        self._accumulation = accumulation
        self._counted: dict[int, int] = {}  # of quorum_samples
        self._resting = 0
        self._working = 0
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
        self.quorum_samples -= self._counted.pop(rank, 0)
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
        counted = min(samples, self._accumulation * member.share)
        self.quorum_samples += counted - self._counted.get(rank, 0)
        self._counted[rank] = counted
        (self.ready.add if member.ready else self.ready.discard)(rank)

    def all_hungry(self) -> None:
        """There may be samples again for ranks that got none."""
        self.hungry = set(self.members)

    def move(self, member: Member, to: Activity) -> None:
        self._resting += (to is Activity.RESTING) - (member.activity is Activity.RESTING)
        self._working += (to in WORKING) - (member.activity in WORKING)
        member.activity = to

    @property
    def resting(self) -> bool:
        """Do all hold no work?"""
        return self._resting == len(self.members)

    @property
    def working(self) -> bool:
        """Will any rank speak without another round?"""
        return self._working > 0
