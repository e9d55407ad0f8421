"""scikit-learn's handwritten digits: 1,797 grey images of 8×8 pixels (Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from hetsync.data import Data


def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Data:
    """Images of shape (1, 8, 8) in [0, 1], labels 0 to 9; split at random, always alike for one seed."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    tests = int(len(labels) * test_fraction)
    test, train = order[:tests], order[tests:]
    return Data(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]))
