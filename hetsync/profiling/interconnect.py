"""What the ranks' interconnect can do, by the collective that training uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from hetsync.balance.profile import fit
from hetsync.emulation.cluster import Link
from hetsync.plane.base import Plane, PlaneError

# Four values to 16 MiB: the smallest shows the latency, the largest the bandwidth.
SIZES_BYTES = (16, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)

# As a job begins: sums grow until one takes so long, or is of all weights. A fast link has done so in no time.
FIRST_BYTES = 16 * 1024
ENOUGH_SECONDS = 0.25

MOST_REPETITIONS = 7
CPU = torch.device("cpu")
WAIT_SECONDS = 50e-6


def measure_interconnect(
    plane: Plane,
    budget_seconds: float = 2.0,
    timeout_seconds: float = 60.0,
    device: torch.device = CPU,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Link:
    """Latency and bandwidth of float32 allreduces over all ranks, of tensors on their `device`; collective, the same
    result everywhere.

    Every size is warmed up once and timed up to seven times; its time is the slowest rank's median. A size
    that would not fit into what is left of the budget ends the measurement. The bandwidth is that of each
    rank's own link in a ring allreduce, which carries 2·(N−1)/N times the tensor. One rank has a free link.
    PlaneError where an allreduce takes longer than `timeout_seconds`.
    """
    if plane.size == 1:
        return Link()
    started = clock()
    sizes: list[int] = []
    seconds: list[float] = []
    for size in SIZES_BYTES:
        values = torch.zeros(size // 4, dtype=torch.float32, device=device)
        first = _timed(plane, values, timeout_seconds, clock, sleep)
        left = budget_seconds - (clock() - started)
        # Rank 0 decides for all: ranks that count differently would post different collectives and hang.
        repetitions = plane.broadcast_object(min(MOST_REPETITIONS, int(left / (len(SIZES_BYTES) * first))))
        repeats = range(max(1, repetitions))
        times = [_timed(plane, values, timeout_seconds, clock, sleep) for _ in repeats]
        sizes.append(size)
        seconds.append(max(plane.gather_objects(median(times))))
        if repetitions < 1 and len(sizes) >= 2:
            break
    line = fit(sizes, [max(s, 1e-9) for s in seconds])
    carried = 2 * (plane.size - 1) / plane.size
    bandwidth = carried / line.seconds_per_sample if line.seconds_per_sample > 0 else None
    return Link(line.fixed_seconds, bandwidth)


def measure_sum(
    plane: Plane,
    n_bytes: int,
    timeout_seconds: float = 60.0,
    device: torch.device = CPU,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Seconds of one float32 sum of so many bytes, on ranks' `device`; collective, the same result everywhere.

    Where that takes longer than a moment it follows from a part of them that takes one, and from one value, which shows
    the latency: a small part would tell of jitter. Each size is the slowest rank's better of two, since noise only
    adds; the first opens connections. PlaneError where a sum takes longer than `timeout_seconds`.
    """

    def seconds_of(size: int) -> float:
        values = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
        best = min(_timed(plane, values, timeout_seconds, clock, sleep) for _ in range(2))
        return float(max(plane.gather_objects(best)))

    latency, size = seconds_of(0), min(n_bytes, FIRST_BYTES)
    while (seconds := seconds_of(size)) - latency < ENOUGH_SECONDS and size < n_bytes:
        size = min(n_bytes, 4 * size)
    return latency + max(0.0, seconds - latency) * n_bytes / size


def _timed(
    plane: Plane,
    values: torch.Tensor,
    timeout_seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> float:
    """Seconds of one allreduce that all ranks start together."""
    plane.barrier()
    started = clock()
    handle = plane.allreduce(values)
    while not handle.done():
        if clock() - started > timeout_seconds:
            raise PlaneError(f"an allreduce of {values.numel() * 4} bytes took more than {timeout_seconds} s")
        sleep(WAIT_SECONDS)
    return max(clock() - started, 1e-9)
