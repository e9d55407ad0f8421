"""Synchronous mode's gradients equal those of one process with the whole batch, however it is cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.errors import UserError
from hetsync.plane.wire import WIRE_FORMATS, round_trip
from hetsync.sync.gradients import COUNTS, Gradients, make_buckets
from hetsync.sync.loop_report import LoopReport
from hetsync.sync.slice_gradient import SliceGradient

FEATURES = 6


class Net(torch.nn.Module):
    """Two layers, statistics, one parameter that never gets a gradient, one that does where asked."""

    def __init__(self, norm=False):
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 5)
        self.norm = torch.nn.BatchNorm1d(5) if norm else torch.nn.Identity()
        self.unused = torch.nn.Parameter(torch.ones(4))
        self.sometimes = torch.nn.Parameter(torch.ones(3))
        self.second = torch.nn.Linear(5, 3)
        self.with_sometimes = False

    def forward(self, inputs):
        out = self.second(torch.tanh(self.norm(self.first(inputs))))
        return out * self.sometimes if self.with_sometimes else out


def net(norm=False):
    torch.manual_seed(0)
    return Net(norm)


def batch(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return inputs, torch.randint(3, (samples,), generator=generator)


def loss_of(model, inputs, labels):
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def gradients_of(model, bucket_bytes=64, pace=lambda fraction: None, wake=lambda: None):
    return Gradients(model, bucket_bytes, pace, wake)


def allreduce(everyones, wire="float32"):
    """The communication threads of all ranks, one round: fetch what was released, add, hand back."""
    for index in range(len(everyones[0].buckets)):
        assert all(gradients.released() for gradients in everyones)
        add_up([gradients.pack(index, wire) for gradients in everyones])
    assert all(gradients.released() for gradients in everyones)
    more = True
    while more:
        add_up([gradients.tail.flat for gradients in everyones])
        (more,) = {gradients.tail.unpack() for gradients in everyones}
    assert not any(gradients.released() for gradients in everyones)


def add_up(tensors):
    total = sum(tensor.clone() for tensor in tensors)
    for tensor in tensors:
        tensor.copy_(total)


def backward(model, gradients, inputs, labels, sizes):
    """One rank's task: slices of some sizes."""
    start = 0
    model.zero_grad()
    gradients.open_task()
    for index, size in enumerate(sizes):
        gradients.open_slice(size, last=index == len(sizes) - 1)
        loss_of(model, inputs[start : start + size], labels[start : start + size]).backward()
        gradients.close_slice()
        start += size
    gradients.flush(start)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("slices", [[[16]], [[5, 7, 4]], [[9, 1], [3, 3]], [[1], [], [15]]])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
def test_slices_of_unequal_size_equal_one_big_batch(optimizer, slices, bucket_bytes):
    models = [net() for _ in slices]
    steps = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    everyones = [gradients_of(model, bucket_bytes) for model in models]
    single = net()
    single_step = OPTIMIZERS[optimizer](single.parameters())
    for number in range(4):
        inputs, labels = batch(16, number)
        start = 0
        for model, gradients, sizes in zip(models, everyones, slices, strict=True):
            backward(model, gradients, inputs[start:], labels[start:], sizes)
            start += sum(sizes)
        allreduce(everyones)
        for gradients, step in zip(everyones, steps, strict=True):
            gradients.collect()
            step.step()
            step.zero_grad(set_to_none=True)
        single_step.zero_grad()
        loss_of(single, inputs, labels).backward()
        single_step.step()
    for model in models:
        for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6), name
            assert torch.equal(ours, dict(models[0].named_parameters())[name]), "all ranks alike"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=4).filter(any))
