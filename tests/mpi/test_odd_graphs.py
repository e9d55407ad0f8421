"""Graphs as DDP's own tests have them: weights that are used by turns, outputs that no loss uses, hooks, odd shapes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from plain_job import (
    Body,
    Loop,
    Row,
    assert_learned,
    assert_used_once_an_epoch,
    in_a_job,
    in_one_process,
)
from torch import nn
from torch.nn.functional import cross_entropy
from training import CLASSES, FEATURES, Net

from hetsync.plane.base import Plane

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]


class Named(NamedTuple):
    scores: torch.Tensor
    other: torch.Tensor


@dataclass
class Kept:
    scores: torch.Tensor
    other: torch.Tensor


def nested(scores: torch.Tensor, other: torch.Tensor) -> Any:
    return {"all": [scores, (other, {"none": None})]}


class Two(Net):
    """With an output beside its scores; `make` makes one thing of both."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any] = Named) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, CLASSES)
        self.make = make

    def both(self, points: torch.Tensor) -> Any:
        return self.make(self.body(points), self.other(points))


def stepping(loss_of: Callable[[Loop, torch.Tensor, torch.Tensor], torch.Tensor]) -> Body:
    def body(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        loop.optimizer.zero_grad()
        loss_of(loop, points, labels).backward()
        loop.optimizer.step()

    return body


def scores_alone(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = loop.model.both(points)  # type: ignore[operator]
    scores = found["all"][0] if isinstance(found, dict) else found.scores
    return cross_entropy(scores, labels)


def other_at_first(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In later batches of an epoch no loss uses it."""
    scores, other = loop.model.both(points)  # type: ignore[operator]
    return cross_entropy(scores + other if loop.number < 2 else scores, labels)


def by_turns(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Every second batch a layer more, on all ranks."""
    scores = loop.model(points)
    return cross_entropy(scores + loop.model.other(points) if loop.number % 2 else scores, labels)  # type: ignore[operator]


def added_up_by_turns(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    """Gradients of two batches, each with a layer of its own."""
    layer: Any = loop.model.other if loop.number % 2 else loop.model
    (cross_entropy(layer(points), labels) / 2).backward()
    if loop.number % 2:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def undefined(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The other's gradient is none that autograd knows."""
    scores, other = loop.model.both(points)  # type: ignore[operator]
    return cross_entropy(scores, labels) + torch._C._functions.UndefinedGrad()(other.sum())


def usual(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(loop.model(points), labels)


def detached(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores = loop.model(points)
    target = scores.detach()
    assert not target.requires_grad
    return cross_entropy(scores, labels) + (scores - target).square().mean()


def forward_twice(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (cross_entropy(loop.model(points), labels) + cross_entropy(loop.model(points.flip(0)), labels.flip(0))) / 2


def divided_in_place(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(loop.model(points), labels)
    loss /= 2
    return loss


def called_with_weights(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A stateless call, with weights that are made of the model's."""
    weights = {name: weight * 0.9 for name, weight in loop.model.named_parameters()}
    return cross_entropy(torch.func.functional_call(loop.model, weights, points), labels)


def looked_at_by_the_first(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Rank 0 alone calls the model for a look, copies and saves it."""
    if loop.job.rank == 0:
        loop.model.eval()
        with torch.no_grad():
            seen = loop.model(points)
        twin = copy.deepcopy(loop.model)
        saved = io.BytesIO()
        torch.save(loop.model, saved)
        saved.seek(0)
        again = torch.load(saved, weights_only=False)
        for each in (twin, again):
            torch.testing.assert_close(each(points).detach(), seen, rtol=0, atol=0)
        loop.model.train()
    return cross_entropy(loop.model(points), labels)


class TiedUnused(Net):
    """Two names of one weight, which no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(CLASSES))
        self.first = nn.Linear(FEATURES, CLASSES, bias=False)
        self.first.bias = self.bias


class Hooked(Net):
    """Hooks on modules, all of them linear in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body.register_forward_pre_hook(lambda module, inputs: nn.functional.gelu(inputs[0]))
        self.body.register_forward_hook(lambda module, inputs, scores: 2.0 * scores)
        self.body[1].register_full_backward_hook(lambda module, given, got: (0.5 * given[0],))


class Empty(Net):
    """A layer without outputs, whose weight has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(FEATURES, 0)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points) + self.none(points).sum(1, keepdim=True)


class MakesTensors(Net):
    """Tensors made in forward, which the next call gets."""

    kept: Any = None

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = {"zeros": torch.zeros(1, CLASSES)}
        return super().forward(points) + self.kept["zeros"]


ROWS = {
    "a named tuple": Row(body=stepping(scores_alone), model=Two),
    "a dataclass": Row(body=stepping(scores_alone), model=lambda: Two(Kept)),
    "nested dictionaries": Row(body=stepping(scores_alone), model=lambda: Two(nested)),
    "an output unused in later batches": Row(body=stepping(other_at_first), model=Two),
    "a layer by turns": Row(body=stepping(by_turns), model=Two),
    "a layer by turns, added up": Row(body=added_up_by_turns, model=Two, falls_to=0.8),
    "undefined gradients": Row(body=stepping(undefined), model=Two),
    "a detached output": Row(body=stepping(detached)),
    "two forwards": Row(body=stepping(forward_twice)),
    "a loss divided in place": Row(body=stepping(divided_in_place), falls_to=0.8),
    "a stateless call": Row(body=stepping(called_with_weights)),
    "one rank looks, copies, saves": Row(body=stepping(looked_at_by_the_first)),
    "tied weights, unused": Row(body=stepping(usual), model=TiedUnused),
    "hooks of modules": Row(body=stepping(usual), model=Hooked),
    "an empty layer": Row(body=stepping(usual), model=Empty),
    "tensors made in forward": Row(body=stepping(usual), model=MakesTensors),
}


@pytest.mark.parametrize("name", ROWS)
def test_at_0_it_is_one_process(plane: Plane, name: str) -> None:
    row = ROWS[name]
    loop = in_a_job(plane, row, 0)
    alone = in_one_process(row)
    torch.testing.assert_close(loop.model.state_dict(), alone.model.state_dict(), rtol=1e-5, atol=1e-5)
    assert_used_once_an_epoch(plane, loop)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (place % 3 > 0)) for place, name in enumerate(ROWS)]
)
def test_delayed_it_learns(plane: Plane, name: str) -> None:
    row = ROWS[name]
    loop = in_a_job(plane, row, 4)
    assert_learned(loop, row.falls_to)
    assert_used_once_an_epoch(plane, loop)


@pytest.mark.ranks(1)
def test_a_step_within_backward_is_refused(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    def body(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
        if len(loop.used) == len(points):
            for weight in loop.model.parameters():
                weight.register_post_accumulate_grad_hook(lambda weight: loop.optimizer.step())
        cross_entropy(loop.model(points), labels).backward()

    with pytest.raises(SystemExit):
        in_a_job(plane, Row(body=body), 0)
    assert "stepped twice in one slice" in capsys.readouterr().err
