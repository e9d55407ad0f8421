"""One rank of gpu.py's job: python -m benchmarks.gpu_rank FOLDER, under a launcher; FOLDER/setting.json says what.

Every task is trained in four ways that take turns: DDP with equal shares, DDP with shares by speed, HetSync at D = 0,
HetSync delayed. All have the same model, data, order of samples, loader and precision, and train off the clock before.
Rank 0 writes FOLDER/result.json after each task.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hetsync
from benchmarks.gpu_tasks import SMALL_TASKS, TASKS, Task
from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import choose_shares, solo_rates
from hetsync.config.schema import Config, DataConfig, EmulationConfig, RunConfig, SyncConfig
from hetsync.data import Data
from hetsync.data.loader import Loader, Source
from hetsync.emulation.cluster import load_cluster
from hetsync.emulation.device import make_device
from hetsync.files import write_atomically
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.profiling.measure import Subject, autocast, batch_of, find_place, measure_ranks, ranks_sharing, take_device
from hetsync.sync.deltas import Deltas

DELAYED = "HetSync, delayed"
DELAY_BOUND = 4
AHEAD = 2  # steps whose batches are loaded before they are needed
TRACED_STEPS, TRACED_STEPS_SMALL = 8, 2
WARM_UP_STEPS = 3  # at least: DDP orders its buckets anew before the second
Interval = tuple[float, float]


@dataclass(frozen=True)
class Step:
    """A rank's part of a step of DDP, as the loader takes it."""

    number: int
    slices: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Trained:
    """What a way has come to, on one rank: seconds of training, and the loss of each of its slices."""

    seconds: float
    losses: list[tuple[int, float]]
    summary: dict[str, Any] | None = None


