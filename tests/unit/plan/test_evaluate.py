"""The three costs: step time against a simulation of every event, laws of all three, and what infeasible means."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from block_graphs import cost, graph
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_pipeline import simulate

from hetsync.balance.profile import StepTime
from hetsync.balance.shares import speed_shares
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, LognormalJitter, PairLink, load_cluster
from hetsync.emulation.jitter import jitter_sampler
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.schedule import bounded_in_flight, micro_batch_sizes, stage_order
from hetsync.plan.search.contiguous import first_shares

FREE = Link()


def cluster(ranks, link=FREE, memory_gib=None, links=()):
    devices = tuple(DeviceGroup(f"d{rank}", memory_gib=memory_gib) for rank in range(ranks))
    return Cluster("made up", "made up", devices, link, links=links)


def chain(cuts, blocks, micro_batches=1, share=None, in_flight=None, first_rank=0):
    """Consecutive blocks on consecutive ranks."""
    bounds = [0, *cuts, blocks]
    held = [tuple(range(*pair)) for pair in pairwise(bounds)]
    stages = tuple(Stage((first_rank + index,), blocks, in_flight) for index, blocks in enumerate(held))
    return Replica(stages, share, micro_batches)


@st.composite
def pipelines(draw):
    """A model, its costs, and one replica of it: stages of one rank or two, in any order, over slow links."""
    blocks = draw(st.integers(1, 6))
    pairs = [(a, b) for b in range(blocks) for a in range(b)]
    edges = sorted(draw(st.sets(st.sampled_from(pairs)))) if pairs else []
    seconds = st.integers(1, 20)
    costs = [
        cost(draw(seconds), draw(seconds), draw(seconds), draw(st.integers(1, 9)), 0, 0, draw(st.integers(0, 40)))
        for _ in range(blocks)
    ]
    cuts = sorted(draw(st.sets(st.integers(1, blocks - 1)))) if blocks > 1 else []
    bounds = [0, *cuts, blocks]
    wide = [draw(st.integers(1, 2)) for _ in bounds[1:]]
    ranks = iter(range(sum(wide)))
    in_flight = st.none() | st.integers(1, 6)
    stages = [
        Stage(tuple(next(ranks) for _ in range(width)), tuple(range(bounds[i], bounds[i + 1])), draw(in_flight))
        for i, width in enumerate(wide)
    ]
    micro_batches = draw(st.integers(1, 5))
    share = max(wide) * micro_batches + draw(st.integers(0, 7))
    times = [StepTime(draw(st.integers(0, 5)), draw(st.integers(1, 9))) for _ in range(sum(wide))]
    link = Link(draw(st.integers(0, 4)) / 2, draw(st.sampled_from([None, 1.0, 7.0])))
    slow = PairLink(("d0", f"d{len(times) - 1}"), 1.0, 0.5)
    order = draw(st.permutations(range(len(stages))))
    replica = Replica(tuple(stages[i] for i in order), share, micro_batches)
    return (
        graph([f"b{i}" for i in range(blocks)], edges),
        costs,
        replica,
        times,
        cluster(len(times), link, links=(slow,)),
    )


@given(pipelines())
@settings(max_examples=150)
def test_a_step_takes_what_a_simulation_of_every_event_says(pipeline):
    model, costs, replica, times, devices = pipeline
    evaluator = Evaluator(model, costs, devices, times, Training(replica.share))
    found = evaluator.evaluate(Placement((replica,)))
    assert found.step_seconds == pytest.approx(slow_seconds(*pipeline, evaluator.times), rel=1e-9)


def slow_seconds(model, costs, replica, times, devices, divided_by):
    """`divided_by`: the evaluator's, by which ranks divide samples, so that ties are broken alike."""
    samples = replica.share / len(times)
    forward = [c.fixed_forward_seconds + samples * c.forward_seconds for c in costs]
    backward = [c.fixed_backward_seconds + samples * c.backward_seconds for c in costs]
    update, passes = sum(c.update_seconds for c in costs), sum(forward) + sum(backward)
    fixed = sum(c.fixed_forward_seconds + c.fixed_backward_seconds for c in costs)

    def work(stage, rank, kind):
        """As the step without its update, of which as much is fixed as on the profiled device."""
        part = sum((forward if kind == "F" else backward)[block] for block in stage.blocks) / passes
        whole = (times[rank].fixed_seconds + samples * times[rank].seconds_per_sample) * passes / (passes + update)
        always = times[rank].fixed_seconds * fixed / (fixed + update)
        return part * always, part * (whole - always) / samples

    def updating(stage):
        part = sum(costs[block].update_seconds for block in stage.blocks) / (passes + update)
        return max(part * (times[r].fixed_seconds + samples * times[r].seconds_per_sample) for r in stage.ranks)

    stages = [
        (
            [{kind: work(stage, rank, kind) for kind in "FB"} for rank in stage.ranks],
            lambda size, stage=stage: speed_shares([divided_by[rank] for rank in stage.ranks], size),
        )
        for stage in replica.stages
    ]
    edges = {}
    for a, one in enumerate(replica.stages):
        for b, other in enumerate(replica.stages):
            needed = {e.source for e in model.edges if e.source in one.blocks and e.target in other.blocks}
            if a != b and needed:
                edges[a, b] = sum(costs[block].output_bytes for block in needed)
    last, needed = stage_order(len(stages), list(edges))[-1], set(edges)
    for block in set(range(len(costs))) - {edge.source for edge in model.edges}:  # what the model returns
        (stage,) = (index for index, one in enumerate(replica.stages) if block in one.blocks)
        if stage != last:
            edges[stage, last] = edges.get((stage, last), 0) + costs[block].output_bytes

    def links(one, other):
        link = devices.link_between(*(replica.stages[s].ranks[i] for s, i in (one, other)))
        return link.latency_seconds, 1 / link.bytes_per_second if link.bytes_per_second else 0.0

    said = [stage.in_flight for stage in replica.stages]
    in_flight = bounded_in_flight(len(stages), edges, replica.micro_batches, said)
    sums = [  # of a lockstep stage's gradients: weights have no bytes here, so latency is all
        devices.ring_link(stage.ranks).latency_seconds if len(stage.ranks) > 1 else 0.0 for stage in replica.stages
    ]
    sizes = micro_batch_sizes(replica.share, replica.micro_batches)
    ends = simulate(stages, edges, sizes, in_flight, links, late=set(edges) - needed)
    return max(end + after + updating(stage) for end, after, stage in zip(ends, sums, replica.stages, strict=True))


