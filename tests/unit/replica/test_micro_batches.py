"""How a slice's samples become micro-batches."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hetsync.balance.profile import StepTime
from hetsync.data.sets.images import as_it_is
from hetsync.data.workers import fetch
from hetsync.errors import UserError
from hetsync.plan.division import WHOLE, Division
from hetsync.plan.schedule import micro_batch_sizes
from hetsync.replica.base import MicroBatches

IMAGES, LABELS = torch.arange(40.0).reshape(20, 2), torch.arange(20)


class WholeBatches(Dataset[Any]):
    """As data sets of images are."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return IMAGES[list(indices)], LABELS[list(indices)]


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [(TensorDataset(IMAGES, LABELS), None), (WholeBatches(), as_it_is)],
    ids=["tensors", "whole"],
)
@pytest.mark.parametrize(
    ("division", "sizes"),
    [
        (WHOLE, [[3], [2], [2]]),
        (Division([[1, 0]], [StepTime(0.0, 1.0), StepTime(0.0, 2.0)]), [[1, 2], [1, 1], [1, 1]]),
    ],
    ids=["whole", "shared"],
)
def test_samples_keep_their_order_whatever_the_data_set_returns(
    dataset: Dataset[Any], collate: Any, division: Division, sizes: list[list[int]]
) -> None:
    cut = MicroBatches(dataset, collate, 3, division)
    indices = [7, 3, 19, 0, 11, 5, 2]
    found = fetch(range(20), indices, pickle.loads(pickle.dumps(cut)))  # as a worker has it
    assert [[piece.samples for piece in each.pieces] for each in found] == sizes
    pieces = [piece.batch for each in found for piece in each.pieces]
    assert torch.equal(torch.cat([images for images, _ in pieces]), IMAGES[indices])
    assert torch.cat([labels for _, labels in pieces]).tolist() == indices


def test_fewer_samples_than_micro_batches_are_one_each() -> None:
    found = MicroBatches(WholeBatches(), as_it_is, 4)([8, 6])
    assert [each.samples for each in found] == [1, 1]


PAIR = Division([[1, 0], [2]], [StepTime(0.0, 1.0)] * 3)


@pytest.mark.parametrize(
    ("division", "full", "samples", "sizes"),
    [
        (WHOLE, 12, 10, [[2]] * 5),
        (WHOLE, 12, 7, [[3], [2], [2]]),
        (WHOLE, 12, 1, [[1]]),
        (WHOLE, 11, 10, [[2], [2], [2], [2], [1], [1]]),  # full slices have one sample each, too
        (PAIR, 24, 20, [[2, 2]] * 2 + [[3]] * 4),
        (PAIR, 24, 3, [[3]]),
        (PAIR, 18, 16, [[2, 1]] * 4 + [[1, 1]] * 2),
    ],
)
def test_short_slices_have_one_sample_nowhere_where_full_ones_have_more(
    division: Division, full: int, samples: int, sizes: list[list[int]]
) -> None:
    """Batch norm does not train on one."""
    cut = MicroBatches(WholeBatches(), as_it_is, 6, division.of_slices(micro_batch_sizes(full, 6)))
    found = cut(list(range(samples)))
    assert [[piece.samples for piece in each.pieces] for each in found] == sizes


def test_files_that_cannot_be_read_are_one_sentence_and_what_the_users_collate_says_is_not() -> None:
    class Unreadable(WholeBatches):
        def __getitems__(self, indices: Sequence[int]) -> Any:
            raise FileNotFoundError("images.npy")

    def refused(samples: Any) -> Any:
        raise ConnectionRefusedError("tokenizer")

    with pytest.raises(UserError, match=r"the data cannot be read: images\.npy"):
        fetch(range(20), [1, 2], MicroBatches(Unreadable(), as_it_is, 2))
    with pytest.raises(ConnectionRefusedError, match="tokenizer"):
        fetch(range(20), [1, 2], MicroBatches(TensorDataset(IMAGES, LABELS), refused, 2))
