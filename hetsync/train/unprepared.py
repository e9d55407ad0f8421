"""Models that an evaluation uses and that were not prepared: they may differ by rank, as averages of weights do that
each rank makes by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hetsync.errors import UserError
from hetsync.sync.digests import weights_sha256

Digests = Mapping[str, str]  # of weights, by what a sentence calls their model


def digests_of(models: Iterable[tuple[str, Any]], prepared: torch.nn.Module) -> Digests:
    """Of those that have weights which are not among the prepared ones."""
    known = {id(weight) for weight in prepared.parameters()}
    return {
        f"{name} ({type(model).__name__})": weights_sha256(model.parameters())
        for name, model in models
        if isinstance(model, torch.nn.Module) and any(id(weight) not in known for weight in model.parameters())
    }


def names_in(function: Callable[..., Any], *arguments: Any, **named: Any) -> Iterator[tuple[str, Any]]:
    """What a function is given, and what else it says by name, itself."""
    while isinstance(function, partial):
        arguments, named, function = (*function.args, *arguments), {**function.keywords, **named}, function.func
    yield from ((f"argument {number}", each) for number, each in enumerate(arguments))
    yield from named.items()
    try:
        said = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # it is none of Python's, or a name has no value yet
        return
    yield from {**said.globals, **said.nonlocals}.items()


def require_same_unprepared(told: Sequence[Digests], who: str) -> None:
    """By all ranks. UserError where a model has weights of each rank's own."""
    first, *others = told
    for name in (name for theirs in others for name, digest in theirs.items() if first.get(name, digest) != digest):
        raise UserError(
            f"{who} uses {name}, whose weights differ by rank, as it was not prepared: give an average of weights that"
            " the loop makes by itself to job.keep_average before the loop, and any other model the same weights on all"
            " ranks"
        )