def test_any_cut_of_the_batch_gives_its_gradient(slices):
    total = sum(map(sum, slices))
    inputs, labels = batch(total)
    models = [net() for _ in slices]
    everyones = [gradients_of(model) for model in models]
    start = 0
    for model, gradients, sizes in zip(models, everyones, slices, strict=True):
        backward(model, gradients, inputs[start:], labels[start:], sizes)
        start += sum(sizes)
    allreduce(everyones)
    single = net()
    loss_of(single, inputs, labels).backward()
    for model, gradients in zip(models, everyones, strict=True):
        gradients.collect()
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_unused_parameters_stay_without_gradient_and_those_used_anywhere_get_one():
    models = [net(), net()]
    models[1].with_sometimes = True
    everyones = [gradients_of(model) for model in models]
    for number in range(3):
        models[1].with_sometimes = number != 1
        for model, gradients in zip(models, everyones, strict=True):
            backward(model, gradients, *batch(4, number), [4])
        allreduce(everyones)
        for model, gradients in zip(models, everyones, strict=True):
            gradients.collect()
            assert model.unused.grad is None
            assert (model.sometimes.grad is not None) == (number != 1)
            assert model.first.weight.grad is not None
    assert torch.equal(models[0].first.weight.grad, models[1].first.weight.grad)


def test_a_parameter_used_in_an_earlier_slice_only_still_counts():
    model = net()
    gradients = gradients_of(model)
    for index in range(2):
        model.with_sometimes = index == 0
        gradients.open_slice(2, last=index == 1)
        loss_of(model, *batch(2, index)).backward()
        gradients.close_slice()
    gradients.flush(4)
    allreduce([gradients])
    gradients.collect()
    assert model.sometimes.grad is not None


def slice_of_one(gradients, loss, last=True):
    gradients.open_slice(1, last)
    loss.backward()
    gradients.close_slice()


class Parts(torch.nn.Module):
    """Parameters whose gradients arrive in whatever order a test lets them."""

    def __init__(self, count=4):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(count))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_buckets_are_released_in_one_order_whatever_arrives_first(order):
    """The deadlock otherwise: rank A posts buckets (0, 1) while rank B posts (1, 0), and both wait."""
    model, events = Parts(), []
    gradients = Gradients(model, 1, lambda fraction: events.append(fraction), lambda: events.append("wake"))
    slice_of_one(gradients, sum(part.sum() for part in model.parts), last=False)
    gradients.open_slice(1, last=True)
    arrived = set()
    for index in order:
        model.parts[index].sum().backward()
        arrived.add(3 - index)  # buckets run backwards
        ready = next((n for n in range(5) if n not in arrived), 4)
        assert events.count("wake") == ready
    gradients.close_slice()
    gradients.flush(1)
    assert events == [x for n in range(1, 5) for x in ((1 + 2 * n / 4) / 3, "wake")] + ["wake"]
    assert [bool(gradients.released()) for _ in range(6)] == [True] * 5 + [False]


def test_buckets_keep_backward_order_and_size():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5, 2, 40, 1)]
    buckets = make_buckets(parameters, 4 * 8)
    assert [[p.numel() for p in bucket.parameters] for bucket in buckets] == [[1], [40], [2, 5], [3]]
    assert [bucket.flat.numel() for bucket in buckets] == [1, 40, 7, 3]


def test_nothing_is_released_before_the_last_slice():
    model, wakes = net(), []
    gradients = gradients_of(model, wake=lambda: wakes.append(1))
    gradients.open_slice(4, last=False)
    loss_of(model, *batch(4)).backward()
    assert not gradients.released()
    assert not wakes
    gradients.close_slice()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
def test_the_pace_rises_to_the_whole_of_the_slice(bucket_bytes):
    fractions = []
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    gradients = gradients_of(model, bucket_bytes, pace=fractions.append)
    backward(model, gradients, *batch(4), [4])
    assert not fractions, "the first slice has to show that there is one backward"
    allreduce([gradients])
    gradients.collect()
    model.zero_grad()
    for _ in range(2):
        fractions.clear()
        backward(model, gradients, *batch(4), [2, 2])
        assert fractions == sorted(set(fractions)), "rising"
        assert fractions[0] > 1 / 3, "forward takes the first third"
        assert fractions[-1] == pytest.approx(1.0)
        assert len(fractions) == len(gradients.buckets)
        allreduce([gradients])
        gradients.collect()
        model.zero_grad()


def test_closed_or_not_opened_gradients_are_left_alone():
    model = net()
    gradients = gradients_of(model)
    loss_of(model, *batch(4)).backward()
    assert model.first.weight.grad is not None
    model.zero_grad()
    gradients.open_slice(4, last=True)
    gradients.close()
    loss_of(model, *batch(4)).backward()
    assert model.first.weight.grad is not None
    assert not gradients.released()


