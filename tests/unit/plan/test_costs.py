"""What blocks are said to cost, on a clock that the model itself moves, and how that is kept."""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetsync.errors import UserError
from hetsync.files import DiskError
from hetsync.plan.blocks import cut
from hetsync.plan.calls import observed_call
from hetsync.plan.costs import Measured, _source, _told_model, block_costs, measure


class Clock:
    """Seconds that pass where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, clock: Clock, forward: float, backward: float) -> torch.Tensor:
        context.clock, context.seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        context.clock.now += context.seconds
        return gradients[0], None, None, None


class Slow(nn.Linear):
    """Takes fixed + each · samples seconds forward, twice as long backward."""

    def __init__(self, clock: Clock, fixed: float, each: float) -> None:
        super().__init__(4, 4)
        self.clock, self.fixed, self.each = clock, fixed, each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self.fixed + self.each * len(x)
        outputs: torch.Tensor = _Takes.apply(super().forward(x), self.clock, seconds, 2 * seconds)
        return outputs


def measured(model: nn.Module, *sizes: int) -> Measured:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    batches = {size: torch.randn(size, 4) for size in sizes}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Measured(model, cut(model, observed_call(model, loss, batches[sizes[0]])), loss, optimizer, batches)


def test_seconds_are_a_line_and_add_up_to_the_whole_step() -> None:
    clock = Clock()
    what = measured(nn.Sequential(Slow(clock, 0.5, 0.25), nn.ReLU(), Slow(clock, 1.0, 0.5)), 2, 6)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        clock.now += 1.5 + 0.75 * len(batch)  # as much as both blocks: their seconds count twice
        return what.loss(model, batch)

    first, second = measure(replace(what, loss=loss), 0.0, clock)

    assert (first.fixed_forward_seconds, first.forward_seconds) == pytest.approx((1.0, 0.5))
    assert (second.fixed_forward_seconds, second.forward_seconds) == pytest.approx((2.0, 1.0))
    assert (first.fixed_backward_seconds, first.backward_seconds) == pytest.approx((1.0, 0.5))
    assert (second.fixed_backward_seconds, second.backward_seconds) == pytest.approx((2.0, 1.0))


class SlowUpdates(torch.optim.SGD):
    """Takes a second, and a quarter of one for each weight."""

    def __init__(self, clock: Clock, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.1)
        self.clock = clock

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        self.clock.now += 1.0 + 0.25 * sum(weight.grad is not None for weight in group["params"])
        super().step(closure)


def test_a_blocks_update_is_its_part_of_the_whole_ones() -> None:
    """By its weights, of which the first has two and the last one; in all seconds of passes the update has no part."""
    clock = Clock()
    model = nn.Sequential(Slow(clock, 0.5, 0.25), nn.ReLU(), nn.Linear(4, 4, bias=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    what = measured(model, 2, 6)

    costs = measure(replace(what, optimizer=SlowUpdates(clock, model)), 0.0, clock)

    assert [cost.update_seconds for cost in costs] == pytest.approx([2 / 3 * 1.75, 1 / 3 * 1.75])
    assert sum(cost.forward_seconds for cost in costs) == pytest.approx(0.25)
    assert sum(cost.fixed_backward_seconds for cost in costs) == pytest.approx(1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Normed(torch.optim.SGD):
    """Like those of users that scale by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        assert torch.stack([weight.grad.norm() for weight in group["params"]]).max() > 0
        super().step(closure)


def test_an_optimizer_that_wants_all_gradients_is_divided_by_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    costs = measure(replace(measured(model, 2, 6), optimizer=Normed(model.parameters(), 0.1)), 0.0)
    assert costs[0].update_seconds == pytest.approx(2 * costs[-1].update_seconds)
    assert costs[-1].update_seconds > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bytes_of_a_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    first, second = measure(measured(model, 3, 5), 0.0)

    assert (first.output_bytes, second.output_bytes) == (4 * 8, 0)
    assert first.saved_bytes == 4 * 4 + 4 * 8  # its input and the ReLU's output, which the second one saves as well
    assert (first.received_bytes, second.received_bytes) == (0, 4 * 8)
    assert second.saved_bytes == 4 * 2  # what the loss squares, which is there before
    assert second.loss_bytes == 4 * 2
    assert (first.weight_bytes, second.weight_bytes) == (4 * (4 * 8 + 8), 4 * (8 * 2 + 2))


def test_samples_that_are_padded_save_more_in_a_larger_batch() -> None:
    """Twice as many are four times as long here; what has one size for each sample does not grow."""

    class Longest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(self.each(x).mean(1)).tanh()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    model, batches = Longest(), {2: torch.randn(2, 5, 4), 4: torch.randn(4, 20, 4)}
    blocks = cut(model, observed_call(model, loss, batches[2]))

    costs = measure(Measured(model, blocks, loss, torch.optim.SGD(model.parameters(), 0.1), batches), 0.0)

    assert costs[0].saved_bytes == 4 * 20 * 4
    assert costs[0].padding == pytest.approx(2.0)
    assert [cost.padding for cost in costs[1:]] == [0.0] * (len(costs) - 1)
    assert {cost.padded_samples for cost in costs} == {4}


