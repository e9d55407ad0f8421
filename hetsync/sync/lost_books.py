"""Once all who kept the books have died together nobody knows which samples have been applied, but each rank has
counted how many (`Tally`). The first survivor makes up books by that (`begun_anew`), in which all that is to come is a
rest to go back to the newest checkpoint: there they become true. At a rest they are true, and it begins anew. A job
that cannot go back ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetsync.data.ledger import cut, gaps, merged
from hetsync.sync.messages import Settings, Standing
from hetsync.sync.milestones import ROLLBACK, Marks, Milestone
from hetsync.sync.recovery import Action, Books, Decision, LandedRound, Report, spans_of, unapplied
from hetsync.sync.worker import kept_of

BOOKS_LOST = "all ranks that kept the books have gone, so nobody knows what has been applied"


@dataclass
class Tally:
    """What every rank knows, also one that keeps no books: how many samples have been applied by what has landed on it,
    the settings as they were at the last rest, and where evaluations are due."""

    settings: Settings
    evaluations: Marks
    applied: int = 0
    samples_by_rank: dict[int, int] = field(default_factory=dict)

    def land(self, landed: LandedRound) -> None:
        self.applied += sum(landed.samples.values())
        for rank, samples in landed.samples.items():
            self.samples_by_rank[rank] = self.samples_by_rank.get(rank, 0) + samples


def begun_anew(decision: Decision, reports: Mapping[int, Report], tally: Tally) -> Decision:
    """Where nobody kept books, with such as let all go back: by the `tally` of one who has landed all that counts. So
    many samples have been applied, and these may as well be the first that nobody holds: none of them stays applied,
    nor does what is held. At a rest that begins anew they are the first, and nobody need go back."""
    version = decision.version
    rest = Milestone(tally.applied, ROLLBACK)
    if decision.rest_again:
        assert decision.newest is not None
        drained = decision.newest.start
        assert drained.drain is not None
        rest = Milestone(tally.applied, drained.drain, drained.final)
    goes_back = rest.reason == ROLLBACK
    kept = {rank: kept_of(one.holding, version, rank in decision.behind) for rank, one in reports.items()}
    held = merged(spans_of([one.task for holding in kept.values() for one in unapplied(holding)]))
    end = held[-1][1] if held else 0
    applied, _ = cut([*gaps(held), (end, end + tally.applied)], tally.applied)
    books = Books(
        [Standing(version, tally.settings, rest, tally.evaluations(tally.applied))],
        list(applied),
        version,
        attempt=1,
        samples_by_rank=dict(tally.samples_by_rank),
        lost_at=version if goes_back else None,
    )
    books.keep_tasks(kept)
    return decision._replace(books=books, action=Action.GO_BACK if goes_back else Action.GO_ON)
