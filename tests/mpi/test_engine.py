"""Training through the engine on real MPI ranks: the invariants of the design, at any world size.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_engine.py
"""

from __future__ import annotations

import math
from itertools import count
from time import sleep
from typing import Any

import pytest
import torch
from training import (
    BATCH,
    OPTIMIZERS,
    SAMPLES,
    Blobs,
    Net,
    Outcome,
    assert_invariants,
    delayed,
    of_unequal_speed,
    plain_training,
    synchronous,
    train,
)

from hetsync.balance.device import RealDevice
from hetsync.config.schema import OuterConfig, SyncConfig, WireFormat
from hetsync.emulation.link import EmulatedLink
from hetsync.plane.base import Plane
from hetsync.plane.faulty import Delay, FaultyPlane
from hetsync.plane.local import LocalPlane
from hetsync.sync.messages import Settings
from hetsync.telemetry import Telemetry
from hetsync.train.session import Session

pytestmark = pytest.mark.mpi


def close(plane: Plane, outcome: Outcome, expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Collective: every rank's weights are the expected ones, relative to the largest of each tensor."""
    off = [
        float((mine - theirs).abs().max() / theirs.abs().max())
        for mine, theirs in zip(outcome.weights, expected, strict=True)
    ]
    assert max(plane.gather_objects(max(off))) < tolerance


# D = 0 is one process with batch K·B.


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "unused", "clipped"])
def test_synchronous_training_is_one_process(plane: Plane, accumulation: int, optimizer: str, kind: str) -> None:
    model = Net(unused=kind == "unused")
    clip = 0.3 if kind == "clipped" else None
    expected, losses, batches = plain_training(
        accumulation=accumulation, optimizer=optimizer, model=Net(unused=kind == "unused"), clip=clip
    )
    sync = synchronous(plane, accumulation=accumulation, bucket_bytes=200)
    outcome = train(plane, sync, model=model, optimizer=optimizer, clip=clip, rests=[2 * accumulation * BATCH])
    close(plane, outcome, expected)
    assert_invariants(plane, [outcome], SAMPLES, 0)

    # Samples of a step are those of one process; so is the mean of their losses.
    step_of = {index: step for step, indices in enumerate(batches) for index in indices}
    sums = [0.0] * len(batches)
    for slices in plane.gather_objects(outcome.slices):
        for indices, loss in slices:
            (step,) = {step_of[index] for index in indices}
            sums[step] += loss * len(indices)
    means = [total / len(indices) for total, indices in zip(sums, batches, strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)


def test_the_unused_weight_gets_no_gradient(plane: Plane) -> None:
    # AdamW's weight decay would move a weight whose gradient is zero, and leaves one whose gradient is None.
    outcome = train(plane, synchronous(plane), model=Net(unused=True), optimizer="adamw")
    assert torch.equal(outcome.model.unused.detach(), torch.ones(7))  # type: ignore[operator]


def test_the_number_of_ranks_does_not_matter(plane: Plane) -> None:
    rests = [50, 100]  # not where a round would end by itself
    alone = train(LocalPlane(), SyncConfig(0, accumulation=2), rests=rests)
    together = train(plane, synchronous(plane, accumulation=2), rests=rests)
    close(plane, together, alone.weights)
    assert [r.version for r in together.rests] == [r.version for r in alone.rests]
    assert [r.loss for r in together.rests] == pytest.approx([r.loss for r in alone.rests], rel=1e-5)


@pytest.mark.parametrize("bound", [0, 4])
def test_all_ranks_start_from_the_weights_of_rank_0(plane: Plane, bound: int) -> None:
    model = Net(batch_norm=True)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data += plane.rank
    outcome = train(plane, delayed(plane, delay_bound=bound), model=model, optimizer="sgd")
    if bound == 0 and plane.size == 1:
        close(plane, outcome, plain_training(accumulation=1, optimizer="sgd", model=Net(batch_norm=True))[0])
    started_from = Net(batch_norm=True)
    biases = zip(outcome.model.body[0].bias, started_from.body[0].bias, strict=True)
    assert all(abs(mine - its) < 0.5 for mine, its in biases)
    assert_invariants(plane, [outcome], SAMPLES, bound)


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4", "int2", "top64"])
def test_synchronous_training_with_rounded_gradients_stays_near(plane: Plane, wire: WireFormat) -> None:
    exact, _, _ = plain_training(accumulation=1, optimizer="sgd")
    outcome = train(plane, synchronous(plane, wire=wire), optimizer="sgd")
    close(plane, outcome, exact, 0.05)
    assert_invariants(plane, [outcome], SAMPLES, 0)


@pytest.mark.parametrize("bound", [0, 2])
def test_batch_norm_buffers_are_everywhere_the_same(plane: Plane, bound: int) -> None:
    sync = delayed(plane, delay_bound=bound)
    outcome = train(plane, sync, model=Net(batch_norm=True), rests=[75])
    assert_invariants(plane, [outcome], SAMPLES, bound)
    means = outcome.model.body[2].running_mean
    assert means.abs().max() > 0.05
    assert all(torch.equal(theirs, means) for theirs in plane.gather_objects(means))


def test_synchronous_batch_norm_takes_the_mean_over_samples(plane: Plane) -> None:
    outcome = train(plane, synchronous(plane), model=Net(batch_norm=True), samples=BATCH)
    untrained = Net(batch_norm=True).body[:2]
    data, mean = Blobs(), torch.zeros(8)
    for slices in plane.gather_objects(outcome.slices):
        for indices, _ in slices:
            hidden = untrained(data.points[indices]).detach()
            mean += 0.1 * hidden.mean((0, 2)) * len(indices) / BATCH
    torch.testing.assert_close(outcome.model.body[2].running_mean, mean)


# D >= 1 keeps its promises whatever happens.

DELAYED = [
    (1, 0.1, 1, "float32", "identity", 1),
    (1, 1.0, 3, "bfloat16", "identity", 1),
    (1, 0.25, 1, "int8", "nesterov", 1),
    (4, 0.25, 1, "float32", "identity", 1),
    (4, 1.0, 1, "float32", "nesterov", 1),
    (4, 0.1, 3, "int8", "identity", 1),
    (4, 0.25, 1, "bfloat16", "identity", 1),
    (None, 0.1, 1, "float32", "identity", 1),
    (None, 0.25, 3, "int8", "identity", 1),
    (None, 1.0, 1, "bfloat16", "nesterov", 1),
    (4, 0.25, 1, "float32", "identity", 3),
    (1, 0.1, 1, "int8", "identity", 2),
    (None, 0.25, 3, "bfloat16", "identity", 4),
    (1, 0.25, 1, "int2", "nesterov", 1),
    (4, 0.25, 3, "top64", "identity", 2),
    (None, 0.25, 1, "int4", "identity", 1),
]


@pytest.mark.parametrize(("bound", "quorum", "accumulation", "wire", "outer", "fragments"), DELAYED)
def test_delayed_training_keeps_the_invariants(
    plane: Plane, bound: int | None, quorum: float, accumulation: int, wire: WireFormat, outer: Any, fragments: int
) -> None:
    sync = delayed(
        plane,
        delay_bound=bound,
        quorum=quorum,
        accumulation=accumulation,
        wire=wire,
        outer=OuterConfig(outer, 0.7, 0.5),
        fragments=fragments,
    )
    samples = 3 * SAMPLES + 31
    rests = [100, 101, SAMPLES, 2 * SAMPLES + 5]
    outcome = train(plane, sync, samples=samples, rests=rests, device=of_unequal_speed(plane.rank))
    assert_invariants(plane, [outcome], samples, bound)
    assert [rest.applied for rest in outcome.rests] == [*rests, samples]
    assert outcome.rests[-1].loss < 0.6 * outcome.first_loss
    coordinator = outcome.session.coordinator
    if coordinator is not None:
        assert sum(coordinator.machine.samples_by_rank.values()) == samples
        assert coordinator.machine.staleness.total() > 0


def test_large_models_have_fragments_without_being_told(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsync.config.schema.LARGE_VALUES", 10)
    outcome = train(plane, delayed(plane, delay_bound=4), rests=[100])
    assert_invariants(plane, [outcome], SAMPLES, 4)
    assert outcome.session.settings.fragments == 2
    assert outcome.session.engine.fragments == (1 if plane.size == 1 else 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_states_are_one_at_rest(plane: Plane, optimizer: str) -> None:
    def state(outcome: Outcome) -> list[torch.Tensor]:
        states = outcome.optimizer.state.values()
        return [value for of_weight in states for value in of_weight.values() if torch.is_tensor(value)]

    def compare(outcome: Outcome) -> None:
        mine = state(outcome)
        for theirs in plane.gather_objects(mine):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    train(plane, delayed(plane), optimizer=optimizer, rests=[60, 120], at_rest=compare)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_one_rank_alone_is_plain_training(plane: Plane, bound: int) -> None:
    """At one rank delayed mode takes the very steps of plain training, and its weights are in no sum."""
    if plane.size > 1:
        pytest.skip("one rank only")
    expected, _, _ = plain_training(accumulation=1, optimizer="momentum")
    outcome = train(plane, delayed(plane, delay_bound=bound), optimizer="momentum")
    close(plane, outcome, expected)
    values = sum(weight.numel() for weight in outcome.weights)
    assert outcome.session.engine.bytes_sent < len(outcome.staleness) * 4 * values


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_one_rank_alone_with_its_progress_in_flight_is_plain_training(plane: Plane, bound: int) -> None:
    """However long it flies. A rank alone has no deltas but where an outer optimizer acts on them; this one does
    nothing."""
    if plane.size > 1:
        pytest.skip("one rank only")
    expected, _, _ = plain_training(accumulation=1, optimizer="momentum")
    late = FaultyPlane(plane, [Delay(0, nth, 0.01) for nth in range(20)])
    outer = OuterConfig("nesterov", learning_rate=1.0, momentum=0.0)
    outcome = train(late, delayed(plane, delay_bound=bound, outer=outer), optimizer="momentum")
    assert late.fired
    assert bound == 1 or max(outcome.staleness) > 0  # it went on while progress flew
    close(plane, outcome, expected)


@pytest.mark.parametrize(
    ("bound", "quorum", "accumulation", "wire", "fragments"), [(*case[:4], case[5]) for case in DELAYED]
)
def test_no_progress_is_lost_or_counted_twice(
    plane: Plane, bound: int | None, quorum: float, accumulation: int, wire: WireFormat, fragments: int
) -> None:
    """Where the gradient is the same everywhere, each sample moves the weights by learning rate / B times it."""
    model = Net()
    before = [weight.detach().clone() for weight in model.parameters()]
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(weight.shape, generator=generator) for weight in before]

    def linear(net: torch.nn.Module, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        terms = [(weight * slope).sum() for weight, slope in zip(net.parameters(), slopes, strict=True)]
        return torch.stack(terms).mean() * len(terms)  # a plain sum is refused

    sync = delayed(plane, delay_bound=bound, quorum=quorum, accumulation=accumulation, wire=wire, fragments=fragments)
    late = FaultyPlane(plane, [Delay(0, nth, 0.005) for nth in range(0, 40, 2)])
    moved: list[tuple[int, list[torch.Tensor]]] = []
    train(
        late,
        sync,
        model=model,
        optimizer="sgd",
        samples=2 * SAMPLES + 31,
        rests=[100, SAMPLES],
        loss_of=linear,
        device=of_unequal_speed(plane.rank),
        at_rest=lambda outcome: moved.append((outcome.session.applied, outcome.weights)),
    )
    assert late.fired or plane.rank or plane.size == 1  # alone, nothing travels
    for applied, weights in moved:
        for start, slope, now in zip(before, slopes, weights, strict=True):
            expected = -0.1 * slope * applied / BATCH
            off = (now - start - expected).abs().max() / expected.abs().max()
            assert off < 2e-5, "at a rest all has arrived that roundings had left for later"


@pytest.mark.parametrize("bound", [0, 4])
def test_a_rank_without_a_share_takes_part(plane: Plane, bound: int) -> None:
    pins = {0: BATCH} | {rank: 0 for rank in range(1, plane.size)}
    outcome = train(plane, delayed(plane, delay_bound=bound, pins=pins), rests=[75])
    assert_invariants(plane, [outcome], SAMPLES, bound)
    assert [bool(slices) for slices in plane.gather_objects(outcome.slices)] == [True] + [False] * (plane.size - 1)


def test_shares_follow_the_measured_speeds(plane: Plane) -> None:
    device = of_unequal_speed(plane.rank, 5e-5)
    outcome = train(plane, SyncConfig(4, 0.25), samples=12 * SAMPLES, device=device)
    assert_invariants(plane, [outcome], 12 * SAMPLES, 4)
    shares = outcome.session.shares
    assert sum(shares) == BATCH
    assert plane.size == 1 or shares[0] > shares[-1]


# Slow, late and unequal.


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_delayed_collective_changes_nothing_but_time(plane: Plane, bound: int) -> None:
    if plane.size == 1:
        pytest.skip("alone, nothing travels")
    late = [Delay(plane.size - 1, nth, seconds=0.1) for nth in (0, 3, 4)]
    faulty = FaultyPlane(plane, late)
    outcome = train(faulty, delayed(plane, delay_bound=bound), rests=[100])
    assert faulty.fired == [fault for fault in late if fault.rank == plane.rank]
    assert_invariants(plane, [outcome], SAMPLES, bound)
    if bound == 0:
        close(plane, outcome, train(LocalPlane(), SyncConfig(0), rests=[100]).weights)


@pytest.mark.each_value
@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_behind_a_slow_link(plane: Plane, bound: int, wire: WireFormat) -> None:
    link = EmulatedLink(plane, latency_seconds=2e-3, bytes_per_second=1e6)
    outcome = train(link, delayed(plane, delay_bound=bound, wire=wire), rests=[100])
    assert_invariants(plane, [outcome], SAMPLES, bound)


def test_a_rank_that_is_late_to_a_rest(plane: Plane) -> None:
    """Its peers wait for it: nobody begins on what comes after the rest."""

    def dawdle(outcome: Outcome) -> None:
        if plane.rank == plane.size - 1:
            sleep(0.1)

    outcome = train(plane, delayed(plane), rests=[50, 100, 150], at_rest=dawdle)
    assert_invariants(plane, [outcome], SAMPLES, 4)


class SlowTelemetry(Telemetry):
    """Holds the communication thread up just after a round has landed."""

    def __init__(self) -> None:
        super().__init__(None)

    def record(self, kind: str, **fields: Any) -> None:
        if kind == "round":
            sleep(0.005)


@pytest.mark.parametrize("mode", ["delayed", "synchronous", "both"])
def test_a_rank_that_hears_of_new_work_before_its_drain_has_landed_rests_first(plane: Plane, mode: str) -> None:
    """All but rank 0 see sums late: what comes after a rest is handed out before these ranks are there."""
    late = [Delay(rank, nth, 0.01) for rank in range(1, plane.size) for nth in range(200)]

    def switch(outcome: Outcome) -> None:
        if plane.rank == 0 and mode == "both":
            outcome.session.tune(Settings(0 if outcome.session.settings.delay_bound else 4, 0.1, 1))

    outcome = train(
        FaultyPlane(plane, late),
        delayed(plane, delay_bound=0 if mode == "synchronous" else 4),
        rests=[30, 60, 90, 120, 150],
        at_rest=switch,
        telemetry=SlowTelemetry(),
    )
    assert_invariants(plane, [outcome], SAMPLES, 4)


@pytest.mark.parametrize(
    ("optimizer", "bound", "rate"), [("adamw", 4, 0.01), ("adamw", 0, 0.01), ("momentum", 4, 0.05)]
)
def test_local_steps_on_few_samples_are_short(plane: Plane, optimizer: str, bound: int, rate: float) -> None:
    """Below the even share B / R by the root of n over it; adaptive ones are at the recipe's rate."""
    seen: list[float] = []
    due: list[float] = []

    def look(session: Session, number: int) -> None:
        assert session.tasks.work is not None
        task = session.tasks.work.task
        part = task.samples / len(task.slices) * plane.size / BATCH
        seen.append(session.optimizers[0].param_groups[0]["lr"])
        due.append(rate * min(1.0, math.sqrt(part)) if optimizer == "momentum" else rate)

    train(plane, delayed(plane, delay_bound=bound), optimizer=optimizer, on_slice=look)
    assert all(plane.gather_objects(seen == pytest.approx(due)))
    assert sum(plane.gather_objects(len(seen))) >= SAMPLES / BATCH


# Failures that are the program's to name.


def test_other_weights_on_one_rank_are_noticed(plane: Plane) -> None:
    from hetsync.sync.agreement import AnchorMismatchError

    if plane.size == 1:
        pytest.skip("needs ranks to compare")

    def meddle(session: Session, number: int) -> None:
        if plane.rank == 1 and number == 1:
            next(session.model.parameters()).data[0, 0] += 1e-3

    with pytest.raises(AnchorMismatchError, match=r"ranks \[1\] hold other weights than rank 0"):
        train(plane, synchronous(plane), on_slice=meddle, optimizer="sgd", rests=[4 * BATCH])


@pytest.mark.parametrize("on_host", [True, False])
def test_a_rank_knows_for_how_long_it_can_do_without_a_round(plane: Plane, on_host: bool) -> None:
    """Where polls take the cores that compute; of a bound of 9, for 4 tasks. Each look at this clock is a second."""
    device = RealDevice(count().__next__) if on_host else of_unequal_speed(0)
    seen: list[float] = []
    train(
        plane,
        delayed(plane, delay_bound=9),
        device=device,
        on_slice=lambda session, _: seen.append(session.engine._shared.patience_seconds),
    )
    assert seen[0] == 0
    assert len(seen) > 1  # a rank has two tasks at least
    assert set(seen[1:]) <= ({4.0, 8.0} if on_host else {0.0})
