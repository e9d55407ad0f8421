"""Parts of data that have an order: to train on, to evaluate on while training, and to test on."""

from __future__ import annotations

import torch

from hetsync.config.checks import at_least
from hetsync.errors import UserError

Parts = tuple[range, range, range]


def split(count: int, what: str, validation_fraction: float, test_fraction: float) -> Parts:
    """So many samples, in their order: the last to test on, those before to evaluate on while training. Rounded as
    DCRNN's authors do (Li et al. 2018). UserError where a part has none."""
    at_least("data.options.validation_fraction", validation_fraction, 0, above=True, most=1)
    at_least("data.options.test_fraction", test_fraction, 0, above=True, most=1)
    train = max(0, round(count * (1 - validation_fraction - test_fraction)))
    test = max(0, count - round(count * test_fraction))
    parts = range(train), range(train, test), range(test, count)
    if not all(parts):
        raise UserError(
            f"there are {count} {what}, which leave none to train, to validate or to test on: give more, or other"
            " data.options.validation_fraction and test_fraction"
        )
    return parts


def require_shape(predicted: torch.Tensor, targets: torch.Tensor) -> None:
    """UserError for predictions that would be broadcast to what is to be predicted."""
    if predicted.shape != targets.shape:
        raise UserError(
            f"the model returned predictions of shape {tuple(predicted.shape)} for targets of shape"
            f" {tuple(targets.shape)}: return one for each"
        )


def require_counts(**counts: int) -> None:
    """UserError unless these options are 1 or more."""
    for name, value in counts.items():
        at_least(f"data.options.{name}", value, 1)