def test_the_update_comes_once_a_step_however_many_micro_batches_there_are():
    """Of 13 s on the profiled device 4 s are the update's, and 1 s is fixed besides; the rank is half as fast."""
    costs = [cost(0.25, 0.5, 1 / 3, update=1), cost(0.25, 0.0, 0.0, update=3)]
    evaluator = Evaluator(graph("ab"), costs, cluster(1), [StepTime(10, 2)], Training(8))
    assert evaluator.times == (StepTime(2, 2),)
    for micro_batches in (1, 2, 8):
        found = evaluator.evaluate(Placement((chain((), 2, micro_batches),)))
        assert found.step_seconds == pytest.approx(2 * micro_batches + 8 * 2 + 8)


def test_a_stage_updates_its_own_weights_after_its_last_backward_pass():
    """The first stage ends last, but the last one has more weights, which it updates meanwhile."""
    costs = [cost(1, 2, update=2), cost(1, 2, update=22)]
    evaluator = Evaluator(graph("ab"), costs, cluster(2), [StepTime(0, 12)] * 2, Training(8))
    # A step of 4 samples is 24 s of passes and 24 s of update on the profiled device, and here.
    assert evaluator.update_seconds == pytest.approx((24, 24))
    found = evaluator.evaluate(Placement((chain((1,), 2),)))
    assert found.step_seconds == pytest.approx(8 * (1 + 1 + 2) + 22)  # and not 8 · 6 + 22