def test_buffers_are_averaged_by_samples():
    models = [net(norm=True) for _ in range(3)]
    everyones = [gradients_of(model) for model in models]
    sizes = [[2, 4], [10], []]
    for number, (model, gradients, mine) in enumerate(zip(models, everyones, sizes, strict=True)):
        backward(model, gradients, *batch(16, number), mine)
    means = [model.norm.running_mean.clone() for model in models]
    tracked = [int(model.norm.num_batches_tracked) for model in models]
    allreduce(everyones)
    for model, gradients, count in zip(models, everyones, tracked, strict=True):
        gradients.collect()
        assert torch.allclose(model.norm.running_mean, (6 * means[0] + 10 * means[1]) / 16, atol=1e-6)
        assert int(model.norm.num_batches_tracked) == count, "whole numbers stay"


@pytest.mark.parametrize(("wire", "steps"), [("bfloat16", 127), ("int8", 127), ("int4", 7), ("int2", 1), ("top64", 7)])
def test_what_rounding_loses_goes_out_next_time(wire, steps):
    model = Parts(1)
    gradients = gradients_of(model)
    slope = torch.tensor([1.0, 1e-3 / 3])  # blocks cannot tell the second from 0 beside the first
    sent, rounds = torch.zeros(2), 100
    for _ in range(rounds):
        gradients.open_task()
        slice_of_one(gradients, (model.parts[0] * slope).sum())
        gradients.flush(1)
        loaded = gradients.pack(0, wire)
        assert torch.equal(loaded, round_trip(loaded, wire)), "the plane rounds it no further"
        sent += loaded
        gradients.collect()
        model.zero_grad()
    quantum = float(slope.max()) / steps
    assert torch.allclose(sent, rounds * slope, atol=1.1 * quantum)
    assert (rounds * (round_trip(slope, wire) - slope).abs() > (1e-5 if wire == "bfloat16" else quantum / 50)).any()


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
def test_an_infinite_gradient_leaves_nothing_to_be_sent_later(wire):
    """Where gradients are scaled, its round is skipped; the next one's must not be infinite, too."""
    model = Parts(1)
    gradients = gradients_of(model)
    for slope in (math.inf, 1.0):
        gradients.open_task()
        slice_of_one(gradients, (model.parts[0] * slope).sum())
        gradients.flush(1, scaled=True)
        loaded = gradients.pack(0, wire).clone()
        gradients.collect()
        model.zero_grad()
    assert loaded.isfinite().all()


def test_ranks_of_which_some_step_and_others_do_not_are_refused():
    models = [net(), net()]
    everyones = [gradients_of(model) for model in models]
    for model, gradients, step in zip(models, everyones, (0, None), strict=True):
        gradients.open_task()
        gradients.open_slice(4, last=True)
        loss_of(model, *batch(4)).backward()
        gradients.close_slice()
        gradients.flush(4, step)
    allreduce(everyones)
    for gradients in everyones:
        with pytest.raises(UserError, match=r"the loops of 1 ranks step an optimizer .* and those of 1 do not"):
            gradients.collect()


def test_a_rank_without_samples_need_not_step():
    models = [net(), net()]
    everyones = [gradients_of(model) for model in models]
    for gradients in everyones:
        gradients.open_task()
    everyones[0].open_slice(4, last=True)
    loss_of(models[0], *batch(4)).backward()
    everyones[0].close_slice()
    everyones[0].flush(4, 0)
    everyones[1].flush(0, report=LoopReport(computed=False))
    allreduce(everyones)
    assert [gradients.collect() for gradients in everyones] == [4, 4]


def test_the_tail_holds_the_buffers_that_change():
    model = net(norm=True)
    gradients = gradients_of(model)
    for sent in (2, 10):  # at first, whether they have changed; then running mean and variance
        backward(model, gradients, *batch(4), [4])
        assert gradients.tail.flat.numel() == len(list(model.parameters())) + COUNTS + sent
        allreduce([gradients], "int8")
        gradients.collect()
        model.zero_grad()