def test_what_the_loss_saves_is_the_last_blocks() -> None:
    """Of a thousand words more than all else."""
    words = 1000

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, words))
    _, last = measure(replace(measured(model, 3, 5), loss=loss), 0.0)
    assert 4 * words <= last.loss_bytes <= last.saved_bytes <= 4 * words + 64


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    what = measured(model, 3, 5)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)

    measure(what, 0.0)

    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Untraced(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


def test_a_model_of_one_block_is_measured_whole() -> None:
    (cost,) = measure(measured(Untraced(4, 4), 2, 6), 0.0)

    assert cost.output_bytes == 0
    assert cost.saved_bytes == 4 * 4 + 4 * 4  # the input, and what is squared
    assert cost.weight_bytes == 4 * 20


def test_costs_are_kept_in_a_file_for_the_same_blocks_and_batches(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    costs = block_costs(measured(model, 3, 5), path, 0.0)

    def stopped() -> float:
        raise AssertionError("measured again")

    assert block_costs(measured(model, 3, 5), path, 0.0, stopped) == costs
    with pytest.raises(AssertionError, match="measured again"):
        block_costs(measured(model, 3, 6), path, 0.0, stopped)
    adam = replace(measured(model, 3, 5), optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(AssertionError, match="measured again"):
        block_costs(adam, path, 0.0, stopped)
    other = block_costs(measured(nn.Sequential(nn.Linear(4, 2)), 3, 5), path, 0.0)
    assert len(other) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_costs_of_an_earlier_format_are_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    what = measured(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 3, 5)
    block_costs(what, path, 0.0)
    written = json.loads(path.read_text())
    path.write_text(json.dumps({"format": 1, "key": written["key"], "costs": [{"forward_seconds": 1.0}] * 2}))

    block_costs(what, path, 0.0)

    assert json.loads(path.read_text())["format"] == written["format"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"costs": content["costs"][:1]},
        lambda content: content | {"costs": [cost | {"forward_seconds": -1.0} for cost in content["costs"]]},
        lambda content: content | {"costs": [cost | {"saved_bytes": "many"} for cost in content["costs"]]},
        lambda content: content | {"costs": [{"forward_seconds": 1.0}]},
        lambda content: content | {"costs": [cost | {"saved_bytes": 10**400} for cost in content["costs"]]},
        lambda content: [],
    ],
)
def test_a_file_that_is_broken_is_refused(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    what = measured(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 3, 5)
    block_costs(what, path, 0.0)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))

    with pytest.raises(UserError, match="holds no costs of blocks that can be read: delete it"):
        block_costs(what, path, 0.0)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the costs of blocks"):
        block_costs(measured(nn.Linear(4, 4), 3, 5), tmp_path, 0.0)


def test_costs_are_measured_anew_once_the_model_or_the_time_for_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"

    def stopped() -> float:
        raise AssertionError("measured again")

    block_costs(measured(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 3, 5), path, 0.01)
    frozen = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    block_costs(measured(frozen, 3, 5), path, 0.0, stopped)  # a shorter look is none that is needed
    with pytest.raises(AssertionError, match="measured again"):
        block_costs(measured(frozen, 3, 5), path, 0.02, stopped)
    frozen[0].requires_grad_(False)
    with pytest.raises(AssertionError, match="measured again"):
        block_costs(measured(frozen, 3, 5), path, 0.0, stopped)
    narrow, wide = (
        nn.Sequential(nn.Unflatten(1, (1, 4)), nn.MaxPool1d(1, stride), nn.Flatten(), nn.LazyLinear(2))
        for stride in (1, 2)
    )
    assert len({json.dumps(_told_model(measured(model, 3, 5))) for model in (narrow, narrow, wide)}) == 2


def test_costs_that_cannot_be_kept_are_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, _: str, remedy: str) -> None:
        raise DiskError(f"cannot write {path}: no space is left; {remedy}")

    monkeypatch.setattr("hetsync.plan.costs.write_atomically", full)
    found = block_costs(measured(nn.Sequential(nn.Linear(4, 8)), 3, 5), tmp_path / "costs.json", 0.0)
    assert len(found) == 1
    assert "let XDG_CACHE_HOME name another folder; until then" in capsys.readouterr().err


def test_code_of_the_model_and_of_what_it_inherits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's, and not where objects lie in memory."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    told = set()
    for factor in ("2", "2", "3"):
        (tmp_path / "edited.py").write_text(
            "from torch import nn\n"
            f"class Base(nn.Linear):\n    def forward(self, x):\n        return {factor} * super().forward(x)\n"
            "class Mine(Base):\n    hook = print\n    def extra_repr(self):\n        return repr(object())\n"
        )
        linecache.clearcache()
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        told.add(json.dumps(_told_model(measured(importlib.import_module("edited").Mine(4, 4), 3, 5))))
    assert len(told) == 2


def test_a_file_of_a_newer_version_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    what = measured(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 3, 5)
    block_costs(what, path, 0.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 4}))
    with pytest.raises(UserError, match="is of a newer HetSync, as its format is 4"):
        block_costs(what, path, 0.0)


def test_code_that_is_being_edited_has_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "half.py").write_text("class Mine: pass\n")
    mine = importlib.import_module("half").Mine
    (tmp_path / "half.py").write_text("class (\n")
    linecache.clearcache()
    assert _source(mine) is None
