"""One process of a rival's job in which a rank dies: DDP under torchrun, torchft's replica groups, Horovod Elastic.

    python -m benchmarks.peers.mortal ddp|torchft|horovod FOLDER STEPS [DYING_STEP]

The loop is that of each project's own example: DDP saves a snapshot every `SAVE_EVERY` steps, and torchrun starts all
processes anew, which go on from there; in torchft every replica group takes its part of each batch, by its number, the
others go on without it, and gradients are summed in one piece (`average`); in Horovod Elastic all go back to what was
committed in memory, every `COMMIT_EVERY` steps, and those left go on with as many samples each. Rank 1 kills itself
within its `DYING_STEP`, once. Each process appends a line for a step that it has applied to FOLDER/steps-RANK.jsonl;
`died.json` says when it died, in seconds of this machine's clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.common.local_job import RECIPES
from benchmarks.common.processes import end_groups
from hetsync import data, models
from hetsync.config.parser import read_recipe
from hetsync.data.loader import EpochOrder
from hetsync.data.workers import fetch
from hetsync.files import write_atomically
from hetsync.sync.optimizers import build_optimizer

DYING_RANK = 1
SAVE_EVERY = 50  # steps: 5 s
COMMIT_EVERY = 10  # steps
FIRST_HOST, DYING_HOST = "localhost", "127.0.0.1"  # names of this one, to Horovod
STEP_SECONDS = 0.1  # of every device: what is left of it after backward is slept
SUMS_TIMEOUT, TIMEOUT = timedelta(seconds=5), timedelta(seconds=30)  # of torchft and Horovod, as in torchft's example


class Work(NamedTuple):
    """What one process has to do, and where it tells of it."""

    folder: Path
    rank: int
    size: int
    steps: int
    dying_step: int | None

    def dies_in(self, step: int) -> None:
        path = self.folder / "died.json"
        if self.rank == DYING_RANK and step == self.dying_step and not path.exists():
            write_atomically(path, json.dumps(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def applied(self, step: int, samples: int) -> None:
        """In one write each, so that a death leaves no half of a line."""
        line = json.dumps({"step": step, "at": time.monotonic(), "samples": samples}) + "\n"
        with (self.folder / f"steps-{self.rank}.jsonl").open("a") as file:
            file.write(line)


class Training:
    """HetSync's recipe for digits: model, data, order of samples, optimizer."""

    def __init__(self) -> None:
        config = read_recipe(RECIPES / "digits.yaml")
        torch.set_num_threads(1)
        torch.manual_seed(config.run.seed)
        self.batch_size = config.data.batch_size
        self.source = data.build(config.data.name, config.data.options)
        self.model = models.build_for(self.source, config.model.name, config.model.options)
        self.optimizer = build_optimizer(config.optimizer, self.model)
        self._order = EpochOrder(len(self.source.train), config.run.seed, self.source.costs)  # type: ignore[arg-type]

    def batch(self, step: int, rank: int, size: int) -> Any:
        """A rank's equal part of a step's batch."""
        share = self.batch_size // size
        first = step * self.batch_size + rank * share
        return self.samples(first, first + share)

    def samples(self, first: int, last: int) -> Any:
        """Of these positions in the order of samples."""
        return fetch(self.source.train, self._order.indices([(first, last)]), self.source.collate)

    def backward(self, module: torch.nn.Module, batch: Any, work: Work, step: int) -> None:
        began = time.monotonic()
        loss = self.source.loss(module, batch)
        work.dies_in(step)
        loss.backward()
        time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))


def ddp(work: Work) -> None:
    dist.init_process_group("gloo")
    training, snapshot = Training(), work.folder / "snapshot.pt"
    first = 0
    if snapshot.exists():
        kept = torch.load(snapshot, weights_only=True)
        training.model.load_state_dict(kept["model"])
        training.optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    module = torch.nn.parallel.DistributedDataParallel(training.model)
    for step in range(first, work.steps):
        training.backward(module, training.batch(step, work.rank, work.size), work, step)
        training.optimizer.step()
        training.optimizer.zero_grad()
        work.applied(step, training.batch_size)
        if work.rank == 0 and (step + 1) % SAVE_EVERY == 0:
            kept = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save({**kept, "step": step + 1}, snapshot.with_suffix(".new"))
            snapshot.with_suffix(".new").replace(snapshot)
    end_groups()


@contextmanager
def managed(training: Training, work: Work) -> Iterator[Any]:
    """torchft's manager; where its lighthouse is, is in the environment."""
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    def load(state: dict[str, Any]) -> None:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=SUMS_TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"rank-{work.rank}-",
        hostname="127.0.0.1",
    )
    yield manager
    manager.shutdown(wait=False)


def average(manager: Any, model: torch.nn.Module) -> None:
    """Gradients in one piece. torchft's wrapper of DDP (0.2.0) does not live on where a peer dies within a sum."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def torchft(work: Work) -> None:
    from torchft.optim import OptimizerWrapper

    training = Training()
    with managed(training, work) as manager:
        optimizer = OptimizerWrapper(manager, training.optimizer)
        while (step := manager.current_step()) < work.steps:
            optimizer.zero_grad()  # asks for a quorum
            training.backward(training.model, training.batch(step, work.rank, work.size), work, step)
            average(manager, training.model)
            optimizer.step()
            if manager.current_step() > step:
                share = training.batch_size // work.size
                work.applied(manager.current_step() - 1, share * manager.num_participants())


def horovod(work: Work) -> None:
    import horovod.torch as hvd

    hvd.init()
    # Ranks change; and of those on the dead one's host Horovod would keep none, so it is alone on a name of its own.
    host, place = os.environ["HOROVOD_HOSTNAME"], int(os.environ["HOROVOD_LOCAL_RANK"])
    number = DYING_RANK if host == DYING_HOST else DYING_RANK + 1 + place if host != FIRST_HOST else 0
    work, training = work._replace(rank=number), Training()
    optimizer = hvd.DistributedOptimizer(training.optimizer, named_parameters=training.model.named_parameters())
    share, total = training.batch_size // work.size, work.steps * training.batch_size

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.position < total:
            count = min(share * hvd.size(), total - state.position)
            each = -(-count // hvd.size())  # the last step's may be fewer
            first = state.position + hvd.rank() * each
            batch = training.samples(first, min(first + each, state.position + count))
            training.backward(training.model, batch, work, state.step)
            optimizer.step()
            optimizer.zero_grad()
            work.applied(state.position, count)
            state.step, state.position = state.step + 1, state.position + count
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(model=training.model, optimizer=optimizer, step=0, position=0))


def main() -> None:
    peer, folder, steps, *dying = sys.argv[1:]
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ["PEERS_SIZE"])  # Horovod tells it later
    work = Work(Path(folder), rank, size, int(steps), int(dying[0]) if dying else None)
    {"ddp": ddp, "torchft": torchft, "horovod": horovod}[peer](work)


if __name__ == "__main__":
    main()
