"""Images as the data sets keep them: held out, batched, mapped anew by workers, shifted and mirrored."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pictures import made

from hetsync.data import Data
from hetsync.data.sets.images import Split, hold_out, load, save, shift_and_mirror
from hetsync.data.workers import fetch


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_hold_out_takes_the_last_of_each_class(labels: list[int], fraction: float) -> None:
    labels_N = np.array(labels)
    held_N = hold_out(labels_N, fraction)
    for label in set(labels):
        of_class = held_N[labels_N == label]
        assert of_class.sum() == int(len(of_class) * fraction)
        assert (np.diff(of_class.astype(int)) >= 0).all()


@pytest.fixture
def images(tmp_path: Path) -> Data:
    folder = tmp_path / "filled"
    folder.mkdir()
    labels, content = made(64)
    split = Split(labels, [content.reshape(-1, 3, 32, 32)])
    save(folder, split, split, [str(digit) for digit in range(10)])
    return load(folder, augment=True)


def test_a_batch_is_its_samples(images: Data) -> None:
    together, labels = fetch(images.test, [5, 3, 60], images.collate)
    assert together.shape == (3, 3, 32, 32)
    assert together.dtype == torch.float32
    assert (labels.dtype, labels.tolist()) == (torch.int64, [5, 3, 0])
    for place, index in enumerate([5, 3, 60]):
        image, label = images.test[index]
        assert torch.equal(image, together[place])
        assert label == labels[place]


def test_worker_processes_map_the_files_anew(images: Data) -> None:
    sent = pickle.dumps(images.train)
    assert len(sent) < 1000, "workers get the content instead of mapping the files"
    batches = [list(range(0, 30)), list(range(30, 64))]
    loader = torch.utils.data.DataLoader(pickle.loads(sent), batch_sampler=batches, collate_fn=images.collate)
    for indices, (batch, labels) in zip(batches, loader, strict=True):
        here, labels_here = images.train.__getitems__(indices)
        assert torch.equal(batch, here)
        assert torch.equal(labels, labels_here)


def test_draws_follow_from_the_indices_alone(images: Data) -> None:
    one, other = [4, 8, 15, 16, 23, 42], [42, 4, 8, 15, 16, 23]
    first, _ = images.train.__getitems__(one)
    torch.manual_seed(99)
    np.random.default_rng().random()
    again, _ = images.train.__getitems__(one)
    assert torch.equal(first, again)
    shuffled, _ = images.train.__getitems__(other)
    assert not torch.equal(first, shuffled[[1, 2, 3, 4, 5, 0]])


@settings(max_examples=30, deadline=None)
@given(
    arrays.arrays(
        np.uint8, st.tuples(st.integers(1, 6), st.just(3), st.sampled_from([8, 16]), st.sampled_from([8, 32]))
    ),
    st.integers(0, 1000),
)
def test_each_image_is_shifted_and_maybe_mirrored(content: np.ndarray, seed: int) -> None:
    height, width = content.shape[2:]
    down, right = height // 8, width // 8
    padded = np.pad(content, ((0, 0), (0, 0), (down, down), (right, right)))
    for image, whole in zip(shift_and_mirror(content, np.random.default_rng(seed)), padded, strict=True):
        windows = [whole[:, y : y + height, x : x + width] for y in range(2 * down + 1) for x in range(2 * right + 1)]
        assert any((image == w).all() or (image == w[:, :, ::-1]).all() for w in windows)


def test_shifts_and_mirrors_are_uniform() -> None:
    image = np.zeros((1, 1, 32, 32), np.uint8)
    image[..., 16, 10] = 255
    out = shift_and_mirror(image.repeat(4000, 0), np.random.default_rng(0))
    _, _, rows, columns = np.nonzero(out)
    assert len(rows) == 4000
    assert set(rows) == set(range(12, 21))
    straight = columns < 16
    assert 0.45 < straight.mean() < 0.55
    assert set(columns[straight]) == set(range(6, 15))
    assert set(columns[~straight]) == {31 - column for column in range(6, 15)}
    assert np.bincount(rows)[12:21].min() > 4000 / 9 * 0.8
