"""Shared weights are evaluated while training goes on: the same on all ranks, and training does not notice."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from training import BATCH, SAMPLES, Net, assert_invariants, local_tensors, of_unequal_speed, train

from hetsync.config.schema import OuterConfig, SyncConfig
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256
from hetsync.sync.messages import Settings
from hetsync.sync.milestones import Evaluation
from hetsync.sync.watchdog import PROBE_SECONDS
from hetsync.train.session import Session

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]

EVERY = 3 * BATCH


class Witness:
    """Tells what weights it saw; draws random numbers, as an evaluation may."""

    def __init__(self, model: nn.Module, seconds: float = 0.0) -> None:
        self.reports: list[tuple[Evaluation, float]] = []
        self._model = model
        self._seconds = seconds

    def score(self, shares: Sequence[int]) -> dict[str, float]:
        torch.rand(5)
        time.sleep(self._seconds)
        return {weights_sha256(local_tensors(self._model)): 1.0}

    def report(self, evaluation: Evaluation, train_seconds: float) -> None:
        self.reports.append((evaluation, train_seconds))


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("outer", ["identity", "nesterov"])
def test_all_ranks_evaluate_the_same_weights_each_time(plane: Plane, bound: int, outer: str) -> None:
    model = Net(batch_norm=True)
    witness = Witness(model)
    sync = SyncConfig(bound, rebalance=False, outer=OuterConfig(outer))
    outcome = train(
        plane,
        sync,
        model=model,
        samples=4 * SAMPLES,
        rests=[2 * SAMPLES],
        device=of_unequal_speed(plane.rank),
        evaluate_every=EVERY,
        scorer=witness,
    )
    assert_invariants(plane, [outcome], 4 * SAMPLES, bound)
    if plane.rank != 0:
        assert not witness.reports
        return
    assert len(witness.reports) >= 4  # ranks that get no processor for long evaluate seldom
    applied = [evaluation.samples_applied for evaluation, _ in witness.reports]
    assert applied == sorted(set(applied))
    seen = [tuple(part) for evaluation, _ in witness.reports for part in evaluation.parts]
    for evaluation, _ in witness.reports:
        assert len(evaluation.parts) == plane.size
        assert len({digest for part in evaluation.parts for digest in part}) == 1, "ranks saw different weights"
    assert len(set(seen)) == len(witness.reports), "some weights were seen twice"
    seconds = [seconds for _, seconds in witness.reports]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] <= seconds[-1] <= outcome.session.totals.train_seconds


def test_synchronous_training_is_the_same_with_and_without(plane: Plane) -> None:
    sync = SyncConfig(0, rebalance=False)
    without = train(plane, sync, model=Net(dropout=0.3))
    model = Net(dropout=0.3)
    witness = Witness(model)
    with_them = train(plane, sync, model=model, evaluate_every=EVERY, scorer=witness)
    assert plane.rank != 0 or witness.reports
    for mine, plain in zip(with_them.weights, without.weights, strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bound", [0, 4])
def test_evaluation_is_not_training_time(plane: Plane, bound: int) -> None:
    """Each sleeps longer than the whole job trains."""
    model = Net()
    witness = Witness(model, seconds=0.5)
    began = time.monotonic()
    outcome = train(plane, SyncConfig(bound, rebalance=False), model=model, evaluate_every=SAMPLES // 2, scorer=witness)
    assert time.monotonic() - began > outcome.session.totals.train_seconds + 0.5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.thorough), 4])
def test_an_evaluation_may_last_longer_than_a_rank_may_be_silent(plane: Plane, bound: int) -> None:
    """All ranks do their part at once: nobody is late, though nothing moves for longer than limit and probe."""
    model = Net()
    witness = Witness(model, seconds=PROBE_SECONDS + 2.0)
    sync = SyncConfig(bound, rebalance=False)
    every = SAMPLES // 2 + BATCH  # once
    outcome = train(plane, sync, model=model, evaluate_every=every, scorer=witness, timeout_seconds=1.5)
    assert_invariants(plane, [outcome], SAMPLES, bound)
    assert plane.rank != 0 or len(witness.reports) == 1


def test_modes_change_between_evaluations(plane: Plane) -> None:
    model, samples = Net(batch_norm=True), 6 * SAMPLES
    witness = Witness(model, seconds=0.01)
    course = [Settings(0, 0.25, 1), Settings(4, 0.25, 1), Settings(0, 0.25, 2), Settings(1, 1.0, 2)]
    left = list(course)

    def tune(session: Session, number: int) -> None:
        if plane.rank == 0 and left and number % 4 == 3:
            session.tune(left.pop(0))

    outcome = train(
        plane,
        SyncConfig(4, rebalance=False),
        model=model,
        samples=samples,
        device=of_unequal_speed(plane.rank),
        on_slice=tune,
        evaluate_every=2 * BATCH,
        scorer=witness,
    )
    assert_invariants(plane, [outcome], samples, 4)
    assert outcome.session.settings == course[-1]
    if plane.rank == 0:
        assert len(witness.reports) >= 4
    for evaluation, _ in witness.reports:
        assert len({digest for part in evaluation.parts for digest in part}) == 1, "ranks saw different weights"
