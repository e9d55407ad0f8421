"""At a drain every rank's optimizer adopts the average over samples."""

from __future__ import annotations

import threading

import pytest
import torch

from hetsync.sync import optimizer_state
from hetsync.sync.optimizer_state import average_optimizer_state, set_state


class Ranks:
    """Collectives between threads of one process."""

    def __init__(self, count):
        self.slots = [None] * count
        self.barrier = threading.Barrier(count, timeout=20)
        self.summed = []  # values of each sum, as the ranks see it

    def exchange(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        everyones = list(self.slots)
        self.barrier.wait()
        return everyones

    def allreduce(self, rank, tensor):
        self.summed.append(tensor.numel())
        total = sum(t.clone() for t in self.exchange(rank, tensor.clone()))
        tensor.copy_(total)


def average(optimizers, samples):
    ranks, errors = Ranks(len(optimizers)), []

    def one(rank):
        try:
            average_optimizer_state(
                optimizers[rank],
                samples[rank],
                lambda value: ranks.exchange(rank, value),
                lambda tensor: ranks.allreduce(rank, tensor),
            )
        except BaseException as error:
            errors.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(optimizers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    return ranks.summed


KINDS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}


def stepped(kind, rank, steps, unused=()):
    """An optimizer after some steps on gradients of its own."""
    generator = torch.Generator().manual_seed(rank)
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), ())]
    optimizer = KINDS[kind](weights)
    for _ in range(steps):
        for place, weight in enumerate(weights):
            weight.grad = None if place in unused else torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return optimizer


def tensors(optimizer):
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        (place, name): value.clone()
        for place, weight in enumerate(weights)
        for name, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_is_weighted_by_samples(kind):
    optimizers = [stepped(kind, rank, steps) for rank, steps in enumerate((3, 1, 6))]
    samples = [30, 10, 120]
    before = [tensors(optimizer) for optimizer in optimizers]
    average(optimizers, samples)
    for optimizer in optimizers:
        after = tensors(optimizer)
        assert after.keys() == before[0].keys()
        for key, value in after.items():
            mean = sum(n * theirs[key] for n, theirs in zip(samples, before, strict=True)) / 160
            assert torch.allclose(value, mean, atol=1e-6), key
            assert torch.equal(value, tensors(optimizers[0])[key]), "all alike, to the bit"
            assert value.shape == before[0][key].shape


@pytest.mark.parametrize("kind", KINDS)
def test_memory_beside_the_state_is_bounded(kind, monkeypatch):
    whole, chunked = ([stepped(kind, rank, 2) for rank in range(2)] for _ in range(2))
    average(whole, [10, 30])
    monkeypatch.setattr(optimizer_state, "CHUNK_VALUES", 3)
    assert max(average(chunked, [10, 30])) <= 3
    for one, other in zip(whole, chunked, strict=True):
        before, after = tensors(one), tensors(other)
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_state_adopts_the_others_and_weighs_nothing(kind):
    """It was given no work, or did none: its samples, whatever was claimed, do not dilute the average."""
    optimizers = [stepped(kind, 0, 2), stepped(kind, 1, 0), stepped(kind, 2, 4)]
    before = [tensors(optimizer) for optimizer in optimizers]
    assert not before[1]
    average(optimizers, [10, 50, 30])
    for optimizer in optimizers:
        for key, value in tensors(optimizer).items():
            assert torch.allclose(value, (10 * before[0][key] + 30 * before[2][key]) / 40, atol=1e-6)
    assert tensors(optimizers[1]).keys() == before[0].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_from_nothing_is_of_the_others_types(kind):
    """Ranks at rest are compared by their bytes: step counts are float64 where that is the default."""
    torch.set_default_dtype(torch.float64)
    try:
        optimizers = [stepped(kind, 0, 0), stepped(kind, 1, 2)]
        average(optimizers, [0, 10])
    finally:
        torch.set_default_dtype(torch.float32)
    mine, theirs = (tensors(optimizer) for optimizer in optimizers)
    assert {key: value.dtype for key, value in mine.items()} == {key: value.dtype for key, value in theirs.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_is_the_same_everywhere(kind):
    """The adopted state is one that the optimizer can use, also where it was made from nothing."""
    optimizers = [stepped(kind, 0, 2), stepped(kind, 1, 0)]
    average(optimizers, [10, 0])
    moved = []
    for optimizer in optimizers:
        weights = optimizer.param_groups[0]["params"]
        for weight in weights:
            weight.data.zero_()
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved.append([weight.detach().clone() for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*moved, strict=True))


def test_parameters_that_only_some_ranks_have_used():
    optimizers = [stepped("momentum", 0, 2, unused=(1,)), stepped("momentum", 1, 2, unused=(2,))]
    average(optimizers, [10, 30])
    first, second = (tensors(optimizer) for optimizer in optimizers)
    assert first.keys() == second.keys() == {(place, "momentum_buffer") for place in range(3)}
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_optimizers_without_state_need_no_collective():
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2)]
    average(optimizers, [10, 10])
    assert not tensors(optimizers[0])


