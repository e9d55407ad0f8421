"""What ranks find becomes a mean over samples where that means anything, and else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetsync.errors import UserError
from hetsync.train.evaluation import Part, combined


def parts(*found: Any, samples: tuple[int, ...] = (3, 1)) -> list[Part]:
    return [Part(value, count) for value, count in zip(found, samples, strict=True)]


@pytest.mark.parametrize(
    ("found", "mean"),
    [
        ((1.0, 0.0), 0.75),
        ((torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])), [0.75, 2.0]),
        ((np.ones(2), np.zeros(2)), [0.75, 0.75]),
        (([1.0, 4.0], [0.0, 8.0]), [0.75, 5.0]),
        (({"a": (1.0, 2.0)}, {"a": (0.0, 2.0)}), {"a": (0.75, 2.0)}),
    ],
)
def test_means_are_weighted_by_samples(found: tuple[Any, Any], mean: Any) -> None:
    got = combined(parts(*found), None)
    assert (got.tolist() if hasattr(got, "tolist") else got) == mean


def test_one_value_for_each_of_as_many_samples_as_a_tuple_has_values() -> None:
    assert combined(parts((1.0, 2.0), (3.0, 4.0), samples=(2, 2)), None) == (2.0, 3.0)


@pytest.mark.parametrize(
    "found",
    [
        (torch.ones(3), torch.ones(1)),
        (np.ones((3, 2)), np.ones((1, 2))),
        ([1.0, 2.0, 3.0], [1.0]),
        ({"scores": torch.ones(3)}, {"scores": torch.ones(1)}),
    ],
)
def test_rows_of_samples_are_refused(found: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match=r"give job\.evaluate a combine"):
        combined(parts(*found), None)


def test_rows_of_equal_parts_are_refused_too() -> None:
    with pytest.raises(UserError, match="rows of samples have no mean over ranks"):
        combined(parts(torch.ones(4), torch.ones(4), samples=(4, 4)), None)


def test_rows_are_joined_by_combine() -> None:
    assert combined(parts(torch.ones(3), torch.zeros(1)), torch.cat).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_one_rank_may_return_what_it_likes() -> None:
    assert combined([Part(torch.ones(4), 4)], None).tolist() == [1.0] * 4


def test_where_no_prepared_loader_was_asked_each_rank_has_looked_at_all() -> None:
    assert combined([Part(torch.tensor([1.0]), 0), Part(torch.tensor([3.0]), 0)], None).tolist() == [2.0]


def test_who_has_no_samples_has_no_say() -> None:
    """A script that adds up returns what it began with."""
    assert combined(parts(torch.tensor([1.0, 2.0]), 0, samples=(3, 0)), None).tolist() == [1.0, 2.0]
