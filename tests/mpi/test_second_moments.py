"""The squares of gradients that Adam and its kin keep are a batch's at rest, whatever slices they were made on.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_second_moments.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import BATCH, BOUNDS, Result, Seen, on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetsync.plane.base import Plane
from hetsync.sync.optimizers import SECOND_MOMENTS

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 4)]

BATCHES, EPOCHS, WEIGHTS = 6, 25, 2000  # many rests, before which slices are smaller


def kept(optimizer: torch.optim.Optimizer, forgets: float) -> float:
    """The mean square, as of steps without number."""
    (state,) = optimizer.state.values()
    squares = next(state[name] for name in SECOND_MOMENTS if name in state)
    return float(squares.mean()) / (1 - forgets ** float(state["step"]))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_they_are_those_of_a_batch_on_every_rank(plane: Plane, bound: int, kind: type[torch.optim.Optimizer]) -> None:
    """Gradients are means of normal deviates, so that the squares of a batch's are 1 / B: those of a slice of n
    samples are 1 / n, by which they were kept before."""
    forgets = 0.95
    settings: dict[str, Any] = {"betas": (0.9, forgets)} if kind is torch.optim.AdamW else {"alpha": forgets}

    def script(job: Any, seen: Seen) -> Result:
        model = nn.Linear(WEIGHTS, 1, bias=False)
        deviates = torch.randn(BATCH * BATCHES, WEIGHTS, generator=torch.Generator().manual_seed(5))
        loader = DataLoader(TensorDataset(deviates), BATCH, shuffle=True)
        optimizer = kind(model.parameters(), lr=1e-6, **settings)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        for _ in job.epochs(EPOCHS):
            for (batch,) in loader:
                job.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            seen.values.append(kept(optimizer, forgets))
        return Result(model, 0.0, 0.0)

    _, seen = on_ranks(plane, script, bound)
    everyones = plane.gather_objects(seen.values)
    assert everyones == [seen.values] * plane.size
    assert seen.values == pytest.approx([1 / BATCH] * EPOCHS, rel=0.2)