class RankJob:
    """One task on one rank."""

    def __init__(self, plane: Plane, device: torch.device, task: Task, setting: dict[str, Any]) -> None:
        self.plane, self.device, self.task, self.setting = plane, device, task, setting
        self.precision = "bfloat16" if device.type == "cuda" else "float32"
        self.source = Source(task.data())
        self.data = Data(self.source.dataset, self.source.dataset, self.loss)
        self.cluster = load_cluster(setting["emulate"]) if setting["emulate"] else None
        self.place = find_place(plane)
        self.profiles = self._measure()
        self.solo = solo_rates(task.batch, self.profiles)
        steps = max(2 * plane.size, round(setting["seconds"] * sum(self.solo) / task.batch))
        self.total = min(steps, task.most_steps) * task.batch

    def model(self) -> torch.nn.Module:
        torch.manual_seed(self.setting["seed"])
        return self.task.model().to(self.device)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with autocast(self.precision, self.device):
            return self.task.loss(model, batch)

    def _measure(self) -> list[RankProfile]:
        run = RunConfig(profile_seconds=self.setting["profile_seconds"])
        emulation = EmulationConfig(self.setting["emulate"], self.setting["samples_per_second"])
        config = Config(run=run, data=DataConfig(batch_size=self.task.batch), emulation=emulation)
        model = self.model()
        subject = Subject(self.plane, config, model, self.data, self.place, [self.task.optimizer(model)])
        return measure_ranks(subject, self.cluster)

    def shares(self, kind: Any) -> tuple[int, ...]:
        return choose_shares(SyncConfig(4, shares=kind), self.task.batch, self.profiles)

    def settle(self) -> None:
        """Collective: all that ranks have queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.plane.barrier()

    # DDP.

    def ddp(self, kind: str) -> Trained:
        shares = self.shares(kind)
        module = DistributedDataParallel(self.model())
        fresh = deepcopy(module.state_dict())
        self._ddp_steps(module, shares, self._warm_up(shares[self.plane.rank]))
        module.load_state_dict(fresh)
        self.settle()
        began = time.monotonic()
        losses = self._ddp_steps(module, shares, self._batches(shares))
        self.settle()
        return Trained(time.monotonic() - began, [(count, float(loss)) for count, loss in losses])

    def _ddp_steps(
        self, module: torch.nn.Module, shares: Sequence[int], batches: Iterable[Any]
    ) -> list[tuple[int, torch.Tensor]]:
        """The loss of each."""
        optimizer = self.task.optimizer(module)
        share, rank = shares[self.plane.rank], self.plane.rank
        weight = share * self.plane.size / self.task.batch  # DDP's mean over ranks is the mean over samples
        timer = make_device(self.cluster, rank, self.profiles[rank].time, 0, self.device)
        losses = []
        for batch in batches:
            timer.begin_slice(share)
            loss = self.loss(module, batch)
            if self.cluster is not None:
                timer.end_slice()  # an emulated slice is over before its sums begin
            (weight * loss).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append((share, loss.detach()))
        return losses

    def _warm_up(self, share: int) -> Iterator[Any]:
        """For as long as HetSync's ranks measure themselves before its clock begins: kernels are chosen meanwhile, and
        memory is taken. Rank 0 says when it is over, since all make the same number of steps."""
        batch, until = batch_of(self.data, share, self.device), time.monotonic() + self.setting["profile_seconds"]
        steps = 0
        while self.plane.broadcast_object(steps < WARM_UP_STEPS or time.monotonic() < until):
            yield batch
            steps += 1

    def _batches(self, shares: Sequence[int]) -> Iterator[Any]:
        first = sum(shares[: self.plane.rank])
        stop = first + shares[self.plane.rank]
        starts = range(0, self.total, self.task.batch)
        steps = [Step(number, (((start + first, start + stop),),)) for number, start in enumerate(starts)]
        loader = Loader(self.source, self.setting["seed"], self.device)
        for step in steps[:AHEAD]:
            loader.prefetch(step)
        for step in steps:
            if step.number + AHEAD < len(steps):
                loader.prefetch(steps[step.number + AHEAD])
            yield from loader.slices(step)
        loader.close()

    # HetSync.

    def joined(self, delay_bound: int, total: int | None = None) -> Trained:
        summaries: list[dict[str, Any]] = []
        losses = []
        model = self.model()
        with hetsync.join(
            plane=self.plane,
            progress=False,
            seed=self.setting["seed"],
            device=self.device.type,
            precision=self.precision,
            delay_bound=delay_bound,
            profile_seconds=self.setting["profile_seconds"],
            emulate=self.setting["emulate"],
            samples_per_second=self.setting["samples_per_second"],
        ) as job:
            optimizer = job.prepare(model, self.task.optimizer(model))[1]
            loader = job.loader(self.source.dataset, self.task.batch, samples=total or self.total)
            job.measure(self.loss)
            job.on("end", summaries.append)
            for batch in loader:
                loss = self.loss(model, batch)
                job.backward(loss)
                job.step(optimizer)
                losses.append((len(batch[0]), loss.detach()))
        summary = self.plane.broadcast_object(summaries[0] if summaries else None)
        return Trained(summary["train_seconds"], [(count, float(loss)) for count, loss in losses], summary)

    def traced(self, folder: Path, name: str) -> dict[str, float] | None:
        """Of a short delayed run on this rank: seconds of copies between host and GPU, and of those beside kernels."""
        with torch.profiler.profile() as profiler:
            steps = TRACED_STEPS_SMALL if self.setting["small"] else TRACED_STEPS
            self.joined(DELAY_BOUND, steps * self.task.batch)
        if self.plane.rank == 0:
            profiler.export_chrome_trace(str(folder / f"trace-{name}.json"))
        spans: dict[bool, list[Interval]] = {True: [], False: []}
        for event in profiler.events() or []:
            if event.device_type == torch.autograd.DeviceType.CUDA:
                copies = "memcpy" in event.name.lower() and "DtoD" not in event.name
                spans[copies].append((event.time_range.start * 1e-6, event.time_range.end * 1e-6))
        if not spans[True]:
            return None
        return {"copy_seconds": length(merged(spans[True])), "beside_kernels": overlap(spans[True], spans[False])}

    def buffers(self) -> dict[str, int]:
        """Bytes of the model's weights, and of what delayed mode keeps beside them."""
        model = self.model()
        weights = list(model.parameters())
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        deltas = Deltas(weights)
        found = {"weights": 4 * sum(w.numel() for w in weights), "delayed_mode": deltas.buffer_bytes}
        if self.device.type == "cuda":
            found["allocated"] = torch.cuda.memory_allocated(self.device) - before
            found["peak"] = torch.cuda.max_memory_allocated(self.device)
        return found


