"""What this rank's device can do with the actual model: seconds a step, memory a sample."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from hetsync.balance.profile import StepTime, fit
from hetsync.cgroups import CGROUPS, PROC, groups_of
from hetsync.config.schema import Config, SyncConfig
from hetsync.data.random_state import untouched
from hetsync.sync.reals import count_reals, summed_in
from hetsync.sync.sparse import dense_parts

# Backward needs gradients of activations beside the saved ones. Peak resident memory over saved bytes was
# 1.23 for a batch-norm CNN and 1.34 for a deep MLP (torch 2.13, CPU).
BACKWARD_OVERHEAD = 1.4

# Copies of what is trained, in the precision of sums, that delayed training keeps (`sync/deltas.py`).
ENGINE_BUFFERS = 4
# More, while an anchor is evaluated: itself, and the weights whose place it takes.
EVALUATION_BUFFERS = 2

# Left to everything that no model of memory knows: fragmentation, workspaces, the data loader.
USABLE_FRACTION = 0.9

# Batches whose memory is measured. Not 1: batch norm refuses to train on one value a channel. On a GPU libraries choose
# workspaces by size, which swamp small batches: so larger ones follow, until two differ by a part of the limit.
MEMORY_SIZES = (2, 8)
MEMORY_SIZES_ON_CUDA = (*MEMORY_SIZES, 32, 128, 512)
TELLING_FRACTION = 0.1

# A step's time is known when its 95 % interval is narrower than this part of it.
INTERVAL = 0.02

# A shorter look would see one moment of the machine, however little its steps scatter.
LEAST_SECONDS = 1.0

# By version files with a memory cgroup's limit and usage, and the key of the reclaimable page cache in memory.stat.
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class Profiled:
    """What steps were found to take.

    `uncertainty` is half of the 95 % interval of a step's median time, as a part of it, at the size where it is widest;
    None where too few steps were timed to tell.
    """

    time: StepTime
    uncertainty: float | None


def profile_step(
    step: Callable[[int], None],
    sizes: Sequence[int],
    budget_seconds: float = 10.0,
    clock: Callable[[], float] = time.perf_counter,
    most_rounds: int | None = None,
    least_seconds: float = LEAST_SECONDS,
) -> Profiled:
    """Fit a line to the medians of measured steps; `step(b)` runs forward and backward on b samples and
    synchronises with the device.

    Every size is warmed up once, smallest first, then all sizes are timed in turn, so that a drift of the
    machine's speed meets them alike: until the 95 % interval of each median is narrower than `INTERVAL`, but for
    `least_seconds`, or for `most_rounds`. Over budget the largest sizes (never the two smallest) and further rounds
    (never the first) are left out. ValueError without sizes.
    """
    if not sizes:
        raise ValueError("cannot fit step times to no sizes")
    started = clock()
    seconds: dict[int, list[float]] = {}
    for size in sorted(set(sizes)):
        if len(seconds) >= 2 and clock() - started > budget_seconds:
            break
        step(size)
        seconds[size] = []
    for done in count(1):
        for size, taken in seconds.items():
            before = clock()
            step(size)
            insort(taken, clock() - before)
        spent, uncertainty = clock() - started, _uncertainty(seconds.values())
        known = uncertainty is not None and 2 * uncertainty <= INTERVAL
        if spent > budget_seconds or done == most_rounds or (known and spent >= least_seconds):
            break
    # A clock may be too coarse for a tiny step; the fit needs a positive time.
    return Profiled(fit(list(seconds), [max(median(taken), 1e-9) for taken in seconds.values()]), uncertainty)


def _uncertainty(measured: Iterable[Sequence[float]]) -> float | None:
    """Half of the widest interval, as a part of its median; `measured` are sorted seconds."""
    widest = 0.0
    for taken in measured:
        interval = median_interval(taken)
        if interval is None:
            return None
        low, high = interval
        widest = max(widest, (high - low) / 2 / max(median(taken), 1e-9))
    return widest


def median_interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the median of sorted values, whatever their distribution: two of them, by the normal
    approximation of how many lie below the median (Conover 1999, section 3.2). None for fewer than six."""
    values = len(ordered)
    outside = (values - 1 - 1.96 * math.sqrt(values)) / 2
    if outside < 0:
        return None
    return ordered[int(outside)], ordered[values - 1 - int(outside)]


def activation_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps from this forward for its backward: each storage once, parameters not."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        for storage in map(torch.Tensor.untyped_storage, dense_parts(tensor)):
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    leaves = {leaf.untyped_storage().data_ptr() for leaf in _leaves(output)}
    return sum(size for address, size in saved.items() if address not in leaves)


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """The tensors that backward from here would accumulate gradients in."""
    waiting = [output.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):  # AccumulateGrad
            yield node.variable
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        waiting.extend(new)


def state_buffers(optimizer: torch.optim.Optimizer) -> int:
    """Values that it keeps for each weight; one that is not known as many as Adam."""
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if any(group["momentum"] for group in optimizer.param_groups) else 0
    return 2


