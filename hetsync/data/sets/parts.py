"""Parts of data that have an order: to train on, to evaluate on while training, and to test on."""

from __future__ import annotations

from hetsync.errors import UserError

Parts = tuple[range, range, range]


def split(count: int, what: str, validation_fraction: float, test_fraction: float) -> Parts:
    """So many samples, in their order: the last to test on, those before to evaluate on while training. Rounded as
    DCRNN's authors do (Li et al. 2018). UserError where a part has none."""
    fractions = {"validation_fraction": validation_fraction, "test_fraction": test_fraction}
    for name, fraction in fractions.items():
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise UserError(f"data.options.{name} is {fraction}: it must be above 0 and below 1")
    train = max(0, round(count * (1 - validation_fraction - test_fraction)))
    test = count - round(count * test_fraction)
    parts = range(train), range(train, test), range(test, count)
    if not all(parts):
        raise UserError(
            f"there are {count} {what}, which leave none to train, to validate or to test on: give more, or other"
            " data.options.validation_fraction and test_fraction"
        )
    return parts


def require_counts(**counts: int) -> None:
    """Raise UserError unless these options are whole numbers from 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"data.options.{name} is {value}: give a whole number from 1")
