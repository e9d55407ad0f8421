"""What works in a loop of a user's own, part one: number formats, gradients and what is done to them.

At D = 0 a row is equal to the same loop in one process; at D = 4 it learns, and counts each sample once an epoch.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_loops_numbers.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
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
    make_scaler,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from training import BATCH, CLASSES, FEATURES, Blobs, Net

from hetsync.config.parser import recipe_of
from hetsync.plane.base import Plane
from hetsync.train.job import Job

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

BFLOAT16 = 2**-8  # distance of neighbours

# Bodies: what a loop does with a batch.


def plain(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loss = cross_entropy(loop.model(points), labels)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def zero_grad_first(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.optimizer.zero_grad()
    cross_entropy(loop.model(points), labels).backward()
    loop.optimizer.step()


def zeros_first(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    cross_entropy(loop.model(points), labels).backward()
    loop.optimizer.step()


def steps_on_scaled(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Plainly, where one process would call the scaler."""
    loop.job.backward(cross_entropy(loop.model(points), labels))
    if isinstance(loop.job, PlainJob):
        loop.job.step(loop.optimizer)
    else:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def by_job(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    with loop.job.autocast():
        loss = cross_entropy(loop.model(points), labels)
    loop.job.backward(loss)
    loop.job.step(loop.optimizer)


def own_autocast(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(loop.model(points), labels)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def clipped(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    with loop.job.autocast():
        loss = cross_entropy(loop.model(points), labels)
    loop.job.backward(loss)
    loop.job.clip_grad_norm_(loop.model.parameters(), 0.3)
    loop.job.step(loop.optimizer)


def own_scaler(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = cross_entropy(loop.model(points), labels)
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def own_scaler_skips(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """All ranks alike, once they have seen the gradients' norm."""
    loop.scaler.scale(cross_entropy(loop.model(points), labels)).backward()
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    if loop.number != 3:
        loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


# What a loop does with gradients between backward and step, by torch alone.


def changes(change: Callable[[nn.Module], object], by_job: bool = False) -> Body:
    def body(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        loss = cross_entropy(loop.model(points), labels)
        loop.job.backward(loss) if by_job else loss.backward()
        change(loop.model)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    return body


def clips(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def clips_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clips_through_data(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.data.clamp_(-0.01, 0.01)


def clips_by_names_of_before(model: nn.Module) -> None:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    torch._foreach_mul_(gradients, 0.3 / max(0.3, float(norm)))


def centralizes(model: nn.Module) -> None:
    """Gradients of matrices have a mean of zero."""
    for weight in model.parameters():
        if weight.grad is not None and weight.grad.dim() > 1:
            weight.grad = weight.grad - weight.grad.mean(1, keepdim=True)


def takes_signs(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            torch.sign(weight.grad, out=weight.grad)


def zeros(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def normalizes(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad = weight.grad / (1 + weight.grad.norm())


def mends_all_in_one(model: nn.Module) -> None:
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([weight.grad.flatten() for weight in weights]).nan_to_num(0.0, 1e5, -1e5)  # type: ignore[union-attr]
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)


def halves_by_names_of_another_batch(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    cross_entropy(loop.model(points), labels).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    found = [weight.grad for weight in loop.model.parameters() if weight.grad is not None]
    names = loop.__dict__.setdefault("names", found)
    torch._foreach_mul_(names, 0.5)
    loop.optimizer.step()


def clips_with_graph(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points), labels).backward(create_graph=True)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def looks_and_steps_every_second(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.job.backward(cross_entropy(loop.model(points), labels) / 2)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    if loop.number % 2:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def clips_twice_back(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """After two backward calls."""
    half = len(points) // 2
    for part in (slice(half), slice(half, None)):
        if len(points[part]):
            share = len(points[part]) / len(points)
            (cross_entropy(loop.model(points[part]), labels[part]) * share).backward()
    clips(loop.model)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def clips_every_third(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Gradients that have been added up over batches."""
    (cross_entropy(loop.model(points), labels) / 3).backward()
    if loop.number % 3 == 2:
        clips(loop.model)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def looks_every_time(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """At gradients that are added up over batches."""
    (cross_entropy(loop.model(points), labels) / 3).backward()
    assert all(float(weight.grad.norm()) >= 0 for weight in loop.model.parameters() if weight.grad is not None)
    if loop.number % 3 == 2:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def one_rank_looks(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points), labels).backward()
    if loop.job.rank == 0:
        assert float(next(loop.model.parameters()).grad.norm()) >= 0  # type: ignore[union-attr]
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def in_bfloat16(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points.bfloat16()), labels).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def in_the_weights_own(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points.to(next(loop.model.parameters()).dtype)), labels).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def several_backwards(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points), labels).backward()
    (0.1 * loop.model(points).square().mean()).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def auxiliary_loss(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    scores = loop.model(points)
    penalty = sum(weight.square().sum() for weight in loop.model.parameters())
    loop.job.backward(cross_entropy(scores, labels) + 0.1 * scores.abs().mean() + 1e-3 * penalty)
    loop.job.step()


def summed(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Two backward passes of sums, as of a variational autoencoder's."""
    loop.job.backward(0.02 * cross_entropy(loop.model(points), labels, reduction="sum"), reduction="sum")
    loop.job.backward(1e-3 * loop.model(points).square().sum(), reduction="sum")
    loop.job.step()


def second_derivatives(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    points = points.clone().requires_grad_()
    scores = loop.model(points)
    (slope,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
    loop.job.backward(cross_entropy(scores, labels) + 0.1 * slope.square().sum(1).mean())
    loop.job.step()


def every_third(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Accumulation as scripts have it; what is left at an epoch's end goes into the next epoch's first step."""
    (cross_entropy(loop.model(points), labels) / 3).backward()
    if (loop.number + 1) % 3 == 0:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def every_third_and_last(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    (cross_entropy(loop.model(points), labels) / 3).backward()
    if (loop.number + 1) % 3 == 0 or loop.number + 1 == loop.batches:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def every_second_by_job(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    with loop.job.autocast():
        loss = cross_entropy(loop.model(points), labels) / 2
    loop.job.backward(loss)
    if loop.number % 2:
        loop.job.clip_grad_norm_(loop.model.parameters(), 0.3)
        loop.job.step(loop.optimizer)


def skips_a_batch(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """All ranks skip alike."""
    loss = cross_entropy(loop.model(points), labels)
    if loop.number == 3:
        return
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step()


# Models.


class Fourier(nn.Module):
    """A layer of complex weights on the features' spectrum, as neural operators have them."""

    def __init__(self, dtype: torch.dtype = torch.cfloat) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.Parameter(0.3 * torch.randn(FEATURES // 2 + 1, 8, dtype=dtype))
        self.classify = nn.Linear(8, CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classify(
            (torch.fft.rfft(points).to(self.weights.dtype) @ self.weights).abs().float()
        )
        return found


class Looked(nn.Module):
    """Rows of a table, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(50, 8, sparse=True)
        self.classify = nn.Linear(8 + FEATURES, CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        rows = self.table((7 * points[:, 0]).long().abs() % 50)
        found: torch.Tensor = self.classify(torch.cat([rows, points], 1))
        return found


class Pictures(nn.Module):
    """Convolutions over the features as a picture, in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(
            nn.Unflatten(1, (FEATURES, 1, 1)), nn.Conv2d(FEATURES, 16, 3, padding=1), nn.Tanh(), nn.Flatten()
        )
        self.last = nn.Linear(16, CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.body(points))
        return scores


class PartlyUnused(Net):
    """Its first weight never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self._parameters = {"unused": nn.Parameter(torch.ones(3, 2)), **self._parameters}


class Recomputed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)  # a reentrant checkpoint needs inputs that require a gradient
        self.reentrant = reentrant

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = checkpoint(self.body, self.first(points), use_reentrant=self.reentrant)
        return scores


def channels_last() -> nn.Module:
    return Pictures().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """They take it for granted that gradients and states lie in memory as their weights do."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def gentle(model: nn.Module) -> torch.optim.Optimizer:
    """For absolute values, whose gradients jump: at the rows' own rate a delayed loop of them may diverge."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def small_steps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001)


ROWS = {
    "plain": Row(body=plain),
    "zero_grad first": Row(body=zero_grad_first),
    "zeros first": Row(body=zeros_first),
    "by job": Row(body=by_job),
    "by job, AdamW": Row(body=by_job, optimizer=adamw),
    "bfloat16": Row(body=by_job, precision="bfloat16", tolerance=8 * BFLOAT16),
    "bfloat16, own autocast": Row(body=own_autocast, tolerance=8 * BFLOAT16),
    "float16": Row(body=by_job, precision="float16", tolerance=0.01),
    "float16, clipped": Row(body=clipped, precision="float16", tolerance=0.01),
    "own scaler": Row(body=own_scaler, scaler=True, tolerance=0.01),
    "steps on scaled gradients": Row(body=steps_on_scaled, precision="float16", tolerance=0.01),
    "own scaler, skips": Row(body=own_scaler_skips, scaler=True),
    "bfloat16 weights": Row(body=in_bfloat16, model=lambda: Net().bfloat16(), tolerance=16 * BFLOAT16),
    "channels_last": Row(body=plain, model=channels_last),
    "channels_last, fused": Row(body=plain, model=channels_last, optimizer=fused),
    "torch.compile": Row(body=plain, wrap=compiled),
    "model.compile": Row(body=plain, wrap=compiled_in_place),
    "checkpoint, reentrant": Row(body=plain, model=lambda: Recomputed(True)),
    "checkpoint": Row(body=plain, model=lambda: Recomputed(False)),
    "complex weights": Row(body=plain, model=Fourier, optimizer=gentle),
    "complex weights, double": Row(body=plain, model=lambda: Fourier(torch.cdouble), optimizer=gentle),
    "complex weights, clipped, AdamW": Row(body=clipped, model=Fourier, optimizer=adamw, tolerance=1e-3),
    "complex weights, K = 2": Row(body=plain, model=Fourier, optimizer=gentle, accumulation=2),
    "sparse gradients": Row(body=plain, model=Looked, optimizer=sgd),
    "second derivatives": Row(body=second_derivatives, falls_to=0.9),
    "clipped": Row(body=clipped),
    "clipped, AdamW": Row(body=clipped, optimizer=adamw),
    "several backwards": Row(body=several_backwards, falls_to=0.7),
    "auxiliary loss": Row(body=auxiliary_loss, falls_to=0.7),
    "sums": Row(body=summed, falls_to=0.7),
    "sums, K = 2": Row(body=summed, accumulation=2, falls_to=0.7),
    "own accumulation": Row(body=every_third, falls_to=0.7),
    "own accumulation, rest stepped": Row(body=every_third_and_last, falls_to=0.7),
    "own accumulation by job": Row(body=every_second_by_job, falls_to=0.8),
    "own accumulation, float16": Row(body=every_second_by_job, precision="float16", tolerance=0.02, falls_to=0.8),
    "K = 2, own scaler": Row(body=own_scaler, scaler=True, accumulation=2, tolerance=0.02),
    "K = 2": Row(body=plain, accumulation=2),
    "K = 3 by job": Row(body=clipped, accumulation=3),
    "skips": Row(body=skips_a_batch),
    "clips by itself": Row(body=changes(clips)),
    "clips by itself, AdamW": Row(body=changes(clips), optimizer=adamw),
    "clips by itself, K = 3": Row(body=changes(clips), accumulation=3),
    "clips by itself, two backwards": Row(body=clips_twice_back, falls_to=0.7),
    "clips by itself, own accumulation": Row(body=clips_every_third, falls_to=0.8),
    "clips values": Row(body=changes(clips_values), falls_to=0.95),
    "clips values through data": Row(body=changes(clips_through_data), falls_to=0.95),
    "clips by names of before": Row(body=changes(clips_by_names_of_before)),
    "centralizes": Row(body=changes(centralizes), falls_to=0.7),
    "takes signs": Row(body=changes(takes_signs), optimizer=small_steps, falls_to=0.95),
    "zeros between": Row(body=changes(zeros), falls_to=1.001),
    "no gradient, normalized": Row(body=changes(normalizes, True), model=PartlyUnused, optimizer=decaying),
    "no gradient, mended in one": Row(body=changes(mends_all_in_one, True), model=PartlyUnused, optimizer=decaying),
    "no gradient, every second": Row(
        body=looks_and_steps_every_second, model=PartlyUnused, optimizer=decaying, falls_to=0.8
    ),
    "names of another batch": Row(body=halves_by_names_of_another_batch, falls_to=0.8),
    "a graph, clipped": Row(body=clips_with_graph),
    "looks every time": Row(body=looks_every_time, falls_to=0.8),
    "one rank looks": Row(body=one_rank_looks),
}
EACH = pytest.mark.parametrize("name", ROWS)
SOME = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (place % 4 > 0)) for place, name in enumerate(ROWS)]
)  # of those whose numbers are looked at without delay


@EACH
def test_synchronous_loops_are_one_process(plane: Plane, name: str) -> None:
    row = ROWS[name]
    loop = in_a_job(plane, row, 0)
    assert_equal(plane, loop, in_one_process(row), row.tolerance)
    assert_used_once_an_epoch(plane, loop)


def test_norms_that_a_loop_looks_at_are_those_of_one_process(plane: Plane) -> None:
    """On the rank that looks, whatever the others do."""

    def looking(norms: list[float], who: Callable[[Loop], bool]) -> Body:
        def body(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
            cross_entropy(loop.model(points), labels).backward()
            if who(loop):
                norms.append(float(nn.utils.get_total_norm([weight.grad for weight in loop.model.parameters()])))
            loop.optimizer.step()
            loop.optimizer.zero_grad()

        return body

    last, alone = [], []
    in_a_job(plane, Row(body=looking(last, lambda loop: loop.job.rank == plane.size - 1)), 0)
    in_one_process(Row(body=looking(alone, lambda loop: True)))
    assert last == (pytest.approx(alone, rel=1e-4) if plane.rank == plane.size - 1 else [])


@SOME
def test_delayed_loops_learn(plane: Plane, name: str) -> None:
    row = ROWS[name]
    loop = in_a_job(plane, row, 4)
    assert_learned(loop, row.falls_to)
    assert_used_once_an_epoch(plane, loop)


@pytest.mark.usefixtures("float64_by_default")
@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_float64_may_be_the_default(plane: Plane, dtype: torch.dtype, bound: int) -> None:
    """Sums are float32, whatever the weights are."""
    row = Row(body=in_the_weights_own, model=lambda: Net(batch_norm=True).to(dtype), falls_to=0.7)
    loop = in_a_job(plane, row, bound)
    assert_used_once_an_epoch(plane, loop)
    assert_learned(loop, row.falls_to)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_last_batch_that_leaves_a_rank_without_samples(plane: Plane, bound: int) -> None:
    """The ledger's last round of an epoch has one sample: only one rank has a batch, and makes the step."""
    data = Blobs(8 * BATCH + 1)
    row = Row(body=every_third_and_last)
    loop = in_a_job(plane, row, bound, data)
    assert_used_once_an_epoch(plane, loop, len(data))
    assert_learned(loop, 0.7)


# Infinities and scales.


def test_an_unprepared_scaler_is_each_rank_s_own_in_delayed_mode(plane: Plane) -> None:
    def scales(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        scaler.scale(cross_entropy(loop.model(points), labels)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = in_a_job(plane, Row(body=scales), 4)
    assert_learned(loop, 0.6)


def overflowing(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """In the fourth batch of each epoch, on the last rank only (in one process, too)."""
    loss = cross_entropy(loop.model(points), labels)
    if loop.number == 3 and getattr(loop.job, "rank", 0) == getattr(loop.job, "size", 1) - 1:
        loss = loss * torch.inf
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def overflowing_by_job(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loss = cross_entropy(loop.model(points), labels)
    if loop.number == 3 and getattr(loop.job, "rank", 0) == getattr(loop.job, "size", 1) - 1:
        loss = loss * torch.inf
    loop.job.backward(loss)
    loop.job.step(loop.optimizer)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_synchronous_ranks_skip_alike_where_one_overflows(plane: Plane, wire: str) -> None:
    row = Row(body=overflowing, scaler=True, tolerance=1e-5 if wire == "float32" else 0.1)
    loop, alone = in_a_job(plane, row, 0, wire=wire), in_one_process(row)
    assert_equal(plane, loop, alone, row.tolerance)
    states = plane.gather_objects(loop.scaler.state_dict())
    assert states == [alone.scaler.state_dict()] * plane.size
    assert loop.scaler.get_scale() != 1024.0


def test_synchronous_ranks_skip_alike_by_job(plane: Plane) -> None:
    row = Row(body=overflowing_by_job, precision="float16")
    assert_equal(plane, in_a_job(plane, row, 0), in_one_process(row), row.tolerance)


@pytest.mark.parametrize("body", [overflowing, overflowing_by_job])
def test_delayed_ranks_skip_for_themselves_and_lose_no_sample(plane: Plane, body: Body) -> None:
    row = Row(body=body, scaler=body is overflowing, precision="float16")
    loop = in_a_job(plane, row, 4)
    assert_used_once_an_epoch(plane, loop)
    assert_learned(loop, 0.6)
    if loop.scaler is not None:  # one at rest
        assert len(set(plane.gather_objects(loop.scaler.get_scale()))) == 1


def test_ranks_scale_alike_after_a_batch_that_one_of_them_had_no_part_in(plane: Plane) -> None:
    """Scales that differ between ranks would weigh their gradients."""

    def scaled(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        scales.append((loop.number, loop.scaler.get_scale()))
        loop.scaler.scale(cross_entropy(loop.model(points), labels)).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad()

    scales: list[tuple[int, float]] = []
    data = Blobs(8 * BATCH + 1)
    in_a_job(plane, Row(body=scaled, scaler=True), 0, data)
    whole = [theirs for theirs in ([s for n, s in each if n < 8] for each in plane.gather_objects(scales))]
    assert all(theirs == whole[0] for theirs in whole)
    assert max(whole[0]) > 1024.0


@pytest.mark.parametrize("bound", [0, 4])
def test_a_scaler_goes_on_where_it_was(plane: Plane, folder: Path, bound: int) -> None:
    """An epoch, and two more of a job that is resumed."""

    def tells_its_scale(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        scales.append(loop.scaler.get_scale())
        overflowing(loop, points, labels)

    scales: list[float] = []
    row = Row(body=tells_its_scale, scaler=True)
    whole = in_a_job(plane, row, bound)
    first = in_a_job(plane, row, bound, epochs=1, run=str(folder / "run"))
    before = len(scales)
    resumed = in_a_job(plane, row, bound, run=str(folder / "run"), resume=True)
    assert scales[before] == first.scaler.get_scale()
    assert len(set(plane.gather_objects(scales[before]))) == 1
    if bound == 0:
        assert first.scaler.get_scale() < 1024.0
        assert resumed.scaler.state_dict() == whole.scaler.state_dict()
        assert_equal(plane, resumed, whole, 1e-6)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_model_that_is_lost_is_said_to_be(plane: Plane, capfd: pytest.CaptureFixture[str], bound: int) -> None:
    """A GradScaler would skip its steps for ever."""

    def loses(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        loop.job.backward(cross_entropy(loop.model(points), labels) * torch.nan)
        loop.job.step()

    if plane.size > 1:
        pytest.skip("one rank only: a mistake ends all processes")
    with pytest.raises(SystemExit):
        in_a_job(plane, Row(body=loses, precision="float16"), bound, Blobs(40 * BATCH))
    assert "has fallen to" in capfd.readouterr().err


# What cannot work. Sentences of several ranks: tests/fault/test_loop_mistakes.py.


def no_step(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points), labels).backward()


def no_backward(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.optimizer.step()


def no_backward_by_job(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.job.step()


def two_steps(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    plain(loop, points, labels)
    plain(loop, points, labels)


def zero_grad_between(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points), labels).backward()
    loop.optimizer.zero_grad()
    loop.optimizer.step()


def unprepared_scaler(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    scaler = make_scaler()
    scaler.scale(cross_entropy(loop.model(points), labels)).backward()
    scaler.step(loop.optimizer)


def steps_on_unscaled(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points), labels).backward()
    loop.job.step()


def scales_twice(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.job.backward(loop.scaler.scale(cross_entropy(loop.model(points), labels)))


def drops_its_gradients(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(loop.model(points), labels).backward()
    if loop.number != 2:
        loop.optimizer.step()
    loop.optimizer.zero_grad()


REFUSED = {
    "no step": (no_step, {}, [0, 4], "no optimizer has made a step"),
    "no backward": (no_backward, {}, [0, 4], "step found no gradient"),
    "no backward, by job": (no_backward_by_job, {}, [0, 4], "step found no gradient"),
    "two steps": (two_steps, {}, [0], "stepped twice in one slice"),
    "zero_grad between": (zero_grad_between, {}, [0, 4], "step found no gradient"),
    "zero_grad between, no step": (drops_its_gradients, {}, [0], "were set to none after backward"),
    "unprepared scaler": (unprepared_scaler, {}, [0], "give the GradScaler to job.prepare"),
    "steps on unscaled gradients": (
        steps_on_unscaled,
        {"precision": "float16"},
        [0, 4],
        "the gradients are not scaled",
    ),
    "scales twice": (scales_twice, {"scaler": True}, [0, 4], "scaled already"),
    "accumulates twice": (every_third, {"accumulation": 2}, [0], "set sync.accumulation to 1"),
}


@pytest.mark.parametrize(("name", "bound"), [(name, bound) for name, case in REFUSED.items() for bound in case[2]])
def test_what_cannot_work_is_refused(plane: Plane, capfd: pytest.CaptureFixture[str], name: str, bound: int) -> None:
    if plane.size > 1:
        pytest.skip("one rank only: a mistake ends all processes")
    body, row, _, sentence = REFUSED[name]
    with pytest.raises(SystemExit) as ended:
        in_a_job(plane, Row(body=body, **row), bound)
    assert ended.value.code == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize("bound", [1, 4])
def test_two_steps_a_batch_work_in_delayed_mode(plane: Plane, bound: int) -> None:
    loop = in_a_job(plane, Row(body=two_steps), bound)
    assert_learned(loop, 0.6)
    assert_used_once_an_epoch(plane, loop)


def test_delayed_ranks_skip_batches_for_themselves(plane: Plane) -> None:
    def skips(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        if loop.number % 4 != loop.job.rank:
            plain(loop, points, labels)

    loop = in_a_job(plane, Row(body=skips), 4)
    assert_learned(loop, 0.7)
    assert_used_once_an_epoch(plane, loop)


def test_both_accumulations_work_together_in_delayed_mode(plane: Plane) -> None:
    loop = in_a_job(plane, Row(body=every_third, accumulation=2), 4)
    assert_learned(loop, 0.8)
    assert_used_once_an_epoch(plane, loop)


class Count(nn.Module):
    """Weight i falls by the learning rate for each time that sample i counts, in whatever order."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(samples))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.counts[numbers]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("adds_up", [1, 3, 4])
def test_each_sample_counts_once_where_a_loop_adds_slices_up(plane: Plane, adds_up: int) -> None:
    """Though slices differ: those before an epoch's end are short, and a step falls into one of them at times."""
    samples, batch = 100, 24
    found: list[tuple[float, float]] = []
    with Job(recipe_of({"sync": {"delay_bound": 4}}), plane, keep=False, show="nothing") as job:
        model = Count(samples)
        optimizer = torch.optim.SGD(model.parameters(), lr=batch / adds_up)
        data = DataLoader(range(samples), batch, shuffle=True)  # type: ignore[arg-type]
        model, optimizer, loader = job.prepare(model, optimizer, data)
        number = not_stepped = 0
        for epoch in job.epochs(4):
            for numbers in loader:
                job.backward(model(numbers).mean())
                number, not_stepped = number + 1, not_stepped + len(numbers)
                if number % adds_up == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    not_stepped = 0
            due = samples * (epoch + 1) - sum(plane.gather_objects(not_stepped))
            found.append((-float(model.counts.detach().sum()) * adds_up, due))
    assert [counted for counted, _ in found] == pytest.approx([due for _, due in found], rel=1e-4)
