"""Searches by name."""

from __future__ import annotations

from hetsync.errors import UserError, did_you_mean
from hetsync.plan.search.contiguous import Contiguous
from hetsync.plan.search.exact import Exact
from hetsync.plan.search.list_schedule import ListSchedule
from hetsync.plan.search.local import Local
from hetsync.plan.search.mincut import MinCut
from hetsync.plan.search.plain import Data, Single
from hetsync.plan.search.random_search import Random
from hetsync.plan.search.search import Problem, Scored, Search

SEARCHES: dict[str, type[Search]] = {
    "contiguous": Contiguous,
    "data": Data,
    "exact": Exact,
    "list": ListSchedule,
    "local": Local,
    "mincut": MinCut,
    "random": Random,
    "single": Single,
}
BEST = "best"
ARMS_OF_BEST = ("data", "single", "contiguous", "list", "exact", "local")  # in turn, each from the best of those before


def arms_of(name: str) -> tuple[str, ...]:
    """The searches that a name stands for. UserError where there is none of this name."""
    if name == BEST:
        return ARMS_OF_BEST
    if name not in SEARCHES:
        known = [BEST, *SEARCHES]
        raise UserError(f"there is no search {name}{did_you_mean(name, known)}: use {', '.join(known)}")
    return (name,)


def make_search(name: str, problem: Problem, seed: int = 0, start: Scored | None = None) -> Search:
    """UserError where it cannot search this problem."""
    return SEARCHES[name](problem, seed, start)
