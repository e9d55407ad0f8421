"""Who the ranks are: devices, speeds, memory limits; measured, or taken from an emulated cluster's profile."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import hetsync
from hetsync.config import Config
from hetsync.data import Data
from hetsync.data.loader import to_device
from hetsync.data.workers import fetch
from hetsync.disk import write_atomically
from hetsync.emulate import affordable_rate, emulated_rates
from hetsync.errors import UserError
from hetsync.optimizers import build_optimizer
from hetsync.plane.base import Plane
from hetsync.profiling.cluster import Cluster
from hetsync.profiling.device import memory_cap, profile_step, untouched
from hetsync.session import RankProfile
from hetsync.slicing import StepTime

# A step takes as long as a profile says if it is off by no more than this factor; re-balancing does the rest.
ALIKE = 1.15

Step = Callable[[int], torch.Tensor]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    host: str
    local_rank: int
    ranks_on_host: int


def find_place(plane: Plane) -> Place:
    """Collective."""
    hosts = plane.gather_objects(socket.gethostname())
    mine = hosts[plane.rank]
    return Place(mine, hosts[: plane.rank].count(mine), hosts.count(mine))


def choose_device(name: str, place: Place) -> torch.device:
    """The rank's own device: `auto` takes the host's CUDA devices in turn, or the CPU."""
    if name not in ("auto", "cpu", "cuda") and not (name.startswith("cuda:") and name[5:].isdigit()):
        raise UserError(f"run.device is {name}: use auto, cpu, cuda or cuda:INDEX")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"run.device is {name}, but {place.host} has no CUDA device: use auto or cpu")
    index = int(name[5:]) if ":" in name else place.local_rank % torch.cuda.device_count()
    if index >= torch.cuda.device_count():
        raise UserError(f"run.device is {name}, but {place.host} has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def limit_threads(place: Place, emulated: bool) -> None:
    """Ranks of one host share its cores; emulated devices take one thread each. OMP_NUM_THREADS has precedence."""
    if emulated:
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.ranks_on_host))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def loss_on(model: torch.nn.Module, data: Data, device: torch.device) -> Step:
    """A function that runs forward on b training samples."""

    def forward(samples: int) -> torch.Tensor:
        indices = [index % len(data.train) for index in range(samples)]  # type: ignore[arg-type]
        return data.loss(model, to_device(fetch(data.train, indices, data.collate), device))

    return forward


def seconds_of_steps(
    config: Config,
    model: torch.nn.Module,
    data: Data,
    device: torch.device,
    sizes: list[int],
    clock: Clock = time.perf_counter,
) -> StepTime:
    """Fit t(b) = a + c·b to whole training steps (forward, backward, optimizer) on a copy of the model."""
    copy = deepcopy(model)
    optimizer = build_optimizer(config.optimizer, copy)
    forward = loss_on(copy, data, device)

    def step(samples: int) -> None:
        forward(samples).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with untouched(copy):
        return profile_step(step, sizes, clock=clock)


@dataclass(frozen=True)
class Subject:
    """What is profiled, and where."""

    plane: Plane
    config: Config
    model: torch.nn.Module
    data: Data
    place: Place

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def step_time(self, sizes: list[int], clock: Clock = time.perf_counter) -> StepTime:
        return seconds_of_steps(self.config, self.model, self.data, self.device, sizes, clock)

    def cap(self, limit_bytes: int | None = None) -> int | None:
        forward = loss_on(self.model, self.data, self.device)
        return memory_cap(self.model, forward, self.device, self.place.ranks_on_host, limit_bytes=limit_bytes)


def measure_ranks(subject: Subject, cluster: Cluster | None) -> list[RankProfile]:
    """Collective: every rank's profile, in rank order."""
    mine = _measured(subject) if cluster is None else _emulated(subject, cluster)
    return subject.plane.gather_objects(mine)


def _emulated(subject: Subject, cluster: Cluster) -> RankProfile:
    plane, config = subject.plane, subject.config
    group = cluster.device_of(plane.rank)
    batch = config.data.batch_size
    affordable = None
    if plane.rank == 0:  # alone, so that the other ranks do not take its core
        share = max(1, batch // plane.size)
        # What the machine does besides, such as ranks that are still starting, is no cost of a step.
        clock = time.process_time if subject.device.type == "cpu" else time.perf_counter
        real = subject.step_time([share, 4 * share], clock)
        per_sample = real.seconds_per_sample + plane.size * real.fixed_seconds / batch
        affordable = affordable_rate(per_sample, batch)
    affordable = plane.broadcast_object(affordable)
    total = config.emulation.samples_per_second
    rates = emulated_rates(cluster, plane.size, config.model.name, total, affordable)
    cap = None if group.memory_bytes is None else subject.cap(group.memory_bytes)
    name = f"{group.name} (emulated)"
    return RankProfile(name, subject.place.host, StepTime(0.0, 1 / rates[plane.rank]), True, cap)


def _measured(subject: Subject) -> RankProfile:
    config = subject.config
    typical = max(1, config.data.batch_size // subject.plane.size)
    sizes = sorted({max(1, typical // 2), typical, 2 * typical})
    place, name = subject.place, device_name(subject.device)

    def still_holds(kept: StepTime) -> bool:
        # A host that was busy, or had another quota, would leave wrong shares and efficiencies to all later runs.
        now, then = subject.step_time([typical]).seconds(typical), kept.seconds(typical)
        return then / ALIKE <= now <= then * ALIKE

    key = [config.model, config.data, config.optimizer, name, place.host, place.ranks_on_host, sizes]
    step_time = _cached(key, still_holds, lambda: subject.step_time(sizes))
    return RankProfile(name, place.host, step_time, False, subject.cap())


def _cached(key: Any, still_holds: Callable[[StepTime], bool], measure: Callable[[], StepTime]) -> StepTime:
    """One small file a model, host and device in the user's cache folder; measured anew where it no longer holds."""
    text = repr((hetsync.__version__, torch.__version__, key))
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hetsync" / "profiles"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    kept = _read(path)
    if kept is not None and still_holds(kept):
        return kept
    measured = measure()
    with contextlib.suppress(UserError):  # a home that cannot be written costs some seconds at the next start
        write_atomically(path, json.dumps(asdict(measured)))
    return measured


def _read(path: Path) -> StepTime | None:
    try:
        return StepTime(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
