"""What an optimizer changes in its groups by steps is its own; what is changed between steps is a setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_state import Adapting, Averaging, Elsewhere

from hetsync.errors import UserError
from hetsync.sync.group_state import (
    GroupState,
    alike,
    averaged,
    beside,
    check_state_dict,
    kept,
    mean,
    require_same_settings,
    settings_of,
)


def stepped(make: Any, steps: int, scale: float = 1.0) -> GroupState:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    getattr(optimizer, "train", lambda: None)()
    groups = GroupState(optimizer)
    for step in range(steps):
        groups.check()
        weight.grad = scale * (step + 1) * torch.tensor([1.0, -2.0, 0.5])
        optimizer.step()
        groups.note_step()
    return groups


def test_what_steps_change_is_its_own() -> None:
    own = {name for _, name in stepped(Adapting, 3).own}
    assert own == {"d", "numerator", "denominator", "k"}
    assert {name for _, name in stepped(Averaging, 3).own} == {"weight_sum", "k", "peak"}


def test_ranks_take_the_mean_by_samples_and_counts_of_the_first_that_has_stepped() -> None:
    ranks = [stepped(Adapting, 0), stepped(Adapting, 4), stepped(Adapting, 2, 3.0)]
    names = set().union(*(each.own for each in ranks))
    for each in ranks:
        each.own = set(names)
    before = [each.told() for each in ranks]
    found = averaged([(told, used) for told, used in zip(before, (0, 30, 10), strict=True)])
    one, other = (told["group 0 d"] for told in before[1:])
    assert one != other
    assert found["group 0 d"] == pytest.approx((30 * one + 10 * other) / 40, rel=1e-15)
    assert found["group 0 k"] == 4
    for each in ranks:
        tensor = each.optimizer.param_groups[0]["denominator"]
        each.take(found)
        assert each.optimizer.param_groups[0]["denominator"] is tensor, "the optimizer may hold it elsewhere"
        each.check()
    assert alike(ranks[0].told(), ranks[1].told())
    assert alike(ranks[0].told(), ranks[2].told())


def test_what_is_in_no_group_is_shared_too() -> None:
    one, other = stepped(Elsewhere, 3), stepped(Elsewhere, 1)
    found = averaged([(one.told(), 1), (other.told(), 1)])
    for each in (one, other):
        each.take(found)
    assert alike(beside(one.optimizer), beside(other.optimizer))
    assert isinstance(other.optimizer, Elsewhere)
    torch.testing.assert_close(other.optimizer.pace, torch.full((2,), 1.02))
    assert beside(other.optimizer)["state all"] == {"steps": 3, "seconds": 1.0}


def test_a_digest_has_all_of_it() -> None:
    before = stepped(Adapting, 2).values()
    for name, change in (("d", 0.5), ("k", 7), ("denominator", torch.ones(()))):
        groups = stepped(Adapting, 2)
        groups.optimizer.param_groups[0][name] = change
        now = groups.values()
        assert [key for key in now if not torch.equal(now[key], before[key])] == [f"group 0 {name}"]


@pytest.mark.parametrize("value", [0.5, (0.1, 0.2), torch.ones(()), None])
def test_a_setting_that_the_loop_changes_is_refused(value: Any) -> None:
    groups = stepped(lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), 1)
    groups.optimizer.param_groups[0]["momentum"] = value
    with pytest.raises(UserError, match=r"the optimizer's momentum was changed in the loop, from 0\.9 to"):
        groups.check()


def test_a_tensor_that_the_loop_changes_in_place_is_refused() -> None:
    groups = stepped(Adapting, 1)
    groups.optimizer.param_groups[0]["denominator"].fill_(1.0)
    with pytest.raises(UserError, match="denominator was changed in the loop"):
        groups.check()


def test_settings_that_differ_by_rank_are_refused_once_changed() -> None:
    """Which steps are fused may differ between devices."""
    one, other = (
        stepped(lambda weights, fast=fast: torch.optim.SGD(weights, lr=0.1, foreach=fast), 1) for fast in (True, False)
    )
    require_same_settings({0: [one.settings()], 3: [other.settings()]})
    one.optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(UserError, match=r"the optimizer's momentum is 0\.5 on rank 0 and 0 on rank 3"):
        require_same_settings({0: [one.settings()], 3: [other.settings()]})
    other.optimizer.param_groups[0]["momentum"] = 0.5
    require_same_settings({0: [one.settings()], 3: [other.settings()]})


@pytest.mark.parametrize(("make", "names"), [(Adapting, "d, denominator, k"), (Elsewhere, "all, pace")])
def test_a_stage_has_no_optimizer_that_looks_at_all_weights(make: Any, names: str) -> None:
    groups = stepped(make, 0)
    if make is Adapting:
        groups.require_nothing_own()
    groups.optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    groups.optimizer.step()
    with pytest.raises(UserError, match=f"the optimizer keeps {names} for all of its weights"):
        groups.require_nothing_own()


def test_means() -> None:
    assert mean([1.0, 2.0], [3, 1]) == 1.25
    assert mean([1, 2], [3, 1]) == 1
    assert mean([None, 2.0], [3, 1]) is None
    assert mean([{"a": (1.0, "x")}, {"a": (3.0, "y")}], [1, 1]) == {"a": (2.0, "x")}
    third = 1 / 3
    assert mean([third] * 3, [1, 1, 1]) == third, "equal values stay as they are"
    assert torch.equal(mean([torch.zeros(2), torch.ones(2)], [1, 3]), torch.full((2,), 0.75))


def test_an_optimizer_around_another_is_refused() -> None:
    class Around(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"inside": super().state_dict()}

    with pytest.raises(UserError, match="a Around, whose state_dict has no state"):
        check_state_dict(Around([torch.nn.Parameter(torch.ones(1))], lr=0.1))


def test_kept_is_nobodys_but_ours() -> None:
    group = {"params": [], "history": [torch.ones(1)], "betas": (0.1, 0.2)}
    copy = kept(settings_of(group))
    group["history"][0].zero_()  # type: ignore[index]
    assert alike(copy, {"history": [torch.ones(1)], "betas": (0.1, 0.2)})
