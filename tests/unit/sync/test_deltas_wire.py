"""The delayed mode's tensors behind low-precision wires: what rounding loses goes with the next contribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetsync.plane.base import Residual
from hetsync.plane.wire import WIRE_FORMATS, round_trip
from hetsync.simulate.replicas import sum_in_order
from hetsync.sync.deltas import Deltas

BATCH = 8


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_rounding_loses_goes_with_the_next_contribution(wire, overlap):
    """What has arrived after many rounds is what was computed, to within one rounding of the last round, or few where
    a rounding leaves whole values for later."""
    generator = torch.Generator().manual_seed(0)
    # Some values are far below the least that int8 can tell from 0 beside the greatest.
    scale = torch.logspace(-4, 0, 200)
    local = [torch.zeros(200)]
    deltas = Deltas(local)
    computed, arrived, greatest = torch.zeros(200), torch.zeros(200), 0.0
    flying = None
    rounds = 200

    def land():
        flight, sent = flying
        flight.copy_(sent)
        deltas.apply_sum()

    for _ in range(rounds):
        progress = scale * (1 + torch.rand(200, generator=generator))
        local[0] += progress
        computed += progress / 2
        if overlap and flying is not None:  # finish the next task while the last one's flies
            deltas.finish(4, 1)
            land()
        else:
            deltas.finish(4, 1)
        flight = deltas.pack(True, BATCH, wire)
        sent = round_trip(flight, wire)
        flying = (flight, sent)
        arrived += sent
        greatest = max(greatest, float(sent.abs().max()))
        if not overlap:
            land()
            assert deltas.apply()
    shares = {"int8": 1 / 254, "int4": 1 / 14, "int2": 2, "top64": 1}
    quantum = 2**-8 * sent.abs() if wire == "bfloat16" else torch.full((200,), greatest * shares[wire])
    assert ((arrived - computed).abs() <= 1.01 * quantum + 2e-5 * computed).all()
    lost = rounds * (round_trip(scale, wire) - scale).abs()
    assert (lost > 5 * quantum).any(), "without feedback more would be missing: the test can fail"


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_rounding_loses_counts_by_its_own_samples(wire, overlap):
    """However many the next contribution has: each sample's progress moves the anchor once."""
    generator, local, expected = torch.Generator().manual_seed(2), [torch.zeros(200)], torch.zeros(200)
    deltas = Deltas(local)
    for number, samples in enumerate((7, 1, 5, 2, 8, 3)):
        progress = torch.randn(200, generator=generator)
        local[0] += progress
        expected += progress * samples / BATCH
        deltas.finish(samples, 1)
        addend = deltas.pack(True, BATCH, wire if number < 5 else "float32")
        addend.copy_(round_trip(addend, wire if number < 5 else "float32"))
        if overlap and number < 5:
            local[0] += (more := torch.randn(200, generator=generator))
            expected += more * 4 / BATCH
            deltas.finish(4, 1)
            deltas.apply_sum()
            flight = deltas.pack(True, BATCH, wire)
            flight.copy_(round_trip(flight, wire))
        deltas.apply_sum()
        assert deltas.apply()
    torch.testing.assert_close(deltas.anchor, expected, rtol=1e-5, atol=1e-5)


