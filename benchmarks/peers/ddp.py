"""What comes with PyTorch: one device alone, DDP, PostLocalSGD, Join."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.job import Job
from benchmarks.peers.plan import lockstep, uneven

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

LOCAL_STEPS = 4  # between averages of weights, as in PyTorch's example of PostLocalSGD
SYNCHRONOUS_PART = 0.1  # of a job's steps, before weights are averaged instead of gradients


class Link:
    """The emulated interconnect: one transfer at a time, each beginning when the real one is done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._waiting: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        while True:
            arriving, seconds, arrived = self._waiting.get()
            value = arriving.wait()
            time.sleep(seconds)
            arrived.set_result(value)

    def behind(self, hook: Hook) -> Hook:
        """The communication hook, with this link's time added."""

        def slowed(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
            arrived: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            seconds = self._job.transfer_seconds(bucket.buffer().numel())
            self._waiting.put((hook(state, bucket), seconds, arrived))
            return arrived

        return slowed


def wrap(job: Job) -> DistributedDataParallel:
    """DDP as it comes; behind an emulated link where the cluster has one."""
    module = DistributedDataParallel(job.module)
    if job.linked:
        module.register_comm_hook(None, Link(job).behind(default_hooks.allreduce_hook))
    return module


def alone(job: Job) -> None:
    """One device with the whole batch."""
    job.pacer.overlaps = False
    lockstep_with(job, job.module, job.shares("equal"))


def unsynchronised(job: Job) -> None:
    """By speed, and nothing is exchanged: what this machine gives to so many processes at once."""
    job.pacer.overlaps = False
    shares = job.shares("speed")
    for batches in job.segments(lockstep(job.total, job.config.data.batch_size, None, shares, job.rank)):
        for step, batch in batches:
            job.backward(job.module, step, batch)
            job.update()


def ddp_equal(job: Job) -> None:
    lockstep_with(job, wrap(job), job.shares("equal"))


def ddp_by_speed(job: Job) -> None:
    """Shares set by hand by the devices' known speeds; DDP's mean over ranks is the mean over samples."""
    lockstep_with(job, wrap(job), job.shares("speed"))


def lockstep_with(job: Job, module: torch.nn.Module, shares: tuple[int, ...]) -> None:
    for batches in job.segments(plan(job, shares)):
        for step, batch in batches:
            job.backward(module, step, batch)
            job.update()
            job.bytes_sent += 4 * job.values if job.size > 1 else 0


def plan(job: Job, shares: tuple[int, ...]) -> list[Any]:
    config = job.config
    return lockstep(job.total, config.data.batch_size, config.run.evaluate_every, shares, job.rank)


def ddp_join(job: Job) -> None:
    """Slices of equal size, more of them on fast ranks; ranks that are done early shadow the others' collectives."""
    module, run, shares = wrap(job), job.config.run, job.shares("speed")
    plans = [uneven(job.total, job.config.data.batch_size, run.evaluate_every, shares, r) for r in range(job.size)]
    longest = [max(map(len, segments)) for segments in zip(*plans, strict=True)]
    for batches, sums in zip(job.segments(plans[job.rank]), longest, strict=True):
        with Join([module]):
            for step, batch in batches:
                job.backward(module, step, batch)
                job.update()
            done_at = time.monotonic()
        job.communicated(done_at)  # as the others' shadow, which gives zeros
        job.bytes_sent += 4 * job.values * sums


def post_local_sgd(job: Job) -> None:
    """By speed; gradients are averaged at first, then the weights every few steps, to the mean over ranks.

    The losses stay weighted by samples, so that the mean of the ranks' steps is that of the samples, to first order.
    """
    from torch.distributed.optim import PostLocalSGDOptimizer  # seconds to load, which the others need not spend

    steps = plan(job, job.shares("speed"))
    warm = int(SYNCHRONOUS_PART * sum(map(len, steps)))
    module = DistributedDataParallel(job.module)
    state = PostLocalSGDState(None, None, warm, post_local_gradient_allreduce=False)
    module.register_comm_hook(state, linked_post_local_sgd(job) if job.linked else post_localSGD_hook)
    averager = PeriodicModelAverager(LOCAL_STEPS, warm)
    optimizer = PostLocalSGDOptimizer(job.optimizer, averager)
    for batches in job.segments(steps):
        for step, batch in batches:
            number = averager.step
            job.pacer.overlaps = number < warm
            job.backward(module, step, batch)
            averages = number >= warm and (number - warm) % LOCAL_STEPS == 0
            job.bytes_sent += 4 * job.values if averages or number < warm else 0
            with job.waiting() if averages else nullcontext():
                job.update(optimizer)
                time.sleep(job.transfer_seconds(job.values) if averages else 0.0)


def linked_post_local_sgd(job: Job) -> Hook:
    """PyTorch's hook, whose first steps go over the emulated link, and whose later ones go nowhere."""
    slowed = Link(job).behind(post_localSGD_hook)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # as above
        travels = state.iter < state.start_localSGD_iter
        return (slowed if travels else post_localSGD_hook)(state, bucket)

    return hook
