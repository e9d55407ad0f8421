"""The peers benchmark: its plans, its reference figures and its recipes. Imports no MPI."""

from itertools import pairwise

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from peers_fixtures import DIGITS, SCENARIOS, cell

from benchmarks.peers import cells, plan, starter
from hetsync import data, models
from hetsync.cli.train import parse
from hetsync.emulation.cluster import save_cluster
from hetsync.errors import UserError
from hetsync.profiling.device import memory_cap
from hetsync.profiling.measure import loss_on

# Plans.

jobs = st.tuples(
    st.integers(1, 400),
    st.integers(1, 50),
    st.none() | st.integers(1, 120),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
)


@given(jobs, st.sampled_from([plan.lockstep, plan.uneven]))
def test_every_sample_is_used_once_and_none_after_its_rest(job, make):
    total, batch, every, shares = job
    plans = [make(total, batch, every, shares, rank) for rank in range(len(shares))]
    stretches = plan.rests(total, every)
    assert stretches[0][0] == 0
    assert stretches[-1][1] == total
    for index, (first, last) in enumerate(stretches):
        used = [p for steps in plans for step in steps[index] for p in range(step.start, step.stop)]
        assert sorted(used) == list(range(first, last))
    assert all(len(steps) == len(stretches) for steps in plans)


@given(jobs)
def test_in_lockstep_all_ranks_share_every_step(job):
    total, batch, every, shares = job
    plans = [plan.lockstep(total, batch, every, shares, rank) for rank in range(len(shares))]
    for segments in zip(*plans, strict=True):
        for steps in zip(*segments, strict=True):
            assert {step.batch for step in steps} == {sum(step.samples for step in steps)}
            assert steps[0].batch <= batch
            assert all(before.stop == after.start for before, after in pairwise(steps))


def test_with_join_fast_ranks_have_more_steps_of_the_same_size():
    fast, slow = (plan.uneven(800, 80, None, (3, 1), rank)[0] for rank in (0, 1))
    assert {step.samples for step in fast + slow} == {40}
    assert (len(fast), len(slow)) == (15, 5)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6))
def test_evaluations_change_no_ranks_clock(segments):
    """Two ranks that never meet: each ends when its own segments are over, in however many parts they run."""
    clocks = plan.TrainingClock(), plan.TrainingClock()
    for seconds in segments:
        times = [clock.at(clock.lag + spent) for clock, spent in zip(clocks, seconds, strict=True)]
        for clock, mine in zip(clocks, times, strict=True):
            clock.rest(mine, times)
    assert times == pytest.approx([sum(mine) for mine in zip(*segments, strict=True)])


# Reference figures.


def test_equal_devices_lose_nothing_by_equal_shares():
    stretches = cells.phases(SCENARIOS["homogeneous"], 400.0)
    assert cells.equal_rate(stretches) == pytest.approx(cells.ideal_rate(stretches)) == pytest.approx(400)


def test_ceiling_of_equal_shares_on_three_generations():
    stretches = cells.phases(SCENARIOS["v100-p100-k80"], 400.0)
    assert cells.equal_rate(stretches) / cells.ideal_rate(stretches) == pytest.approx(8 / (2 * 7.10 + 2 * 4.23 + 4))


def test_the_reference_follows_the_rank_that_slows_down():
    stretches = cells.phases(SCENARIOS["slows-half-way"], 160.0)
    assert [sum(rates) for rates in stretches] == pytest.approx([160, 160 - 40 * 2 / 3])
    half, rest = 1000 / 2 / 160, 1000 / 2 / (160 - 40 * 2 / 3)
    assert cells.ideal_rate(stretches) == pytest.approx(1000 / (half + rest))


@pytest.mark.parametrize(("peer", "after"), [("ddp-equal", 62), ("ddp-by-speed", 125), ("hetsync-delayed", 125)])
def test_the_slow_down_comes_half_way_whatever_the_shares(peer, after):
    event = cells.profile(cell("slows-half-way", peer), None).events[0]
    assert (event.rank, event.factor, event.after_samples) == (cells.SLOW_RANK, 3.0, after)


def test_the_single_device_is_the_fastest_at_its_own_rate(tmp_path):
    alone = cell("t4-v100-a100", "alone")
    cluster = cells.profile(alone, None)
    assert [(group.name, group.count) for group in cluster.devices] == [("A100", 1)]
    made = cells.recipe(alone, tmp_path, tmp_path / "cluster.yaml", None)
    speeds = SCENARIOS["t4-v100-a100"].speeds()
    assert made["emulation"]["samples_per_second"] == pytest.approx(400 * max(speeds) / sum(speeds))


def test_limited_memory_holds_just_the_samples_that_it_shall():
    source = data.build("digits", {})
    model = models.build_for(source, "digits_cnn", {})
    cpu, limit = torch.device("cpu"), starter.memory_for(DIGITS, 20, None)
    assert memory_cap(model, loss_on(model, source, cpu), cpu, 8, limit_bytes=limit) == 20


@pytest.mark.parametrize("peer", cells.PEERS)
def test_memory_limits_only_those_that_cannot_accumulate_what_does_not_fit(peer):
    job = cell("uneven-memory", peer)
    cluster = cells.profile(job, 2**30)
    limits = [cluster.device_of(rank).memory_gib for rank in range(job.ranks)]
    assert limits == ([1.0] * 2 + [None] * 6 if peer in cells.HETSYNC else [None] * job.ranks)


@pytest.mark.each_value
@pytest.mark.parametrize("peer", cells.PEERS)
@pytest.mark.parametrize("workload", cells.WORKLOADS.values(), ids=lambda w: w.name)
def test_recipes_are_what_hetsync_train_reads(peer, workload, tmp_path):
    job = cell("slow-link", peer, workload, learning_rate=0.125)
    save_cluster(cells.profile(job, None), tmp_path / "cluster.yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(cells.recipe(job, tmp_path / "run", tmp_path / "cluster.yaml", tmp_path)))
    config, *_ = parse([str(path)])
    assert config.optimizer.learning_rate == 0.125
    assert config.data.batch_size == workload.batch
    assert (config.sync.delay_bound == 0) == (peer == "hetsync-sync")


@pytest.mark.parametrize(
    ("peer", "pins"),
    [("ddp-by-speed", {0: 80, 1: 40, 2: 20, 3: 20}), ("hetsync-sync", {}), ("hetsync-delayed", {}), ("alone", {})],
)
def test_peers_on_real_devices_have_shares_by_measured_speeds_and_hetsync_finds_its_own(peer, pins, tmp_path):
    job = cell("throttled", peer, known_rates=(400.0, 200.0, 100.0, 100.0))
    assert cells.recipe(job, tmp_path, None, None)["sync"].get("pins", {}) == pins


def test_a_folder_without_the_trace_is_named(tmp_path):
    with pytest.raises(UserError, match=f"--traces is {tmp_path}, which holds no job_1_norm.csv"):
        cells.scenarios(tmp_path)
    (tmp_path / "job_1_norm.csv").touch()
    assert "trace" in cells.scenarios(tmp_path)["production-jitter"].title
