"""job.samples and job.step_count: what the whole job has trained on, as curricula need it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetsync

BATCH, BATCHES, EPOCHS = 8, 4, 3


@pytest.mark.mpi
@pytest.mark.parametrize("bound", [0, 4])
def test_the_jobs_samples_are_those_of_one_process(bound: int) -> None:
    with hetsync.join(delay_bound=bound, progress=False) as job:
        assert job.samples == 0
        data = TensorDataset(torch.randn(BATCH * BATCHES, 3), torch.randn(BATCH * BATCHES, 1))
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
        seen, rests = [], []
        for _ in job.epochs(EPOCHS):
            for points, targets in loader:
                seen.append(job.samples)
                job.backward(nn.functional.mse_loss(model(points), targets))
                assert job.samples == seen[-1]
                optimizer.step()
                optimizer.zero_grad()
            rests.append(job.samples)
        assert rests == [BATCH * BATCHES * epoch for epoch in range(1, EPOCHS + 1)]
        assert seen == sorted(seen)
        if bound == 0:  # every rank has a slice of each batch
            assert seen == [BATCH * batch for batch in range(BATCHES * EPOCHS)]
        assert all(number < BATCH * BATCHES * EPOCHS for number in seen)


@pytest.mark.mpi
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_jobs_step_count_is_that_of_one_process(accumulation: int) -> None:
    """Also where the last batch of an epoch is small, and some ranks have no part of it."""
    samples = BATCH * BATCHES + 1
    with hetsync.join(delay_bound=0, accumulation=accumulation, rebalance=False, progress=False) as job:
        assert job.step_count == 0
        data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
        for epoch in job.epochs(EPOCHS):
            counts = []
            for points, targets in loader:
                counts.append(job.step_count)
                job.backward(nn.functional.mse_loss(model(points), targets))
                job.step()
            first = epoch * len(loader)
            assert counts[:BATCHES] == list(range(first, first + BATCHES))
            assert counts[BATCHES:] in ([], [first + BATCHES])
            assert job.step_count == first + len(loader)


@pytest.mark.mpi
def test_a_slow_rank_has_a_part_of_each_batch_that_a_loop_counts() -> None:
    """Where each batch makes a step it would have none."""
    with hetsync.join(delay_bound=0, progress=False) as job:
        data = TensorDataset(torch.randn(BATCH * 100, 3), torch.randn(BATCH * 100, 1))
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
        for _ in job.epochs(2):
            for number, (points, targets) in enumerate(loader):
                time.sleep(0.01 if job.rank == 1 else 0.001)
                job.backward(nn.functional.mse_loss(model(points), targets) / 4)
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
            assert job.gather(number) == [99] * job.size
