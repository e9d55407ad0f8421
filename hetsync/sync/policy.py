"""When a round starts, who contributes, and who works on which samples: a pure state machine.

Events go in, instructions come out; there are no tensors, no MPI, no threads and no clock here. The engine
drives it over a data plane, the simulator over a virtual clock, property tests with arbitrary event orders.

Delayed mode (D >= 1). A rank begins new work while at most D of its contributions are not yet applied.
A round starts when every rank is ready or the quorum is there, and in either case only if every piece of work
then under way can still be applied within its bound: version + 1 - (version it began from) <= D. A rank that
was just released has not said yet from where it begins; its *floor* is the least version that it can begin from.
With q = 1 a round needs a piece of every rank, and a rank's n-th piece may begin only after round n - D: no rank
is more than D pieces ahead of the slowest, which is stale synchronous parallel (Ho et al. 2013).

Synchronous mode (D = 0). All ranks' pieces of a round are handed out together, two rounds ahead, so that no rank
waits for an instruction; each rank contributes to every round.

Near a milestone (checkpoint, end) pieces shrink with the samples left, so that ranks of unequal speed come to rest
together; then a drain round merges everything. The anchor of a round is the same on all ranks, so it is evaluated
without a rest: each rank does its part between two pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hetsync.data.ledger import Ledger, split
from hetsync.slicing import apportion
from hetsync.sync.members import TRANSITIONS, Activity, Cause, Member, Round, Work
from hetsync.sync.messages import (
    Began,
    Completed,
    DrainRequested,
    Event,
    Finished,
    Give,
    Instruction,
    Joined,
    Left,
    Piece,
    Reshared,
    Scored,
    Settings,
    StartRound,
    Took,
    Tuned,
)
from hetsync.sync.milestones import Marks, Milestones, Rests, Snapshots, no_marks
from hetsync.sync.roster import Roster
from hetsync.sync.story import ProtocolError, Story

SYNCHRONOUS_ROUNDS_AHEAD = 2


class Policy:
    """The coordinator's mind."""

    def __init__(
        self,
        shares: Mapping[int, int],
        settings: Settings,
        ledger: Ledger,
        milestones: Milestones,
        version: int = 0,
        evaluations: Marks = no_marks,
    ) -> None:
        """`shares` are samples a slice by live rank; `version` the anchor that all ranks hold now.

        All ranks rest at the milestones; at `evaluations` the anchor is evaluated.
        """
        self.settings = settings
        self.ledger = ledger
        self.version = version  # rounds completed
        self._roster = Roster(shares, version, settings.accumulation)
        self.members: Mapping[int, Member] = self._roster.members  # the live ranks
        self.staleness: Counter[int] = Counter()
        self.samples_by_rank: Counter[int] = Counter()
        self.snapshots = Snapshots(evaluations, ledger.applied)
        self.rests = Rests(milestones, ledger.applied)
        self._rounds: dict[int, Round] = {}  # under way
        self._next_round = version
        self._next_piece = 0
        self._pending_settings: Settings | None = None
        self._ended = False
        self._story = Story()

    # What the driver asks.

    @property
    def ended(self) -> bool:
        """The final drain round is complete."""
        return self._ended

    @property
    def full_set(self) -> int:
        """Samples in one contribution of every live rank."""
        return self.settings.accumulation * self.batch

    @property
    def batch(self) -> int:
        """B, samples in one slice of every live rank."""
        return self._roster.batch

    def waited_for(self) -> list[int]:
        """Ranks whose next word would move the job on."""
        return [rank for rank, member in self.members.items() if member.working or rank in self.snapshots.awaited]

    def begin(self) -> list[Instruction]:
        """The first work."""
        return self._decide()

    def on(self, event: Event) -> list[Instruction]:
        """Take in one event; returns what to tell the ranks, in order. Norms (`Weighed`) are not its business."""
        self._story.goes_on(event)
        match event:
            case Began():
                self._on_began(event)
            case Finished():
                self._on_finished(event)
            case Took():
                self._on_took(event)
            case Completed():
                self._on_completed(event)
            case Scored():
                if not self.snapshots.scored(event.rank, event.round, event.sums):
                    raise self._wrong(f"rank {event.rank} was not asked to evaluate round {event.round}")
            case Tuned():
                self._on_tuned(event)
            case Reshared():
                for rank, share in event.shares.items():
                    self._member(rank)
                    self._roster.reshare(rank, share)
            case DrainRequested():
                self.rests.ask(self.ledger.frontier, event.reason)
            case Left():
                self._on_left(event)
            case Joined():
                if event.rank in self.members:
                    raise self._wrong(f"rank {event.rank} is a member already")
                self._roster.add(event.rank, event.share, event.version)
        return self._decide()

    # Events.

    def _on_began(self, event: Began) -> None:
        member = self._member(event.rank)
        blocked = member.activity is Activity.BLOCKED
        self._move(member, Cause.BEGAN)
        work = member.held.popleft()
        if work.piece.number != event.piece:
            raise self._wrong(f"rank {event.rank} began another piece")
        if event.version < member.floor:
            raise self._wrong(f"rank {event.rank} began below its floor {member.floor}")
        work.version = member.floor = event.version
        member.current = work
        if blocked:
            self._roster.look_at(event.rank, self._next_round)

    def _on_finished(self, event: Finished) -> None:
        member = self._member(event.rank)
        work = member.current
        if work is None or work.piece.number != event.piece:
            raise self._wrong(f"rank {event.rank} finished another piece")
        member.current = None
        if work.piece.synchronous_round is None:
            member.ready.append(work)
            self._roster.count(event.rank)
        self._roster.hungry.add(event.rank)
        self._move(member, self._after_finish(member))

    def _after_finish(self, member: Member) -> Cause:
        if not member.held:
            return Cause.FINISHED_EMPTY_HANDED
        return Cause.FINISHED_MAY_BEGIN if self._below_bound(member) else Cause.FINISHED_AT_BOUND

    def _below_bound(self, member: Member) -> bool:
        """May the rank begin the piece that it holds next?"""
        piece = member.held[0].piece
        if piece.synchronous_round is not None:
            return piece.synchronous_round <= self.version  # earlier rounds are complete
        return self.version >= piece.not_before and len(member.ready) + len(member.flying) <= piece.delay_bound

    def _on_took(self, event: Took) -> None:
        member = self._member(event.rank)
        taken = [work for work in member.ready if work.piece.number <= event.piece]
        if not taken or event.round not in self._rounds:
            raise self._wrong("nothing to take, or no such round")
        if event.rank not in self._rounds[event.round].unheard:
            raise self._wrong(f"rank {event.rank} was not asked")
        for work in taken:
            self._count(event.rank, work, event.round - work.version)
        member.ready = member.ready[len(taken) :]
        member.flying += taken
        self._roster.count(event.rank)
        self._rounds[event.round].unheard.discard(event.rank)
        self._land()

    def _count(self, rank: int, work: Work, staleness: int) -> None:
        if not 0 <= staleness <= work.piece.delay_bound:
            raise self._wrong(f"rank {rank}'s piece {work.piece.number} is applied with staleness {staleness}")
        self.staleness[staleness] += 1
        self.samples_by_rank[rank] += work.piece.samples

    def _on_completed(self, event: Completed) -> None:
        if event.round not in self._rounds:
            raise self._wrong("no such round")
        self._rounds[event.round].summed = True
        self._land()

    def _land(self) -> None:
        """Book the rounds that are over, in order."""
        while (over := self._rounds.get(self.version)) is not None and over.summed and not over.unheard:
            del self._rounds[self.version]
            self.version += 1
            for rank, member in self.members.items():
                if member.flying:
                    self._book(rank, member, over.start)
                if member.activity is Activity.BLOCKED and self._below_bound(member):
                    self._move(member, Cause.RELEASED)
                    member.floor = self.version
            self.snapshots.landed(over.start.number, self.ledger.applied)
            if over.start.drain is not None:
                self._on_drained(over.start)

    def _book(self, rank: int, member: Member, started: StartRound) -> None:
        flying, member.flying = member.flying, []
        for work in flying:
            if work.piece.synchronous_round not in (None, started.number):
                member.flying.append(work)
                continue
            self.ledger.book(work.piece.number)
            if started.synchronous:
                self._count(rank, work, 0)

    def _on_drained(self, started: StartRound) -> None:
        self.ledger.check(self.rests.next.position)
        if self._pending_settings is not None:
            self._adopt(self._pending_settings)
        self._even_out()
        self._roster.all_hungry()
        self._ended = started.final
        if not started.final:
            self.rests.over(self.ledger.applied)

    def _on_tuned(self, event: Tuned) -> None:
        self._even_out()
        if event.settings.synchronous == self.settings.synchronous:
            self._adopt(event.settings)
        else:
            self._pending_settings = event.settings  # the two modes never overlap: drain between them
            self.rests.bring_forward(self.ledger.frontier, "mode change")

    def _adopt(self, settings: Settings) -> None:
        self.settings, self._pending_settings = settings, None
        self._roster.accumulate(settings.accumulation)

    def _even_out(self) -> None:
        """At rest, and under new settings, nobody counts as ahead."""
        for member in self.members.values():
            member.pace = None

    def _on_left(self, event: Left) -> None:
        for number in self._member(event.rank).unapplied():
            self.ledger.give_back(number)
        self._roster.remove(event.rank)
        self.snapshots.left(event.rank)
        for under_way in self._rounds.values():
            under_way.unheard.discard(event.rank)
        self._land()

    # Decisions.

    def _decide(self) -> list[Instruction]:
        if self._ended:
            return []
        given = self._give_synchronous() if self.settings.synchronous else self._give_delayed()
        return given if self._rounds else given + self._start_round()

    def _give_delayed(self) -> list[Instruction]:
        """Every rank holds one piece beyond the one that it computes, so that it never waits for an answer."""
        if not self._roster.hungry:
            return []
        out: list[Instruction] = []
        hungry, self._roster.hungry = sorted(self._roster.hungry), set()
        for depth in (1, 2):
            for rank in hungry:
                member = self.members[rank]
                begun = member.current is not None
                if begun + len(member.held) < depth and (samples := self._piece_samples(member)):
                    out.append(self._give(rank, samples, self.ledger.frontier))
        return out

    def _piece_samples(self, member: Member) -> int:
        """A full piece; near the milestone the rank's part of what is left, down to a quarter of a slice."""
        available = self.ledger.available(self.rests.next.position)
        wanted = self.settings.accumulation * member.share
        if available < self.full_set:
            part = -(-available * member.share // self.batch)
            wanted = min(wanted, max(part, -(-member.share // 4)))
        return min(wanted, available)

    def _give_synchronous(self) -> list[Instruction]:
        out: list[Instruction] = []
        while self._next_round < self.version + SYNCHRONOUS_ROUNDS_AHEAD:
            position = self.ledger.frontier
            total = min(self.full_set, self.ledger.available(self.rests.next.position))
            if not total:
                break
            parts = apportion(total, {rank: member.share for rank, member in self.members.items()})
            out += [self._give(rank, part, position, self._next_round, total) for rank, part in parts.items()]
            out.append(self._started(synchronous=True))
        return out

    def _give(
        self, rank: int, samples: int, position: int, synchronous_round: int | None = None, round_samples: int = 0
    ) -> Give:
        member = self.members[rank]
        number, self._next_piece = self._next_piece, self._next_piece + 1
        spans = self.ledger.take(number, samples, self.rests.next.position)
        not_before = 0
        if synchronous_round is None and self.settings.quorum >= 1:
            not_before = member.keep_pace(self.version, self.settings.delay_bound)
        if member.activity is Activity.RESTING:
            member.floor = self.version
            not_before = max(not_before, self.version)
        piece = Piece(
            number=number,
            slices=split(spans, samples, -(-samples // max(1, member.share))),
            delay_bound=self.settings.delay_bound,
            position=position,
            not_before=not_before,
            synchronous_round=synchronous_round,
            round_samples=round_samples,
            share=member.share,
        )
        member.held.append(Work(piece))
        rests = member.activity is Activity.RESTING
        self._move(member, Cause.GIVEN_AT_BOUND if rests and not self._below_bound(member) else Cause.GIVEN)
        if synchronous_round is not None:  # part of its round from the start
            member.flying.append(member.held[-1])
        else:
            self._roster.look_at(rank, self._next_round)
        return Give(rank, piece)

    def _start_round(self) -> list[Instruction]:
        """No round is under way: may the next one start?"""
        if self._at_rest():
            rest, synchronous = self.rests.next, self.settings.synchronous
            return [self._started(synchronous, frozenset(self._roster.ready), rest.reason, rest.final)]
        if self.settings.synchronous or not self._roster.ready:
            return []
        if not self._roster.working or (self._quorum() and self._roster.all_in_bound(self._next_round)):
            return [self._started(contributors=frozenset(self._roster.ready))]
        return []

    def _at_rest(self) -> bool:
        if not self._roster.resting or self.snapshots.awaited:
            return False
        return not self.ledger.available(self.rests.next.position)

    def _quorum(self) -> bool:
        """Enough of a full set is ready. No rank counts for more than its own part: with q = 1, all must be."""
        return self._roster.quorum_samples >= self.settings.quorum * self.full_set

    def _started(
        self,
        synchronous: bool = False,
        contributors: frozenset[int] | None = None,
        drain: str | None = None,
        final: bool = False,
    ) -> StartRound:
        members = frozenset(self.members) if contributors is None else contributors
        # What is applied once the round has landed, as far as that is known.
        reaches = self.ledger.frontier if synchronous else self.ledger.applied + self._roster.ready_samples
        evaluate = self.snapshots.due(reaches)
        number, self._next_round = self._next_round, self._next_round + 1
        started = StartRound(number, members, self.ledger.applied, synchronous, drain, final, evaluate)
        if evaluate and drain is None:  # at rest they evaluate together
            self.snapshots.begin(number, self.members)
        self._rounds[number] = Round(started, set() if synchronous else set(members))
        self._roster.round_starts(number)
        return started

    # The rules of the machine.

    def _member(self, rank: int) -> Member:
        member = self.members.get(rank)
        if member is None:
            raise self._wrong(f"rank {rank} is no member")
        return member

    def _move(self, member: Member, cause: Cause) -> None:
        to = TRANSITIONS.get((member.activity, cause))
        if to is None:
            raise self._wrong(f"{cause.name} while {member.activity.name}")
        self._roster.move(member, to)

    def _wrong(self, what: str) -> ProtocolError:
        return self._story.error(what, self.version)
