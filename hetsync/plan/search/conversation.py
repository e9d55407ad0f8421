"""Searches that learn: update after update, each of which asks for scores and goes on when it hears them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence

from hetsync.errors import UserError
from hetsync.plan.placement import Placement
from hetsync.plan.search.search import PENALTY, Problem, Scored, Search

PATIENCE = 5  # updates without a plan that was not known, after which there is nothing more to find

Course = Generator[Sequence[Placement], Sequence[Scored], None]
Asking = Generator[Sequence[Placement], Sequence[Scored], list[Scored]]


class Conversation(Search):
    """Subclasses write `update`, and ask for scores by `yield from self.ask(...)`. No placement is scored twice."""

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self._known: dict[Placement, Scored] = {} if start is None else {start.placement: start}
        self._course = self._updates()
        self._proposed: Sequence[Placement] | None = None

    @abstractmethod
    def update(self) -> Course:
        """Ask for scores, and learn from them once."""

    def _updates(self) -> Course:
        idle = 0
        while idle < PATIENCE:
            known = len(self._known)
            yield from self.update()
            idle = 0 if len(self._known) > known else idle + 1

    def propose(self) -> Sequence[Placement]:
        if self._proposed is None:
            self._proposed = next(self._course, ())
        return self._proposed

    def hear(self, scored: Sequence[Scored]) -> None:
        proposed = self._proposed or ()
        if len(scored) < len(proposed):
            self._proposed = ()  # the budget is spent
            return
        try:
            self._proposed = self._course.send(scored)
        except StopIteration:
            self._proposed = ()

    def cost(self, scored: Scored) -> float:
        """What is to fall: the objective. Bounded: `PENALTY` for what does not fit, or does not count."""
        return scored.penalised if self._counts(scored) else PENALTY

    def relative_seconds(self, scored: Scored) -> float:
        """Of a step, over those of the fastest rank alone; bounded as `cost` is."""
        evaluator = self.problem.evaluator
        alone = min(time.seconds(evaluator.training.batch_size) for time in evaluator.times)
        fits = scored.costs.feasible and self._counts(scored)
        return min(scored.costs.step_seconds / alone, PENALTY) if fits else PENALTY

    def require_group_each(self) -> None:
        """UserError where a rank would be left without a group, and the problem says that none may be."""
        for ranks in self.problem.given_replicas:
            if self.problem.every_rank and len(ranks) > len(self.problem.groups):
                raise UserError(
                    f"a replica has {len(ranks)} ranks, but the model has {len(self.problem.groups)} groups of blocks, "
                    "and each rank needs one: give more replicas, of fewer ranks, or more --groups"
                )

    def _counts(self, scored: Scored) -> bool:
        return not self.problem.unused_ranks(scored.placement)

    def ask(self, placements: Sequence[Placement]) -> Asking:
        """What they cost; those that are not known yet are proposed."""
        new = [placement for placement in dict.fromkeys(placements) if placement not in self._known]
        if new:
            scored = yield new
            self._known |= dict(zip(new, scored, strict=True))
        return [self._known[placement] for placement in placements]
