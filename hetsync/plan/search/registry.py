"""Searches by name."""

from __future__ import annotations

from hetsync.errors import UserError, did_you_mean
from hetsync.plan.search.contiguous import Contiguous
from hetsync.plan.search.exact import Exact
from hetsync.plan.search.hierarchical import Hierarchical, HierarchicalMulti
from hetsync.plan.search.list_schedule import ListSchedule
from hetsync.plan.search.local import Local
from hetsync.plan.search.mincut import MinCut
from hetsync.plan.search.placement_policy import PlacementPolicy
from hetsync.plan.search.plain import Data, Single
from hetsync.plan.search.random_search import Random
from hetsync.plan.search.search import Problem, Scored, Search
from hetsync.plan.search.tapp import Tapp
from hetsync.plan.search.trinity import PpoTime, Trinity, TrinityNothing

SEARCHES: dict[str, type[Search]] = {
    "contiguous": Contiguous,
    "data": Data,
    "exact": Exact,
    "hierarchical": Hierarchical,
    "hierarchical-multi": HierarchicalMulti,
    "list": ListSchedule,
    "local": Local,
    "mincut": MinCut,
    "ppo-time": PpoTime,
    "random": Random,
    "single": Single,
    "tapp": Tapp,
    "trinity": Trinity,
    "trinity-nothing": TrinityNothing,
}
BEST = "best"
CHEAP = ("data", "single", "contiguous", "list")  # an evaluation for each number of micro-batches, and no time
BASELINES = (*CHEAP, "exact")  # what they propose depends on no other search
ARMS = {  # each from the best of those before
    "local": (*BASELINES, "local"),
    "ppo-time": (*CHEAP, "ppo-time"),
    "trinity": (*CHEAP, "trinity"),
    BEST: (*BASELINES, "local", "trinity"),
}


def arms_of(name: str) -> tuple[str, ...]:
    """The searches that a name stands for. UserError where there is none of this name.

    `best` begins as `local` does, evaluation by evaluation: so on no budget is it worse.
    """
    if name in ARMS:
        return ARMS[name]
    if name not in SEARCHES:
        known = [BEST, *SEARCHES]
        raise UserError(f"there is no search {name}{did_you_mean(name, known)}: use {', '.join(known)}")
    return (name,)


def takes_policy(name: str) -> bool:
    """Whether any of the searches that the name stands for begins with a policy. UserError as in `arms_of`."""
    return any(issubclass(SEARCHES[arm], Trinity) for arm in arms_of(name))


def make_search(
    name: str, problem: Problem, seed: int = 0, start: Scored | None = None, policy: PlacementPolicy | None = None
) -> Search:
    """`policy`: what Trinity's searches begin with; None is an untrained one. UserError where it cannot search this
    problem."""
    search = SEARCHES[name]
    return search(problem, seed, start, policy) if issubclass(search, Trinity) else search(problem, seed, start)
