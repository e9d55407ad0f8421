"""What ranks must hold alike at rest, beyond weights: buffers of every kind, and what other processors round.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_agreement.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn
from training import CLASSES, FEATURES, SAMPLES, Net, Outcome, delayed, local_tensors, train

from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.sync import agreement
from hetsync.sync.agreement import AnchorMismatchError
from hetsync.sync.digests import weights_sha256
from hetsync.train.session import Session

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Counting(nn.Module):
    """Buffers as users write them: assigned anew, counted up, set once."""

    buffer_rules: ClassVar = {"seen": "sum", "mean": "mean"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.long))
        self.register_buffer("used", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(points)
            self.used = torch.tensor(True)
            self.mean = 0.9 * self.mean + 0.1 * points.mean(0).detach()
        scores: torch.Tensor = self.body(points)
        return scores


def everywhere_alike(plane: Plane, tensors: dict[str, torch.Tensor]) -> bool:
    return len(set(plane.gather_objects(weights_sha256(tensors.values())))) == 1


@BOUNDS
def test_buffers_of_every_kind_are_shared(plane: Plane, bound: int) -> None:
    model = Counting()
    seen: list[int] = []

    def look(outcome: Outcome) -> None:
        seen.append(int(model.seen))
        assert everywhere_alike(plane, model.state_dict())

    outcome = train(plane, delayed(plane, delay_bound=bound), model=model, rests=[72], at_rest=look)
    assert seen == [72, SAMPLES]
    assert model.used
    assert model.mean.abs().max() > 0.05
    anchor = outcome.session.engine.anchor
    assert weights_sha256(anchor) == weights_sha256(local_tensors(model))


@BOUNDS
def test_batches_are_counted_as_on_one_device(plane: Plane, bound: int) -> None:
    model = Net(batch_norm=True)
    train(plane, delayed(plane, delay_bound=bound), model=model, rests=[72])
    counted = plane.gather_objects(int(model.body[2].num_batches_tracked))
    assert len(set(counted)) == 1
    assert counted[0] > 0
    if bound == 0:
        assert counted[0] == SAMPLES // 24


def unfreeze(session: Session) -> None:
    next(session.model.parameters()).requires_grad_(True)


def add_strangers(session: Session) -> None:
    session.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@BOUNDS
@pytest.mark.parametrize(
    ("change", "sentence"), [(unfreeze, "body.0.weight was unfrozen"), (add_strangers, "that the model has not")]
)
def test_what_ranks_would_not_share_is_refused(
    plane: Plane, bound: int, change: Callable[[Session], None], sentence: str
) -> None:
    if plane.size > 1:
        pytest.skip("one rank only: the others would wait")
    model = Net()
    next(model.parameters()).requires_grad_(False)

    def act(session: Session, number: int) -> None:
        if number == 3:
            change(session)

    with pytest.raises(UserError, match=sentence):
        train(plane, delayed(plane, delay_bound=bound), model=model, on_slice=act, optimizer="sgd")


# Processors that round otherwise: played by a rank that changes its weights a little.


def meddling(plane: Plane, by: float) -> Callable[[Session, int], None]:
    def meddle(session: Session, number: int) -> None:
        if plane.rank == plane.size - 1 and number == 1:
            next(session.model.parameters()).data.mul_(1 + by)

    return meddle


@pytest.fixture
def processors(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    if plane.size == 1:
        pytest.skip("needs ranks to compare")
    monkeypatch.setattr(agreement, "processor", lambda device: f"kind {plane.rank}")


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_what_processors_round_otherwise_is_evened_out(plane: Plane, optimizer: str) -> None:
    model = Net(batch_norm=True)
    hook = meddling(plane, 1e-6)
    outcome = train(plane, delayed(plane, delay_bound=0), model=model, optimizer=optimizer, rests=[72], on_slice=hook)
    assert everywhere_alike(plane, model.state_dict())
    assert len(set(plane.gather_objects(weights_sha256(outcome.session.engine.anchor)))) == 1


@pytest.mark.usefixtures("processors")
def test_more_than_rounding_is_no_rounding(plane: Plane) -> None:
    with pytest.raises(AnchorMismatchError, match=r"body.0.weight differs .*, by .* of its largest value"):
        train(plane, delayed(plane, delay_bound=0), on_slice=meddling(plane, 1e-2), optimizer="sgd", rests=[72])


def test_like_processors_must_agree_to_the_bit(plane: Plane) -> None:
    if plane.size == 1:
        pytest.skip("needs ranks to compare")
    with pytest.raises(AnchorMismatchError, match="hold other weights than rank 0 at version"):
        train(plane, delayed(plane, delay_bound=0), on_slice=meddling(plane, 1e-6), optimizer="sgd", rests=[72])
