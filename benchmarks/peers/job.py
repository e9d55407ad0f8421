"""One rank of a peer's job: model, data, order of samples, seeds, devices, evaluation, clock as in HetSync's trainer.

    job = Job(config, rank, size)
    for batches in job.segments(plan):      # all ranks rest and evaluate after each
        for step, batch in batches:
            job.backward(module, step, batch)
            job.update()

Emulation. A slice is padded from within backward, in a hook of each parameter, which runs before those of DDP and of
Horovod: when a bucket of DDP is full and the gradients so far are the fraction c of all, the hook sleeps until
(1 + 2c) / 3 of the slice's time has passed, and the last one until all of it has. This is the schedule by which HetSync
releases its buckets (hetsync/sync/gradients.py), with the same device, the same draws of jitter and the same link.
Nobody sleeps between: what is left to compute after a sleep makes the slice late.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.peers.plan import Segment, Step, TrainingClock
from benchmarks.peers.timeline import Interval, shifted
from hetsync import data, models
from hetsync.balance.device import Device
from hetsync.balance.shares import apportion, choose_shares, makespan
from hetsync.config.schema import Config, SyncConfig
from hetsync.data.evaluation import evaluate_range
from hetsync.data.ledger import total_samples
from hetsync.data.loader import EpochOrder
from hetsync.data.workers import fetch
from hetsync.emulation.cluster import load_cluster
from hetsync.emulation.device import make_device
from hetsync.emulation.link import EmulatedLink, behind_link
from hetsync.files import write_atomically
from hetsync.plane.base import Plane
from hetsync.profiling.measure import Subject, find_place, measure_ranks
from hetsync.sync.optimizers import build_optimizer
from hetsync.sync.tail import travelling_values

DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 2**20, 25 * 2**20  # PyTorch's defaults
AHEAD = 2  # slices loaded before they are needed


class Meeting:
    """What HetSync's profiling asks of a plane, over torch.distributed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ranks_at_start = size

    def gather_objects(self, value: Any) -> list[Any]:
        everyones: list[Any] = [None] * self.size
        dist.all_gather_object(everyones, value)
        return everyones

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]

    def barrier(self) -> None:
        dist.barrier()


class SampleLoss(torch.nn.Module):
    """A batch's mean loss, as a module that data parallelism can wrap whatever the model's loss calls."""

    def __init__(self, model: torch.nn.Module, loss: Any) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self._loss(self.model, batch)
        return loss


class Pacer:
    """Stretches backward to the device's time; see the head of this file."""

    def __init__(self, model: torch.nn.Module, device: Device) -> None:
        # An empty one (an embedding of no columns) would come after the slice is complete.
        parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self.device = device
        self.begun_at = 0.0
        self.ready_at: float | None = None  # the first gradients may travel
        self.ended_at = 0.0
        self.overlaps = True  # gradients travel while backward runs; else backward is padded at its end only
        self._values = sum(p.numel() for p in parameters)
        self._arrived = 0
        self._bucket_ends = 0  # as a number of values
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def begin(self, samples: int) -> None:
        self._arrived, self._bucket_ends = 0, DDP_FIRST_BUCKET_BYTES // 4
        self.begun_at, self.ready_at = time.monotonic(), None
        self.device.begin_slice(samples)

    @property
    def complete(self) -> bool:
        return self._arrived == self._values

    def _arrive(self, parameter: torch.Tensor) -> None:
        self._arrived += parameter.numel()
        if self.complete:
            self.device.end_slice()
            self.ended_at = time.monotonic()
        elif self.overlaps and self._arrived >= self._bucket_ends:
            self.device.pace((1 + 2 * self._arrived / self._values) / 3)
            self._bucket_ends = self._arrived + DDP_BUCKET_BYTES // 4
            self.ready_at = self.ready_at or time.monotonic()