def test_weights_may_be_frozen_when_delayed_mode_ends():
    """And unfrozen in the loop: their gradients travel."""
    model = torch.nn.Linear(FEATURES, 3)
    gradients = gradients_of(model, bucket_bytes=1000)
    gradients.close()
    model.requires_grad_(False)
    gradients.open_task()
    assert not model.weight.requires_grad
    model.requires_grad_(True)
    slice_of_one(gradients, loss_of(model, *batch(1)), last=False)
    gradients.open_slice(4, last=True)
    loss_of(model, *batch(4)).backward()
    assert gradients.released()


def test_a_spoiled_round_brings_nothing_to_anybody_and_the_next_one_is_whole():
    """Whoever's gradients are nan, and however the wire rounds."""
    for wire in ("float32", "int8"):
        models = [net(norm=True), net(norm=True)]
        everyones = [Gradients(model, 64, lambda fraction: None, lambda: None, skips=True) for model in models]
        for gradients in everyones:
            gradients.adopt_buffers()
        before = [buffer.clone() for buffer in models[0].buffers()]
        for spoiled in (True, False):
            for number, (model, gradients) in enumerate(zip(models, everyones, strict=True)):
                inputs, labels = batch(4, number)
                backward(model, gradients, inputs * torch.nan if spoiled and number else inputs, labels, [4])
            allreduce(everyones, wire)
            assert [gradients.sum_is_spoiled for gradients in everyones] == [spoiled, spoiled]
            for model, gradients in zip(models, everyones, strict=True):
                assert gradients.collect() == 8
                assert gradients.spoiled == spoiled
                assert all(
                    (p.grad is None) == (spoiled or p is model.unused)
                    for p in model.parameters()
                    if p is not model.sometimes
                )
                floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
                assert all(buffer.isfinite().all() for buffer in floats)
                if spoiled:
                    kept = [buffer for buffer in before if buffer.is_floating_point()]
                    assert all(torch.equal(a, b) for a, b in zip(floats, kept, strict=True))
        grads = [[p.grad for p in model.parameters() if p.grad is not None] for model in models]
        assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_round_leaves_nothing_behind_for_the_next():
    model = net()
    gradients = gradients_of(model)
    seen = []
    for _ in range(2):
        backward(model, gradients, *batch(6), [4, 2])
        allreduce([gradients])
        gradients.collect()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


# Several backward calls in a slice.


def halves(model, inputs, labels):
    """The same gradient in two backward calls."""
    first = len(inputs) // 2
    for part in (slice(first), slice(first, None)):
        (loss_of(model, inputs[part], labels[part]) * len(inputs[part]) / len(inputs)).backward()


def test_several_backward_calls_of_a_slice_are_summed():
    models, single = [net(), net()], net()
    everyones = [gradients_of(model) for model in models]
    for number in range(3):
        inputs, labels = batch(12, number)
        for model, gradients, part in zip(models, everyones, (slice(4), slice(4, None)), strict=True):
            model.zero_grad()
            gradients.open_task()
            gradients.open_slice(len(inputs[part]), last=True)
            halves(model, inputs[part], labels[part])
            assert not gradients.released(), "there may be more to come"
            gradients.close_slice()
            gradients.flush(len(inputs[part]))
        allreduce(everyones)
        single.zero_grad()
        loss_of(single, inputs, labels).backward()
        for model, gradients in zip(models, everyones, strict=True):
            gradients.collect()
            for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
                assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-6)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_second_gradient_after_the_first_has_left_is_refused(overlap):
    model = net()
    gradients = Gradients(model, 64, lambda fraction: None, lambda: None, overlap)
    inputs, labels = batch(8)
    slice_of_one(gradients, loss_of(model, inputs, labels), last=False)  # shows one backward
    gradients.open_slice(8, last=True)
    if overlap:
        with pytest.raises(UserError, match=r"second gradient in one slice.*set sync\.overlap to false"):
            halves(model, inputs, labels)
    else:
        halves(model, inputs, labels)
        gradients.close_slice()
        assert not gradients.released()


