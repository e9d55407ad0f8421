"""The optimizer's steps on slices and on batches. Imports no MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetsync.errors import UserError
from hetsync.sync.messages import Task
from hetsync.sync.rates import Cadence, Rates, ScheduleRates, SchedulerRates
from hetsync.sync.steps import LocalSteps, Steps

BATCH = 16
SHARE = 4
DELAYED = Task(0, (((0, SHARE),),), 4, 0, 0, share=SHARE)
SYNCHRONOUS = DELAYED._replace(synchronous_round=0, round_samples=BATCH)


def steps_of(optimizer: torch.optim.Optimizer, rates: Rates, batch: int = BATCH, **more: Any) -> Steps:
    return Steps(optimizer, rates, LocalSteps.of([optimizer], batch, BATCH // SHARE), **more)


def stepped_each_batch(optimizer: torch.optim.Optimizer, batch_size: int) -> SchedulerRates:
    """Of a scheduler that halves."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = SchedulerRates(optimizer, [scheduler], batch_size)
    rates.begin_loop(0)
    rates.stepped_in_loop(scheduler, 1)
    return rates


@pytest.mark.parametrize(
    ("task", "gradient", "length"),
    [
        (SYNCHRONOUS, 10.0, 1.0),
        (DELAYED, 10.0, 2.0),  # √(B / n) times as far as the bound for the batch
        (DELAYED, 1.5, 1.5),
        (SYNCHRONOUS, 0.5, 0.5),
    ],
)
def test_the_bound_of_clipping_is_meant_for_the_batch(task: Task, gradient: float, length: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    steps = steps_of(optimizer, ScheduleRates(optimizer), max_grad_norm=1.0)
    steps.begin_task(task)
    weight.grad = torch.full_like(weight, gradient)
    steps.step()
    assert -weight.item() == pytest.approx(length, rel=1e-4)
    steps.clear()
    assert weight.grad is None


def decayed(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, task: Task) -> float:
    """What is left of an anchor of 1 once a step along a gradient of zero is merged."""
    steps = steps_of(optimizer, ScheduleRates(optimizer))
    steps.begin_task(task)
    weight.grad = torch.zeros_like(weight)
    steps.step()
    return 1 - LocalSteps.of([optimizer], BATCH, BATCH // SHARE).lift(task) * (1 - weight.item())


KINDS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.5),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_decoupled_decay_is_that_of_the_batch_in_slices_too(kind: str) -> None:
    left = []
    for task in (SYNCHRONOUS, DELAYED):
        weight = torch.nn.Parameter(torch.ones(1))
        left.append(decayed(KINDS[kind]([weight]), weight, task))
    assert left == pytest.approx([0.95, 0.95])


def test_a_change_of_mode_brings_the_decay_back() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([{"params": [weight], "weight_decay": 0.5}], lr=0.1)
    steps = steps_of(optimizer, ScheduleRates(optimizer))
    seen = []
    for task in (DELAYED, SYNCHRONOUS, DELAYED):
        steps.begin_task(task)
        seen.append(optimizer.param_groups[0]["weight_decay"])
    assert seen == [0.25, 0.5, 0.25]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_the_owner_gets_the_optimizer_back_as_it_was(kind: type[torch.optim.Optimizer]) -> None:
    """Else the next job, or a saved state, would scale rates and decays once more."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.5, weight_decay=0.25)  # type: ignore[call-arg]
    steps = steps_of(optimizer, ScheduleRates(optimizer))
    steps.begin_task(DELAYED)
    steps.show_owner(SHARE)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    steps.begin_task(DELAYED)
    steps.close(SHARE)
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)


KEEPERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, betas=(0.0, 0.99), weight_decay=0.0),
    "amsgrad": lambda weights: torch.optim.Adam(weights, lr=0.1, betas=(0.0, 0.99), amsgrad=True),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=0.1, betas=(0.0, 0.99)),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=0.1, betas=(0.0, 0.99)),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1),
    "centred": lambda weights: torch.optim.RMSprop(weights, lr=0.1, centered=True),
}


def noise_of(task: Task, values: int) -> torch.Tensor:
    """A gradient of which nothing is signal."""
    return torch.randn(values) / (BATCH if task.synchronous_round is not None else SHARE) ** 0.5


def stepped(steps: Steps, weight: torch.nn.Parameter, task: Task) -> float:
    """How long a step is."""
    before = weight.detach().clone()
    steps.begin_task(task)
    weight.grad = noise_of(task, weight.numel())
    steps.step()
    return float((weight.detach() - before).norm())


@pytest.mark.parametrize("kind", KEEPERS)
@pytest.mark.parametrize(("before", "after"), [(SYNCHRONOUS, DELAYED), (DELAYED, SYNCHRONOUS)])
def test_a_change_of_mode_leaves_steps_as_long_as_they_were(kind: str, before: Task, after: Task) -> None:
    """The optimizer has forgotten a hundredth of what it kept: by that alone, steps would be twice or half as long."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = KEEPERS[kind]([weight])
    steps = steps_of(optimizer, ScheduleRates(optimizer))
    first = [stepped(steps, weight, before) for _ in range(400)][-1]
    assert stepped(steps, weight, after) == pytest.approx(first, rel=0.05)


@given(
    kind=st.sampled_from(list(KEEPERS)),
    tasks=st.lists(st.tuples(st.integers(1, BATCH), st.booleans()), min_size=1, max_size=8),
)
def test_what_is_kept_of_squares_is_a_batchs_again_after_any_tasks(kind: str, tasks: list[tuple[int, bool]]) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = KEEPERS[kind]([weight])
    steps = steps_of(optimizer, ScheduleRates(optimizer))
    for _ in range(3):
        stepped(steps, weight, SYNCHRONOUS)
    before = {name: value.clone() for name, value in optimizer.state[weight].items()}
    for share, synchronous in tasks:
        task = DELAYED._replace(slices=(((0, share),),), synchronous_round=0 if synchronous else None)
        steps.begin_task(task)
    saved = optimizer.state_dict()
    steps.show_owner(SHARE)
    torch.testing.assert_close(optimizer.state[weight], before)
    torch.testing.assert_close(saved["state"], optimizer.state_dict()["state"])  # in the midst, too
    assert saved["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_state_is_loaded_at_rest() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    steps, saved = steps_of(optimizer, ScheduleRates(optimizer)), optimizer.state_dict()
    steps.begin_task(DELAYED)
    with pytest.raises(UserError, match=r"state was loaded in the loop, .*: load it between epochs, or train with"):
        optimizer.load_state_dict(saved)
    steps.show_owner(SHARE)
    optimizer.load_state_dict(saved)
    steps.begin_task(SYNCHRONOUS)
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_slice_that_is_smaller_than_a_ranks_share_counts_as_what_it_is(kind: str) -> None:
    """As before a rest: by the squares of its gradients, and by its weight in the anchor."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = KEEPERS[kind]([weight])
    steps = steps_of(optimizer, ScheduleRates(optimizer))
    whole, small = DELAYED, DELAYED._replace(slices=(((0, 1),),))
    for _ in range(400):
        stepped(steps, weight, whole)
    steps.begin_task(small)
    for _ in range(400):
        weight.grad = torch.randn(20_000)
        steps.step()
    steps.show_owner(SHARE)
    state = optimizer.state[weight]
    squares = next(state[name] for name in ("exp_avg_sq", "square_avg") if name in state)
    squares = squares - state["grad_avg"] ** 2 if "grad_avg" in state else squares
    assert float(squares.mean()) == pytest.approx(1 / BATCH, rel=0.05)


@pytest.mark.parametrize("eps", [1e-8, 0.3, 100.0])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_eps_is_added_to_the_root_of_a_batchs_squares(kind: type[torch.optim.Optimizer], eps: float) -> None:
    """Ranks whose gradients are noise alone move the anchor by a step as long as the batch's, whatever part of the
    denominator is eps: by steps on slices it was up to √(B / n) times as long."""
    lengths = []
    for task in (SYNCHRONOUS, DELAYED):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(20_000))
        optimizer = kind([weight], lr=0.1, eps=eps)  # type: ignore[call-arg]
        steps = steps_of(optimizer, ScheduleRates(optimizer))
        for _ in range(400):
            length = stepped(steps, weight, task)
        lift = LocalSteps.of([optimizer], BATCH, BATCH // SHARE).lift(task)
        ranks = BATCH // SHARE if task is DELAYED else 1
        lengths.append(length * lift * ranks**0.5 / ranks)  # of a sum of independent ones, each of n / B
        steps.show_owner(SHARE)
        assert optimizer.param_groups[0]["eps"] == eps
    assert lengths[1] == pytest.approx(lengths[0], rel=0.05)


def test_ranks_that_step_a_scheduler_at_different_times_are_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    rates = SchedulerRates(optimizer, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], batch_size=4)
    rates.agree(lambda mine: [mine, [(2, 0)]])  # this rank has had no batch
    assert rates.at(16) == [0.25]
    with pytest.raises(UserError, match="each 2, 3 batches: step it alike on all ranks"):
        rates.agree(lambda mine: [mine, [(3, 0)]])


@pytest.mark.parametrize("batch_size", [2, 4, 8])
def test_a_resume_with_other_batches_goes_on_from_where_the_scheduler_stood(batch_size: int) -> None:
    """16 samples in batches of 4 made four steps, and each batch from there on makes one more."""

    def rates_for(batch_size: int) -> SchedulerRates:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return SchedulerRates(optimizer, [scheduler], batch_size, epoch_samples=32)

    before, after = rates_for(4), rates_for(batch_size)
    before.begin_loop(0)
    before.stepped_in_loop(before._schedulers[0], 1)
    assert before.at(16) == [0.5**4]
    after.load_state_dict(before.state_dict(), 16)
    after.rebase(before.at(16))  # with the optimizer
    assert [after.at(16 + batches * batch_size)[0] for batches in range(3)] == [0.5 ** (4 + n) for n in range(3)]


def test_ranks_that_resume_with_other_batches_count_from_one_place() -> None:
    """Their first tasks lie at positions of their own."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    state = stepped_each_batch(optimizer, 4).state_dict()
    ranks = [stepped_each_batch(optimizer, 8) for _ in range(2)]
    for number, rates in enumerate(ranks):
        rates.load_state_dict(state, 12)
        rates.at(12 + 8 * number)
    ranks[0].agree(lambda mine: [mine, [(1, ranks[1]._cadences[0].first)]])


def test_a_checkpoint_that_does_not_tell_its_batches_is_of_the_same() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    rates = stepped_each_batch(optimizer, 4)
    state = rates.state_dict()
    del state["batches"]
    state["cadences"][0] |= {"done": 3}
    rates.load_state_dict(state, 12)
    assert rates.at(16) == [0.5]


def test_batches_of_an_epoch_are_counted_anew() -> None:
    """Epochs of 9 batches, stepped after each second one: four steps an epoch."""
    cadence = Cadence(every=2)
    assert [cadence.due(batches, 9) for batches in (1, 2, 8, 9, 10, 11, 18)] == [0, 1, 4, 4, 4, 5, 8]


def test_batches_without_a_step_may_be_counted_or_not() -> None:
    """The third of five batches is void."""
    for every, calls in [(1, (1, 2, 3, 4, 5)), (1, (1, 2, 4, 5)), (2, (2, 4)), (2, (2, 5))]:
        cadence = Cadence(every)
        for slices in calls:
            cadence.void = int(slices > 3)
            cadence.called(0, slices)
    with pytest.raises(UserError, match="time after 6"):
        Cadence(2, calls=1, void=1).called(0, 6)


def test_a_batch_without_a_step_before_a_schedulers_first_is_not_counted() -> None:
    cadence = Cadence(void=1)
    cadence.called(0, 2)
    assert cadence.every == 1


def test_rates_that_are_set_at_the_last_rest_hold() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = steps_of(optimizer, ScheduleRates(optimizer))
    steps.begin_task(DELAYED)
    steps.show_owner(BATCH)
    optimizer.param_groups[0]["lr"] = 0.5
    steps.close(BATCH)
    assert optimizer.param_groups[0]["lr"] == 0.5


def halved_in_place(group: dict[str, Any]) -> None:
    group["lr"] *= 0.5


def halved_by_fill(group: dict[str, Any]) -> None:
    group["lr"].fill_(group["lr"] / 2)


@pytest.mark.parametrize("change", [halved_in_place, halved_by_fill])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("task", [DELAYED, SYNCHRONOUS])
def test_a_tensor_that_is_a_rate_is_changed_at_rest_only(
    task: Task, kind: type[torch.optim.Optimizer], change: Callable[[dict[str, Any]], None]
) -> None:
    """Sixteen bits hold no product of rates exactly: what is in force is what they hold."""
    rate = torch.tensor(0.1, dtype=torch.bfloat16)
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=rate)  # type: ignore[call-arg]
    steps = steps_of(optimizer, ScheduleRates(optimizer, lambda position: 0.3))
    (group,) = optimizer.param_groups
    steps.start()
    steps.begin_task(task)
    in_force = group["lr"].clone()
    steps.begin_task(task)
    assert torch.equal(group["lr"], in_force)
    change(group)
    with pytest.raises(UserError, match=r"rate was changed in the loop, from \[0\.\d+\] to \[0\.\d+\].*job\.schedule"):
        steps.begin_task(task)
    group["lr"].copy_(in_force)
    steps.show_owner(SHARE)
    assert group["lr"].item() == rate.item() == pytest.approx(0.1, rel=0.01)
    change(group)
    steps.start()
    steps.begin_task(task)
    assert group["lr"].dtype == torch.bfloat16
    assert group["lr"].item() == pytest.approx(in_force.item() / 2, rel=0.01)


def test_two_optimizers_may_have_one_tensor_for_their_rate() -> None:
    rate = torch.tensor(0.1)
    both = [kind([torch.nn.Parameter(torch.zeros(1))], lr=rate) for kind in (torch.optim.SGD, torch.optim.Adam)]
    each = [steps_of(optimizer, ScheduleRates(optimizer)) for optimizer in both]
    for _ in range(2):
        for steps in each:
            steps.begin_task(DELAYED)
    assert [optimizer.param_groups[0]["lr"].item() for optimizer in both] == pytest.approx([0.1, 0.1])


def test_a_scheduler_of_a_tensor_that_is_a_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0))
    rates = stepped_each_batch(optimizer, 4)
    steps = steps_of(optimizer, rates, 4)
    (group,) = optimizer.param_groups
    seen = []
    for batch in range(3):
        steps.begin_task(DELAYED._replace(position=4 * batch))
        seen.append(group["lr"].item())
    assert seen == [1.0, 0.5, 0.25]
    assert all(isinstance(rate, float) for rate in steps.scheduled)
