"""Trinity (Zeng et al. 2022): PPO on the objective of time, bytes and memory.

The paper's abstract says no more. Our reading: an episode takes a plan and improves it for a few steps, as Placeto does
(Addanki et al. 2019). A step decides a device for every group, and the pace. The better plan is what the next step
starts from; each episode starts from the best plan that is known.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.conversation import Conversation, Course
from hetsync.plan.search.features import Features, Indices, Ranks
from hetsync.plan.search.masks import Masks
from hetsync.plan.search.placement_policy import PlacementPolicy, untrained
from hetsync.plan.search.ppo import Inputs, Ppo, Step
from hetsync.plan.search.search import PENALTY, Problem, Scored, acyclic

EPISODES = 8  # side by side
STEPS = 4  # of an episode
LEAST_COST = 1e-9  # of a plan, as far as gains are told: with no weight on time one may cost nothing
LOSS = -0.1  # reward of a plan that does not fit; of one that is worse it is 0

Pace = tuple[int, bool]  # micro-batches, and whether all are in flight, as GPipe has them


@dataclass(frozen=True)
class _Plan:
    """`devices` (R, G) and `paces` (R,): indices, of each replica."""

    devices: Indices
    paces: Indices
    cost: float


class Trinity(Conversation):
    """Begins with the plan that is known, if that fits; else with one that took no thought."""

    def __init__(
        self,
        problem: Problem,
        seed: int = 0,
        start: Scored | None = None,
        policy: PlacementPolicy | None = None,
    ) -> None:
        """`policy`: one to begin with; it stays as it is. UserError where a device would be left without a group, and
        the problem says that none may be."""
        random = np.random.default_rng(seed)
        known = start is not None and start.costs.feasible and self.begins_from(start.placement)
        super().__init__(problem, seed, start if known else None)
        self.learner = Ppo(deepcopy(policy) if policy is not None else untrained(seed), random)
        self._replicas = _devices_of(problem, self.start)
        self.require_group_each()
        self._features = Features(problem, self._replicas)
        numbers = problem.numbers_for(len(self._replicas))
        self._most = numbers[-1]
        if self.start is not None:
            numbers = tuple(sorted({*numbers, *(each.micro_batches for each in self.start.placement.replicas)}))
        self._best: _Plan | None = None
        self._paces: list[Pace] = [(number, False) for number in numbers]
        self._paces += [(number, True) for number in numbers if number > 1]

    @classmethod
    def begins_from(cls, placement: Placement) -> bool:
        """Of several replicas of a rank each nothing is left to be placed."""
        replicas = placement.replicas
        return len(replicas) == 1 or any(len(replica.stages) > 1 for replica in replicas)

    def update(self) -> Course:
        """Play some episodes from the best plan, and learn from them."""
        if self._best is None:
            self._best = (yield from self._scored([self._first()]))[0]
        plans = [self._best] * EPISODES
        steps, rewards = [], []
        for number in range(STEPS):
            step = self._decide(plans, backwards=number % 2 == 1)
            after = yield from self._scored(self._decided(step))
            gains = [_gain(plan, new) for plan, new in zip(plans, after, strict=True)]
            least = [LOSS if new.cost >= PENALTY else 0.0 for new in after]
            steps.append(step)
            rewards.append(np.repeat(np.clip(gains, least, 1.0), len(self._replicas)))
            plans = [new if new.cost < plan.cost else plan for plan, new in zip(plans, after, strict=True)]
        self.learner.learn(steps, np.array(rewards, dtype=np.float32))
        self._best = min([self._best, *plans], key=lambda plan: plan.cost)

    def _decide(self, plans: Sequence[_Plan], backwards: bool) -> Step:
        devices = np.concatenate([plan.devices for plan in plans])
        replicas = np.tile(np.arange(len(self._replicas)), len(plans))
        seen = self._features.of(devices, replicas)
        inputs = Inputs(
            torch.from_numpy(seen.groups),
            torch.from_numpy(self._features.joined),
            torch.from_numpy(seen.devices),
            torch.from_numpy(seen.pairs),
            self._pace_figures(np.concatenate([plan.paces for plan in plans])),
        )
        masks = Masks(self._features, devices, replicas, self.problem.every_rank)
        return self.learner.decide(inputs, masks, devices, backwards)

    def _decided(self, step: Step) -> list[tuple[Indices, Indices]]:
        count = len(self._replicas)
        devices, paces = step.devices.numpy(), step.paces.numpy()
        return [(devices[row : row + count], paces[row : row + count]) for row in range(0, len(paces), count)]

    def _pace_figures(self, paces: Indices) -> torch.Tensor:
        """(N, K, F)."""
        figures = [(np.log2(number) / 6, float(whole), 0.0) for number, whole in self._paces]
        found = torch.tensor(figures, dtype=torch.float32).repeat(len(paces), 1, 1)
        found[torch.arange(len(paces)), torch.from_numpy(paces), -1] = 1.0
        return found

    def _scored(
        self, decided: Sequence[tuple[Indices, Indices]]
    ) -> Generator[Sequence[Placement], Sequence[Scored], list[_Plan]]:
        scored = yield from self.ask([self._placement(devices, paces) for devices, paces in decided])
        return [_Plan(*pair, self.cost(one)) for pair, one in zip(decided, scored, strict=True)]

    def _placement(self, devices: Indices, paces: Indices) -> Placement:
        chosen = [self._paces[pace] for pace in paces.tolist()]
        if not self.problem.divides(number for number, _ in chosen):
            chosen = [(min(number, self._most), whole) for number, whole in chosen]
        return Placement(
            tuple(
                self._replica(own, of, pace)
                for own, of, pace in zip(devices.tolist(), self._replicas, chosen, strict=True)
            )
        )

    def _replica(self, devices: Sequence[int], ranks: Sequence[Ranks], pace: Pace) -> Replica:
        number, whole = pace
        groups = self.problem.groups
        stages = tuple(
            Stage(
                ranks[device],
                groups.blocks_of(group for group, own in enumerate(devices) if own == device),
                number if whole else None,
            )
            for device in dict.fromkeys(devices)
        )
        return Replica(stages, None, number)

    def _first(self) -> tuple[Indices, Indices]:
        """The plan that is known; without one, each replica's fastest device has all, or, where none may be without
        groups, each has as many."""
        groups = len(self.problem.groups)
        if self.start is not None:
            devices = [
                _device_of_groups(self.problem, replica, ranks)
                for replica, ranks in zip(self.start.placement.replicas, self._replicas, strict=True)
            ]
            paces = [self._pace_of(replica) for replica in self.start.placement.replicas]
            return np.array(devices), np.array(paces)
        if self.problem.every_rank:
            devices = [[group * len(ranks) // groups for group in range(groups)] for ranks in self._replicas]
        else:
            devices = [[int(fastest)] * groups for fastest in self._features.step_seconds.argmin(1)]
        return np.array(devices), np.zeros(len(self._replicas), dtype=np.int64)

    def _pace_of(self, replica: Replica) -> int:
        number = replica.micro_batches
        whole = number > 1 and all(stage.in_flight == number for stage in replica.stages)
        return self._paces.index((number, whole)) if (number, whole) in self._paces else 0


class PpoTime(Trinity):
    """The same, on time alone."""

    def cost(self, scored: Scored) -> float:
        return self.relative_seconds(scored)


class TrinityNothing(Trinity):
    """The same from nothing, whatever is known: what the plan that it begins with is worth."""

    @classmethod
    def begins_from(cls, placement: Placement) -> bool:
        return False


def _gain(before: _Plan, after: _Plan) -> float:
    return math.log(max(before.cost, LEAST_COST) / max(after.cost, LEAST_COST))


def _devices_of(problem: Problem, start: Scored | None) -> tuple[tuple[Ranks, ...], ...]:
    """By replica: the plan's that is known; of one replica with those that it leaves unused."""
    if start is None:
        return tuple(tuple((rank,) for rank in ranks) for ranks in problem.given_replicas)
    found = [tuple(stage.ranks for stage in replica.stages) for replica in start.placement.replicas]
    if len(found) == 1:
        used = set(chain.from_iterable(found[0]))
        found = [(*found[0], *((rank,) for rank in problem.ranks if rank not in used))]
    return tuple(found)


def _device_of_groups(problem: Problem, replica: Replica, ranks: Sequence[Ranks]) -> list[int]:
    """Where most of a group's blocks are; elsewhere, where stages would wait for each other by that."""
    stage_of, device_of = replica.stage_of, {own: device for device, own in enumerate(ranks)}
    found = []
    for group in range(len(problem.groups)):
        holders = [device_of[replica.stages[stage_of[block]].ranks] for block in problem.groups.blocks(group)]
        found.append(max(set(holders), key=lambda device: (holders.count(device), -device)))
    return acyclic(problem.groups, found)