def unscale(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def set_to_none(model):
    model.zero_grad()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_to_none, r"were set to none.*job\.backward\(loss, weight=0\)"),
        (unscale, "give the GradScaler to job.prepare"),
    ],
)
def test_what_a_loop_cannot_do_with_its_gradients_is_refused(change, sentence):
    model = net()
    gradients = gradients_of(model)
    gradients.open_slice(4, last=True)
    loss_of(model, *batch(4)).backward()

    def change_and_go_on():
        change(model)
        gradients.close_slice()

    with pytest.raises(UserError, match=sentence):
        change_and_go_on()


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_values(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def of(model):
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def clip_through_data(model):
    for parameter in of(model):
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def project(model):
    for parameter in of(model):
        parameter.grad -= parameter.grad.mean()


def replace(model):
    for parameter in of(model):
        parameter.grad = parameter.grad.sign()


def by_a_name_of_its_own(model):
    """Which it has had since backward."""
    gradients = [parameter.grad for parameter in of(model)]
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    torch._foreach_div_(gradients, norm)


def set_to_zero(model):
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "change", [clip, clip_values, clip_through_data, project, replace, by_a_name_of_its_own, set_to_zero]
)
def test_what_a_loop_does_with_gradients_it_does_with_the_whole_ones(change):
    """Two ranks with a few samples each, and one process with all."""
    single, models = net(), [net(), net()]
    inputs, labels = batch(8)
    loss_of(single, inputs, labels).backward()
    change(single)
    everyones = [gradients_of(model) for model in models]
    looks = []

    def look(stage):
        """All ranks have come there."""
        looks.append(stage)
        if len(looks) == 1:
            for gradients, samples in zip(everyones, (5, 3), strict=True):
                gradients.take(0)
                gradients.flush(samples, 0, report=LoopReport(looks=True))
            allreduce(everyones)
            for gradients in everyones:
                gradients.collect(0)

    for model, gradients, part in zip(models, everyones, (slice(0, 5), slice(5, 8)), strict=True):
        gradients.look = look
        gradients.open_task()
        gradients.open_slice(part.stop - part.start, last=True)
        loss_of(model, inputs[part], labels[part]).backward()
    assert not looks
    for model in models:
        change(model)
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-6)
            assert not isinstance(ours.grad, SliceGradient)
    assert looks


def test_what_tells_no_value_is_no_look():
    model = net()
    gradients, looks = gradients_of(model), []
    gradients.look = looks.append
    gradients.open_slice(4, last=True)
    loss_of(model, *batch(4)).backward()
    grad = model.first.weight.grad
    assert (grad.shape, grad.dtype, len(grad), grad.numel(), grad.device.type) == ((5, 6), torch.float32, 5, 30, "cpu")
    assert not (grad.is_sparse)
    assert not (grad.requires_grad)
    assert not looks
    assert float(grad.norm()) > 0
    assert looks == [0]


def test_a_gradient_that_comes_after_a_look_is_refused():
    model = net()
    gradients = gradients_of(model)
    for stepped in (True, False):
        gradients.open_task()
        gradients.open_slice(4, last=True)
        loss_of(model, *batch(4)).backward()
        gradients.hold(0, True)
        gradients.take(0)
        gradients.hold(0, not stepped)
        if stepped:
            loss_of(model, *batch(4)).backward()  # of no matter to the step that was made
        else:
            with pytest.raises(UserError, match="a weight got another gradient after gradients of this batch"):
                loss_of(model, *batch(4)).backward()


@pytest.mark.parametrize("looks", [(True, True), (True, False), (False, False)])
def test_ranks_of_which_some_look_at_gradients_know_it(looks):
    models = [net(), net()]
    everyones = [gradients_of(model) for model in models]
    for model, gradients, looked in zip(models, everyones, looks, strict=True):
        gradients.open_task()
        gradients.open_slice(4, last=True)
        loss_of(model, *batch(4)).backward()
        gradients.take(0)
        gradients.flush(4, 0, report=LoopReport(looks=looked))
    allreduce(everyones)
    for gradients in everyones:
        gradients.collect(0)
        assert gradients.looks_differ == (len(set(looks)) == 2)


