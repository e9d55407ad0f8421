"""Whether a loss is a mean over its batch, or a sum; over how many units it is a mean.

Ranks' slices differ in size, and their gradients are weighted by samples. That of a sum would count a slice of twice
the samples four times.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from hetsync.errors import UserError

Reduction = Literal["mean", "sum"]
SUMMED, AVERAGED = 2, 1  # as autograd's nodes of losses keep the words "sum" and "mean"
PASSED = ("AddBackward", "SubBackward", "NegBackward", "ToCopyBackward")  # what is made of a sum by these is one
SCALED = ("MulBackward", "DivBackward")  # which may make a mean of a sum
MOST_NODES = 200  # that are looked at: of more terms the graph does not tell


def units_of(weight: torch.Tensor | float) -> float:
    """A loop's `weight`, for which a device may be waited for. UserError for what is no number of units."""
    one = not isinstance(weight, torch.Tensor) or weight.numel() == 1
    units = float(weight) if one and isinstance(weight, torch.Tensor | int | float) else math.nan
    if not 0 <= units < math.inf:
        raise UserError(
            f"job.backward got weight {weight!r}: give how many units the loss is a mean over (tokens, entries that are"
            " not masked, the sum of class weights), a number of 0 or more"
        )
    return units


def looks_summed(loss: torch.Tensor, samples: int) -> bool:
    """Is it made, by additions only, of sums over a batch of so many samples? False where the graph does not tell: in
    compiled models, beside a mean, and where anything is multiplied or divided, which may have made a mean of it."""
    terms = _terms(loss.grad_fn)
    if not terms or any(_is_mean(term) for term in terms):
        return False
    if any(getattr(term, "_saved_reduction", None) == SUMMED for term in terms):
        return True
    # Sums over anything else, such as several losses, have hardly just as many rows.
    return samples > 1 and all(_rows(term) == samples for term in terms)


def check_is_mean(loss: torch.Tensor, samples: int) -> None:
    """UserError where it looks like a sum."""
    if looks_summed(loss, samples):
        raise UserError(
            "the loss is a sum over the batch's samples, and slices of unequal size want its mean: take that (divide by"
            " the batch's samples), or in a script call job.backward(loss, reduction='sum'), and with reduction='mean'"
            " if it only looks like a sum"
        )


def _terms(root: Any) -> list[Any]:
    """What the loss is a sum of; none where there are too many."""
    terms, waiting, seen = [], [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES:
            return []
        if node.name().startswith(PASSED):
            waiting += [following for following, _ in node.next_functions]
        else:
            terms.append(node)
    return terms


def _is_mean(node: Any) -> bool:
    return getattr(node, "_saved_reduction", None) == AVERAGED or node.name().startswith("MeanBackward")


def _rows(node: Any) -> int | None:
    """Of what is summed up whole; None where nothing is, or by weights."""
    if not node.name().startswith("SumBackward0"):
        return None
    sizes = list(node._saved_self_sym_sizes)
    inner = node.next_functions[0][0]
    scaled = inner is not None and inner.name().startswith(SCALED)
    return int(sizes[0]) if sizes and not scaled else None
