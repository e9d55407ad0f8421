"""Samples a second of ranks that share a device: HetSync beside DDP.

    launch/mps 60,30 -- python -m benchmarks.gpu.speed --output results/gpu

Every task is trained in ways that take turns: DDP with equal shares, DDP with shares by speed, HetSync at D = 0,
HetSync delayed, with K = 1 and 4. All have the same model, data, order of samples, loader and precision, and train off
the clock before. Ranks of one GPU cannot sum by NCCL: DDP's sums go by Gloo, HetSync's by MPI. What that makes of a
difference D = 0 shows. Rank 0 writes NAME.json and NAME.md after each way, and a trace of a few batches.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hetsync
from benchmarks.common.report import grouped, spread
from benchmarks.gpu.kept import keep, seconds_left, table, tell_where_it_hangs
from benchmarks.gpu.rounds import STRETCHES, RoundTimes
from benchmarks.gpu.tasks import SMALL_TASKS, TASKS, Task
from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import choose_shares, solo_rates
from hetsync.config.schema import Config, DataConfig, EmulationConfig, RunConfig, SyncConfig
from hetsync.data import Data
from hetsync.data.loader import Loader, Source
from hetsync.emulation.cluster import Cluster, DeviceGroup, load_cluster, save_cluster
from hetsync.emulation.device import make_device
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.profiling.measure import Subject, autocast, batch_of, find_place, measure_ranks, ranks_sharing, take_device
from hetsync.sync.deltas import Deltas

# Of the multiprocessors, by the number of ranks. With 100 in all, of two a rank that waits speeds nobody up.
PERCENTAGES = {2: (60, 30), 4: (50, 25, 15, 10)}
DELAY_BOUND = 4
DELAYED, OFTEN = f"HetSync, D = {DELAY_BOUND}, K = 4", f"HetSync, D = {DELAY_BOUND}"
AHEAD = 2  # steps whose batches are loaded before they are needed
TRACED_STEPS = 4
TRACE_SECONDS = 25.0  # of the part's time, that it may take
BRIEFLY = 0.1  # seconds of profiling, where kernels have been chosen
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
    round_milliseconds: Sequence[float] = ()


@dataclass(frozen=True)
class Setting:
    """`emulate`: a cluster profile, with so many `samples_per_second`, where the device is a processor."""

    seed: int
    seconds: float
    repetitions: int
    profile_seconds: float
    emulate: str | None = None
    samples_per_second: float | None = None


class RankJob:
    """One task on one rank."""

    def __init__(self, plane: Plane, device: torch.device, task: Task, setting: Setting) -> None:
        self.plane, self.device, self.task, self.setting = plane, device, task, setting
        self.precision = "bfloat16" if device.type == "cuda" else "float32"
        self.source = Source(task.data())
        self.data = Data(self.source.dataset, self.source.dataset, self.loss)
        self.cluster = load_cluster(setting.emulate) if setting.emulate else None
        self.place = find_place(plane)
        self.profiles = self._measure()
        self.solo = solo_rates(task.batch, self.profiles)
        steps = max(2 * plane.size, round(setting.seconds * sum(self.solo) / task.batch))
        self.total = min(steps, task.most_steps) * task.batch

    def model(self) -> torch.nn.Module:
        torch.manual_seed(self.setting.seed)
        return self.task.model().to(self.device)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with autocast(self.precision, self.device):
            return self.task.loss(model, batch)

    def _measure(self) -> list[RankProfile]:
        run = RunConfig(profile_seconds=self.setting.profile_seconds)
        emulation = EmulationConfig(self.setting.emulate, self.setting.samples_per_second)
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
        batch, until = batch_of(self.data, share, self.device), time.monotonic() + self.setting.profile_seconds
        steps = 0
        while self.plane.broadcast_object(steps < WARM_UP_STEPS or time.monotonic() < until):
            yield batch
            steps += 1

    def _batches(self, shares: Sequence[int]) -> Iterator[Any]:
        first = sum(shares[: self.plane.rank])
        stop = first + shares[self.plane.rank]
        starts = range(0, self.total, self.task.batch)
        steps = [Step(number, (((start + first, start + stop),),)) for number, start in enumerate(starts)]
        loader = Loader(self.source, self.setting.seed, self.device)
        for step in steps[:AHEAD]:
            loader.prefetch(step)
        for step in steps:
            if step.number + AHEAD < len(steps):
                loader.prefetch(steps[step.number + AHEAD])
            yield from loader.slices(step)
        loader.close()

    # HetSync.

    def joined(self, delay_bound: int, accumulation: int = 1, steps: int | None = None) -> Trained:
        summaries: list[dict[str, Any]] = []
        losses = []
        model, times = self.model(), RoundTimes()
        with (
            times.watching(),
            hetsync.join(
                plane=self.plane,
                progress=False,
                seed=self.setting.seed,
                device=self.device.type,
                precision=self.precision,
                delay_bound=delay_bound,
                accumulation=accumulation,
                profile_seconds=self.setting.profile_seconds if steps is None else BRIEFLY,
                emulate=self.setting.emulate,
                samples_per_second=self.setting.samples_per_second,
            ) as job,
        ):
            optimizer = job.prepare(model, self.task.optimizer(model))[1]
            samples = self.total if steps is None else steps * self.task.batch
            loader = job.loader(self.source.dataset, self.task.batch, samples=samples)
            job.measure(self.loss)
            job.on("end", summaries.append)
            for batch in loader:
                loss = self.loss(model, batch)
                job.backward(loss)
                job.step(optimizer)
                losses.append((len(batch[0]), loss.detach()))
        summary = self.plane.broadcast_object(summaries[0] if summaries else None)
        counted = [(count, float(loss)) for count, loss in losses]
        return Trained(summary["train_seconds"], counted, summary, times.medians())

    def traced(self, path: Path) -> dict[str, float] | None:
        """Of a short delayed run on this rank: seconds of copies between host and GPU, and of those beside kernels.
        Rank 0 keeps the trace, for chrome://tracing."""
        with torch.profiler.profile() as profiler:
            self.joined(DELAY_BOUND, steps=TRACED_STEPS)
        if self.plane.rank == 0:
            profiler.export_chrome_trace(str(path))
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


