"""Runs searches one after another on a common budget, scores what they propose, and keeps the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hetsync.errors import UserError
from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.placement import Placement
from hetsync.plan.search.list_schedule import list_placement
from hetsync.plan.search.objective import Weights, objective
from hetsync.plan.search.placement_policy import PlacementPolicy
from hetsync.plan.search.plain import whole
from hetsync.plan.search.policy_file import SHIPPED, load_policy
from hetsync.plan.search.registry import BEST, SEARCHES, Part, make_search, parts_of
from hetsync.plan.search.search import Problem, Scored

MOST_LEADERS = 5


@dataclass(frozen=True)
class Budget:
    """What all searches of a run may spend together: calls of the evaluator, seconds of this process, and the time up
    to `deadline`, by the monotonic clock."""

    evaluations: int = 1000
    seconds: float | None = None
    deadline: float | None = None


@dataclass
class Arm:
    """A search's part of a run. `refused`: why it could not search, in words."""

    method: str
    evaluations: int = 0
    seconds: float = 0.0
    best: Scored | None = None
    refused: str | None = None

    @property
    def fitting(self) -> Scored | None:
        return _fitting(self.best)


@dataclass(frozen=True)
class Found:
    """The best plan, with its shares."""

    placement: Placement
    costs: Costs
    objective: float
    method: str


class Leader(NamedTuple):
    """One of the best plans, and the search that tried it first."""

    method: str
    scored: Scored


