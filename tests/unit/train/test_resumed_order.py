"""A resumed run takes the samples that the run so far has left, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.data.loader import Source
from hetsync.train.checkpoint import complete

SAMPLES, BATCH, EPOCH = 60, 16, 48  # an epoch is of whole batches


def train(
    folder: Path,
    epochs: int = 2,
    batch: int = BATCH,
    samples: int = SAMPLES,
    seed: int = 0,
    weights: list[float] | None = None,
) -> list[int]:
    """Indices in the order of their use."""
    used: list[int] = []
    points = TensorDataset(torch.randn(samples, 4), torch.arange(samples))
    with hetsync.join(
        run=folder, resume="auto", delay_bound=0, seed=seed, checkpoint_every=24, keep_checkpoints=9, progress=False
    ) as job:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = job.prepare(model, optimizer)
        loader = job.loader(DataLoader(points, batch, shuffle=True, drop_last=True), weights=weights)
        for _ in job.epochs(epochs):
            for inputs, indices in loader:
                used += indices.tolist()
                job.backward(model(inputs).square().mean())
                job.step()
    return used


def go_back(folder: Path, samples: int) -> None:
    """As if the job had died right after it saved there."""
    for path in complete(folder / "checkpoints"):
        if not path.name.endswith(f"{samples:012d}"):
            shutil.rmtree(path)


def test_an_epoch_that_goes_on_has_each_sample_once(tmp_path: Path) -> None:
    used = train(tmp_path)
    go_back(tmp_path, 80)
    assert train(tmp_path) == used[80:]


def test_drawn_epochs_go_on_as_they_were_drawn(tmp_path: Path) -> None:
    weights = [index % 3 for index in range(SAMPLES)]
    used = train(tmp_path, weights=weights)
    assert len(used) == 2 * EPOCH
    assert all(index % 3 for index in used)
    go_back(tmp_path, 80)
    assert train(tmp_path, weights=weights) == used[80:]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"batch": 20}, "samples of an epoch: 48 before, 60 now"),
        ({"samples": 63}, "samples of the data set: 60 before, 63 now"),
        ({"seed": 1}, "seed: 0 before, 1 now"),
        ({"weights": [1.0] * SAMPLES}, "weights: other ones than before"),
    ],
)
def test_another_order_is_refused_in_mid_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], sentence: str
) -> None:
    train(tmp_path)
    go_back(tmp_path, 80)
    with pytest.raises(SystemExit) as end:
        train(tmp_path, **changed)
    assert end.value.code == 2
    assert (
        f"the run stands at sample 80 of an order that these data do not have ({sentence})" in capsys.readouterr().err
    )


def test_another_length_of_epochs_is_refused_between_them_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positions would be those of other epochs."""
    train(tmp_path)
    with pytest.raises(SystemExit):
        train(tmp_path, epochs=3, batch=20)
    assert "stands at sample 96" in capsys.readouterr().err


def test_another_order_may_follow_between_epochs(tmp_path: Path) -> None:
    train(tmp_path)
    used = train(tmp_path, epochs=3, samples=63, seed=1)
    assert len(set(used)) == EPOCH


def test_costs_and_weights_are_of_the_order_and_a_seed_is_where_samples_are_shuffled() -> None:
    data = TensorDataset(torch.arange(4))
    plain, dear = Source(data, costs=[1, 1, 1, 1]).order(0), Source(data, costs=[1, 1, 1, 2]).order(0)
    assert plain["costs"] != dear["costs"]
    drawn = [Source(data, weights=torch.tensor([1.0, weight, 1, 1])).order(0)["weights"] for weight in (1, 2)]
    assert len({*drawn, plain["weights"]}) == 3
    assert Source(data, shuffle=False).order(0) == Source(data, shuffle=False).order(1)