def engine_buffers(config: Config) -> int:
    """Copies of what is trained that a job of these settings keeps, in the precision of sums: with a controller it may
    be delayed later."""
    if config.sync.delay_bound == 0 and config.control.name == "fixed":
        return buckets_of(config.sync)
    evaluates = EVALUATION_BUFFERS if config.run.evaluate_every is not None else 0
    ruled = config.sync.wire == "auto" and config.control.name == "fixed"
    rounds_off = ruled or config.sync.first_wire != "float32"
    return ENGINE_BUFFERS + evaluates + (config.sync.outer.name != "identity") + rounds_off


def buckets_of(sync: SyncConfig) -> int:
    """Copies of the model that synchronous training keeps: its gradients, and what rounding has taken from them."""
    return 1 + (sync.first_wire != "float32")


def memory_cap(
    model: nn.Module,
    make_loss: Callable[[int], Tensor],
    device: torch.device,
    sharing: int,
    optimizer_state_buffers: int = 2,
    limit_bytes: int | None = None,
    engine_buffers: int = ENGINE_BUFFERS,
) -> int | None:
    """The largest batch that fits into this rank's memory; None for any, 0 if not even two samples fit.

    `make_loss(b)` runs forward on b samples. Memory is a line through two small batches (on CPU the bytes
    that autograd saves, on CUDA the allocator's peak), plus gradients, `optimizer_state_buffers` values a
    weight that is trained, and the trainer's own `engine_buffers` copies of these, in float32 or more. The limit
    is `limit_bytes` (an emulated device's memory), else an equal part for each of the ranks that are `sharing` it:
    on CPU of the host's available memory, within its cgroup, on CUDA of the device's; a tenth of it stays free. The
    model is left as it was.
    """
    cuda = device.type == "cuda"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained_bytes = sum(parameter.nbytes for parameter in trained)
    kept = optimizer_state_buffers * trained_bytes
    kept += engine_buffers * sum(map(count_reals, trained)) * summed_in(trained).itemsize
    if not cuda:
        # CUDA's peak holds parameters and gradients; of the host's available memory the parameters are gone.
        kept += trained_bytes
        kept += 0 if limit_bytes is None else sum(parameter.nbytes for parameter in model.parameters())
    limit = limit_bytes if limit_bytes is not None else _own_memory(device, sharing)
    if limit is None:
        return None
    with untouched(model):
        measured = _measured_memory(model, make_loss, device, limit)
    if len(measured) < len(MEMORY_SIZES):
        return max(measured, default=0)
    fixed, per_sample = _line(measured)
    free = USABLE_FRACTION * limit - kept - fixed
    if per_sample <= 0:
        return None if free >= 0 else 0
    return max(0, int(free / per_sample))


def _line(measured: Mapping[int, float]) -> tuple[float, float]:
    """Bytes of no sample, and of each, by the two largest sizes."""
    (small, low), (large, high) = sorted(measured.items())[-2:]
    per_sample = (high - low) / (large - small)
    return low - small * per_sample, per_sample


def _measured_memory(
    model: nn.Module, make_loss: Callable[[int], Tensor], device: torch.device, limit: float
) -> dict[int, float]:
    """Bytes needed by each size that could be run at all, within this rank's `limit`: others may have the rest."""
    measured: dict[int, float] = {}
    for size in MEMORY_SIZES_ON_CUDA if device.type == "cuda" else MEMORY_SIZES:
        if len(measured) >= len(MEMORY_SIZES):
            (_, low), (_, high) = sorted(measured.items())[-2:]
            fixed, per_sample = _line(measured)
            if high - low >= TELLING_FRACTION * limit or fixed + size * max(0.0, per_sample) > limit:
                break
        try:
            if device.type == "cuda":
                measured[size] = _cuda_peak_bytes(model, make_loss, size, device)
            else:
                measured[size] = BACKWARD_OVERHEAD * activation_bytes(partial(make_loss, size))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
    return measured


def _cuda_peak_bytes(model: nn.Module, make_loss: Callable[[int], Tensor], size: int, device: torch.device) -> float:
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats(device)
    make_loss(size).backward()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device))


def _own_memory(device: torch.device, sharing: int) -> int | None:
    """Bytes that are this rank's, of the device's or the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory // sharing)
    available = available_host_bytes()
    return None if available is None else available // sharing


def available_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that this process's host and cgroup still have; None where the system does not say (no Linux)."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
        available = int(fields["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([available, *_cgroup_free_bytes(proc, cgroups)])


def _cgroup_free_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each limit on the way up from this process's memory cgroup leaves."""
    for folder, version in groups_of("memory", proc, cgroups):
        limit_file, usage_file, cache = MEMORY_FILES[version]
        try:
            limit = int((folder / limit_file).read_text())
            usage = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # The page cache counts as usage, but gives way.
            yield max(0, limit - usage + int(stat.get(cache, 0)))
        except (OSError, ValueError):  # "max", or a cgroup of another container
            continue