@given(
    st.lists(st.tuples(st.sampled_from(WIRE_FORMATS), st.integers(1, 9)), min_size=1, max_size=8), st.integers(0, 99)
)
def test_all_arrives_whatever_wires_follow_each_other(rounds, seed):
    """As the rule has them."""
    generator, local, expected = torch.Generator().manual_seed(seed), [torch.zeros(70)], torch.zeros(70)
    deltas = Deltas(local)
    for wire, samples in [*rounds, ("float32", 4)]:
        local[0] += (progress := torch.randn(70, generator=generator))
        expected += progress * samples / BATCH
        deltas.finish(samples, 1)
        addend = deltas.pack(True, BATCH, wire)
        addend.copy_(round_trip(addend, wire))
        deltas.apply_sum()
        assert deltas.apply()
    torch.testing.assert_close(deltas.anchor, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
def test_a_drain_settles_also_after_low_precision_rounds(wire):
    ranks = [[torch.zeros(40)] for _ in range(2)]
    deltas = [Deltas(local) for local in ranks]
    generator = torch.Generator().manual_seed(1)
    for wire_of_round in (wire, wire, wire, "float32"):
        for local, mine in zip(ranks, deltas, strict=True):
            local[0] += torch.randn(40, generator=generator)
            mine.finish(4, 1)
        flights = [mine.pack(True, BATCH, wire_of_round) for mine in deltas]
        total = sum(round_trip(f, wire_of_round) for f in flights)
        for flight, mine in zip(flights, deltas, strict=True):
            flight.copy_(total)
            mine.apply_sum()
            mine.apply()
    for local, mine in zip(ranks, deltas, strict=True):
        mine.reset_to_anchor()
        assert torch.equal(local[0], deltas[0].anchor)


@pytest.mark.each_value
@pytest.mark.parametrize("small", [1e-2, 2e-3, 5e-4])
@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_steady_progress_arrives_however_small_beside_the_greatest(wire, small):
    """Of a mean step that is far below what a sum can tell from 0, beside one of random sign."""
    locals_ = [[torch.zeros(1024)] for _ in range(8)]
    everyones = [Deltas(local) for local in locals_]
    generator, residual, rounds, computed = torch.Generator().manual_seed(1), Residual(), 600, torch.zeros(1024)
    for number in range(rounds + 1):
        sign = 1 - 2 * torch.randint(2, (), generator=generator)
        form = wire if number < rounds else "float32"  # as at a drain
        addends = []
        for local, mine in zip(locals_, everyones, strict=True):
            step = small * 2 * torch.rand(1024, generator=generator)
            step[0] = sign * (0.5 + torch.rand((), generator=generator))
            local[0] += step
            computed += step / len(everyones)
            mine.finish(4, 1)
            addends.append(mine.pack(True, 4 * len(everyones), form))
        total = sum_in_order(addends, form, residual)
        for flight, mine in zip(addends, everyones, strict=True):
            flight.copy_(total)
            mine.apply_sum()
            assert mine.apply()
        if number == rounds - 1:
            assert everyones[0].anchor[1:].mean() > 0.99 * computed[1:].mean()
    torch.testing.assert_close(everyones[0].anchor, computed, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
def test_a_drain_delivers_what_was_rounded_off_a_rank_that_has_nothing_more_to_give(wire):
    local = [torch.zeros(40)]
    deltas = Deltas(local)
    progress = torch.randn(40, generator=torch.Generator().manual_seed(1))
    local[0] += progress
    deltas.finish(4, 1)
    for wire_of_round in (wire, "float32"):
        gives = wire_of_round == wire or deltas.take_leftover()
        assert gives
        flight = deltas.pack(gives, BATCH, wire_of_round)
        flight.copy_(round_trip(flight, wire_of_round))
        deltas.apply_sum()
        assert deltas.apply()
    assert not deltas.take_leftover(), "it goes once"
    deltas.reset_to_anchor()
    torch.testing.assert_close(local[0], progress / 2, rtol=1e-6, atol=1e-7)
    assert (round_trip(progress / 2, wire) - progress / 2).abs().max() > 1e-4, "without it: the test can fail"


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
def test_of_a_task_that_is_dropped_goes_only_what_rounding_took_before(wire):
    """Its own samples are computed by others; those of contributions before count as computed."""
    local = [torch.zeros(40)]
    deltas = Deltas(local)
    progress = torch.randn(40, generator=torch.Generator().manual_seed(1))
    local[0] += progress
    deltas.finish(4, 1)
    flight = deltas.pack(True, BATCH, wire)
    flight.copy_(round_trip(flight, wire))
    deltas.apply_sum()
    assert deltas.apply()
    assert not torch.allclose(deltas.anchor, progress / 2, rtol=1e-5), "something is owed: the test can fail"
    local[0] += 100.0  # half a task
    assert deltas.take_leftover()
    deltas.pack(True, BATCH, "float32")
    deltas.apply_sum()
    deltas.reset_to_anchor()
    torch.testing.assert_close(deltas.anchor, progress / 2, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(local[0], progress / 2, rtol=1e-6, atol=1e-7)
    assert not deltas.take_leftover(), "it goes once"


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("withheld", [False, True])
def test_a_task_that_is_undone_keeps_what_rounding_took_before(wire, landed, withheld):
    """Where its gradient was not finite it is done again. In P, or beside it; with weights that change."""
    local, steps = [torch.zeros(40)], torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    deltas = Deltas(local)
    local[0] += steps[0]
    deltas.finish(6, 1)
    flight = deltas.pack(True, BATCH, wire)
    flight.copy_(round_trip(flight, wire))
    if landed:
        deltas.apply_sum()
        assert deltas.apply()
    local[0] += torch.nan if withheld else 7.0
    if withheld:
        deltas.finish(3, 1)
        deltas.withhold()
        deltas._samples = deltas._steps = 0
        deltas._worth = deltas._merged_steps = 0.0
    deltas.undo()
    if not landed:
        deltas.apply_sum()
        assert deltas.apply()
    local[0] += steps[1]
    deltas.finish(2, 1)
    deltas.pack(True, BATCH, "float32")
    deltas.apply_sum()
    assert deltas.apply()
    torch.testing.assert_close(deltas.anchor, steps[0] * 6 / BATCH + steps[1] * 2 / BATCH, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
@pytest.mark.parametrize("more", [False, True])
def test_a_void_drain_is_made_again(wire, more):
    """A rank has died within it: what rounding took before goes with the next, by its own samples."""
    local, steps = [torch.zeros(40)], torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    deltas = Deltas(local)
    local[0] += steps[0]
    deltas.finish(6, 1)
    flight = deltas.pack(True, BATCH, wire)
    flight.copy_(round_trip(flight, wire))
    deltas.apply_sum()
    assert deltas.apply()
    if more:
        local[0] += steps[1]
        deltas.finish(2, 1)
    for counts in (False, True):
        assert more or deltas.take_leftover()
        deltas.pack(True, BATCH, "float32")
        if not counts:
            deltas.take_back()
    deltas.apply_sum()
    deltas.reset_to_anchor()
    torch.testing.assert_close(deltas.anchor, (6 * steps[0] + 2 * more * steps[1]) / BATCH, rtol=1e-5, atol=1e-5)
    assert not deltas.take_leftover()


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
def test_a_void_contribution_that_was_rounded_goes_whole(wire):
    """Also where nothing is finished before it goes again."""
    local = [torch.zeros(40)]
    deltas = Deltas(local)
    progress = torch.randn(40, generator=torch.Generator().manual_seed(1))
    local[0] += progress
    deltas.finish(4, 1)
    deltas.pack(True, BATCH, wire)
    deltas.take_back()
    deltas.pack(True, BATCH, "float32")
    deltas.apply_sum()
    assert deltas.apply()
    torch.testing.assert_close(deltas.anchor, progress / 2, rtol=1e-6, atol=1e-6)
