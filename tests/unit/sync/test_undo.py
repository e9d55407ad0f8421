"""What a void step has changed is put back, to the bit."""

from __future__ import annotations

import pytest
import torch

from hetsync.sync.group_state import GroupState
from hetsync.sync.undo import BeforeStep, Tensors
from hetsync.train.prepared import PreparedScaler


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, factor: float) -> None:
    optimizer.zero_grad()
    (model(torch.ones(2, 3)) * factor).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_step_that_is_put_back_leaves_no_trace(kind: type[torch.optim.Optimizer], before: int) -> None:
    torch.manual_seed(0)
    ours, twin = (torch.nn.Linear(3, 2) for _ in range(2))
    twin.load_state_dict(ours.state_dict())
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    of_ours, of_twin = (kind(model.parameters(), lr=0.1, **options) for model in (ours, twin))  # type: ignore[call-arg]
    for number in range(before):
        step(ours, of_ours, 1.0 + number)
        step(twin, of_twin, 1.0 + number)
    kept = BeforeStep(GroupState(of_ours))
    step(ours, of_ours, 7.0)
    kept.put_back()
    for factor in (2.0, 3.0):
        step(ours, of_ours, factor)
        step(twin, of_twin, factor)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True))


def test_tensors_are_what_they_were() -> None:
    values = torch.arange(4.0)
    kept = Tensors([values])
    values.add_(1)
    kept.put_back()
    assert torch.equal(values, torch.arange(4.0))


@pytest.mark.parametrize("updated", [True, False])
def test_the_scale_is_what_it_was_before_steps_that_are_put_back(updated: bool) -> None:
    """Whether or not the loop has updated it since; and the next batch is stepped as ever."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = PreparedScaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), lambda optimizer: True)

    def backward() -> None:
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()

    backward()
    state = scaler.state_dict()
    scaler.step(optimizer)
    if updated:
        scaler.update()
        assert scaler.get_scale() == 16.0
    scaler.give_up(state)
    scaler.update()  # the loop's own, in the rest of the void batch
    assert scaler.get_scale() == 8.0
    backward()
    scaler.unscale_(optimizer)
    scaler.give_up(None)
    backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("values", [[1.0, 2.0], [float("nan"), -float("inf")], []])
def test_what_has_not_changed_is_not_written(values: list[float]) -> None:
    """What ranks do not share, as frozen weights and masks, must not: the job would end at a slice that is put back."""
    frozen, changed = torch.tensor(values), torch.zeros(3)
    kept = Tensors([frozen, changed, scalar := torch.tensor(5)])
    changed += 1
    versions = frozen._version, scalar._version
    kept.put_back()
    assert (frozen._version, scalar._version) == versions
    assert changed.tolist() == [0, 0, 0]


def test_not_a_number_in_place_of_a_number_is_put_back() -> None:
    tensor = torch.tensor([1.0, float("nan")])
    kept = Tensors([tensor])
    tensor[:] = torch.tensor([float("nan"), float("nan")])
    kept.put_back()
    assert tensor[0] == 1
