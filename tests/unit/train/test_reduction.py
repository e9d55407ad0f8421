"""A loss that is a sum over the batch is told from a mean by what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from hetsync.errors import UserError
from hetsync.train.reduction import check_is_mean, looks_summed

SAMPLES = 8
SCORES = torch.randn(SAMPLES, 4, requires_grad=True)
TARGETS, LABELS = torch.rand(SAMPLES, 4), torch.arange(SAMPLES) % 4
WEIGHTS = torch.ones(SAMPLES, 4, requires_grad=True)  # as many rows as samples, by chance

SUMS: dict[str, Callable[[], torch.Tensor]] = {
    "cross entropy": lambda: F.cross_entropy(SCORES, LABELS, reduction="sum"),
    "squares": lambda: F.mse_loss(SCORES, TARGETS, reduction="sum"),
    "absolutes": lambda: F.l1_loss(SCORES, TARGETS, reduction="sum"),
    "divergence": lambda: F.kl_div(SCORES, TARGETS, reduction="sum"),
    "by hand": lambda: SCORES.square().sum(1).sum(),
    "in 16 bits": lambda: F.cross_entropy(SCORES, LABELS, reduction="sum").bfloat16(),
    "autoencoder's": lambda: (
        F.binary_cross_entropy(SCORES.sigmoid(), TARGETS, reduction="sum") - 0.5 * torch.sum(1 + SCORES)
    ),
}
MEANS: dict[str, Callable[[], torch.Tensor]] = {
    "cross entropy": lambda: F.cross_entropy(SCORES, LABELS),
    "smoothed": lambda: F.cross_entropy(SCORES, LABELS, label_smoothing=0.1),
    "divided": lambda: F.cross_entropy(SCORES, LABELS, reduction="sum") / SAMPLES,
    "multiplied": lambda: SCORES.square().sum() * (1 / SAMPLES),
    "batch's mean": lambda: F.kl_div(SCORES, TARGETS, reduction="batchmean"),
    "of sums": lambda: SCORES.square().sum(1).mean(),
    "of several losses": lambda: torch.stack([SCORES.mean(), SCORES.square().mean()]).sum(),
    "by weights": lambda: (SCORES.square().sum(1) * torch.full((SAMPLES,), 1 / SAMPLES)).sum(),
    "of parts": lambda: (SCORES.square().sum(1) / SAMPLES).sum(),
    "with a penalty's sum": lambda: F.cross_entropy(SCORES, LABELS) + F.mse_loss(WEIGHTS, TARGETS, reduction="sum"),
    "with a penalty": lambda: F.mse_loss(SCORES, TARGETS) + WEIGHTS.square().sum(),
    "without a graph": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_seen(name: str) -> None:
    assert looks_summed(SUMS[name](), SAMPLES)


@pytest.mark.parametrize("name", MEANS)
def test_what_may_be_a_mean_is_none(name: str) -> None:
    assert not looks_summed(MEANS[name](), SAMPLES)


def test_a_loss_of_thousands_of_terms_is_not_looked_through() -> None:
    assert not looks_summed(sum(SCORES.square().sum() for _ in range(2000)) + SCORES.mean(), SAMPLES)


def test_what_is_added_to_itself_is_looked_at_once() -> None:
    loss = SCORES.square().sum()
    for _ in range(60):
        loss = loss + loss
    assert looks_summed(loss, SAMPLES)


def test_it_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"job\.backward\(loss, reduction='sum'\)"):
        check_is_mean(SUMS["cross entropy"](), SAMPLES)