def test_no_work_since_the_last_drain_changes_nothing():
    optimizers = [stepped("adamw", 0, 2), stepped("adamw", 0, 2)]
    before = tensors(optimizers[0])
    average(optimizers, [0, 0])
    assert all(torch.equal(value, before[key]) for key, value in tensors(optimizers[1]).items())


def test_one_rank_keeps_its_state():
    optimizer = stepped("adamw", 0, 3)
    before = tensors(optimizer)
    average([optimizer], [7])
    assert all(torch.allclose(value, before[key]) for key, value in tensors(optimizer).items())


def test_what_has_no_average_is_the_lowest_ranks():
    optimizers = [stepped("momentum", rank, 2) for rank in range(3)]
    for rank, optimizer in enumerate(optimizers):
        for weight in optimizer.param_groups[0]["params"][: 3 - rank]:
            optimizer.state[weight] |= {"steps": 10 + rank, "codes": torch.tensor([rank], dtype=torch.uint8)}
    average(optimizers, [10, 20, 30])
    for optimizer in optimizers:
        states = [optimizer.state[weight] for weight in optimizer.param_groups[0]["params"]]
        assert [state["steps"] for state in states] == [10, 10, 10]
        assert [state["codes"].item() for state in states] == [0, 0, 0]


def test_a_rank_without_state_takes_over_what_has_no_average():
    optimizers = [stepped("momentum", 0, 0), stepped("momentum", 1, 2)]
    for weight in optimizers[1].param_groups[0]["params"]:
        optimizers[1].state[weight]["steps"] = 2
    average(optimizers, [0, 20])
    assert [optimizers[0].state[weight]["steps"] for weight in optimizers[0].param_groups[0]["params"]] == [2, 2, 2]


def test_groups_that_only_some_ranks_have_are_refused():
    optimizers = [stepped("momentum", rank, 2) for rank in range(2)]
    optimizers[1].add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(AssertionError, match=r"optimizers have \[3, 4\] weights: add parameter groups between epochs"):
        average(optimizers, [10, 20])


def test_plain_numbers_are_taken_over_as_such() -> None:
    """Some optimizers count steps in integers, of which `state_by_place` has no memory to be written to."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"step": 9, "average": torch.zeros(2)}
    average = optimizer.state[weight]["average"]
    set_state([optimizer], 0, "step", torch.tensor(10))
    set_state([optimizer], 0, "average", torch.ones(2))
    assert optimizer.state[weight]["step"] == 10
    assert isinstance(optimizer.state[weight]["step"], int)
    assert average.tolist() == [1.0, 1.0], "in place"


MAKERS = {
    **KINDS,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adafactor": torch.optim.Adafactor,
}


def with_layouts(kind, dtype, device="cpu"):
    """An optimizer of weights that have no dimension, one, and four in another memory format."""
    weights = [torch.randn(shape, dtype=dtype, device=device) for shape in ((), (3,), (4, 3, 2, 2))]
    weights[-1] = weights[-1].to(memory_format=torch.channels_last)
    return MAKERS[kind]([torch.nn.Parameter(weight) for weight in weights])


def layouts(optimizer):
    return {key: (value.dtype, value.device, value.stride()) for key, value in tensors(optimizer).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", MAKERS)
def test_state_is_made_as_the_optimizer_itself_makes_it(kind, dtype):
    first, second, third = (with_layouts(kind, dtype) for _ in range(3))
    for weight in first.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    first.step()
    average([first, second], [10, 0])
    for place, state in enumerate(first.state.values()):
        for name, value in state.items():
            set_state([third], place, name, value)
    assert layouts(first)
    assert layouts(second) == layouts(third) == layouts(first)


@pytest.mark.parametrize(
    ("kind", "name", "flags", "device"),
    [
        ("adamw", "step", {}, "cpu"),
        ("adamw", "step", {"fused": True}, "meta"),
        ("adamw", "step", {"capturable": True}, "meta"),
        ("nadam", "mu_product", {}, "cpu"),
        ("nadam", "mu_product", {"capturable": True}, "meta"),
        ("asgd", "step", {}, "meta"),
        ("asgd", "eta", {}, "meta"),
        ("adamw", "exp_avg", {}, "meta"),
    ],
)
def test_state_is_made_where_the_optimizer_itself_makes_it(kind, name, flags, device):
    """No step can be made on such a device: the optimizers' own sources say where."""
    optimizer = with_layouts(kind, torch.bfloat16, device="meta")
    optimizer.param_groups[0].update(flags)
    set_state([optimizer], 0, name, torch.tensor(1.0))
    (state,) = optimizer.state.values()
    assert state[name].device.type == device
    assert state[name].dtype == (torch.bfloat16 if name == "exp_avg" else torch.float32)
