"""Who the ranks are: devices, speeds, memory limits; measured, or taken from an emulated cluster's profile."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hetsync
from hetsync.config import Config
from hetsync.data import Data
from hetsync.data.loader import fetch, to_device
from hetsync.disk import write_atomically
from hetsync.emulate import emulated_rates
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.profiling.cluster import Cluster
from hetsync.profiling.device import memory_cap, profile_step, untouched
from hetsync.session import RankProfile
from hetsync.slicing import StepTime

Step = Callable[[int], torch.Tensor]


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


def seconds_of_steps(model: torch.nn.Module, forward: Step, device: torch.device, sizes: list[int]) -> StepTime:
    """Fit t(b) = a + c·b to forward and backward on this device."""

    def step(samples: int) -> None:
        forward(samples).backward()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with untouched(model):
        return profile_step(step, sizes)


def measure_ranks(
    plane: Plane, config: Config, model: torch.nn.Module, data: Data, place: Place, cluster: Cluster | None
) -> list[RankProfile]:
    """Collective: every rank's profile, in rank order."""
    device = next(model.parameters()).device
    forward = loss_on(model, data, device)
    mine = (
        _emulated(plane, config, model, forward, place, cluster)
        if cluster is not None
        else _measured(plane, config, model, forward, place)
    )
    return plane.gather_objects(mine)


def _emulated(
    plane: Plane, config: Config, model: torch.nn.Module, forward: Step, place: Place, cluster: Cluster
) -> RankProfile:
    group = cluster.device_of(plane.rank)
    device = next(model.parameters()).device
    real = None
    if plane.rank == 0:  # alone, so that the other ranks do not take its core
        real = seconds_of_steps(model, forward, device, [8, 32])
    real = plane.broadcast_object(real)
    batch = config.data.batch_size
    per_sample = real.seconds_per_sample + plane.size * real.fixed_seconds / batch
    total = config.emulation.samples_per_second
    rates = emulated_rates(cluster, plane.size, config.model.name, total, per_sample)
    time = StepTime(0.0, 1 / rates[plane.rank])
    cap = None
    if group.memory_bytes is not None:
        cap = memory_cap(model, forward, device, place.ranks_on_host, limit_bytes=group.memory_bytes)
    return RankProfile(f"{group.name} (emulated)", place.host, time, True, cap)


def _measured(
    plane: Plane, config: Config, model: torch.nn.Module, forward: Step, place: Place
) -> RankProfile:
    device = next(model.parameters()).device
    typical = max(1, config.data.batch_size // plane.size)
    sizes = sorted({max(1, typical // 2), typical, 2 * typical})
    key = [config.model, config.data, device_name(device), place.ranks_on_host, sizes]
    kept = _cached(key, partial(_measure, model, forward, place, sizes))
    time = StepTime(kept["fixed_seconds"], kept["seconds_per_sample"])
    return RankProfile(device_name(device), place.host, time, False, kept["cap"])


def _measure(model: torch.nn.Module, forward: Step, place: Place, sizes: list[int]) -> dict[str, Any]:
    device = next(model.parameters()).device
    time = seconds_of_steps(model, forward, device, sizes)
    return {**asdict(time), "cap": memory_cap(model, forward, device, place.ranks_on_host)}


def _cached(key: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One small file a model and device in the user's cache folder."""
    text = repr((hetsync.__version__, torch.__version__, key))
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hetsync" / "profiles"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = measure()
        write_atomically(path, json.dumps(kept))
    return kept