class Loader:
    """A rank's batches in order, on a thread of their own, whose CPU time is counted apart."""

    def __init__(self, source: data.Data, seed: int) -> None:
        self.cpu_seconds = 0.0
        self._source = source
        self._order = EpochOrder(len(source.train), seed, source.costs)  # type: ignore[arg-type]
        self._pool = ThreadPoolExecutor(1)

    def _load(self, step: Step) -> Any:
        began = time.thread_time()
        # A rank without samples still computes, with weight 0: everyone takes part in every collective.
        span = (step.start, max(step.stop, step.start + 1))
        batch = fetch(self._source.train, self._order.indices([span]), self._source.collate)
        self.cpu_seconds += time.thread_time() - began
        return batch

    def batches(self, steps: Sequence[Step]) -> Iterator[tuple[Step, Any]]:
        loading = [self._pool.submit(self._load, step) for step in steps[:AHEAD]]
        for index, step in enumerate(steps):
            if index + AHEAD < len(steps):
                loading.append(self._pool.submit(self._load, steps[index + AHEAD]))
            yield step, loading.pop(0).result()


class Job:
    def __init__(self, config: Config, rank: int, size: int) -> None:
        """Collective; torch.distributed's default group must be there."""
        self.config, self.rank, self.size = config, rank, size
        self.meeting = Meeting(rank, size)
        torch.set_num_threads(1)
        torch.manual_seed(config.run.seed)
        self.data = data.build(config.data.name, config.data.options)
        self.model = models.build_for(self.data, config.model.name, config.model.options)
        self.module = SampleLoss(self.model, self.data.loss)
        self.optimizer = build_optimizer(config.optimizer, self.model)
        self.total = total_samples(config.run.samples, config.run.epochs, len(self.data.train))  # type: ignore[arg-type]
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        self.communication_seconds = 0.0  # a collective was under way here, beside backward or alone
        self.timeline: list[Interval] = []
        self.train_seconds = 0.0
        self.cpu_seconds = 0.0  # of this process in training, beyond its main thread and its loader
        self.samples = 0
        self.evaluations: list[dict[str, float]] = []
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._loader = Loader(self.data, config.run.seed)
        self._meet_cluster()
        self.pacer = Pacer(self.model, self.device)
        torch.manual_seed(hash((config.run.seed, rank, 0)) & (2**63 - 1))  # dropout, as in hetsync.train.session

    def _meet_cluster(self) -> None:
        plane = cast(Plane, self.meeting)
        cluster = load_cluster(self.config.emulation.profile) if self.config.emulation.profile is not None else None
        subject = Subject(plane, self.config, self.model, self.data, find_place(plane))
        self.profiles = measure_ranks(subject, cluster)
        time = self.profiles[self.rank].time
        self.device = make_device(cluster, self.rank, time, self.config.run.seed, torch.device("cpu"))
        # The link's speed follows from shares by speed, whatever shares a peer uses: it is the same link for all.
        self._link = behind_link(
            plane,
            cluster,
            4 * travelling_values(self.model),
            makespan(self.shares("speed"), [profile.time for profile in self.profiles]),
        )

    def shares(self, kind: str) -> tuple[int, ...]:
        """`speed` (or what the recipe sets by hand) or `equal`, as HetSync computes them, within the memory's caps."""
        sync = SyncConfig(4, shares=cast(Any, kind), pins=self.config.sync.pins if kind == "speed" else {})
        return choose_shares(sync, self.config.data.batch_size, self.profiles)

    @property
    def values(self) -> int:
        """Gradient values of one step."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def linked(self) -> bool:
        """Is the interconnect emulated?"""
        return isinstance(self._link, EmulatedLink)

    def transfer_seconds(self, values: int) -> float:
        """What the emulated interconnect needs for an allreduce of float32 values, on top of the real one."""
        return self._link.transfer_seconds(values, "float32") if isinstance(self._link, EmulatedLink) else 0.0

    # Training.

    def segments(self, plan: Iterable[Segment]) -> Iterator[Iterator[tuple[Step, Any]]]:
        """Each segment's batches in turn; evaluates after each, off the clock."""
        done, clock, rested_at = 0, TrainingClock(), math.inf
        for steps in plan:
            dist.barrier()
            free_at = time.monotonic()
            time.sleep(clock.lag)
            began, cpu = time.monotonic(), self._cpu_clock()
            if rested_at < began:
                self.timeline.append(("rest", rested_at, began))
            yield self._loader.batches(steps)
            rested_at = time.monotonic()
            mine = clock.at(rested_at - free_at)
            everyones = self.meeting.gather_objects(mine)
            clock.rest(mine, everyones)
            self.train_seconds = max(everyones)
            self.cpu_seconds += self._cpu_clock() - cpu
            self.samples += sum(step.samples for step in steps)
            done = sum(self.meeting.gather_objects(self.samples))
            self.evaluations.append({"samples": done, "seconds": self.train_seconds, **self.evaluate()})
        ended = self._waited(rested_at, rested_at + self.train_seconds - mine)
        self.timeline.append(("rest", ended, time.monotonic()))
        assert done == self.total, f"{done} of {self.total} samples were used"

    def _cpu_clock(self) -> float:
        return time.process_time() - time.thread_time() - self._loader.cpu_seconds

    def backward(self, module: torch.nn.Module, step: Step, batch: Any) -> None:
        """Forward and backward of one slice, weighted so that a mean over ranks is the mean over samples."""
        factor = self.config.schedule.factor(step.position, self.total)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        self.pacer.begin(step.samples)
        (module(batch) * (step.samples * self.size / step.batch)).backward()
        assert self.pacer.complete, "a weight has no part in the loss, so that nobody knows when backward is over"
        begun, ended = self.pacer.begun_at, self.pacer.ended_at
        self.timeline.append(("compute", begun, ended))
        self.communicated(ended, self.pacer.ready_at or ended)

    def communicated(self, alone_since: float, since: float | None = None) -> None:
        """A collective has ended: under way `since` then, and all that this rank did since `alone_since`."""
        began = alone_since if since is None else since
        now = self._waited(alone_since, time.monotonic())
        self.communication_seconds += now - began
        self.timeline.append(("sum", began, now))

    def _waited(self, since: float, until: float) -> float:
        """This rank stood still; returns until when."""
        self.wait_seconds += until - since
        self.timeline.append(("wait", since, until))
        return until

    def update(self, optimizer: Any = None) -> None:
        """The step of this optimizer, or of the job's own."""
        if self.config.optimizer.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        (optimizer or self.optimizer).step()
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A collective outside backward."""
        began = time.monotonic()
        yield
        self.communicated(began)

    # At rest.

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics of the ranks' average weights (which are the weights, where ranks do not differ)."""
        tensors = [*self.model.parameters(), *(b for b in self.model.buffers() if b.is_floating_point())]
        kept = [tensor.detach().clone() for tensor in tensors]
        mean = torch.cat([tensor.flatten() for tensor in kept])
        dist.all_reduce(mean)
        for tensor, values in zip(tensors, (mean / self.size).split([t.numel() for t in kept]), strict=True):
            tensor.copy_(values.view_as(tensor))
        count = len(self.data.evaluated)  # type: ignore[arg-type]
        parts = apportion(count, dict.fromkeys(range(self.size), 1))
        first = sum(parts[rank] for rank in range(self.rank))
        everyones = self.meeting.gather_objects(evaluate_range(self.model, self.data, first, first + parts[self.rank]))
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.copy_(values)
        names = sorted({name for sums in everyones for name in sums})
        return self.data.report({"samples": count} | {n: sum(s.get(n, 0.0) for s in everyones) for n in names})

    def report(self, folder: Path) -> None:
        """Collective: this job's figures, written by rank 0; seconds and samples are those of training."""
        per_rank = self.meeting.gather_objects(self._rank_figures())
        timelines = self.meeting.gather_objects(self.timeline)  # of one machine's clock
        origin = min(timeline[0][1] for timeline in timelines)
        if self.rank == 0:
            kept = [shifted(timeline, origin) for timeline in timelines]
            write_atomically(folder / "timeline.json", json.dumps(kept))
            last = self.evaluations[-1]
            metrics = {name: value for name, value in last.items() if name not in ("samples", "seconds")}
            figures = {
                "samples": self.total,
                "train_seconds": self.train_seconds,
                "metrics": metrics,
                "evaluations": self.evaluations,
                "per_rank": per_rank,
            }
            write_atomically(folder / "result.json", json.dumps(figures, indent=1))

    def _rank_figures(self) -> dict[str, float]:
        seconds, device = self.train_seconds, self.device
        return {
            "samples": self.samples,
            "compute_fraction": device.emulated_seconds / seconds,
            "wait_fraction": self.wait_seconds / seconds,
            "communication_seconds": self.communication_seconds,
            "runtime_cpu_seconds": self.cpu_seconds,
            "bytes_sent": self.bytes_sent,
            "peak_bytes": peak_bytes(),
            "slices": device.slices,
            "overruns": device.overruns,
            "device_samples_per_second": self.samples / max(1e-9, device.emulated_seconds),
        }


def peak_bytes() -> int:
    """Most memory that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
