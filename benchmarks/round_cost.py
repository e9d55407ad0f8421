"""What a delayed round's tensors cost a rank: CPU time and memory streams of `Deltas` alone, without any plane.

    python -m benchmarks.round_cost [--values 25e6] [--repetitions 20]

Another checkout, for a comparison: PYTHONPATH=OTHER python benchmarks/round_cost.py

A stream is one pass of main memory over all weights, read or written. They are counted by running the same rounds under
a model of a cache of 8 MiB (least recently used, written back), so that they depend on neither machine nor load.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common.report import source, spread
from hetsync.sync.deltas import Deltas

TENSORS = 100
BATCH, SHARE = 64, 8  # samples
CACHE_BYTES = 1 << 23
LINE_BYTES = 1 << 13  # of the model: a real one's 64 would take it minutes
WRITTEN_ONLY = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")
THREADS = MAIN, COMMUNICATION = "main", "communication"

Part = tuple[str, str, Callable[[], Any]]  # thread, method, call
Costs = dict[tuple[str, str], float]  # by thread and method


def rounds_of(deltas: Deltas) -> dict[str, list[Part]]:
    """What a rank's two threads do in a round, by its role, in the order of time."""
    finish: Part = (MAIN, "finish", lambda: deltas.finish(SHARE, 1))
    give: Part = (COMMUNICATION, "pack", lambda: deltas.pack(True, BATCH, "float32"))
    join: Part = (COMMUNICATION, "pack", lambda: deltas.pack(False, BATCH, "float32"))
    land: Part = (COMMUNICATION, "apply_sum", deltas.apply_sum)
    apply: Part = (MAIN, "apply", deltas.apply)
    return {
        "contributes": [finish, give, land, apply],
        "contributes, finishes again meanwhile": [give, finish, land, apply],
        "idle": [join, land, apply],
        "idle twice before it applies": [join, land, join, land, apply],
    }


class Streams(TorchDispatchMode):
    """Counts bytes that pass between a cache and main memory while torch works on CPU tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._lines: OrderedDict[int, bool] = OrderedDict()  # by address, the oldest first: has it been written?

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        name = func._schema.name.removeprefix("aten::")
        columns: list[tuple[list[torch.Tensor], bool, bool]] = []  # tensors, read?, written?
        for argument in func._schema.arguments:
            tensors = [leaf for leaf in tree_leaves(given.get(argument.name)) if isinstance(leaf, torch.Tensor)]
            written = argument.alias_info is not None and argument.alias_info.is_write
            columns.append((tensors, not written or not (argument.is_out or name in WRITTEN_ONLY), written))
        if not any(written for _, _, written in columns):
            columns.append(([leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)], False, True))
        for row in zip_longest(*(tensors for tensors, _, _ in columns)):
            self._operate(
                [(tensor, *how) for tensor, (_, *how) in zip(row, columns, strict=True) if tensor is not None]
            )
        return result

    def _operate(self, operands: Sequence[tuple[torch.Tensor, bool, bool]]) -> None:
        """An operation on elements, which goes through its operands side by side."""
        spans = [range(t.data_ptr() // LINE_BYTES, -(-(t.data_ptr() + t.nbytes) // LINE_BYTES)) for t, _, _ in operands]
        for row in zip_longest(*spans):
            for line, (_, read, written) in zip(row, operands, strict=True):
                if line is not None:
                    self._touch(line, read, written)

    def _touch(self, line: int, read: bool, written: bool) -> None:
        if line not in self._lines and read:
            self.bytes += LINE_BYTES
        self._lines[line] = self._lines.pop(line, False) or written
        if len(self._lines) > CACHE_BYTES // LINE_BYTES:
            _, dirty = self._lines.popitem(last=False)
            self.bytes += LINE_BYTES * dirty

    def flush(self) -> None:
        self.bytes += LINE_BYTES * sum(self._lines.values())
        self._lines.clear()


def made(values: int) -> Deltas:
    """Of weights of random values: zeros that nobody has written are one page, whatever their size."""
    return Deltas([torch.randn(values // TENSORS) for _ in range(TENSORS)])


def cpu_milliseconds(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    call()
    return 1000 * (time.thread_time() - began)


def bytes_streamed(call: Callable[[], Any]) -> float:
    with Streams() as streams:
        call()
    streams.flush()
    return streams.bytes


def costs(parts: Sequence[Part], meter: Callable[[Callable[[], Any]], float]) -> Costs:
    found: Costs = defaultdict(float)
    for thread, method, call in parts:
        found[thread, method] += meter(call)
    return found


def measured(deltas: Deltas, repetitions: int, meter: Callable[[Callable[[], Any]], float]) -> dict[str, list[Costs]]:
    """Of each role's rounds; roles take turns. A round before warms up."""
    found: dict[str, list[Costs]] = {role: [] for role in rounds_of(deltas)}
    for _ in range(repetitions + 1):
        for role, parts in rounds_of(deltas).items():
            deltas.finish(SHARE, 1)  # for those who give without having finished in this round
            found[role].append(costs(parts, meter))
    return {role: rounds[1:] for role, rounds in found.items()}


def streamed(deltas: Deltas) -> dict[str, Costs]:
    """Streams by role, thread and method."""
    size = 4 * deltas.anchor.numel()
    found = measured(deltas, 1, bytes_streamed)
    return {role: {part: count / size for part, count in rounds[0].items()} for role, rounds in found.items()}


def table(taken: dict[str, list[Costs]], counted: dict[str, Costs]) -> str:
    lines = ["| a round in which the rank | thread: method | streams | CPU, ms: best | median [range] |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for role, rounds in taken.items():
        parts = {f"{thread}: {method}": [(thread, method)] for thread, method in rounds[0]}
        threads = {f"{thread} thread": [part for part in rounds[0] if part[0] == thread] for thread in THREADS}
        for name, some in {**parts, **threads, "**both**": list(rounds[0])}.items():
            times = [sum(costs[part] for part in some) for costs in rounds]
            streams = sum(counted[role][part] for part in some)
            lines.append(f"| {role} | {name} | {streams:.1f} | {min(times):.1f} | {spread(times, '.1f')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=lambda text: int(float(text)), default=25_000_000, help="weights")
    parser.add_argument("--repetitions", type=int, default=20, help="rounds of each role")
    options = parser.parse_args()
    torch.set_num_threads(1)
    deltas = made(options.values)
    taken = measured(deltas, options.repetitions, cpu_milliseconds)
    print(source("round_cost"), "", table(taken, streamed(deltas)), sep="\n")


if __name__ == "__main__":
    main()
