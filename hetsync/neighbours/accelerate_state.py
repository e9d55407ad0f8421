"""What all of Accelerate's objects in a process share: who the ranks are, here by a HetSync job."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any, cast

from hetsync.api import join
from hetsync.errors import UserError, early_mistakes
from hetsync.extras import require
from hetsync.train.job import Job

try:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
except ImportError:
    with early_mistakes():
        require("accelerate", "hetsync.neighbours.accelerate")
    raise

JOB = "hetsync_job"  # beside Accelerate's own


def joined(**settings: Any) -> Job:
    """Collective: the process's job, which all of Accelerate's objects in it share; joined with the first call."""
    known = PartialState._shared_state.get(JOB)
    if known is not None:
        return cast(Job, known)
    if PartialState._shared_state and PartialState().num_processes > 1:
        raise UserError(
            "Accelerate has begun without HetSync, and ranks have joined each other already: make"
            " hetsync.neighbours.accelerate's Accelerator (or TrainingArguments of hetsync.neighbours.transformers)"
            " before anything of Accelerate's is used"
        )
    job = join(**({"progress": False} | settings))
    AcceleratorState._reset_state(reset_partial_state=True)
    kind = DistributedType.MULTI_GPU if job.device.type == "cuda" else DistributedType.MULTI_CPU
    PartialState._shared_state.update(
        _cpu=job.device.type == "cpu",
        backend=None if job.size == 1 else "hetsync",
        debug=False,
        device=job.device,
        distributed_type=DistributedType.NO if job.size == 1 else kind,
        fork_launched=False,
        local_process_index=job.local_rank,
        num_processes=job.size,
        process_index=job.rank,
        wait_for_everyone=partial(wait_at_rest, job),  # in place of its own, of which process groups know
        **{JOB: job},
    )
    return job


def wait_at_rest(job: Job) -> None:
    """Nobody is waited for while a batch is out."""
    if not job.in_batch:
        job.gather(None)


def follow(job: Job, place: int) -> None:
    """Collective, at rest: this rank's place among those that are left."""
    hosts = job.gather(socket.gethostname())
    local = hosts[:place].count(hosts[place])
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state.update(num_processes=len(hosts), process_index=place, local_process_index=local)
