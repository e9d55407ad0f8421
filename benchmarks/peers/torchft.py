"""torchft's LocalSGD and DiLoCo: each rank is a replica group of its own, rank 0 hosts the lighthouse."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.ddp import LOCAL_STEPS, plan
from benchmarks.peers.job import Job

TIMEOUT = timedelta(seconds=120)
OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo's paper (Douillard et al. 2023)


@contextmanager
def managed(job: Job) -> Iterator[Any]:
    """A manager in a quorum of all ranks."""
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    lighthouse = None
    if job.rank == 0:
        lighthouse = LighthouseServer("127.0.0.1:0", job.size, join_timeout_ms=1000, quorum_tick_ms=50)
    address = job.meeting.broadcast_object(lighthouse.address() if lighthouse else None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=job.model.load_state_dict,
        state_dict=job.model.state_dict,
        min_replica_size=job.size,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"rank-{job.rank}",
        hostname="127.0.0.1",
    )
    yield manager
    dist.barrier()
    manager.shutdown(wait=False)
    dist.barrier()
    if lighthouse is not None:
        lighthouse.shutdown()


def train(job: Job) -> None:
    """Local steps by speed, the losses weighted as in ddp.post_local_sgd."""
    done = 0
    job.pacer.overlaps = False
    for batches in job.segments(plan(job, job.shares("speed"))):
        for step, batch in batches:
            job.backward(job.module, step, batch)
            done += 1
            if done % LOCAL_STEPS:
                job.update()
                continue
            with job.waiting():
                job.update()  # torchft's hooks on the optimizer average here
                time.sleep(job.transfer_seconds(job.values))
            job.bytes_sent += 4 * job.values


def local_sgd(job: Job) -> None:
    from torchft.local_sgd import LocalSGD

    with managed(job) as manager, LocalSGD(manager, job.model, job.optimizer, LOCAL_STEPS):
        train(job)


def diloco(job: Job) -> None:
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(job.model.parameters(), OUTER_LEARNING_RATE, OUTER_MOMENTUM, nesterov=True)
    with (
        managed(job) as manager,
        DiLoCo(manager, [job.model], job.optimizer, outer, LOCAL_STEPS, pin_memory=False),
    ):
        train(job)
