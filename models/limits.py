"""Limits of models' options, said to the user in one sentence."""

from __future__ import annotations

import math

from hetsync.errors import UserError


def require(option: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise UserError unless a model's option is a number in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise UserError(f"model.options.{option} is {value}: it must be a number {limits}")


def require_count(option: str, value: int, least: int = 1) -> None:
    """Raise UserError unless a model's option is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"model.options.{option} is {value}: it must be a whole number of at least {least}")