def test_ranks_that_share_a_stage_update_all_of_it():
    costs = [cost(1, 2, weight=100, update=12)]
    devices = cluster(2, Link(1.0, 100.0))
    times = [StepTime(0, 6), StepTime(0, 12)]  # half of a step of 4 samples is the update's
    evaluator = Evaluator(graph("a"), costs, devices, times, Training(8))
    assert evaluator.update_seconds == pytest.approx((12, 24))
    found = evaluator.evaluate(Placement((Replica((Stage((0, 1), (0,)),), 8),)))
    assert found.step_seconds == pytest.approx(6 * 3 + (1 + 1) + 24)  # of 8 samples the faster one has 6


JITTER = LognormalJitter(0.5)


def updating_replicas(delay_bound, jitter=None):
    """Two, of ranks whose update takes 12 and 6 s, and passes 3 and 1.5 s a sample. Sums take no time."""
    devices = replace(cluster(2), jitter=jitter)
    training = Training(8, SyncConfig(delay_bound=delay_bound))
    return Evaluator(graph("a"), [cost(1, 2, update=12)], devices, [StepTime(0, 6), StepTime(0, 3)], training)


BOTH = Placement((chain((), 1), chain((), 1, first_rank=1)))
CUT = Placement((chain((), 1, 2), chain((), 1, 2, first_rank=1)))  # into micro-batches


def test_replicas_that_are_apart_update_after_each_slice():
    """And shares are by what they take with it."""
    found = updating_replicas(4).evaluate(BOTH)
    assert found.shares == (1, 7)
    assert found.replica_seconds == pytest.approx((12 + 3, 6 + 7 * 1.5))
    assert found.step_seconds == pytest.approx(8 / (1 / 15 + 7 / 16.5))


def test_replicas_in_step_update_once_all_have_ended_their_passes():
    """So shares are by passes alone: a smaller one would not make up for a longer update."""
    found = updating_replicas(0).evaluate(CUT)
    assert found.shares in {(2, 6), (3, 5)}
    assert found.step_seconds == pytest.approx(9 + 12)
    given = Placement((chain((), 1, share=2), chain((), 1, 2, share=6, first_rank=1)))
    assert updating_replicas(0).evaluate(given).step_seconds == pytest.approx(6 * 1.5 + 12)


def test_whole_models_in_step_wait_for_sums_only():
    """Each begins its next slice when it has updated: a smaller share makes up for a longer update."""
    found = updating_replicas(0).evaluate(BOTH)
    assert found.shares == (1, 7)
    assert found.step_seconds == pytest.approx(max(12 + 3, 6 + 7 * 1.5))


def test_updates_in_step_scatter_as_passes_do():
    found = updating_replicas(0, JITTER).evaluate(CUT).step_seconds
    draws = [jitter_sampler(JITTER, 7, rank) for rank in range(2)]
    drawn = [[draw() for draw in draws] for _ in range(4000)]
    shares = updating_replicas(0, JITTER).evaluate(CUT).shares
    slices = [max(3 * shares[0] * a, 1.5 * shares[1] * b) + max(12 * a, 6 * b) for a, b in drawn]
    assert found == pytest.approx(np.mean(slices), rel=0.05)


def scattering(delay_bound=0, quorum=0.25, jitter=JITTER):
    """Of a chain of three blocks on three equal ranks; slow links."""
    devices = replace(cluster(3, Link(0.1, 100.0)), jitter=jitter)
    sync = SyncConfig(delay_bound=delay_bound, quorum=quorum)
    times = [StepTime(0.0, 1.0)] * 3
    return Evaluator(graph("abc"), [cost(1, 2, output=1, weight=0)] * 3, devices, times, Training(24, sync))


def drawn_seconds(evaluator, placement, slices=1000):
    """Of so many slices of each replica, in which all ranks are as slow as the emulation draws."""
    draws = [jitter_sampler(JITTER, 7, rank) for rank in range(len(evaluator.times))]
    found = []
    for _ in range(slices):
        times = [
            StepTime(0.0, draw() * time.seconds_per_sample) for draw, time in zip(draws, evaluator.times, strict=True)
        ]
        devices = replace(evaluator.cluster, jitter=None)
        one = Evaluator(evaluator.graph, evaluator.block_costs, devices, times, evaluator.training)
        found.append(one.evaluate(placement).replica_seconds)
    return np.array(found)


