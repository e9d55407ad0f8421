"""The anchor keeps to constraints, whatever ranks merge into it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hetsync.errors import UserError
from hetsync.sync.constraints import ChangesAfterSteps, Constraints, Projection
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.lone import LoneDeltas
from hetsync.sync.messages import StartRound

RANKS = 8


class Layers(nn.Module):
    """One weight twice, one that is complex, one that is frozen, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.first.weight
        self.waves = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(3, 4))

    def shorten(self) -> None:
        self.tied.weight *= self.mask
        self.waves /= self.waves.abs().clamp_min(1.0)
        self.first.bias.data = self.first.bias.data.minimum(self.frozen.data.abs())


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def flat(module: nn.Module) -> torch.Tensor:
    real = [torch.view_as_real(weight) if weight.is_complex() else weight for weight in trained(module)]
    return torch.cat([weight.detach().flatten() for weight in real])


def test_a_twin_is_projected_as_the_module_is():
    torch.manual_seed(1)
    module = Layers()
    constraints = Constraints([(module, Layers.shorten)])
    twins = constraints.twins(trained(module))
    module.mask[1] = 0.0  # by a schedule of the script's: twins have the same
    with torch.no_grad():
        module.frozen.fill_(0.01)
    values, before = 3 * flat(module), flat(module)
    twins.constrain(values)
    assert torch.equal(flat(module), before)
    with torch.no_grad():
        for weight in trained(module):
            weight *= 3
    constraints.project()
    torch.testing.assert_close(values, flat(module), rtol=0, atol=0)
    assert not values.equal(3 * before)


def test_other_modules_weights_stay():
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twins = Constraints([(body[1], lambda layer: nn.init.zeros_(layer.weight))]).twins(trained(body))
    values = torch.ones(12)
    twins.constrain(values)
    assert values.tolist() == [1.0] * 6 + [0.0] * 4 + [1.0] * 2


def test_modules_with_parametrizations_and_in_16_bits_have_twins():
    module = parametrizations.weight_norm(nn.Linear(3, 2)).to(torch.bfloat16)
    twins = Constraints([(module, lambda it: it.bias.fill_(0.3))]).twins(trained(module))
    values = torch.rand(10)
    twins.constrain(values)
    assert values[:2].tolist() == [torch.tensor(0.3).item()] * 2


def test_weights_stay_in_their_memory():
    module = nn.Linear(2, 2)
    place = module.weight.detach()

    def halve(it: nn.Linear) -> None:
        it.weight.data = it.weight.data / 2

    expected = place / 2
    Constraints([(module, halve)]).project()
    assert module.weight.data_ptr() == place.data_ptr()
    assert place.equal(expected)


def test_a_function_that_goes_by_the_scripts_own_model_is_refused():
    module = nn.Linear(2, 2)
    before = flat(module)
    other = nn.BatchNorm1d(2)
    model = nn.ModuleList([module, other])
    Constraints([(module, lambda it: it.weight.data.clamp_(-0.1, 0.1))]).check(model)
    assert flat(module).equal(before)
    by_name: list[Projection] = [
        lambda _: module.weight.clamp_(-9, 9),
        lambda _: module.weight.data.clamp_(-9, 9),
        lambda _: other.weight.data.clamp_(-9, 9),
        lambda _: other.running_mean.mul_(2),
    ]
    for function in by_name:
        with pytest.raises(UserError, match="changed weights or buffers of the script's model"):
            Constraints([(module, function)]).check(model)
    assert flat(module).equal(before)


def test_a_function_that_fails_leaves_weights_as_they_were():
    module = nn.Linear(2, 2)
    before = flat(module)
    with pytest.raises(ZeroDivisionError):
        Constraints([(module, lambda _: 1 / 0)]).check(module)
    assert flat(module).equal(before)


class Rank:
    """Steps along the sphere, in two fragments, each step as long as an adaptive optimizer's of its share."""

    def __init__(self, number: int, fragments: int) -> None:
        self.module = nn.Linear(6, 2, bias=False)
        nn.init.constant_(self.module.weight, 12**-0.5)
        self.constraints = Constraints([(self.module, shorten)])
        self.deltas = FragmentedDeltas(
            trained(self.module), rank=number, fragments=fragments, constraints=self.constraints
        )

    @torch.no_grad()
    def step(self, generator: torch.Generator) -> None:
        self.module.weight += 0.1 * torch.randn(2, 6, generator=generator)
        self.constraints.project()
        self.deltas.finish(1, 1, math.sqrt(RANKS))


def shorten(module: nn.Linear) -> None:
    module.weight /= module.weight.norm()


@pytest.mark.parametrize("fragments", [1, 2])
def test_lifted_progress_of_many_ranks_stays_on_the_sphere(fragments):
    generator = torch.Generator().manual_seed(3)
    ranks = [Rank(number, fragments) for number in range(RANKS)]
    for number in range(60):
        start = StartRound(number, frozenset(range(RANKS)), 0, drain=None, fragments=fragments)
        for rank in ranks:
            rank.step(generator)
        addends = [rank.deltas.pack(start, True, RANKS, "float32") for rank in ranks]
        for rank in ranks[: number % RANKS]:  # that compute on meanwhile
            rank.step(generator)
        for parts in zip(*addends, strict=True):
            total = torch.stack(parts).sum(0)
            for part in parts:
                part.copy_(total)
        for rank in ranks:
            rank.deltas.apply_sum()
            assert abs(float(rank.deltas.anchor.norm()) - 1) < 1e-6
            assert rank.deltas.anchor.equal(ranks[0].deltas.anchor)
            rank.deltas.apply()
            assert abs(float(rank.module.weight.detach().norm()) - 1) < 1e-6


def test_a_rank_alone_keeps_to_them_where_its_progress_is_weighted():
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    constraints = Constraints([(module, lambda it: it.weight.clamp_(-1.5, 1.5))])
    deltas = LoneDeltas(trained(module), constraints=constraints)
    deltas.open_task(1, 2, 4)
    with torch.no_grad():
        module.weight += 0.5
    deltas.finish(2, 1, lift=4.0)
    assert module.weight.tolist() == [[1.5, 1.5]]


def test_changes_after_steps_are_found_in_some_slices():
    weight = nn.Parameter(torch.ones(3))
    changes, found = ChangesAfterSteps(), []
    for number in range(1, 10):
        changes.begin_slice()
        changes.note_step([weight])
        weight.data *= 2
        if changes.found():
            found.append(number)
        assert not changes.found()
    assert found == [1, 2, 4, 8]


def test_what_rounds_have_changed_since_the_slice_before_is_no_change_of_the_loop() -> None:
    """Which has ended with its step."""
    weight, changes = torch.nn.Parameter(torch.zeros(3)), ChangesAfterSteps()
    changes.begin_slice()
    changes.note_step([weight])
    changes.end_slice()
    weight.data += 1  # taken over
    assert not changes.found()
    changes.note_step([weight])
    weight.data += 1
    assert changes.found()
    weight.data.fill_(torch.nan)
    changes.note_step([weight])
    assert not changes.found(), "it is lost, and as the step has left it"


def test_twins_are_as_precise_as_weights() -> None:
    module = nn.Linear(2, 2).double()
    values = torch.full((6,), 1 + 1e-12, dtype=torch.float64)
    Constraints([(module, lambda module: None)]).twins(trained(module)).constrain(values)
    assert torch.equal(values, torch.full_like(values, 1 + 1e-12))
