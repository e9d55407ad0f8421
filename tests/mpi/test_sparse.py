"""Sparse matrices (a graph's) as buffers and attributes of a model: trained on, measured, saved, gone on with.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_sparse.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import BATCH, CLASSES, FEATURES, SEED, Blobs

import hetsync
from hetsync.plane.base import Plane

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]
LAYOUTS = [torch.sparse_coo, torch.sparse_csr]


class OnGraph(nn.Module):
    """The graph as a buffer, as an attribute, and in a list."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        torch.manual_seed(5)
        graph = (torch.eye(FEATURES) + 0.1 * torch.ones(FEATURES, FEATURES)).to_sparse(layout=layout)
        self.register_buffer("graph", graph)
        self.support, self.supports = graph.clone(), [graph.clone()]
        self.body = nn.Linear(FEATURES, CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        weighted = points * self.body.weight[0]  # which needs a gradient through each of them
        for graph in (self.graph, self.support, *self.supports):
            weighted = torch.sparse.mm(graph, weighted.T).T
        scores: torch.Tensor = self.body(weighted)
        return scores


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bound", [0, 2])
def test_graphs_are_trained_on_measured_and_gone_on_with(
    plane: Plane, folder: Path, layout: torch.layout, bound: int
) -> None:
    found = []
    options: dict[str, Any] = {"delay_bound": bound, "seed": SEED, "profile_seconds": 0.1, "progress": False}
    for epochs in (1, 2):
        with hetsync.join(plane=plane, run=folder / "run", resume="auto", **options) as job:
            model = OnGraph(layout)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            loader = DataLoader(Blobs(), BATCH, shuffle=True)
            model, optimizer, loader = job.prepare(model, optimizer, loader)
            job.measure(loss_of)
            for _ in job.epochs(epochs):
                for batch in loader:
                    job.backward(loss_of(model, batch))
                    job.step(optimizer)
                job.keep_best(-float(epochs))
            found.append(job.session.applied if epochs == 2 else 0)
    assert found[-1] == 2 * len(Blobs())
    assert model.graph.layout is layout
    assert len(set(plane.gather_objects(float(model.body.weight.sum())))) == 1
