"""Where models are cut: every model of ours, and small ones for each rule."""

from __future__ import annotations

import inspect
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.data import default_collate
from workloads import WORKLOADS, Workload

from hetsync.errors import UserError
from hetsync.plan.blocks import Cut, cut
from hetsync.plan.calls import observed_call, stand_in, weight_used
from hetsync.plan.graph import BATCH, Edge

LAYERS = {
    "deeptte": ["lstm", "upper_lstm"],
    "ptb_lstm": ["embedding", "lstm.0", "lstm.1", "output_weight"],
    "nmt": ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    "transformer_lm": ["blocks.0", "blocks.1", "output_weight"],
    "trajectory_transformer": ["encoder.layers.0", "encoder.layers.1"],
    "inception_v3": ["enlarge", "classifier", "auxiliary"],
}


def cut_for(model: nn.Module, *args: Any, **kwargs: Any) -> Cut:
    call = inspect.signature(model.forward).bind(*args, **kwargs)
    call.apply_defaults()
    return cut(model, call)


def names(cut: Cut) -> list[str]:
    return [block.name for block in cut.graph.blocks]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_model_of_ours_is_cut_and_computes_the_same(workload: Workload, tmp_path: Path) -> None:
    data = workload.data(tmp_path)
    model = workload.model(data).train()
    collate = data.collate or default_collate
    batch, other = (collate([data.train[index] for index in range(count)]) for count in (5, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    found = cut(model, observed_call(model, data.loss, batch))

    assert found.traced is not None, found.opaque
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    held = [name for block in found.graph.blocks for name in block.parameters]
    floats = [name for name, tensor in model.named_buffers() if tensor.is_floating_point()]
    assert sorted(held) == sorted([*dict(model.named_parameters()), *floats])
    assert len(names(found)) >= 4
    assert [name for name in names(found) if name in LAYERS.get(workload.name, [])] == LAYERS.get(workload.name, [])
    traced = fx.GraphModule(model, found.traced.graph)
    assert torch.equal(data.loss(stand_in(model, traced), other), data.loss(model, other))


class Chain(nn.Module):
    """Three layers, with operations between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.relu(self.b(self.relu(self.a(2 * x)))) + x)


def test_what_holds_no_weights_joins_its_producer_or_is_repeated_for_the_batch() -> None:
    found = cut_for(Chain(), torch.randn(2, 4))

    assert names(found) == ["a", "b", "c"]
    assert found.graph.edges == (Edge(BATCH, 0), Edge(BATCH, 1), Edge(0, 1), Edge(1, 2))
    assert found.graph.blocks[0].weight_bytes == 4 * (16 + 4)


class Again(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(self.b(self.a(x))))


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight


class InPlace(Chain):
    """b reads what a made, before and after c's sum changes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x).sigmoid()
        second = self.b(first).detach()
        return self.c(first.add_(second))


@pytest.mark.parametrize(
    ("model", "blocks"), [(Again(), ["a", "c"]), (Tied(), ["a"]), (InPlace(), ["a", "c"])], ids=["again", "tied", "in"]
)
def test_what_must_stay_together_becomes_one_block_with_all_between(model: nn.Module, blocks: list[str]) -> None:
    found = cut_for(model, torch.randn(2, 4))

    assert found.traced is not None, found.opaque
    assert names(found) == blocks
    assert {"a.bias", "b.weight"} <= set(found.graph.blocks[0].parameters)


class Branching(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if x.sum() > 0:  # told of
            return self.b(x)
        return self.c(x)


def test_a_model_that_cannot_be_traced_is_one_block_and_the_line_is_told() -> None:
    found = cut_for(Branching(), torch.randn(2, 4))

    assert found.traced is None
    assert names(found) == ["model"]
    assert len(found.graph.blocks[0].parameters) == 6
    line = inspect.getsource(Branching).splitlines().index("        if x.sum() > 0:  # told of")
    number = inspect.getsourcelines(Branching)[1] + line
    assert f"test_blocks.py:{number} (if x.sum() > 0:" in found.opaque["Branching"]


def test_a_module_that_cannot_be_traced_is_a_block() -> None:
    found = cut_for(nn.Sequential(nn.Linear(4, 4), Branching(), Branching()), torch.randn(2, 4))

    assert names(found) == ["0", "1", "2"]
    assert [block.kind for block in found.graph.blocks] == ["Linear", "Branching", "Branching"]
    assert list(found.opaque) == ["Branching"]


class Misled(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if isinstance(x, torch.Tensor) else self.b(x)


class Any_(Chain):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.a(args[0])


@pytest.mark.parametrize(("model", "says"), [(Misled(), "computes something else"), (Any_(), "takes \\*args")])
def test_a_model_that_is_traced_wrongly_is_one_block(model: nn.Module, says: str) -> None:
    found = cut_for(model, torch.randn(2, 4))

    assert found.traced is None
    assert says.replace("\\", "") in found.opaque[type(model).__name__]


class Noisy(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x + torch.rand(2, 4))  # drawn once, while it is traced


class Nameless(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.__class__ is torch.Tensor else x.no_such_method()


@pytest.mark.parametrize("model", [Noisy(), Nameless()], ids=["noisy", "nameless"])
def test_a_trace_that_does_not_run_as_the_model_does_is_refused(model: nn.Module) -> None:
    found = cut_for(model, torch.randn(2, 4))

    assert found.traced is None
    assert "computes something else" in found.opaque[type(model).__name__]


def test_a_model_without_weights_is_one_block() -> None:
    found = cut_for(nn.Flatten(), torch.randn(2, 4))

    assert names(found) == ["model"]
    assert found.traced is None


def test_weights_that_forward_does_not_use_are_held_by_somebody() -> None:
    found = cut_for(Optional_(), torch.randn(2, 4))

    assert len(found.graph.blocks[0].parameters) == 6


class Optional_(Chain):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, deep: bool = False) -> torch.Tensor:
        x = self.a(x) if mask is None else self.b(x * mask)
        return self.c(x) if deep else x


def test_arguments_that_decide_the_way_are_kept() -> None:
    model, x = Optional_(), torch.randn(2, 4)

    assert names(cut_for(model, x)) == ["a"]
    assert names(cut_for(model, x, torch.ones(2, 4), deep=True)) == ["b", "c"]
    found = cut_for(model, x)
    assert found.traced is not None
    assert found.traced.fixed == {"mask": None, "deep": False}


class Dropped(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(nn.functional.dropout(x, 0.5))


def test_what_draws_random_numbers_on_the_batch_is_a_block() -> None:
    x = torch.randn(2, 4)
    assert names(cut_for(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)), x)) == ["0", "1"]
    assert names(cut_for(Dropped(), x)) == ["dropout", "a"]


def test_a_loss_that_calls_no_model_or_two() -> None:
    model = Chain()
    with pytest.raises(UserError, match="never calls the model"):
        observed_call(model, lambda model, batch: batch.sum(), torch.ones(3))
    standing = stand_in(model, lambda x: x)
    with pytest.raises(UserError, match="calls the model twice"):
        standing(torch.ones(2)) + standing(torch.ones(2))


class Remembering(Chain):
    """Its forward leaves more on it than it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.losses, self.returned = torch.ones(1), list[torch.Tensor](), torch.ones(1)
        self.register_buffer("seen", torch.zeros(()))
        self.part = Chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.losses = [self.a(x).square().mean()]
        self.part.norm = self.b(x).norm()
        self.returned = self.part(x)
        return self.returned


@pytest.mark.parametrize(
    ("reads", "name"),
    [
        (lambda model: model.scale, None),
        (lambda model: model.returned.mean(), None),
        (lambda model: model.a.weight.norm(), "a.weight"),
        (lambda model: model.losses[0], "losses"),
        (lambda model: model.part.norm.item(), "part.norm"),
        (lambda model: model.seen, "seen"),
    ],
)
def test_what_a_loss_reads_of_the_model_besides_what_it_returns(reads: Any, name: str | None) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch).mean() + 0.01 * reads(model)

    assert weight_used(Remembering(), loss, torch.randn(2, 4)) == name


def test_finding_a_call_leaves_the_batch_as_it_was() -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels, returned = batch.pop("labels"), model(batch["x"].mul_(2))
        difference: torch.Tensor = (returned - labels).mean()
        return difference

    batch = {"x": torch.ones(2, 4), "labels": torch.zeros(2, 4)}
    assert torch.equal(observed_call(Chain(), loss, batch).arguments["x"], torch.full((2, 4), 2.0))
    assert weight_used(Chain(), loss, batch) is None
    assert torch.equal(batch["x"], torch.ones(2, 4))
    assert "labels" in batch


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Frozen(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.a(x)
        return self.b(x)


class Decorated(Chain):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Adversarial(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Reversed.apply(self.a(x)))


class Averaging(Chain):
    """Its own batch statistics, with a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.a(x - (self.mean + 1))


class Counting(Averaging):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x)


class Following(Chain):
    """The weights of a teacher follow those of its student."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for own, other in zip(self.a.parameters(), self.b.parameters(), strict=True):
            own.data = 0.9 * own.data + 0.1 * other.data
        return self.b(x) - self.a(x).detach()


class AveragingApart(Chain):
    """What it remembers has no part in what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.b(x)


WITH_MORE = [Frozen, Decorated, Adversarial, Averaging, AveragingApart, Counting, Following]


@pytest.mark.parametrize("kind", WITH_MORE)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_what_a_forward_does_besides_its_outputs_is_kept_or_the_model_is_not_cut(
    kind: type[nn.Module], inside: bool
) -> None:
    """Regions without gradients, backward passes and buffers of its own."""
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4)) if inside else kind()
    alone, x = deepcopy(model), torch.randn(2, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = cut_for(model, x)

    if kind is Following:
        assert found.traced is None
        return
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(value, fx.Proxy) for part in model.modules() for value in vars(part).values())
    if found.traced is None:
        assert not inside
        return
    traced = fx.GraphModule(model, found.traced.graph)
    for _ in range(2):
        for each in (traced, alone):
            each(x).square().sum().backward()
    for name, weight in alone.named_parameters():
        own = model.get_parameter(name).grad
        assert (own is None) == (weight.grad is None), name
        assert own is None or torch.equal(own, weight.grad)
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_why_a_class_is_not_looked_into_is_told() -> None:
    for kind, why in (
        (Frozen, r"\(x = self\.a\(x\)\): computed without gradients"),
        (Adversarial, r"Reversed\.apply.*: has a backward pass of its own"),
        (Counting, r"its forward makes something else of 1\.steps than its trace"),
    ):
        found = cut_for(nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4)), torch.randn(2, 4))
        assert names(found) == ["0", "1", "2"]
        assert list(found.opaque) == [kind.__name__]
        assert re.search(why, found.opaque[kind.__name__])


class Masking(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mask = x > 0
        return self.b(self.a(x) * mask)


def test_what_has_no_gradients_anyhow_may_be_computed_without() -> None:
    assert names(cut_for(Masking(), torch.randn(2, 4))) == ["a", "b"]
    assert names(cut_for(Averaging(), torch.randn(2, 4))) == ["mean", "a"]
    assert names(cut_for(Frozen().eval(), torch.randn(2, 4))) == ["a", "b"]
