"""Data sets with few test samples, for jobs whose evaluations are not what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import Subset

from hetsync import data


def few_tests(name: str, options: Mapping[str, Any], samples: int) -> data.Data:
    """The data of a recipe's `data.name` and `data.options`, with the first of its test samples."""
    found = data.build(name, options)
    return replace(found, test=Subset(found.test, range(samples)), validation=None)