def test_stages_wait_for_whoever_is_slow_in_a_slice():
    evaluator, placement = scattering(), Placement((chain((1, 2), 3, micro_batches=4, share=24),))
    found = evaluator.evaluate(placement)
    steady = scattering(jitter=None).evaluate(placement)
    assert found.step_seconds == pytest.approx(drawn_seconds(evaluator, placement).mean(), rel=0.02)
    assert found.step_seconds > 1.1 * steady.step_seconds
    assert evaluator.evaluate(placement) == found
    assert replace(found, step_seconds=0, replica_seconds=()) == replace(steady, step_seconds=0, replica_seconds=())


def test_replicas_that_scatter_wait_for_each_other_only_where_they_must():
    """A pipeline of two ranks and a rank alone: in step, and with a quorum of all, for the slowest of a slice."""
    placement = Placement((chain((2,), 3, micro_batches=4, share=16), whole_on(2, 8)))
    drawn = drawn_seconds(scattering(), placement)
    pipeline, alone = drawn.mean(axis=0)
    for evaluator in (scattering(), scattering(4, quorum=1.0)):
        found = evaluator.evaluate(placement).step_seconds
        assert found == pytest.approx(drawn.max(axis=1).mean(), rel=0.03)
    apart = scattering(4).evaluate(placement)
    assert apart.step_seconds == pytest.approx(24 / (16 / pipeline + 8 / alone), rel=0.03)
    assert apart.replica_seconds[1] == pytest.approx(8.0)  # which nobody holds up: factors have mean 1


def test_shares_by_speed_know_that_a_pipeline_waits():
    """Of three ranks that are alike, two as a pipeline have less than twice the share of one alone."""
    placement = Placement((chain((2,), 3, micro_batches=2), whole_on(2, None)))
    (pipeline, alone), (steady, other) = (
        scattering(jitter=jitter).evaluate(placement).shares for jitter in (JITTER, None)
    )
    assert pipeline + alone == steady + other == 24
    assert pipeline < steady


def whole_on(rank, share):
    return Replica((Stage((rank,), (0, 1, 2)),), share)


@given(pipelines(), st.sampled_from([1.5, 2.0, 10.0]))
@settings(max_examples=60)
def test_more_bandwidth_never_makes_gpipe_slower(pipeline, factor):
    model, costs, replica, times, devices = pipeline
    gpipe = replace(replica, stages=tuple(replace(stage, in_flight=replica.micro_batches) for stage in replica.stages))
    faster = replace(devices, link=faster_link(devices.link, factor), links=())
    slow, fast = (
        Evaluator(model, costs, one, times, Training(replica.share)).evaluate(Placement((gpipe,)))
        for one in (replace(devices, links=()), faster)
    )
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-9)
    assert (fast.step_bytes, fast.memory_bytes) == (slow.step_bytes, slow.memory_bytes)


def faster_link(link, factor):
    return replace(link, bytes_per_second=link.bytes_per_second and link.bytes_per_second * factor)


@given(pipelines(), st.sampled_from([0.5, 4.0]))  # powers of two: other factors may break ties otherwise
@settings(max_examples=60)
def test_scaling_all_times_scales_step_time_only(pipeline, factor):
    model, costs, replica, times, devices = pipeline

    def scaled(link):
        rate = link.bytes_per_second and link.bytes_per_second / factor
        return replace(link, latency_seconds=link.latency_seconds * factor, bytes_per_second=rate)

    slower = replace(devices, link=scaled(devices.link), links=tuple(scaled(pair) for pair in devices.links))
    slower_times = [StepTime(time.fixed_seconds * factor, time.seconds_per_sample * factor) for time in times]
    plan = Placement((replica,))
    before = Evaluator(model, costs, devices, times, Training(replica.share)).evaluate(plan)
    after = Evaluator(model, costs, slower, slower_times, Training(replica.share)).evaluate(plan)
    assert after.step_seconds == pytest.approx(before.step_seconds * factor)
    assert (after.step_bytes, after.memory_bytes) == (before.step_bytes, before.memory_bytes)


