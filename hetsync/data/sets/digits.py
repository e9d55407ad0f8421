"""scikit-learn's handwritten digits: 1,797 grey images of 8×8 pixels (Alpaydin and Kaynak 1998)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hetsync.data import Data
from hetsync.errors import UserError
from hetsync.extras import install_command, require


def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Data:
    """Images of shape (1, 8, 8) in [0, 1], labels 0 to 9; split at random, always alike for one seed."""
    table = torch.from_numpy(np.loadtxt(_find_table(), delimiter=","))
    images = table[:, :-1].float().view(-1, 1, 8, 8) / 16
    labels = table[:, -1].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    tests = int(len(labels) * test_fraction)
    test, train = order[:tests], order[tests:]
    return Data(
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[test], labels[test]),
        model_options={"classes": 10},
    )


def _find_table() -> Path:
    """The file inside scikit-learn, whose own loader would import SciPy: seconds at the start of every rank."""
    require("digits", "data.name digits")
    package = find_spec("sklearn")
    folders = (package.submodule_search_locations if package is not None else None) or []
    for folder in folders:
        table = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if table.is_file():
            return table
    raise UserError(f"data.name is digits, but this scikit-learn lacks them: {install_command('scikit-learn')}")
