"""Evaluation on the way: of the anchor, as rank 0 sees a round land; it takes no virtual time."""

from __future__ import annotations

from collections.abc import Callable

from hetsync.simulate.world import World
from hetsync.sync.messages import Scored, StartRound
from hetsync.sync.milestones import Evaluation

OnEvaluation = Callable[[int, float, dict[str, float]], None]
"""Told the samples applied, the virtual seconds, and the metrics of the weights that all ranks shared then."""


class Evaluations:
    def __init__(self, world: World, on_evaluation: OnEvaluation | None) -> None:
        self._world = world
        self._on_evaluation = on_evaluation
        self._at = 0.0
        self._metrics: dict[str, float] = {}

    def landed(self, number: int) -> None:
        """A round whose anchor is to be evaluated has landed on rank 0."""
        world = self._world
        self._at = world.clock.now
        if self._on_evaluation is not None:
            self._metrics = world.learner.evaluate()
        world.records.not_training("score", self._at, round=number)
        world.post.hear([Scored(rank, number, {}) for rank in world.nodes])

    def report(self, evaluation: Evaluation) -> None:
        """The round's books are closed: how many samples that was."""
        if self._on_evaluation is not None:
            self._on_evaluation(evaluation.samples_applied, self._at, self._metrics)

    def at_rest(self, start: StartRound) -> None:
        """All ranks have come to rest."""
        world = self._world
        world.records.not_training("rest", world.clock.now, reason=start.drain)
        if self._on_evaluation is not None and (start.evaluate or start.final):
            self._on_evaluation(world.policy.ledger.applied, world.clock.now, world.learner.evaluate())
