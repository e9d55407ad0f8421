"""Who the ranks are: devices, speeds, memory limits; measured, or taken from an emulated cluster's profile."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from hetsync.balance.device import settle
from hetsync.balance.gpu import check_kernels, check_percentage, gpu_identity, gpu_name, mps_name
from hetsync.balance.profile import RankProfile
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.data.random_state import untouched
from hetsync.data.stream import Stream
from hetsync.data.transfer import to_device
from hetsync.data.workers import fetch
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.device import affordable_rate, emulated_times
from hetsync.errors import UserError, brief, cause, complain
from hetsync.launchers import gpus_granted
from hetsync.plane.base import Plane
from hetsync.profiling.cores import bound_to_one_core, granted, threads_of
from hetsync.profiling.device import LEAST_SECONDS, Profiled, engine_buffers, memory_cap, profile_step, state_buffers
from hetsync.sync.optimizers import build_optimizer
from hetsync.sync.sparse import known_copies

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

REFUSES_ONE = "Expected more than 1 value per channel"  # what batch norm says of one sample

# An emulated cluster's speed is a choice, which a rough figure serves.
EMULATION_SECONDS = 3.0
EMULATION_ROUNDS = 5

Step = Callable[[int], torch.Tensor]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `threads`: so many cores are its own, of those that it shares with other ranks."""

    host: str
    local_rank: int
    ranks_on_host: int
    threads: int = 1


def find_place(plane: Plane) -> Place:
    """Collective."""
    return find_places(plane)[plane.rank]


def find_places(plane: Plane) -> list[Place]:
    """Collective: of every rank."""
    told = plane.gather_objects(granted())
    if plane.rank == 0 and (bound := bound_to_one_core(told)):
        complain(bound)
    hosts = [grant.machine for grant in told]
    return [
        Place(grant.host, hosts[:rank].count(grant.machine), hosts.count(grant.machine), threads_of(rank, told))
        for rank, grant in enumerate(told)
    ]


