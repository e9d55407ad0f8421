"""What a script changes of its data set between epochs counts for all batches of the next, with data workers too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import hetsync

SAMPLES, BATCH, EPOCHS = 24, 4, 3
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Scaled(Dataset[Any]):
    scale: Any = -1
    samples = SAMPLES

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(self.scale))


class ScaledStream(IterableDataset[Any]):
    scale: Any = -1

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.full((3,), float(self.scale))] * SAMPLES)


def seen(data: Any, bound: int, workers: int, change: Callable[[int], None]) -> list[set[float]]:
    """What has come of the data set, by epoch."""
    found: list[set[float]] = []
    with hetsync.join(progress=False, delay_bound=bound) as job:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
        job.prepare(model, optimizer)
        loader = job.loader(data, BATCH, workers=workers)
        for epoch in job.epochs(EPOCHS):
            time.sleep(0.1)  # what is loaded ahead is there by now
            change(epoch)
            found.append(set())
            for batch in loader:
                found[-1].update(batch.flatten().tolist())
                job.backward(model(batch).square().mean())
                job.step(optimizer)
    return found


@pytest.mark.each_value
@BOUNDS
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Scaled, ScaledStream])
def test_what_is_set_before_a_loop_counts_from_its_first_batch_on(kind: type[Any], workers: int, bound: int) -> None:
    data = kind()
    assert seen(data, bound, workers, lambda epoch: setattr(data, "scale", epoch)) == [{0.0}, {1.0}, {2.0}]


def test_a_change_that_cannot_be_sent_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    data = Scaled()
    with pytest.raises(SystemExit, match="2"):
        seen(data, 4, 1, lambda epoch: setattr(data, "scale", epoch if epoch < 2 else lambda: epoch))
    assert "hetsync: the data set or its collate function cannot be sent to a data worker (" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_another_length_is_one_sentence(capsys: pytest.CaptureFixture[str], workers: int) -> None:
    data = Scaled()
    with pytest.raises(SystemExit, match="2"):
        seen(data, 4, workers, lambda epoch: setattr(data, "samples", SAMPLES + epoch))
    assert "hetsync: the data set has 25 samples now, and had 24 when the job began" in capsys.readouterr().err
