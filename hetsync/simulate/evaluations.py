"""Evaluation on the way: of the anchor, as rank 0 sees a round land; it takes no virtual time."""

from __future__ import annotations

from collections.abc import Callable

from hetsync.simulate.clock import Clock
from hetsync.simulate.learner import Learner
from hetsync.simulate.telemetry import Telemetry
from hetsync.simulate.virtual_rank import VirtualRanks
from hetsync.sync.messages import Evaluated, StartRound
from hetsync.sync.milestones import Evaluation, Marks

OnEvaluation = Callable[[int, float, dict[str, float]], None]
"""Told the samples applied, the virtual seconds, and the metrics of the weights that all ranks shared then."""


class Evaluations:
    def __init__(
        self,
        clock: Clock,
        ranks: VirtualRanks,
        learner: Learner,
        telemetry: Telemetry,
        on_evaluation: OnEvaluation | None,
        judged: Marks,
    ) -> None:
        self._clock = clock
        self._ranks = ranks
        self._learner = learner
        self._telemetry = telemetry
        self._on_evaluation = on_evaluation
        self._judged = judged
        self._at = 0.0
        self._metrics: dict[str, float] = {}

    def evaluate(self, number: int) -> list[Evaluated]:
        """The anchor of a round that has landed on rank 0; returns what the ranks say of it."""
        self._at = self._clock.now
        if self._on_evaluation is not None:
            self._metrics = self._learner.evaluate()
        self._telemetry.off_the_clock("score", self._at, round=number)
        return [Evaluated(rank, number, {}) for rank in self._ranks.present]

    def report(self, evaluation: Evaluation) -> None:
        """The round's books are closed: how many samples that was."""
        if self._on_evaluation is not None:
            self._on_evaluation(evaluation.samples_applied, self._at, self._metrics)

    def at_rest(self, start: StartRound, applied: int) -> None:
        """All ranks have come to rest."""
        self._telemetry.off_the_clock("rest", self._clock.now, reason=start.drain)
        due = start.evaluate or start.final or self._judged(applied - 1) == applied
        if due and self._on_evaluation is not None:
            self._on_evaluation(applied, self._clock.now, self._learner.evaluate())