def choose_device(name: str, place: Place) -> torch.device:
    """The rank's own device: `auto` takes the host's CUDA devices in turn, or the CPU. UserError where there is none
    such, or where `auto` would leave GPUs idle that the job was given."""
    if name not in ("auto", "cpu", "cuda", "mps") and not (name.startswith("cuda:") and name[5:].isdigit()):
        raise UserError(f"run.device is {name}: use auto, cpu, cuda, cuda:INDEX or mps")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise UserError(f"run.device is mps, but torch finds no GPU of Apple's on {place.host}: use auto or cpu")
        return torch.device("mps", 0)
    if name == "auto" and not torch.cuda.is_available() and (granted := gpus_granted()):
        raise UserError(
            f"run.device is auto, and SLURM has given this job {granted} GPUs of {place.host}, where torch"
            f" {torch.__version__} finds none: install a torch for CUDA, look at nvidia-smi there, or give cpu"
        )
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"run.device is {name}, but {place.host} has no CUDA device: use auto or cpu")
    index = int(name[5:]) if ":" in name else place.local_rank % torch.cuda.device_count()
    if index >= torch.cuda.device_count():
        raise UserError(f"run.device is {name}, but {place.host} has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def take_device(name: str, place: Place) -> torch.device:
    """`choose_device`, and this process computes there from now on: before anything touches CUDA, or every rank would
    open a context on the host's first GPU, and a script's plain "cuda" would be that one."""
    device = choose_device(name, place)
    if device.type == "cuda":
        check_percentage()
        check_kernels(device)
        torch.cuda.set_device(device)
    return device


def ranks_sharing(plane: Plane, place: Place, device: torch.device) -> int:
    """Collective: how many ranks, itself among them, have this rank's memory: that of its GPU, or of its host."""
    mine = place.host, gpu_identity(device) if device.type == "cuda" else None
    everyones = plane.gather_objects(mine)
    return everyones.count(mine) if device.type == "cuda" else place.ranks_on_host


def limit_threads(place: Place, emulated: bool) -> None:
    """Ranks share the cores that launchers and quotas leave to several of them; emulated devices take one thread each.

    OMP_NUM_THREADS has precedence.
    """
    if emulated:
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(place.threads)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A forward pass in the precision of a recipe's `run.precision`."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return gpu_name(device)
    if device.type == "mps":
        return mps_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def batch_of(data: Data, samples: int, device: torch.device) -> Any:
    return to_device(fetch(data.train, typical_indices(data, samples), data.collate), device)


def typical_indices(data: Data, samples: int) -> list[int]:
    """Of a batch from all over the training set: its beginning may hold the shortest samples, or one class. Where
    samples differ in cost, their costs are spread as those of all are: so does training even out its batches.

    Of a stream that is walked through they are the next: the way to all others would be the whole stream, each time."""
    if isinstance(data.train, Stream) and data.train.is_walked:
        return data.train.next_places(samples)
    count = len(data.train)  # type: ignore[arg-type]
    if data.costs is None:
        return [index * count // samples for index in range(samples)]
    by_cost = torch.as_tensor(data.costs).argsort(stable=True)
    return by_cost[[(2 * index + 1) * count // (2 * samples) for index in range(samples)]].tolist()


def loss_on(model: torch.nn.Module, data: Data, device: torch.device) -> Step:
    """A function that runs forward on b training samples."""

    def forward(samples: int) -> torch.Tensor:
        return data.loss(model, batch_of(data, samples, device))

    return forward


def profile_steps(
    config: Config,
    model: torch.nn.Module,
    data: Data,
    device: torch.device,
    sizes: list[int],
    budget_seconds: float,
    clock: Clock = time.perf_counter,
    most_rounds: int | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    least_seconds: float = LEAST_SECONDS,
) -> Profiled:
    """Whole training steps (forward, backward, optimizer) on a copy of the model, on batches that are there before, as
    training has them. `optimizers`: the model's, of which copies step; the recipe's, where there are none."""
    known = known_copies(model)
    copy = deepcopy(model, known)
    if config.run.compile:
        check_compiler(device)
        copy.compile()
    copies = [_twin(optimizer, known) for optimizer in optimizers] or [build_optimizer(config.optimizer, copy)]

    def step(samples: int) -> None:
        data.loss(copy, batches[samples]).backward()
        for optimizer in copies:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        settle(device)

    with untouched(copy):
        batches = {size: batch_of(data, size, device) for size in sizes}
        return profile_step(step, sizes, budget_seconds, clock, most_rounds, least_seconds)


def check_compiler(device: torch.device) -> None:
    """UserError unless torch.compile works for the device: it finds a compiler only when it is first used."""
    try:
        torch.compile(lambda values: values.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:
        raise UserError(
            f"run.compile is true, but torch.compile does not work here ({brief(error)}): install a compiler (g++ for"
            " CPUs, triton for CUDA), or leave run.compile out"
        ) from error


def _twin(optimizer: torch.optim.Optimizer, known: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy that steps the copies of its weights. deepcopy would leave out what a class of one's own keeps besides."""
    twin = type(optimizer).__new__(type(optimizer))
    known[id(optimizer)] = twin
    twin.__dict__.update({name: deepcopy(value, known) for name, value in vars(optimizer).items()})
    return twin


@dataclass(frozen=True)
class Subject:
    """What is profiled, and where."""

    plane: Plane
    config: Config
    model: torch.nn.Module
    data: Data
    place: Place
    optimizers: Sequence[torch.optim.Optimizer] = ()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def step_time(self, sizes: list[int], sharing: int) -> Profiled:
        """Ranks that share a GPU all measure for as long as they may: one that were done would leave it to the rest."""
        seconds, what = self.config.run.profile_seconds, (self.config, self.model, self.data, self.device, sizes)
        least = seconds if self.device.type == "cuda" and sharing > 1 else LEAST_SECONDS
        return profile_steps(*what, seconds, optimizers=self.optimizers, least_seconds=least)

    def affordable_rate(self) -> float:
        """Samples/s of a whole emulated cluster that this machine can imitate."""
        batch, ranks, share = self.config.data.batch_size, self.plane.size, typical_slice(self.config, self.plane.size)
        # What the machine does besides, such as ranks that are still starting, is no cost of a step.
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        what = (self.config, self.model, self.data, self.device, [share, 4 * share])
        with _one_sample_explained(batch, ranks, share):
            real = profile_steps(*what, EMULATION_SECONDS, clock, EMULATION_ROUNDS, self.optimizers).time
        return affordable_rate(real.seconds_per_sample + ranks * real.fixed_seconds / batch, batch)

    def load_seconds(self, samples: int) -> float:
        """Of one batch, on this thread, once its samples have been chosen."""
        indices = typical_indices(self.data, samples)
        with torch.random.fork_rng(devices=[]):
            began = time.perf_counter()
            fetch(self.data.train, indices, self.data.collate)
            return time.perf_counter() - began

    def cap(self, sharing: int, limit_bytes: int | None = None) -> int | None:
        forward = loss_on(self.model, self.data, self.device)
        state = max(map(state_buffers, self.optimizers), default=2)
        copies = engine_buffers(self.config)
        return memory_cap(self.model, forward, self.device, sharing, state, limit_bytes, copies)


def typical_slice(config: Config, ranks: int) -> int:
    """Samples of a rank's slice, where all ranks are alike."""
    batch = config.data.batch_size
    return max(min(config.sync.least_slice, batch), batch // ranks)


@contextmanager
def _one_sample_explained(batch_size: int, ranks: int, share: int) -> Iterator[None]:
    """UserError for batch norm's error, where a slice is one sample: training would fail, too."""
    try:
        yield
    except ValueError as error:
        if share > 1 or REFUSES_ONE not in str(error):
            raise
        raise UserError(
            f"batch_size {batch_size} is less than two samples for each of the {ranks} ranks, and batch norm does not"
            f" train on one ({cause(error)}): raise it to at least {2 * ranks}, or start fewer ranks"
        ) from error


def measure_ranks(subject: Subject, cluster: Cluster | None) -> list[RankProfile]:
    """Collective: every rank's profile, in rank order."""
    mine = _measured(subject) if cluster is None else _emulated(subject, cluster)
    return subject.plane.gather_objects(mine)


def _emulated(subject: Subject, cluster: Cluster) -> RankProfile:
    plane, config = subject.plane, subject.config
    group, total = cluster.device_of(plane.rank), config.emulation.samples_per_second
    affordable = math.inf
    if total is None:
        # Rank 0 alone, so that the other ranks do not take its core.
        affordable = plane.broadcast_object(subject.affordable_rate() if plane.rank == 0 else None)
    times = emulated_times(cluster, plane.size, config.model.name, total, affordable)
    cap = None if group.memory_bytes is None else subject.cap(1, group.memory_bytes)
    name = f"{group.name} (emulated)"
    return RankProfile(name, subject.place.host, times[plane.rank], True, cap)


def _measured(subject: Subject) -> RankProfile:
    """Afresh at every start: figures of another day, or of a busy host, would leave wrong shares and efficiencies."""
    plane, place = subject.plane, subject.place
    sharing = ranks_sharing(plane, place, subject.device)
    cap = subject.cap(sharing)  # before anything larger is tried
    batch, ranks = subject.config.data.batch_size, plane.ranks_at_start
    typical = typical_slice(subject.config, ranks)
    least = min(2, typical)  # batch norm does not train on one sample
    wanted = (max(least, typical // 2), typical, 2 * typical)
    sizes = sorted({max(1, size if cap is None else min(size, cap)) for size in wanted})
    plane.barrier()  # ranks that still start would take this one's core
    with _one_sample_explained(batch, ranks, typical):
        found = subject.step_time(sizes, sharing)
    load = subject.load_seconds(typical) / typical
    return RankProfile(device_name(subject.device), place.host, found.time, False, cap, found.uncertainty, load)
