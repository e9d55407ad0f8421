"""Horovod's DistributedOptimizer, with shares by speed."""

from __future__ import annotations

from benchmarks.peers.ddp import plan
from benchmarks.peers.job import Job


def by_speed(job: Job) -> None:
    """Losses weighted as for DDP by speed: Horovod's mean over ranks is the mean over samples."""
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(job.optimizer, named_parameters=job.model.named_parameters())
    for batches in job.segments(plan(job, job.shares("speed"))):
        for step, batch in batches:
            job.backward(job.module, step, batch)
            with job.waiting():
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                job.update(optimizer)
            job.bytes_sent += 4 * job.values
    hvd.shutdown()