def test_gpipe_without_links_is_the_sum_and_the_slowest_stage():
    """Σ + (M − 1) · max of forward, then of backward: exact for GPipe."""
    model, costs = graph("abc"), [cost(1, 2), cost(3, 4), cost(2, 6)]
    evaluator = Evaluator(model, costs, cluster(3), [StepTime(0, 18)] * 3, Training(5))
    found = evaluator.evaluate(Placement((chain([1, 2], 3, 5, in_flight=5),)))
    assert found.step_seconds == pytest.approx(6 + 4 * 3 + 12 + 4 * 6)


def test_bytes_are_those_of_activations_their_gradients_and_sums():
    """b's output goes to c and d: once, since both are on one rank."""
    model = graph("abcd", [(0, 1), (1, 2), (1, 3), (2, 3)])
    costs = [cost(output=size, weight=40) for size in (10, 20, 30, 40)]
    evaluator = Evaluator(model, costs, cluster(4), [StepTime(0, 1)] * 4, Training(6, SyncConfig(delay_bound=0)))
    one = evaluator.evaluate(Placement((chain([1, 2], 4, 2),)))
    assert one.step_bytes == 2 * 6 * (10 + 20)
    lockstep = Replica((Stage((0,), (0,)), Stage((1, 2), (1, 2, 3))), None, 2)
    assert evaluator.evaluate(Placement((lockstep,))).step_bytes == 2 * 6 * 10 + 2 * 120
    two = Placement((chain([1], 4, 1, 3), chain([2], 4, 1, 3, first_rank=2)))
    assert evaluator.evaluate(two).step_bytes == 2 * 3 * 10 + 2 * 3 * 20 + 2 * 160
    # Ranks that share a stage sum its gradients, and take part in the sums over replicas.
    both = Placement((replace(lockstep, share=3), chain([], 4, share=3, first_rank=3)))
    assert evaluator.evaluate(both).step_bytes == 2 * 3 * 10 + 2 * 120 + 2 * 40 + 2 * 2 * 120
    delayed = Evaluator(model, costs, cluster(4), [StepTime(0, 1)] * 4, Training(6, SyncConfig(quorum=1.0)))
    found = delayed.evaluate(both)
    assert found.step_bytes == evaluator.evaluate(both).step_bytes
    assert found.memory_bytes[1] == found.memory_bytes[2] == 8 * 120 + 3 * 200


def test_what_the_model_returns_goes_to_the_last_stage():
    """Heads b and c side by side: the loss is where c is."""
    evaluator = Evaluator(
        graph("abc", [(0, 1), (0, 2)]), [cost(output=size) for size in (1, 10, 100)], cluster(3), [StepTime(0, 1)] * 3,
        Training(5),
    )  # fmt: skip
    assert evaluator.evaluate(Placement((chain([1, 2], 3),))).step_bytes == 2 * 5 * (1 + 1 + 10)