def merged(spans: Sequence[Interval]) -> list[Interval]:
    """The union, in order, of intervals that may overlap."""
    out: list[Interval] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def length(spans: Sequence[Interval]) -> float:
    return sum(stop - start for start, stop in spans)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Seconds that lie in both unions; the length of all is what each has less what they share."""
    return length(merged(first)) + length(merged(second)) - length(merged([*first, *second]))


def last_loss(everyones: Sequence[Sequence[tuple[int, float]]]) -> float:
    """The mean over the last fifth of all ranks' slices."""
    last = [pair for losses in everyones for pair in losses[-max(1, len(losses) // 5) :]]
    return sum(count * loss for count, loss in last) / sum(count for count, _ in last)


def in_turn(ways: Sequence[str], repetitions: int) -> Iterator[list[str]]:
    """The order of each repetition: none begins always, on a device that is still cold."""
    for repetition in range(repetitions):
        first = repetition * len(ways) // repetitions
        yield [*ways[first:], *ways[:first]]


def run_task(job: RankJob, folder: Path, name: str) -> dict[str, Any]:
    """Collective."""
    ways: dict[str, Callable[[], Trained]] = {
        "DDP, equal shares": lambda: job.ddp("equal"),
        "DDP, shares by speed": lambda: job.ddp("speed"),
        "HetSync, D = 0": lambda: job.joined(0),
        DELAYED: lambda: job.joined(DELAY_BOUND),
    }
    runs = []
    for order in in_turn(list(ways), job.setting["repetitions"]):
        for way in order:
            trained = ways[way]()
            told = job.plane.gather_objects((trained.seconds, trained.losses))
            rate = job.total / max(seconds for seconds, _ in told)
            kept = {"way": way, "samples_per_second": rate, "efficiency": rate / sum(job.solo)}
            runs.append({**kept, "loss": last_loss([losses for _, losses in told]), "summary": trained.summary})
            if job.device.type == "cuda":
                torch.cuda.empty_cache()
    sharing = ranks_sharing(job.plane, job.place, job.device)
    return {
        "task": name,
        "samples": job.total,
        "batch": job.task.batch,
        "precision": job.precision,
        "learns": job.task.learns,
        "sums_by": {"DDP": dist.get_backend(), "HetSync": job.plane.sums_by},
        "devices": [profile.device for profile in job.profiles],
        "ranks_that_share_memory": sharing,
        "solo_samples_per_second": job.solo,
        "shares_by_speed": job.shares("speed"),
        "runs": runs,
        "bytes": job.buffers(),
        "copies": job.plane.gather_objects(job.traced(folder, name)),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    setting = json.loads((folder / "setting.json").read_text())
    plane = open_plane("mpi")
    place = find_place(plane)
    device = take_device(setting["device"], place)
    torch.set_num_threads(1)
    # NCCL refuses ranks that share a GPU.
    own = device.type == "cuda" and max(plane.gather_objects(ranks_sharing(plane, place, device))) == 1
    dist.init_process_group("nccl" if own else "gloo", rank=plane.rank, world_size=plane.size)
    results = []
    known = SMALL_TASKS if setting["small"] else TASKS
    for name in setting["tasks"]:
        results.append(run_task(RankJob(plane, device, known[name], setting), folder, name))
        if plane.rank == 0:
            write_atomically(folder / "result.json", json.dumps(results))
    dist.destroy_process_group()
    plane.close()


if __name__ == "__main__":
    main()
