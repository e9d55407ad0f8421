"""Searches by name."""

from __future__ import annotations

from hetsync.errors import UserError, did_you_mean
from hetsync.plan.search.contiguous import Contiguous
from hetsync.plan.search.exact import Exact
from hetsync.plan.search.plain import Data, Single
from hetsync.plan.search.search import Problem, Search

SEARCHES: dict[str, type[Search]] = {"contiguous": Contiguous, "data": Data, "exact": Exact, "single": Single}


def make_search(name: str, problem: Problem) -> Search:
    """UserError where there is none of this name, and where it cannot search this problem."""
    if name not in SEARCHES:
        raise UserError(f"there is no search {name}{did_you_mean(name, SEARCHES)}: use {', '.join(SEARCHES)}")
    return SEARCHES[name](problem)
