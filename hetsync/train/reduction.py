"""Whether a loss is a mean over its batch, or a sum.

Ranks' slices differ in size, and their gradients are weighted by samples. That of a sum would count a slice of twice
the samples four times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from hetsync.errors import UserError

Reduction = Literal["mean", "sum"]
SUMMED = 2  # as autograd's nodes of losses keep the word "sum"
PASSED = ("AddBackward", "SubBackward", "NegBackward", "ToCopyBackward")  # what is made of a sum by these is one


def looks_summed(loss: torch.Tensor, samples: int) -> bool:
    """Is it made, by additions only, of a sum over a batch of so many samples? False where the graph does not tell: in
    compiled models, and where anything is multiplied or divided, which may have made a mean of it."""
    return any(_sums(node, samples) for node in _terms(loss.grad_fn))


def check_is_mean(loss: torch.Tensor, samples: int) -> None:
    """UserError where it looks like a sum."""
    if looks_summed(loss, samples):
        raise UserError(
            "the loss is a sum over the batch's samples, and slices of unequal size want its mean: take that, or in a"
            " script call job.backward(loss, reduction='sum'), and with reduction='mean' if it only looks like a sum"
        )


def _terms(node: Any) -> Iterator[Any]:
    if node is None:
        return
    if node.name().startswith(PASSED):
        for following, _ in node.next_functions:
            yield from _terms(following)
    else:
        yield node


def _sums(node: Any, samples: int) -> bool:
    if getattr(node, "_saved_reduction", None) == SUMMED:
        return True
    # A sum over anything else, such as several losses, or weights, has hardly just as many rows.
    sizes = list(node._saved_self_sym_sizes) if node.name().startswith("SumBackward0") else []
    return samples > 1 and sizes[:1] == [samples]
