"""The peers benchmark's jobs: learning rates, emulation, and one peer end to end. Imports no MPI."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
from argparse import Namespace

import pytest
import torch
import yaml
from jobs import environment
from peers_fixtures import DIGITS, RANK_FIGURES, cell, job

from benchmarks.common.local_job import ROOT
from benchmarks.common.processes import failure_of
from benchmarks.peers import cells, compare, plan, starter, timeline
from benchmarks.peers import job as job_module
from benchmarks.peers.job import DDP_FIRST_BUCKET_BYTES, Job, Pacer
from hetsync import data, models
from hetsync.balance.device import Device
from hetsync.data.evaluation import evaluate_range
from hetsync.data.loader import EpochOrder
from hetsync.data.workers import fetch

# Learning rates.


class Rehearsal:
    """A starter whose jobs get to the target the sooner, the nearer their learning rate is to the best one."""

    def __init__(self, best):
        self.best = best
        self.cells = []

    def run(self, cell):
        self.cells.append(cell)
        if cell.peer == "horovod":
            return {"missing": "skipped: not here"}
        away = abs(math.log(cell.learning_rate / self.best))
        accuracies = (math.nan,) * 3 if cell.learning_rate > 0.3 else (0.95 - away / 10, 1.0, 1.0)
        return {"result": job(cell.peer, accuracies=accuracies)["result"], "timeline": []}


def test_tuning_gives_every_peer_the_same_jobs():
    peers = ["ddp-by-speed", "horovod", "hetsync-delayed"]
    options = Namespace(workloads=["digits"], quick=True, traces=None, clusters=None, peers=peers, batch=None)
    starter = Rehearsal(best=0.25)
    assert compare.tune(options, starter) == {"digits": {"ddp-by-speed": 0.25, "hetsync-delayed": 0.25}}
    tried = [[c.learning_rate for c in starter.cells if c.peer == peer] for peer in peers]
    assert tried == [[0.0625, 0.125, 0.25, 0.5]] * 3
    assert {(c.samples, c.seed) for c in starter.cells} == {(DIGITS.quick_samples, compare.TUNE_SEED)}


@pytest.mark.parametrize(
    ("by_rate", "expected"),
    [
        ({0.1: (0.5, 0.9, 0.97), 0.2: (0.96, 0.96, 0.965)}, 0.2),  # as good, and sooner there
        ({0.1: (0.5, 0.9, 0.98), 0.2: (0.96, 0.96, 0.96)}, 0.1),  # sooner there, and two points worse in the end
        ({0.1: (0.1, 0.2, 0.6), 0.2: (0.1, 0.2, 0.604)}, 0.2),  # neither gets there
        ({0.1: (0.5, 0.9, 0.97), 0.2: (0.99, math.nan, math.nan)}, 0.1),
        ({0.1: (math.nan,) * 3, 0.2: (math.nan,) * 3}, 0.1),
    ],
)
def test_the_soonest_at_the_target_is_taken_of_the_rates_that_end_well(by_rate, expected):
    assert compare.best_rate({rate: job("alone", accuracies=a) for rate, a in by_rate.items()}) == expected


def test_a_metric_that_falls_ends_well_at_the_bottom():
    falls = {"falling": True, "target": ["accuracy", 18.0]}
    tried = {0.1: (30.0, 17.0, 16.0), 0.2: (17.0, 17.0, 16.1), 0.4: (16.0, 17.0, 17.0)}
    assert compare.best_rate({rate: job("alone", accuracies=a, **falls) for rate, a in tried.items()}) == 0.2


def test_a_batch_that_is_asked_for_brings_its_learning_rate():
    asked = compare.workload_of(Namespace(batch=80), "digits")
    assert (asked.batch, asked.learning_rate) == (80, DIGITS.learning_rate / 2)
    assert compare.workload_of(Namespace(batch=None), "digits") == DIGITS


# Real devices.


class Throttled:
    """A starter whose ranks reach ten times their percentage alone, a little less in the first job of each."""

    def __init__(self):
        self.cells = []

    def run(self, cell):
        known = any(cell.solo_rank == earlier.solo_rank for earlier in self.cells)
        self.cells.append(cell)
        if cell.solo_rank is None:
            return {"result": job(cell.peer)["result"], "timeline": []}
        rate = 10 * cells.CPU_PERCENT[cell.solo_rank] * (1 if known else 0.9)
        return {"result": {"samples": cell.samples, "train_seconds": cell.samples / rate}}


def test_real_devices_are_measured_alone_with_slices_like_the_jobs_and_for_as_long_as_emulated_ones_run():
    starter, records = Throttled(), []
    options = Namespace(
        workloads=["digits"],
        quick=True,
        traces=None,
        clusters=["throttled"],
        peers=["ddp-by-speed"],
        repetitions=1,
        batch=None,
    )
    list(compare.measure(options, starter, {}, records))
    *alone, together = starter.cells
    assert [c.solo_rank for c in alone] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [c.workload.batch for c in alone[::2]] == [80, 40, 20, 20]
    seconds = DIGITS.quick_samples / DIGITS.quick_rate
    assert [c.samples for c in alone[1::2]] == [math.ceil(9 * percent * seconds) for percent in cells.CPU_PERCENT]
    assert together.samples == pytest.approx(1600 * seconds, rel=0.01)
    assert together.samples % DIGITS.batch == 0
    assert together.known_rates == (800, 400, 200, 200)
    assert records[0]["ideal"] == 1600


# Emulation.


class Recorder(Device):
    """Writes down when it is asked to pad."""

    def __init__(self):
        super().__init__()
        self.story = []

    def begin_slice(self, samples):
        self.story.append(samples)

    def pace(self, fraction):
        self.story.append(fraction)

    def end_slice(self):
        self.story.append("end")

    def begin_step(self):
        raise AssertionError("a step is part of its slice here")

    end_step = begin_step


@pytest.mark.parametrize("overlaps", [True, False])
def test_backward_is_padded_where_buckets_of_ddp_are_full(overlaps):
    values = [0, 10, DDP_FIRST_BUCKET_BYTES // 4, 30]
    device, weights = Recorder(), torch.nn.ParameterList([torch.zeros(n) for n in values])
    pacer = Pacer(weights, device)
    pacer.overlaps = overlaps
    for _ in range(2):
        pacer.begin(7)
        assert not pacer.complete
        for weight in reversed(list(weights)):
            weight.sum().backward()
    done = (values[3] + values[2]) / sum(values)
    slice_of_seven = [7, *([(1 + 2 * done) / 3] if overlaps else []), "end"]
    assert device.story == 2 * slice_of_seven
    assert pacer.complete


class Apart:
    """Two ranks on threads, each with a clock of its own; whoever meets takes the later time."""

    def __init__(self):
        self.rank = threading.local()
        self.told = [None, None]
        self.met = threading.Barrier(2)

    def monotonic(self):
        return self.rank.now

    def sleep(self, seconds):
        self.rank.now += seconds

    def gather_objects(self, value):
        self.told[self.rank.number] = (self.rank.now, value)
        self.met.wait(30)
        everyones = list(self.told)
        self.met.wait(30)
        self.rank.now = max(now for now, _ in everyones)
        return [value for _, value in everyones]

    def barrier(self):
        self.gather_objects(None)


def test_evaluations_are_no_barriers_on_the_clock_of_ranks_that_never_meet(monkeypatch):
    """Rank 0 is slow in the first segment, rank 1 in the second; each trains for four seconds in all."""
    world, jobs = Apart(), []
    monkeypatch.setattr(job_module, "time", world)
    monkeypatch.setattr(job_module.dist, "barrier", world.barrier)

    def train(number, seconds):
        world.rank.number, world.rank.now = number, 100.0
        job = Job.__new__(Job)
        job.meeting, job.total, job.timeline, job.evaluations = world, 4, [], []
        job.samples, job.wait_seconds, job.train_seconds, job.cpu_seconds = 0, 0.0, 0.0, 0.0
        job._cpu_clock = lambda: 0.0
        job._loader = Namespace(batches=lambda steps: steps)
        job.evaluate = lambda: world.sleep(7.0) or {}
        for _, spent in zip(job.segments([[plan.Step(0, 1, 1, 0)]] * 2), seconds, strict=True):
            world.sleep(spent)
        jobs.append(job)

    ranks = [threading.Thread(target=train, args=pair) for pair in enumerate([(3.0, 1.0), (1.0, 3.0)])]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [job.train_seconds for job in jobs] == [4.0, 4.0]
    assert [job.wait_seconds for job in jobs] == [0.0, 0.0]
    assert [[point["seconds"] for point in job.evaluations] for job in jobs] == [[3.0, 4.0]] * 2


# Processes.


def test_a_job_that_fails_or_hangs_says_so():
    env = dict(os.environ)
    assert failure_of([sys.executable, "-c", "raise SystemExit(3)"], env, 30) == "failed: it ended with status 3"
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert failure_of(hanging, env, 0.5) == "failed: it did not end within 0 s"
    assert failure_of([sys.executable, "-c", ""], env, 30) is None


SAMPLES, BATCH = 330, 16


def run_on_two_ranks(peer, folder, pins=None):
    """A peer's job of 21 steps on ranks of speeds 3 and 1, without a launcher; its figures."""
    devices = [{"name": "fast", "speed": 3}, {"name": "slow", "speed": 1}]
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"name": "two", "source": "made up", "devices": devices}))
    recipe = cells.recipe(cell("homogeneous", peer), folder, folder / "cluster.yaml", None)
    recipe["run"] |= {"samples": SAMPLES, "evaluate_every": 10 * BATCH}
    recipe["emulation"]["samples_per_second"] = 1000
    recipe["data"]["batch_size"] = BATCH
    recipe["sync"] = {"pins": pins or {}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    words = [sys.executable, *starter.RUNNER, peer, folder / "recipe.yaml", folder]
    env = environment(**told)
    started = [subprocess.Popen(words, env={**env, "RANK": str(rank)}, cwd=ROOT) for rank in range(2)]
    try:
        assert [process.wait(120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return json.loads((folder / "result.json").read_text())


def loss_of_one_process():
    """The same 21 steps by hand."""
    torch.manual_seed(0)
    source = data.build("digits", {})
    model = models.build_for(source, "digits_cnn", {})
    optimizer = torch.optim.SGD(model.parameters(), DIGITS.learning_rate, momentum=0.9)
    order = EpochOrder(len(source.train), 0)
    for first in range(0, SAMPLES, BATCH):
        batch = fetch(source.train, order.indices([(first, min(first + BATCH, SAMPLES))]), None)
        source.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluate_range(model, source, 0, len(source.test))["loss"] / len(source.test)


@pytest.mark.thorough
def test_ddp_by_speed_is_one_process_with_the_whole_batch(tmp_path):
    figures = run_on_two_ranks("ddp-by-speed", tmp_path)
    assert sum(rank["samples"] for rank in figures["per_rank"]) == SAMPLES
    assert figures["per_rank"][0]["samples"] == pytest.approx(SAMPLES * 3 / 4, abs=1)
    assert figures["metrics"]["loss"] == pytest.approx(loss_of_one_process(), rel=1e-4)
    assert figures["metrics"]["loss"] < 2.2  # it has learned: chance is ln 10 = 2.303
    assert figures["train_seconds"] > SAMPLES / 1000  # the emulated devices need that long
    assert [point["samples"] for point in figures["evaluations"]] == [160, 320, 330]
    assert all(rank.keys() == RANK_FIGURES.keys() for rank in figures["per_rank"])
    for rank, mine in enumerate(json.loads((tmp_path / "timeline.json").read_text())):
        its = figures["per_rank"][rank]
        assert [kind for kind, _, _ in mine].count("compute") == its["slices"] == 21
        assert timeline.total(mine, "sum") == pytest.approx(its["communication_seconds"], abs=0.01)
        assert timeline.total(mine, "wait") == pytest.approx(its["wait_fraction"] * figures["train_seconds"], abs=0.01)


def test_unsynchronised_ranks_send_nothing_and_meet_at_the_end_only(tmp_path):
    figures = run_on_two_ranks("unsynchronised", tmp_path, pins={0: 10, 1: 6})
    first, second = figures["per_rank"]
    assert first["samples"] + second["samples"] == SAMPLES
    assert first["samples"] == pytest.approx(SAMPLES * 10 / 16, abs=1), "shares by hand"
    assert first["bytes_sent"] == second["bytes_sent"] == 0
    assert figures["metrics"]["loss"] != pytest.approx(loss_of_one_process(), rel=1e-2), "gradients were exchanged"
    assert [point["samples"] for point in figures["evaluations"]] == [SAMPLES]
