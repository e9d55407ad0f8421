"""At rest: when a drain has landed and its books are closed, members may leave and join, and work goes on."""

from __future__ import annotations

from collections.abc import Sequence

from hetsync.errors import UserError
from hetsync.simulate.clock import Clock
from hetsync.simulate.communicator import Communicator
from hetsync.simulate.engine import MainThreads
from hetsync.simulate.evaluations import Evaluations
from hetsync.simulate.learner import Learner
from hetsync.simulate.script import Change, check_script
from hetsync.simulate.virtual_rank import VirtualRanks
from hetsync.sync.messages import DrainRequested, RankJoined, RankLeft, StartRound, WentBack
from hetsync.sync.milestones import ROLLBACK, STOP


class Drains:
    def __init__(
        self,
        *,
        script: Sequence[Change],
        clock: Clock,
        ranks: VirtualRanks,
        learner: Learner,
        evaluations: Evaluations,
        communicator: Communicator,
        main_threads: MainThreads,
    ) -> None:
        self.ended = False
        self._kept = 0  # samples applied, where all go back to
        self.stopped = False  # before its time, on request
        self._clock = clock
        self._ranks = ranks
        self._learner = learner
        self._evaluations = evaluations
        self._communicator = communicator
        self._main_threads = main_threads
        self._waiting: list[Change] = []  # of membership, until a drain
        check_script(script, len(ranks))
        for change in script:
            clock.at(change.at_seconds, self._make, change)

    def at_rest(self, start: StartRound) -> None:
        """The drain has brought all ranks to rest."""
        ranks, machine = self._ranks.present, self._communicator.machine
        if start.drain == ROLLBACK:
            self._go_back()
            return
        applied = machine.ledger.applied
        samples = {number: rank.samples_since_rest for number, rank in ranks.items()}
        self._learner.at_rest(samples, applied, start.synchronous)
        for rank in ranks.values():
            rank.samples_since_rest = 0
        self.stopped = start.drain == STOP
        self.ended = start.final or self.stopped
        self._evaluations.at_rest(start, applied)
        if not self.ended:
            self._change_members()
            if not machine.settings.synchronous:
                self._kept = applied
                self._learner.keep()
            for rank in list(ranks.values()):
                self._main_threads.go_on(rank)

    def _go_back(self) -> None:
        self._learner.go_back(self._kept)
        for rank in self._ranks.present.values():
            rank.samples_since_rest = 0
        self._communicator.handle_events([WentBack(self._kept)])
        for rank in list(self._ranks.present.values()):
            self._main_threads.go_on(rank)

    # The script.

    def _make(self, change: Change) -> None:
        if change.rank is None:
            self._communicator.link_slow_by = change.factor
            return
        if change.kind in ("slow_by", "recover"):
            rank = self._ranks.present.get(change.rank) or self._ranks.away[change.rank]
            rank.device.slow_by = change.factor
            return
        if self._communicator.machine.settings.synchronous:
            raise UserError(
                f"the script says {change.kind} of rank {change.rank} in synchronous mode, whose rounds are handed out"
                " ahead: set sync.delay_bound to 1 or more"
            )
        self._waiting.append(change)
        self._communicator.handle_events([DrainRequested("membership")])

    def _change_members(self) -> None:
        changes, self._waiting = self._waiting, []
        for change in changes:
            assert change.rank is not None
            if change.kind == "leave":
                self._leave(change.rank)
            else:
                self._join(change.rank)

    def _leave(self, number: int) -> None:
        self._ranks.remove(number, self._clock.now)
        self._learner.remove_rank(number)
        self._communicator.handle_events([RankLeft(number)])

    def _join(self, number: int) -> None:
        version = self._communicator.machine.version
        rank = self._ranks.add_back(number, version, self._clock.now)
        self._learner.add_rank(number)
        self._communicator.handle_events([RankJoined(number, version, rank.share)])