class Busy:
    """Which part of the time the GPU computes, as nvidia-smi samples it."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        program = which("nvidia-smi")
        if program is None:
            yield
            return
        words = [program, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
            thread.start()
            try:
                yield
            finally:
                process.kill()

    def _read(self, lines: Iterable[str]) -> None:
        with contextlib.suppress(ValueError):  # "[N/A]"
            for line in lines:
                self._samples.append((time.monotonic(), float(line.split(",")[0])))

    def mean(self, began: float, ended: float) -> float | None:
        found = [percent for when, percent in self._samples if began <= when <= ended]
        return statistics.mean(found) if found else None


def last_loss(everyones: Sequence[Sequence[tuple[int, float]]]) -> float:
    """The mean over the last fifth of all ranks' slices."""
    last = [pair for losses in everyones for pair in losses[-max(1, len(losses) // 5) :]]
    return sum(count * loss for count, loss in last) / sum(count for count, _ in last)


def in_turn(ways: Sequence[str], repetitions: int) -> Iterator[list[str]]:
    """The order of each repetition: none begins always, on a device that is still cold."""
    for repetition in range(repetitions):
        first = repetition * len(ways) // repetitions
        yield [*ways[first:], *ways[:first]]


def ways_of(job: RankJob) -> dict[str, Callable[[], Trained]]:
    return {
        "DDP, equal shares": lambda: job.ddp("equal"),
        "DDP, shares by speed": lambda: job.ddp("speed"),
        "HetSync, D = 0": lambda: job.joined(0),
        OFTEN: lambda: job.joined(DELAY_BOUND),
        DELAYED: lambda: job.joined(DELAY_BOUND, 4),
    }


def run_task(job: RankJob, name: str, output: Path) -> Iterator[dict[str, Any]]:
    """Collective: what is known of the task, after each way."""
    ways, runs, busy = ways_of(job), list[dict[str, Any]](), Busy()
    known = {
        "task": name,
        "samples": job.total,
        "batch": job.task.batch,
        "precision": job.precision,
        "learns": job.task.learns,
        "sums_by": {"DDP": dist.get_backend(), "HetSync": job.plane.sums_by},
        "devices": [profile.device for profile in job.profiles],
        "ranks_that_share_memory": ranks_sharing(job.plane, job.place, job.device),
        "solo_samples_per_second": job.solo,
        "shares_by_speed": job.shares("speed"),
        "bytes": job.buffers(),
        "runs": runs,
    }
    with busy.sampled() if job.plane.rank == 0 and job.device.type == "cuda" else contextlib.nullcontext():
        for order in in_turn(list(ways), job.setting.repetitions):
            for way in order:
                began = time.monotonic()
                trained = ways[way]()
                runs.append({"way": way, "busy_percent": busy.mean(began, time.monotonic()), **figures(job, trained)})
                yield known
                if job.device.type == "cuda":
                    torch.cuda.empty_cache()
    if job.plane.broadcast_object(seconds_left() < TRACE_SECONDS):
        return
    copies = job.traced(output / f"trace-{name}.json.gz")
    yield {**known, "copies": job.plane.gather_objects(copies)}


def figures(job: RankJob, trained: Trained) -> dict[str, Any]:
    """Collective."""
    told = job.plane.gather_objects((trained.seconds, trained.losses, trained.round_milliseconds))
    rate = job.total / max(seconds for seconds, *_ in told)
    kept = {"samples_per_second": rate, "efficiency": rate / sum(job.solo), "summary": trained.summary}
    kept["round_milliseconds"] = [milliseconds for *_, milliseconds in told]
    return {**kept, "loss": last_loss([losses for _, losses, _ in told])}


def markdown(tasks: Sequence[Mapping[str, Any]]) -> str:
    by = tasks[0]["sums_by"]
    forms = {"samples_per_second": ".1f", "efficiency": ".3f", "loss": ".3f", "busy_percent": ".0f"}
    heads = ["task", "way", "samples/s", "efficiency", "last loss", "GPU busy, %", *(f"{s}, ms" for s in STRETCHES)]
    rows = [
        [task["task"], way, *(spread([run[key] for run in runs], form) for key, form in forms.items()), *slowest(runs)]
        for task in tasks
        for (way,), runs in grouped(task["runs"], "way").items()
    ]
    costs = ["weights, MB", "delayed mode, MB", "allocated, MB", "runtime, part of a core", "waits", "copies, s"]
    costs = ["task", *costs, "of these beside kernels, s"]
    devices = f"Devices {', '.join(tasks[0]['devices'])}; DDP sums by {by['DDP']}, HetSync by {by['HetSync']}."
    return "\n\n".join([devices, table(heads, rows, words=2), table(costs, [cost_row(task) for task in tasks])])


def slowest(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each stretch of a round: the median of the rank whose is the longest."""
    ranks = [milliseconds for run in runs for milliseconds in run["round_milliseconds"] if milliseconds]
    return [f"{max(some):.1f}" for some in zip(*ranks, strict=True)] or ["–"] * len(STRETCHES)


def cost_row(task: Mapping[str, Any]) -> list[str]:
    ranks = [row for run in task["runs"] if run["way"] == OFTEN for row in run["summary"]["per_rank"]]
    keys = ("runtime_cpu_fraction", "wait_fraction")
    parts = [statistics.mean(row[key] for row in ranks) if ranks else None for key in keys]
    megabytes = [task["bytes"].get(key) for key in ("weights", "delayed_mode", "allocated")]
    copies = [traced for traced in task.get("copies", ()) if traced is not None]
    seconds = [sum(traced[key] for traced in copies) if copies else None for key in ("copy_seconds", "beside_kernels")]
    cells = ["–" if value is None else f"{value / 1e6:.1f}" for value in megabytes]
    cells += ["–" if part is None else f"{part:.1%}" for part in parts]
    cells += ["–" if value is None else f"{value:.3f}" for value in seconds]
    return [task["task"], *cells]


def setting_of(options: argparse.Namespace, plane: Plane) -> Setting:
    """Collective. On processors emulated speeds stand in for percentages."""
    seconds, repetitions = options.seconds, options.repetitions
    if not options.small:
        return Setting(0, seconds or 5.0, repetitions, 2.0)
    profile = options.output / "parts.yaml"
    if plane.rank == 0:
        groups = tuple(DeviceGroup(f"{part} %", 1, float(part)) for part in PERCENTAGES[plane.size])
        save_cluster(Cluster("parts", "made up: parts of one device", groups), profile)
    plane.barrier()
    return Setting(0, seconds or 0.5, repetitions, BRIEFLY, str(profile), 256.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small models on processors")
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder for figures and traces")
    parser.add_argument("--seconds", type=float, help="of each training at full speed (default: 5, small: 0.5)")
    parser.add_argument("--repetitions", type=int, default=1, help="of every way")
    parser.add_argument("--name", default="speed", help="of the files")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    plane = open_plane("mpi")
    place = find_place(plane)
    device = take_device("cpu" if options.small else "cuda", place)
    torch.set_num_threads(1)
    tell_where_it_hangs()
    # NCCL refuses ranks that share a GPU.
    own = device.type == "cuda" and max(plane.gather_objects(ranks_sharing(plane, place, device))) == 1
    dist.init_process_group("nccl" if own else "gloo", rank=plane.rank, world_size=plane.size)
    setting, done = setting_of(options, plane), list[dict[str, Any]]()
    known = SMALL_TASKS if options.small else TASKS
    for name in options.tasks:
        for task in run_task(RankJob(plane, device, known[name], setting), name, options.output):
            if plane.rank == 0:
                keep(options.output, options.name, markdown([*done, task]), tasks=[*done, task])
        done.append(task)
    if plane.rank == 0:
        best = {run["way"]: f"{run['efficiency']:.3f}" for task in done for run in task["runs"]}
        print("efficiency", ", ".join(f"{value} ({way})" for way, value in best.items()), flush=True)
    dist.destroy_process_group()
    plane.close()


if __name__ == "__main__":
    main()
