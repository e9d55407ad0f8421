"""Losses that are means over other units than samples, and slices with nothing to learn.

At D = 0 a loop is equal to the same loop in one process, which sees the whole batch's units; at D = 4 it learns, and
counts each sample once an epoch.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_loops_units.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Result, Seen, check
from loops import loader as shuffled
from plain_job import (
    Body,
    Loop,
    PlainJob,
    Row,
    assert_equal,
    assert_learned,
    assert_used_once_an_epoch,
    in_a_job,
    in_one_process,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from training import BATCH, CLASSES, FEATURES, Blobs, Net, loss_on_all

from hetsync.errors import UserError
from hetsync.plane.base import Plane

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 3)]

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0])


def labelled(points: torch.Tensor, share: float = 0.14) -> torch.Tensor:
    """So many of the samples, and none of many a slice of few."""
    return points[:, 0].sub(points[:, 0].floor()) < share


def over_labelled(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over few of the samples, nan over none."""
    known = labelled(points)
    return cross_entropy(loop.model(points), labels.where(known, -100), ignore_index=-100), known.sum()


def tokens(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loss, count = over_labelled(loop, points, labels)
    loop.job.backward(loss, weight=count)
    loop.job.step()


def clipped(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    with loop.job.autocast():
        loss, count = over_labelled(loop, points, labels)
    loop.job.backward(loss, weight=count)
    loop.job.clip_grad_norm_(loop.model.parameters(), 0.3)
    loop.job.step()


def clipped_by_torch(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Also of slices in which nothing is labelled, which have no gradient of their own to be clipped."""
    loss, count = over_labelled(loop, points, labels)
    loop.job.backward(loss, weight=count)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    loop.job.step()


class Branches(nn.Module):
    """A weight a branch, by where a point is; in a small slice some have none."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.branches = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(8))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores = self.last(points)
        number = (points[:, 0] * 100).long() % len(self.branches)
        for place, branch in enumerate(self.branches):
            if (here := number == place).any():
                scores = scores.index_add(0, here.nonzero()[:, 0], branch(points[here]))
        return scores


def branches_clipped_by_torch(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.job.backward(cross_entropy(loop.model(points), labels))
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.job.step()


def twice(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loss, count = over_labelled(loop, points, labels)
    known = labelled(points)
    loop.job.backward(loss, weight=count)
    loop.job.backward(0.1 * loop.model(points[known]).square().mean(), weight=count)
    loop.job.step()


def one_loss_of_both(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """As a loss with two denominators is told to be."""
    scores, units = loop.model(points), CLASS_WEIGHTS[labels].sum()
    first = cross_entropy(scores, labels, weight=CLASS_WEIGHTS, reduction="sum")
    loop.job.backward((first + 0.1 * scores.square().sum()) / units, weight=units)
    loop.job.step()


def micro_batches(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """The loop's own, of other units each."""
    units = CLASS_WEIGHTS[labels].sum()
    for part, known in zip(points.split(3), labels.split(3), strict=True):
        total = cross_entropy(loop.model(part), known, weight=CLASS_WEIGHTS, reduction="sum")
        loop.job.backward(total / units, weight=units)
    loop.job.step()


def classes(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loss = cross_entropy(loop.model(points), labels, weight=CLASS_WEIGHTS)
    loop.job.backward(loss, weight=CLASS_WEIGHTS[labels].sum())
    loop.job.step()


def masked(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """As it is most often written: over an empty mask its gradients are nan, too."""
    mask = labelled(points).float()
    losses = cross_entropy(loop.model(points), labels, reduction="none")
    loop.job.backward((losses * mask).sum() / mask.sum(), weight=mask.sum())
    loop.job.step()


def chosen(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    losses = cross_entropy(loop.model(points), labels, reduction="none")
    loop.job.backward(losses.masked_select(labelled(points)).mean(), weight=int(labelled(points).sum()))
    loop.job.step()


def own_scaler(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loss, count = over_labelled(loop, points, labels)
    if isinstance(loop.job, PlainJob):
        loop.scaler.scale(loss).backward()
    else:
        loop.job.backward(loss, weight=count)
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def skipping_scaled(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Unscaled by step, and not clipped."""
    known = labelled(points)
    if not known.any():
        return
    loss = cross_entropy(loop.model(points[known]), labels[known])
    if isinstance(loop.job, PlainJob):
        loop.scaler.scale(loss).backward()
    else:
        loop.job.backward(loss, weight=known.sum())
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def skipping_scaled_clipped(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """By torch's own clip, whose bound is not reached: then ranks that skip make the same step."""
    known = labelled(points)
    if not known.any():
        return
    loss = cross_entropy(loop.model(points[known]), labels[known])
    if isinstance(loop.job, PlainJob):
        loop.scaler.scale(loss).backward()
    else:
        loop.job.backward(loss, weight=known.sum())
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e3)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def skipping(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """A filter that leaves nothing of some slices."""
    known = labelled(points)
    if not known.any():
        return
    loop.optimizer.zero_grad()
    loop.job.backward(cross_entropy(loop.model(points[known]), labels[known]), weight=known.sum())
    loop.optimizer.step()


def skipping_clipped(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    if labelled(points).any():
        clipped(loop, points, labels)


def skipping_by_hand(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """With K = 2 steps that are not due, and clip nothing, come between."""
    loss, count = over_labelled(loop, points, labels)
    if count or not loop.number:
        loop.job.backward(loss, weight=count)
        loop.job.clip_grad_norm_(loop.model.parameters(), 0.3)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def skipping_plain(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Slices are skipped whole, and the others count by their samples: what one process makes of the rest."""
    rest = torch.arange(len(points)) if loop.job.rank == 0 else torch.arange(0)
    if len(rest):
        cross_entropy(loop.model(points[rest]), labels[rest]).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def decay(loop: Loop) -> torch.Tensor:
    """By hand: a sum over weights, and over no samples."""
    return 0.01 * torch.stack([weight.pow(2).sum() for weight in loop.model.parameters()]).sum()


def sum_and_penalty(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.job.backward(cross_entropy(loop.model(points), labels, reduction="sum") / BATCH, reduction="sum")
    loop.job.backward(decay(loop))
    loop.job.step()


def scaled_mean_and_penalty(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.job.backward(
        BATCH * (cross_entropy(loop.model(points), labels, reduction="none") / BATCH).mean() + decay(loop)
    )
    loop.job.step()


ROWS = {
    "tokens": Row(body=tokens),
    "tokens, K = 3": Row(body=tokens, accumulation=3, falls_to=0.9),
    "tokens, without overlap": Row(body=tokens, settings={"overlap": False}),
    "tokens, small buckets": Row(body=tokens, settings={"bucket_bytes": 64}),
    "tokens, clipped": Row(body=clipped, falls_to=0.7),
    "tokens, clipped by torch": Row(body=clipped_by_torch, falls_to=0.7),
    "tokens, clipped by torch, K = 2": Row(body=clipped_by_torch, accumulation=2, falls_to=0.8),
    "branches, clipped by torch": Row(body=branches_clipped_by_torch, model=Branches, falls_to=0.9),
    "tokens, bfloat16 weights of the wire": Row(body=tokens, settings={"wire": "bfloat16"}, tolerance=0.02),
    "tokens, bfloat16": Row(body=clipped, precision="bfloat16", tolerance=0.05, falls_to=0.7),
    "tokens, own scaler": Row(body=own_scaler, scaler=True, falls_to=0.7),
    "several backwards": Row(body=twice, settings={"overlap": False}, falls_to=0.8),
    "several backwards, K = 2": Row(body=twice, accumulation=2, falls_to=0.9),
    "one loss of both": Row(body=one_loss_of_both, falls_to=0.9),
    "one loss of both, K = 2": Row(body=one_loss_of_both, accumulation=2, falls_to=0.9),
    "micro-batches": Row(body=micro_batches, settings={"overlap": False}, falls_to=0.9),
    "micro-batches, K = 2": Row(body=micro_batches, accumulation=2, falls_to=0.9, settings={"overlap": False}),
    "class weights": Row(body=classes, falls_to=0.9),
    "a sum, and a penalty by itself": Row(body=sum_and_penalty),
    "a sum as a mean, with a penalty": Row(body=scaled_mean_and_penalty),
    "masked": Row(body=masked),
    "chosen": Row(body=chosen),
    "skipping": Row(body=skipping),
    "skipping, K = 2": Row(body=skipping, accumulation=2, falls_to=0.9),
    "skipping, clipped": Row(body=skipping_clipped, falls_to=0.7),
    "skipping, clipped, steps by hand, K = 2": Row(body=skipping_by_hand, accumulation=2, falls_to=0.9),
    "skipping, own scaler, torch's clip": Row(body=skipping_scaled_clipped, scaler=True),
    "skipping, own scaler": Row(body=skipping_scaled, scaler=True),
}
EACH = pytest.mark.parametrize("name", ROWS)
SOME = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (place % 4 > 0)) for place, name in enumerate(ROWS)]
)  # of those whose numbers are looked at without delay


@EACH
def test_synchronous_loops_are_one_process(plane: Plane, name: str) -> None:
    row = ROWS[name]
    mine = in_a_job(plane, row, 0)
    assert_used_once_an_epoch(plane, mine)
    assert_equal(plane, mine, in_one_process(row), row.tolerance)


@SOME
def test_delayed_loops_learn(plane: Plane, name: str) -> None:
    loop = in_a_job(plane, ROWS[name], 4)
    assert_learned(loop, ROWS[name].falls_to)
    assert_used_once_an_epoch(plane, loop)


def idle(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """A constant, in two batches of three; in one of these the rank's own."""
    if loop.number % 3 == 0 or (loop.number % 3 == 1 and loop.job.rank == 0):
        loop.job.backward(torch.tensor(0.0), weight=0)
    else:
        loop.job.backward(cross_entropy(loop.model(points), labels))
    loop.job.step()


def without_number(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """The loss of an empty mask, whose gradients are zeros: for all ranks in some batches, for some in others."""
    losses = cross_entropy(loop.model(points), labels, reduction="none")
    empty = loop.number % 3 == 0 or (loop.number % 3 == 1 and loop.job.rank == 0)
    loop.job.backward(losses.masked_select(torch.full((len(points),), not empty)).mean())
    loop.job.step()


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("body", [idle, without_number, skipping_plain])
def test_slices_with_nothing_to_learn_are_left_out(plane: Plane, body: Body, bound: int) -> None:
    loop = in_a_job(plane, Row(body=body), bound)
    assert_learned(loop, 0.9)
    assert_used_once_an_epoch(plane, loop)


@pytest.mark.parametrize("body", [idle, without_number])
def test_a_slice_with_nothing_to_learn_is_not_in_the_mean(plane: Plane, body: Body) -> None:
    """SGD without momentum: the step is that of the other ranks' gradient, by their own samples."""
    steps: list[torch.Tensor] = []

    def noted(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        before = [weight.detach().clone() for weight in loop.model.parameters()]
        gradients = torch.autograd.grad(cross_entropy(loop.model(points), labels), [*loop.model.parameters()])
        body(loop, points, labels)
        moved = [(b - w.detach()) / 0.1 for b, w in zip(before, loop.model.parameters(), strict=True)]
        if loop.number % 3 == 1 and plane.size == 2 and loop.job.rank == 1:
            steps.append(max((m - g).abs().max() for m, g in zip(moved, gradients, strict=True)))

    in_a_job(plane, Row(body=noted, optimizer=lambda model: SGD(model.parameters(), lr=0.1)), 0)
    assert all(off < 1e-5 for off in steps)
    assert len(steps) > 3 or plane.size != 2 or plane.rank != 1


@pytest.mark.parametrize("bound", [0, 4])
def test_a_rank_that_skips_before_it_has_clipped_cannot_step_alike(plane: Plane, bound: int) -> None:
    refused: list[str] = []

    def body(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        if loop.number == 0 and plane.rank == 1:
            return
        loop.job.backward(cross_entropy(loop.model(points), labels))
        try:
            loop.job.clip_grad_norm_(loop.model.parameters(), 0.3)
        except UserError as mistake:
            refused.append(str(mistake))
        loop.job.step()

    in_a_job(plane, Row(body=body), bound)
    alike = bound > 0 or plane.size == 1 or plane.rank == 1
    assert len(refused) == (0 if alike else 1)
    assert all("has skipped before it had ever clipped" in each for each in refused)


def scheduled(job: Any, seen: Seen) -> Result:
    """Two optimizers whose weights take turns, a scheduler, a loop that skips."""
    model = Net()
    first, last = SGD(model.body[0].parameters(), lr=0.1), SGD(model.body[-1].parameters(), lr=0.05, momentum=0.9)
    scheduler = ExponentialLR(first, 0.99)
    *_, scheduler, batches = job.prepare(model, first, last, scheduler, shuffled())
    data = Blobs()
    result = Result(model, first_loss=loss_on_all(model, data))
    for epoch in job.epochs(3):
        for number, (points, labels, indices) in enumerate(batches):
            seen.indices[epoch] += indices.tolist()
            known = labelled(points, 0.3)
            if number and not known.any():  # at first the scheduler is still to be stepped
                continue
            job.backward(cross_entropy(model(points[known]), labels[known]), weight=known.sum())
            job.step()
            scheduler.step()
        seen.at_rest(model, optimizers=(first, last))
    result.loss = loss_on_all(model, data)
    return result


@pytest.mark.parametrize("bound", [0, 4])
def test_two_optimizers_and_a_scheduler(plane: Plane, bound: int) -> None:
    check(plane, scheduled, bound)


def test_units_are_what_moves_the_anchor(plane: Plane) -> None:
    """Delayed mode, gradients of 1: whatever is merged with what, all samples' units make the way that one process
    makes of them, as far as their average is known."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(torch.zeros(1))

        def forward(self, points: torch.Tensor) -> torch.Tensor:
            return self.at.expand(len(points), CLASSES)

    def moves(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        loop.job.backward(loop.model(points).mean(), weight=labelled(points).sum())
        loop.job.step()

    row = Row(body=moves, model=Line, optimizer=lambda model: SGD(model.parameters(), lr=1.0), accumulation=2)
    loop = in_a_job(plane, row, 4, epochs=12)
    assert float(loop.model.at) == pytest.approx(-12 * 192 / 24, rel=0.06)  # type: ignore[arg-type]


def two_weights(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Each loss a mean over units of its own."""
    labels_known, known = over_labelled(loop, points, labels)
    loop.job.backward(labels_known, weight=known)
    loop.job.backward(0.1 * loop.model(points).square().mean(), weight=points.numel())
    loop.job.step()


def test_two_weights_in_one_slice_count_each_by_its_own_average(plane: Plane) -> None:
    assert_learned(in_a_job(plane, Row(body=two_weights), 4), 0.9)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_weights_in_one_slice_are_exact_where_it_is_the_whole_step(
    plane: Plane, accumulation: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """At D = 0 what slices sum up to has one denominator."""
    row = Row(body=two_weights, accumulation=accumulation)
    if plane.size > 1:
        pytest.skip("a mistake ends all processes")
    if accumulation == 1:
        assert_equal(plane, in_a_job(plane, row, 0), in_one_process(row), row.tolerance)
    else:
        with pytest.raises(SystemExit):
            in_a_job(plane, row, 0)
        assert "units in one slice, but" in capfd.readouterr().err
