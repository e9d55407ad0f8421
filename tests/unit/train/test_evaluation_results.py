"""What ranks find becomes what one would find on all: by sums and counts, metrics, or `combine`; nothing is guessed."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetsync import metrics
from hetsync.errors import UserError
from hetsync.train.evaluation import Evaluations, RankParts, combined, on_cpu, require_own_counts

Pair = namedtuple("Pair", "loss accuracy")


class Largest:
    """A metric of a script's own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def merge_state(self, other: Largest) -> None:
        self.value = max(self.value, other.value)

    def compute(self) -> int:
        return self.value


@pytest.mark.parametrize(
    ("found", "result"),
    [
        (((3.0, 3), (0, 1)), 0.75),
        (((torch.tensor(3), torch.tensor(3)), (torch.tensor(0), torch.tensor(1))), 0.75),
        (((torch.tensor([3]), torch.tensor([3])), (torch.zeros(1), np.array([1]))), 0.75),  # as torch.zeros(1) begins
        (((np.float32(3.0), np.int64(3)), (np.zeros(()), np.int64(1))), 0.75),
        (({"a": (3.0, 3), "b": (1, 2)}, {"a": (0.0, 1), "b": (2, 2)}), {"a": 0.75, "b": 0.75}),
        (({"a": (3.0, 3)}, {"a": (0.0, 1), "b": (1, 2)}), {"a": 0.75, "b": 0.5}),  # a class that one rank has not
        ((((3.0, 3), (8, 2)), ((0.0, 1), (2, 2))), (0.75, 2.5)),
        ((Pair((3.0, 3), (8, 2)), Pair((0.0, 1), (2, 2))), (0.75, 2.5)),
        (((3.0, 4), None), 0.75),  # who has no sample is not asked
        (((0.0, 0), (3.0, 4)), 0.75),  # and who has some, but none that counts, says so
    ],
)
def test_sums_and_counts_are_added_before_they_are_divided(found: tuple[Any, Any], result: Any) -> None:
    assert combined(found, None) == result


def test_sums_of_many_small_numbers_keep_their_places() -> None:
    found = [(torch.tensor([2.0**24]), 1), *[(torch.tensor([1.0]), 1)] * 9]
    assert combined(found, None) == (2**24 + 9) / 10


def test_the_mean_of_nothing_is_nan() -> None:
    assert math.isnan(combined([(0.0, 0), (0, 0)], None))
    assert math.isnan(combined([(torch.zeros(()), torch.tensor(0))], None))


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        torch.tensor(0.5),
        torch.ones(3),
        np.float64(0.5),
        (0.5, 0.25, 0.1),
        Pair(0.5, 0.25),
        [0.5, 4],
        [],
        "good",
        # What may have a place for each sample, or batch, is no sum:
        (torch.tensor([1, 0, 2]), torch.tensor([1, 1, 2])),  # predictions and labels
        (np.array([1, 0, 2]), np.array([1, 1, 2])),
        (torch.tensor([0.5, 0.25]), 2),  # losses
        ([1, 0, 2], [1, 1, 2]),
        [(1, 1), (0, 1), (2, 2)],
        [{"correct": (3, 4)}, {"correct": (1, 4)}],
        # Nor are these:
        (True, 3),
        (torch.tensor([True]), 1),
        (1j, 1),
        (torch.tensor(1j), 1),
        (np.str_("good"), 1),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["its result", "accuracy"])
def test_what_has_no_count_is_refused_on_one_rank_as_on_two(value: Any, ranks: int, name: str) -> None:
    found = value if name == "its result" else {"loss": (1.0, 2), name: value}
    with pytest.raises(UserError, match=rf"as {name}, without its count, .* return a pair \(sum, count\)"):
        combined([found] * ranks, None)


@pytest.mark.parametrize("count", [0.25, torch.tensor(37.0), True, torch.tensor([True]), np.float32(3)])
def test_a_loss_and_an_accuracy_are_no_sum_and_count(count: Any) -> None:
    with pytest.raises(UserError, match=r"as the count of its result, which is no whole number, such as int\(mask"):
        combined([(0.5, count)], None)


