"""Losses and metrics that several data sets share.

Every loss is a mean over samples of a figure that depends on that sample alone, whatever else is in the
batch: then slices weighted by their samples give the gradient of the whole batch exactly.
"""

from __future__ import annotations

from typing import Any

import torch

AUXILIARY_WEIGHT = 0.4  # of the auxiliary classifiers of Inception-V3, NASNet and PNASNet (their papers)


def cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross-entropy of a classifier over (inputs, labels).

    A model may return (scores, auxiliary scores) while training; the auxiliary loss counts 0.4.
    """
    inputs, labels = batch
    scores = model(inputs)
    if isinstance(scores, torch.Tensor):
        return torch.nn.functional.cross_entropy(scores, labels)
    main, auxiliary = (torch.nn.functional.cross_entropy(each, labels) for each in scores)
    return main + AUXILIARY_WEIGHT * auxiliary


def classification(model: torch.nn.Module, batch: Any) -> dict[str, float]:
    """Correct answers (first, and among the first five of more than ten classes) and loss, summed over samples."""
    inputs, labels = batch
    scores = model(inputs)
    sums = {
        "accuracy": (scores.argmax(1) == labels).sum().item(),
        "loss": torch.nn.functional.cross_entropy(scores, labels, reduction="sum").item(),
    }
    if scores.shape[1] > 5:
        sums["top5_accuracy"] = (scores.topk(5).indices == labels[:, None]).sum().item()
    return sums


def means(sums: dict[str, float]) -> dict[str, float]:
    """Sums over the test set to means over its samples."""
    samples = max(1.0, sums["samples"])
    return {name: value / samples for name, value in sums.items() if name != "samples"}