def test_memory_is_weights_their_likes_and_activations_in_flight():
    model, costs = graph("abc"), [cost(saved=10, weight=100), cost(saved=20, weight=200), cost(saved=30, weight=400)]
    evaluator = Evaluator(model, costs, cluster(4), [StepTime(0, 1)] * 4, Training(8))
    one = evaluator.evaluate(Placement((chain([1, 2], 3, 4),)))
    assert one.memory_bytes == {0: 4 * 100 + 3 * 2 * 10, 1: 4 * 200 + 2 * 2 * 20, 2: 4 * 400 + 1 * 2 * 30}
    kept = [replace(each, received_bytes=7) for each in costs]  # of which another stage sends 5
    received = Evaluator(
        model, [replace(each, output_bytes=5) for each in kept], cluster(4), [StepTime(0, 1)] * 4, Training(8)
    )
    found = received.evaluate(Placement((chain([1, 2], 3, 4),))).memory_bytes
    assert [found[rank] - one.memory_bytes[rank] for rank in range(3)] == [0, 2 * 2 * 5, 1 * 2 * 5]
    two = evaluator.evaluate(Placement((chain([], 3, share=6), chain([2], 3, 2, 2, first_rank=1))))
    assert two.memory_bytes == {0: 8 * 700 + 60 * 6, 1: 8 * 300 + 2 * 30, 2: 8 * 400 + 1 * 30}
    synchronous = Evaluator(model, costs, cluster(2), [StepTime(0, 1)] * 2, Training(8, SyncConfig(delay_bound=0)))
    both = synchronous.evaluate(Placement((chain([], 3, share=6), chain([], 3, share=2, first_rank=1))))
    assert both.memory_bytes == {0: 5 * 700 + 60 * 6, 1: 5 * 700 + 60 * 2}  # with buckets of gradients
    apart = synchronous.evaluate(Placement((chain([], 3, 2, share=6), chain([], 3, share=2, first_rank=1))))
    assert apart.memory_bytes == {0: 4 * 700 + 60 * 3, 1: 4 * 700 + 60 * 2}


def test_what_the_loss_saves_is_there_for_one_micro_batch_at_a_time():
    model, costs = graph("ab"), [cost(saved=10, weight=100), cost(saved=30, weight=100)]
    scored = [costs[0], replace(costs[1], loss_bytes=20)]  # of the 30
    gpipe = Placement((chain([1], 2, 4, in_flight=4),))
    needs = [
        Evaluator(model, each, cluster(2), [StepTime(0, 1)] * 2, Training(8)).evaluate(gpipe).memory_bytes
        for each in (costs, scored)
    ]
    assert needs == [{0: 400 + 4 * 2 * 10, 1: 400 + 4 * 2 * 30}, {0: 400 + 4 * 2 * 10, 1: 400 + 2 * (4 * 10 + 20)}]


def test_samples_are_padded_to_the_longest_of_a_micro_batch():
    """Of four in flight one has the longest of all; the others' samples save half as much as in a batch of eight."""
    costs = [cost(saved=10, weight=100), replace(cost(saved=40, weight=100), padding=0.5, padded_samples=8)]
    evaluator = Evaluator(graph("ab"), costs, cluster(2), [StepTime(0, 1)] * 2, Training(8))
    for in_flight, saved in ((4, 40 + 3 * 20), (1, 40)):
        found = evaluator.evaluate(Placement((chain([1], 2, 4, in_flight=in_flight),))).memory_bytes
        assert found == {0: 400 + in_flight * 2 * 10, 1: 400 + 2 * saved}
    more = Evaluator(graph("ab"), costs, cluster(2), [StepTime(0, 1)] * 2, Training(64))
    assert more.evaluate(Placement((chain([1], 2, 4, in_flight=4),))).memory_bytes[1] == 400 + 4 * 16 * 40


def test_what_does_not_fit_is_infeasible():
    model, costs = graph("ab"), [cost(weight=2**20), cost(weight=2**28)]
    evaluator = Evaluator(model, costs, cluster(2, memory_gib=1), [StepTime(0, 1)] * 2, Training(8))
    found = evaluator.evaluate(Placement((chain([1], 2),)))
    need = 4 * 2**28 + 8 * 200
    assert not found.feasible
    assert found.lacking_bytes == {1: need - int(0.9 * 2**30)}
    with pytest.raises(UserError, match=f"rank 1 needs {need:,} bytes for its stage, and 966,367,641 of its d1 may be"):
        evaluator.check_memory(found)


def test_a_stage_on_two_hosts():
    devices = (DeviceGroup("a", 2, host="one"), DeviceGroup("b", host="two"))
    evaluator = Evaluator(graph("ab"), [cost()] * 2, Cluster("x", "s", devices), [StepTime(0, 1)] * 3, Training(8))
    evaluator.check_hosts(Placement((Replica((Stage((0, 1), (0,)), Stage((2,), (1,)))),)))
    with pytest.raises(UserError, match=r"stages\[1\].ranks is \[1, 2\], which are on the hosts one, two: ranks that"):
        evaluator.check_hosts(Placement((Replica((Stage((0,), (0,)), Stage((1, 2), (1,)))),)))


