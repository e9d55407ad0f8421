"""What loops and models may be like: several backward calls a slice, masks and constants, 16-bit weights.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_tensors.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    Blobs,
    Net,
    Outcome,
    cross_entropy,
    delayed,
    plain_training,
    synchronous,
    train,
)

import hetsync
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]


def close(plane: Plane, outcome: Outcome, expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Collective: every rank's weights are the expected ones."""
    off = [float((mine - theirs).abs().max()) for mine, theirs in zip(outcome.weights, expected, strict=True)]
    assert max(plane.gather_objects(max(off))) < tolerance


def halves(model: torch.nn.Module, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss in two parts, of which the first has its own backward call."""
    if not torch.is_grad_enabled() or len(points) == 1:
        return cross_entropy(model, points, labels)
    first, whole = len(points) // 2, len(points)
    (cross_entropy(model, points[:first], labels[:first]) * first / whole).backward()
    return cross_entropy(model, points[first:], labels[first:]) * (whole - first) / whole


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_several_backward_calls_a_slice_are_one_process(plane: Plane, accumulation: int, overlap: bool) -> None:
    expected, _, _ = plain_training(accumulation=accumulation, optimizer="momentum")
    sync = synchronous(plane, accumulation=accumulation, bucket_bytes=200, overlap=overlap)
    close(plane, train(plane, sync, loss_of=halves), expected)


class Masked(Net):
    """An infinite mask, a large constant, a scratch buffer that differs between ranks, and statistics."""

    def __init__(self, rank: int) -> None:
        super().__init__(batch_norm=True)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("positions", torch.arange(10_000.0))
        self.register_buffer("scratch", torch.full((3,), float(rank)), persistent=False)


@pytest.mark.parametrize("bound", [0, 4])
def test_masks_constants_and_scratch_do_not_travel(plane: Plane, bound: int) -> None:
    model = Masked(plane.rank)
    outcome = train(plane, delayed(plane, delay_bound=bound), model=model, rests=[SAMPLES // 2], optimizer="sgd")
    assert model.mask.tolist() == [0.0, float("-inf")]
    assert torch.equal(model.positions, torch.arange(10_000.0))
    assert model.scratch.tolist() == [plane.rank] * 3
    assert model.body[2].running_mean.abs().max() > 0.05
    assert all(weight.isfinite().all() for weight in model.parameters())
    rounds = outcome.session.version
    assert outcome.session.engine.bytes_sent < 4 * 10_000 * rounds / 4, "all of it would be more without the constant"
    assert len({rest.loss for rest in plane.gather_objects(outcome.rests[-1])}) == 1


# AdamW's epsilon is 0 in float16.
@pytest.mark.parametrize(
    ("dtype", "optimizer"), [(torch.bfloat16, "momentum"), (torch.bfloat16, "adamw"), (torch.float16, "momentum")]
)
@pytest.mark.parametrize("bound", [0, 4])
def test_weights_of_16_bits(plane: Plane, dtype: torch.dtype, bound: int, optimizer: str) -> None:
    def loss_of(model: torch.nn.Module, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(points.to(dtype)).float(), labels)

    model = Net().to(dtype)
    outcome = train(
        plane,
        delayed(plane, delay_bound=bound),
        model=model,
        optimizer=optimizer,
        samples=2 * SAMPLES,
        rests=[SAMPLES],
        loss_of=loss_of,
    )
    assert all(weight.dtype is dtype for weight in model.parameters())
    rests = plane.gather_objects(outcome.rests)
    assert all(theirs == outcome.rests for theirs in rests)
    assert outcome.rests[-1].loss < 0.6 * outcome.first_loss
    if bound == 0:
        expected, _, _ = plain_training(accumulation=1, optimizer=optimizer, samples=2 * SAMPLES)
        close(plane, outcome, expected, 0.1)
    assert outcome.session.applied == 2 * SAMPLES
    assert sum(outcome.session.shares) == BATCH


class Chain(nn.Module):
    """Three layers, of which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used, self.unused, self.first = nn.Linear(8, CLASSES), nn.Linear(3, 3), nn.Linear(FEATURES, 8)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.used(self.first(points))
        return scores


def test_a_slice_left_after_its_backward_counts_whole(plane: Plane) -> None:
    """Where some of its gradients had left for the other ranks, and some weights have none."""
    if plane.size == 1:
        pytest.skip("alone, nothing leaves")
    found = []
    for last in (True, False):
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with hetsync.join(plane=plane, delay_bound=0, bucket_bytes=64, progress=False) as job:
            job.prepare(model, optimizer)
            for number, (points, labels, _) in enumerate(job.loader(Blobs(), BATCH, epochs=1)):
                nn.functional.cross_entropy(model(points), labels).backward()
                if number == 3 and not last:
                    break
                job.step()
                if number == 3:
                    break
        found.append((job.samples, weights_sha256(job.session.engine.anchor)))
    assert found[0] == found[1]
    assert found[0][0] == 4 * BATCH