@pytest.mark.parametrize("loss", [0.5, torch.tensor(0.5), np.float32(0.5), math.nan])
def test_a_loss_beside_a_count_is_no_sum_of_that(loss: Any) -> None:
    """As scripts return a mean loss and how many were right."""
    with pytest.raises(UserError, match="may be a mean beside a count: give a sum a name"):
        combined([(loss, 87), (loss, 91)], None)
    assert combined([{"loss": (0.5, 2)}, {"loss": (1.0, 1)}], None) == {"loss": 0.5}


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([(torch.ones(3), 3), (torch.ones(1), 1)], r"tensor\(\[1\., 1\., 1\.\]\) as its result, without its count"),
        ([((1, 2),), ((1, 2), (3, 4))], r"1, 2 values as its result"),
        ([(1, 2), 0.0], r"returned 0\.0 as its result, without its count"),
        ([None, None], "found nothing on any rank"),
    ],
)
def test_what_ranks_have_not_alike_is_refused(found: list[Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        combined(found, None)


def test_rows_are_joined_by_combine() -> None:
    assert combined([torch.ones(3), None, torch.zeros(1)], torch.cat).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_metrics_in_a_list_are_its_own():
    mean = metrics.Mean()
    mean.update(3.0)
    assert combined([[on_cpu(mean), on_cpu(mean)]] * 2, None) == [3.0, 3.0]


def test_metrics_are_merged_before_they_are_computed() -> None:
    rmse = metrics.RMSE(), metrics.RMSE()
    rmse[0].update(torch.zeros(3), torch.tensor([1.0, 2.0, 2.0]))
    rmse[1].update(torch.zeros(1), torch.tensor([4.0]))
    assert combined([{"rmse": rmse[0]}, {"rmse": rmse[1]}], None) == {"rmse": 2.5}


def test_those_of_torchmetrics_too() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def found(actual: list[float]) -> Any:
        errors = {"rmse": torchmetrics.MeanSquaredError(squared=False), "mae": torchmetrics.MeanAbsoluteError()}
        errors = torchmetrics.MetricCollection(errors, prefix="test_")
        errors.update(torch.zeros(len(actual)), torch.tensor(actual))
        return errors

    both = combined([on_cpu(found([1.0, 2.0, 2.0])), None, on_cpu(found([4.0]))], None)
    assert {name: float(value) for name, value in both.items()} == {"test_rmse": 2.5, "test_mae": 2.25}


@pytest.mark.parametrize("others_first", [True, False])
def test_who_has_found_nothing_takes_anothers_result(others_first: bool) -> None:
    """Of a class of theirs that it does not know."""

    def evaluations() -> Evaluations:
        return Evaluations(parts=RankParts(0, 2), model=torch.nn.Linear(1, 1), loaders=[])

    own = evaluations()
    part = own.part_of(lambda: Largest(3), [1, 1])
    parts = [part, None] if others_first else [None, part]
    assert own.agreed_result(parts, None, part, lambda result: [result, []]) == [3]
    assert evaluations().agreed_result(parts, None, None, lambda result: [result, [3]]) == [3]
    with pytest.raises(UserError, match="Largest does not travel"):
        evaluations().result_of(parts, None)


def test_what_other_ranks_get_is_no_more_the_scripts_own() -> None:
    """Which may go on adding to it."""
    mean = metrics.Mean()
    mean.update(1.0)
    combined([on_cpu(mean), on_cpu(mean)], None)
    assert float(mean.count) == 1


@given(st.integers(0, 60), st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
def test_parts_are_all_of_the_data_and_not_of_one_size(samples: int, shares: list[int]) -> None:
    found = []
    for rank in range(len(shares)):
        parts = RankParts(rank, len(shares))
        parts.shares = shares
        found.append(parts.of(samples))
    assert [index for part in found for index in part] == list(range(samples))
    sizes = [len(part) for part in found if part]
    assert len(set(sizes)) > 1 or len(sizes) < 2 or sizes[0] == 1


WHOLE = [[(51, 100)], [(49, 100)]]


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ([(40, 100), (38, 100)], "its result"),
        ([{"a": (1, 51), "b": (40.5, 100)}, {"a": (1, 49), "b": (38.5, np.int64(100))}], "b"),
        ([((1, 51), (2, torch.tensor(100))), ((1, 49), (2, 100))], r"its result\[1\]"),
    ],
)
def test_a_count_of_all_data_on_each_rank_is_refused(found: list[Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"returned 100 as the count of {name} on each rank.* len\(labels\)"):
        require_own_counts(WHOLE, found)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (WHOLE, [(40, 51), (38, 49)]),
        (WHOLE, [(40, 100), (38, 98)]),  # of two a sample
        (WHOLE, [(40, 7), (38, 7)]),  # of something else
        ([[(100, 100)], [(100, 100)]], [(40, 100), (38, 100)]),  # each has all
        ([[(100, 100)]], [(78, 100)]),
        ([[]], [(78, 100)]),
        (WHOLE, [None, (78, 100)]),
    ],
)
def test_counts_that_may_be_right_are_not(sizes: list[list[tuple[int, int]]], found: list[Any]) -> None:
    require_own_counts(sizes, found)