def test_shares_that_are_left_out_are_by_predicted_speed():
    model, costs = graph("ab"), [cost(1, 2), cost(1, 2)]
    evaluator = Evaluator(model, costs, cluster(3), [StepTime(0, 2), StepTime(0, 2), StepTime(0, 1)], Training(90))
    pipelined = chain([1], 2, 1)
    found = evaluator.with_shares(Placement((pipelined, chain([], 2, first_rank=2))))
    assert [replica.share for replica in found.replicas] == [30, 60]
    many = evaluator.with_shares(Placement((chain([1], 2, 50), chain([], 2, first_rank=2))))
    assert many.replicas[0].share == 50  # a sample for each micro-batch
    slower = Evaluator(model, costs, cluster(3), [StepTime(0, each) for each in (1, 2, 20)], Training(20))
    some = [Replica((Stage((rank,), (0, 1)),), None, 6) for rank in range(3)]
    assert [one.share for one in slower.with_shares(Placement(tuple(some))).replicas] == [8, 6, 6]  # short in turn
    pinned = evaluator.with_shares(Placement((replace(pipelined, share=80), chain([], 2, first_rank=2))))
    assert [replica.share for replica in pinned.replicas] == [80, 10]


def test_a_batch_without_a_sample_for_every_micro_batch():
    evaluator = Evaluator(graph("ab"), [cost()] * 2, cluster(3), [StepTime(0, 1)] * 3, Training(9))
    many = Placement((chain([1], 2, 5), chain([], 2, 5, first_rank=2)))
    with pytest.raises(UserError, match=r"data\.batch_size is 9, and 2 replicas need 10 samples"):
        evaluator.evaluate(many)


def test_a_stage_beside_one_that_ranks_share_runs_every_piece_by_itself():
    """Micro-batches of 8 become pieces of 4 and 4, each of which costs what is fixed."""
    times = [StepTime(6, 6)] * 3
    evaluator = Evaluator(graph("ab"), [cost(1, 2)] * 2, cluster(3), times, Training(8))
    shared = Replica((Stage((0, 1), (0,)), Stage((2,), (1,))), 8)
    found = evaluator.evaluate(Placement((shared,)))
    # Half of a step on 4 samples, then on twice as many: forward, all of the last stage, and backward.
    assert found.step_seconds == pytest.approx((6 + 4 * 6) / 2 + (2 * 6 + 8 * 6) / 2)


def test_the_timeline_is_that_of_the_step():
    model, costs = graph("ab"), [cost(1, 2), cost(1, 2)]
    evaluator = Evaluator(model, costs, cluster(2), [StepTime(0, 6)] * 2, Training(2))
    spans = evaluator.timeline(Placement((chain([1], 2, 2),)))
    told = [(s.rank, "F" if s.forward else "B", s.micro_batch, round(s.begin), round(s.end)) for s in spans]
    assert told == [
        (0, "F", 0, 0, 1), (0, "F", 1, 1, 2), (0, "B", 0, 4, 6), (0, "B", 1, 7, 9),
        (1, "F", 0, 1, 2), (1, "B", 0, 2, 4), (1, "F", 1, 4, 5), (1, "B", 1, 5, 7),
    ]  # fmt: skip


def test_a_link_that_is_a_fraction_of_computing_is_refused():
    with pytest.raises(UserError, match=r"slow-link: link.compute_fraction is 0.5, by which nobody .*give bytes"):
        Evaluator(graph("a"), [cost()], load_cluster("slow-link"), [StepTime(0, 1)], Training(8))


def test_first_shares_of_ranks_whose_slices_seem_to_take_no_longer_for_more_samples():
    """Measured on a busy machine."""
    times = [StepTime(1.0, 0.0), StepTime(3.0, 0.0)]
    evaluator = Evaluator(graph("ab"), [cost(1, 2)] * 2, cluster(2), times, Training(40))
    assert first_shares(evaluator, [(0,), (1,)]) == (30, 10)