class Driver:
    """`watch` is called with it after every lot of proposals.

    Attributes:
        arms: Those that have been run, the last one maybe not to its end.
        best: Of all arms; what lacks the least memory as long as nothing fits.
        leaders: The best plans that fit, that have blocks for every rank that must have some, and, as far as there are
            any, no micro-batches that are too small: different ones, the best first.
        evaluations: All that were made, with those of the reference.
        reference: The method whose plan has objective 1: `data`, or `list` where that does not fit and the budget
            allows to try it.
    """

    def __init__(
        self,
        problem: Problem,
        weights: Weights = Weights(),  # noqa: B008 (immutable)
        budget: Budget = Budget(),
        seed: int = 0,
        watch: Callable[[Driver], None] = lambda driver: None,
        policy: PlacementPolicy | None = None,
    ) -> None:
        """`policy`: what Trinity's searches begin with.

        UserError where no device can hold some block, and where memory has a weight but no device a limit."""
        self.problem, self.budget, self.seed = problem, budget, seed
        self._policy = policy
        self.arms: list[Arm] = []
        self.best: Scored | None = None
        self.leaders: list[Leader] = []
        self.evaluations = 0
        self._watch, self._begun = watch, time.process_time()
        self._ended: float | None = None
        _check_blocks(problem.evaluator)
        self.reference, self.reference_costs = self._reference()
        self.objective = objective(weights, self.reference_costs, problem.evaluator)
        most_replicas = len(problem.replicas or problem.ranks)
        self.bound = self.objective.bound(max(problem.micro_batches), most_replicas)

    @property
    def seconds(self) -> float:
        """Of this process from the beginning to the end of the last search."""
        return (self._ended or time.process_time()) - self._begun

    @property
    def gap(self) -> float | None:
        """Of the best to the bound, as a fraction of the bound; None as long as nothing fits."""
        return None if self.fitting is None else self.gap_of(self.fitting.objective)

    def gap_of(self, objective: float) -> float | None:
        """The same of a plan with this objective; None where the bound is 0."""
        return max(0.0, objective / self.bound - 1) if self.bound else None

    @property
    def fitting(self) -> Scored | None:
        """The best, if it fits into memory."""
        return _fitting(self.best)

    def run(self, name: str) -> None:
        """The search of this name, or all that the name stands for. `best` begins with the policy that comes along
        where none is given. What one of several refuses is its part; UserError where none can search."""
        self._ended = None
        try:
            self._run_all(parts_of(name), name)
        finally:
            self._ended = time.process_time()

    def found(self, place: int = 0) -> Found:
        """The best plan, or that of another place among the leaders. UserError where nothing fits, or where nothing has
        blocks for every rank that must have some."""
        if self.best is None:
            raise UserError("the search has tried nothing: raise --evaluations or --seconds")
        tried = sum(arm.evaluations for arm in self.arms)
        _check_fits(self.best.costs, self.problem.evaluator, tried)
        if not self.leaders:
            unused = min(set(self.problem.ranks) - set(self.best.placement.ranks))
            raise UserError(
                f"the best of {tried} plans leaves rank {unused} without blocks, as all of them do that fit, and a job"
                " runs all of its ranks: give fewer --ranks, another --search, or leave --output and --measure out"
            )
        method, one = self.leaders[place]
        return Found(self.problem.evaluator.with_shares(one.placement), one.costs, one.objective, method)

    def _run_all(self, parts: Sequence[Part], name: str) -> None:
        policy = load_policy(SHIPPED) if name == BEST and self._policy is None else self._policy
        for part in parts:
            if self._spent(self.budget):
                return
            arm = Arm(part.method)
            self.arms.append(arm)
            try:
                self._run(arm, part, policy)
            except UserError as mistake:
                if len(parts) == 1:
                    raise
                arm.refused = str(mistake)

    def _run(self, arm: Arm, part: Part, policy: PlacementPolicy | None) -> None:
        begun, budget = self.seconds, self._budget_of(part)
        before = sum(one.method == arm.method for one in self.arms) - 1  # which have drawn by other seeds
        try:
            search = make_search(arm.method, self.problem, self.seed + before, self._start(part), policy)
            while not self._spent(budget) and (proposed := search.propose()):
                search.hear([self._score(arm, one) for one in proposed[: budget.evaluations - self.evaluations]])
                self._watch(self)
        finally:
            arm.seconds = self.seconds - begun

    def _budget_of(self, part: Part) -> Budget:
        """Up to where the part may come, counted from the beginning of all."""
        left, seconds = self.budget.evaluations - self.evaluations, self.budget.seconds
        evaluations = self.evaluations + math.ceil(part.budget_part * left)
        if seconds is not None:
            seconds = self.seconds + part.budget_part * (seconds - self.seconds)
        return replace(self.budget, evaluations=evaluations, seconds=seconds)

    def _start(self, part: Part) -> Scored | None:
        """The best plan from which it can begin."""
        arms = [arm for arm in self.arms if part.from_plans_of is None or arm.method in part.from_plans_of]
        found = [arm.best for arm in arms if arm.best is not None]
        found = [one for one in found if SEARCHES[part.method].begins_from(one.placement)]
        return min(found, key=self.problem.order, default=None)

    def _score(self, arm: Arm, placement: Placement) -> Scored:
        costs = self._evaluate(placement)
        arm.evaluations += 1
        scored = Scored(placement, costs, self.objective.of(costs))
        order = self.problem.order
        if arm.best is None or order(scored) < order(arm.best):
            arm.best = scored
        if self.best is None or order(scored) < order(self.best):
            self.best = scored
        self._consider(arm.method, scored)
        return scored

    def _consider(self, method: str, scored: Scored) -> None:
        leaders, order = self.leaders, self.problem.order
        if self.problem.unused_ranks(scored.placement):
            return
        if len(leaders) == MOST_LEADERS and order(scored) >= order(leaders[-1].scored):
            return
        if scored.costs.feasible and all(scored.placement != one.scored.placement for one in leaders):
            found = sorted([*leaders, Leader(method, scored)], key=lambda one: order(one.scored))
            small = self.problem.small_replicas(found[0].scored)
            self.leaders = [one for one in found if self.problem.small_replicas(one.scored) == small][:MOST_LEADERS]

    def _evaluate(self, placement: Placement) -> Costs:
        self.evaluations += 1
        return self.problem.evaluator.evaluate(placement)

    def _spent(self, budget: Budget) -> bool:
        late = budget.deadline is not None and time.monotonic() >= budget.deadline
        slow = budget.seconds is not None and self.seconds >= budget.seconds
        return late or slow or self.evaluations >= budget.evaluations

    def _reference(self) -> tuple[str, Costs]:
        problem, evaluator = self.problem, self.problem.evaluator
        if len(problem.ranks) <= evaluator.training.batch_size:
            costs = self._evaluate(whole(evaluator, problem.ranks, 1))
            if costs.feasible or self.evaluations >= self.budget.evaluations:
                return "data", costs
        number = problem.numbers_for(1)[-1]
        return "list", self._evaluate(list_placement(problem, (problem.ranks,), number))


def _fitting(best: Scored | None) -> Scored | None:
    return best if best is not None and best.costs.feasible else None


def _check_blocks(evaluator: Evaluator) -> None:
    """UserError where a block alone, with one sample, is more than any device may hold."""
    most = max(evaluator.limit_bytes)
    for block, (_, _, saved, weights) in zip(evaluator.graph.blocks, evaluator.figures.tolist(), strict=True):
        needed = int(evaluator.held_bytes(weights, 1) + saved)
        if needed > most:
            raise UserError(
                f"no device holds block {block.name}: with one sample it needs {needed:,} bytes, {needed - most:,} more"
                " than any device may use; plan for larger devices, an optimizer with less state, or a smaller model"
            )


def _check_fits(costs: Costs, evaluator: Evaluator, tried: int) -> None:
    for rank in costs.lacking_bytes:
        raise UserError(
            f"the model fits nowhere: of {tried} plans the nearest is {sum(costs.lacking_bytes.values()):,} bytes"
            f" short: rank {rank} needs {costs.memory_bytes[rank]:,} and may use {evaluator.limit_bytes[rank]:,}; give"
            " replicas more ranks, a smaller data.batch_size, more micro-batches, or sync.delay_bound 0"
        )