# What cannot be summed.


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("last", [True, False])
def test_gradients_that_are_not_finite_keep_the_round_from_completing(bad, last):
    model = net()
    gradients = gradients_of(model)
    for index in range(2):
        slice_of_one(gradients, loss_of(model, *batch(4)) * (bad if last == (index == 1) else 1), last=index == 1)
    assert not math.isfinite(gradients.flush(8))
    for _ in gradients.buckets:
        assert gradients.released()
    assert not gradients.released(), "without the tail no rank completes the round"


def test_sums_of_others_that_are_not_finite_are_not_taken_for_our_own():
    model = net()
    gradients = gradients_of(model, bucket_bytes=1)
    slice_of_one(gradients, loss_of(model, *batch(4)), last=False)
    gradients.open_slice(4, last=True)
    loss_of(model, *batch(4)).backward()
    assert gradients.released()
    gradients.pack(0, "float32").fill_(torch.nan)  # as the sum comes in, while backward runs
    gradients.close_slice()
    assert math.isfinite(gradients.flush(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_precisions_get_gradients_of_theirs(dtype):
    models, single = [net().to(dtype) for _ in range(2)], net()
    everyones = [gradients_of(model) for model in models]
    inputs, labels = batch(12)
    for model, gradients, part in zip(models, everyones, (slice(4), slice(4, None)), strict=True):
        backward(model, gradients, inputs[part].to(dtype), labels[part], [len(labels[part])])
    allreduce(everyones)
    loss_of(single, inputs, labels).backward()
    for model, gradients in zip(models, everyones, strict=True):
        gradients.collect()
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            if theirs.grad is not None:
                assert ours.grad.dtype is dtype
                assert torch.allclose(ours.grad.float(), theirs.grad, atol=1e-2)


@pytest.mark.parametrize("released", ["nothing", "in backward", "all", "fetched"])
def test_a_task_that_is_given_up_leaves_nothing_behind(released):
    """Another rank has died in the round; its batch comes again, to this rank alone."""
    model, single = net(norm=True), net(norm=True)
    gradients = gradients_of(model, bucket_bytes=1)
    for number in range(2):
        inputs, labels = batch(8, seed=number)
        if number:
            gradients.open_task()
            gradients.open_slice(4, last=True)
            loss_of(model, inputs[:4], labels[:4]).backward()
            if released != "in backward":
                gradients.close_slice()
            if released in ("all", "fetched"):
                gradients.flush(4)
            if released == "fetched":
                assert gradients.released()
                gradients.pack(0, "float32").fill_(torch.nan)
            gradients.give_up()
            assert all(parameter.grad is None for parameter in model.parameters())
            assert gradients.is_collected(0), "what the loop still brings is no matter of any task"
        backward(model, gradients, inputs, labels, [8])
        allreduce([gradients])
        gradients.collect()
        single.zero_grad()
        loss_of(single, inputs, labels).backward()
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            assert theirs.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-6)
        assert torch.allclose(model.norm.running_mean, single.norm.running_mean, atol=1e-6)


def test_a_round_tells_who_has_given_how_many_samples():
    everyones = [Gradients(net(), 64, lambda fraction: None, lambda: None, rank=n, ranks_counted=4) for n in (0, 2)]
    for gradients, samples in zip(everyones, (5, 7), strict=True):
        gradients.flush(samples, report=LoopReport(computed=False))
    allreduce(everyones)
    assert [gradients.samples_given() for gradients in everyones] == [{0: 5, 2: 7}] * 2
    assert everyones[0].summed_samples == 12


def test_who_is_behind_takes_over_buffers():
    ahead, behind = net(norm=True), net(norm=True)
    donor, gradients = gradients_of(ahead), gradients_of(behind)
    inputs, labels = batch(8)
    backward(ahead, donor, inputs, labels, [8])
    allreduce([donor])
    donor.collect()
    ahead.norm.running_mean.fill_(7.0)  # in the forward pass of a round that does not count
    behind.norm.running_mean.fill_(8.0)
    gradients.take_over_buffers(donor.shared_buffers, donor.tail.travel)
    assert torch.allclose(behind.norm.running_mean, 0.1 * ahead.first(inputs).mean(0), atol=1e-6)
    assert gradients.tail.travel == donor.tail.travel
