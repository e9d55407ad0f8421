"""Searches by name."""

from __future__ import annotations

from typing import NamedTuple

from hetsync.errors import UserError, did_you_mean
from hetsync.plan.search.contiguous import Contiguous
from hetsync.plan.search.exact import Exact
from hetsync.plan.search.hierarchical import Hierarchical, HierarchicalMulti
from hetsync.plan.search.list_schedule import ListSchedule
from hetsync.plan.search.local import Local
from hetsync.plan.search.mincut import MinCut
from hetsync.plan.search.placement_policy import PlacementPolicy
from hetsync.plan.search.plain import Data, Single, Whole
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


class Part(NamedTuple):
    """A search among several, one after another.

    Attributes:
        budget_part: That it may spend of what is left of the budget; what it does not spend is for those behind.
        from_plans_of: Searches, from the best of whose plans it begins; None is all before it.
    """

    method: str
    budget_part: float = 1.0
    from_plans_of: tuple[str, ...] | None = None


def _each(*methods: str) -> tuple[Part, ...]:
    return tuple(map(Part, methods))


PARTS = {
    "local": _each(*BASELINES, "local"),
    "ppo-time": _each(*CHEAP, "ppo-time"),
    "trinity": _each(*CHEAP, "trinity"),
    # The plans of `exact` and `local` may be far from any better one: Trinity begins elsewhere, once.
    BEST: (*_each(*BASELINES), Part("local", 1 / 3), Part("trinity", 1 / 2, CHEAP), *_each("local", "trinity")),
}


def parts_of(name: str) -> tuple[Part, ...]:
    """The searches that a name stands for, one after another. UserError where there is none of this name."""
    if name in PARTS:
        return PARTS[name]
    if name not in SEARCHES:
        known = [BEST, *SEARCHES]
        raise UserError(f"there is no search {name}{did_you_mean(name, known)}: use {', '.join(known)}")
    return (Part(name),)


def takes_policy(name: str) -> bool:
    """Whether any of the searches that the name stands for begins with a policy. UserError as in `parts_of`."""
    return any(issubclass(SEARCHES[part.method], Trinity) for part in parts_of(name))


def cuts(name: str) -> bool:
    """Whether it may place a model on several ranks. UserError as in `parts_of`."""
    return not all(issubclass(SEARCHES[part.method], Whole) for part in parts_of(name))


def make_search(
    name: str, problem: Problem, seed: int = 0, start: Scored | None = None, policy: PlacementPolicy | None = None
) -> Search:
    """`policy`: what Trinity's searches begin with; None is an untrained one. UserError where it cannot search this
    problem."""
    search = SEARCHES[name]
    return search(problem, seed, start, policy) if issubclass(search, Trinity) else search(problem, seed, start)
