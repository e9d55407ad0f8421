"""One GPU, nine minutes: checks HetSync on it, and measures it, the most valuable first.

    python -m benchmarks.gpu [--small] [--second]

Each part is processes of its own, with a limit, a log and files of its own; whatever it does, the next begins. What is
known is in OUTPUT/gpu.md, gpu.json and gpu.tgz (all but traces) after each. `--list` shows the parts. Two ranks share
the GPU by MPS, with 60 and 30 % of its multiprocessors; where MPS is not there or serves nobody they take turns.

`--second` is another visit, of what the first has no time for: more models, four ranks, a death under MPS, and NCCL
among ranks of one GPU, which needs NCCL 2.30 or newer. `--small` runs all of its code on processors, where emulated
speeds stand in for percentages: that shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import torch

from benchmarks.common.local_job import ROOT
from benchmarks.common.processes import environment, mpirun
from benchmarks.common.report import command, machine, source
from benchmarks.gpu.kept import table
from benchmarks.gpu.parts import Outcome, Part, Verdict, run
from benchmarks.gpu.speed import PERCENTAGES
from hetsync.files import DiskError, write_atomically

SECONDS = 540.0
SUMMARY_SECONDS = 4.0
SMALL_FACTOR = 4  # other tests may run beside
TOLERANT = "--with-ft ulfm"
# Of the tests, those that `--small` starts.
FEW = "lane or first_sum or plain or timed or nearly or (no_bit and batch) or (every_sample and 4)"


class Visit:
    """The parts of one."""

    def __init__(self, small: bool, output: Path, by_mps: bool = True) -> None:
        self._small, self._output, self._by_mps = small, output, by_mps

    def parts(self, second: bool) -> list[Part]:
        parts = self.second() if second else self.first()
        factor = SMALL_FACTOR if self._small else 1
        return [replace(part, limit_seconds=part.limit_seconds * factor) for part in parts]

    def mps(self) -> Part:
        """Which need not be served where it is installed."""
        sums = [sys.executable, "-c", "import torch; print(torch.ones(9, device='cuda').sum().item())"]
        return Part("mps", "two ranks are served by MPS", 25, self._sharing(PERCENTAGES[2], *sums))

    def _module(self, name: str, *words: object) -> list[object]:
        return [sys.executable, "-m", f"benchmarks.gpu.{name}", "--output", self._output, *words]

    def _sharing(self, parts: Sequence[int], *words: object, flags: str = "") -> list[object]:
        """Ranks that share the GPU. `flags` of mpirun."""
        if self._small or not self._by_mps:
            return [*mpirun(len(parts)), *flags.split(), *words]
        mps = [ROOT / "launch" / "mps", ",".join(map(str, parts)), "--"]
        return ["env", f"MPIRUN_FLAGS={flags}", *mps, *words]

    def _ranks(self, name: str, *words: object, ranks: int = 2) -> list[object]:
        return self._sharing(PERCENTAGES[ranks], *self._module(name, *words), *(["--small"] if self._small else []))

    def _tests(self, file: str, side_by_side: int = 1) -> list[object]:
        few = ["-k", FEW, "--device", "cpu"] if self._small else []
        many = ["-n", side_by_side] if side_by_side > 1 and not self._small else []
        words = ["-v", "--color=no", "-p", "no:cacheprovider", *many, *few]
        return [sys.executable, "-m", "pytest", *words, ROOT / "tests" / "gpu" / file]

    def first(self) -> list[Part]:
        return [
            Part("host", "versions, MPS, what `hetsync doctor` says", 25, self._module("host")),
            Part("lane", "NCCL's lane in one process, all wires", 30, self._tests("test_lane.py")),
            Part("jobs", "what jobs come to, beside one process", 105, self._tests("test_jobs.py", 6)),
            Part("speed", "ResNet-50 beside DDP", 105, self._ranks("speed", "--tasks", "resnet50")),
            Part("races", "the same bits, whatever is late; torch's sanitizer", 50, self._tests("test_races.py", 2)),
            Part("rests", "where a rest's seconds go, 124 M weights", 55, self._ranks("rests")),
            Part("waits", "who waits for the GPU, and where", 30, self._ranks("waits")),
            Part("device", "time and copies of one device", 25, self._tests("test_device.py")),
            Part("memory", "training on 0.95 of what is told to fit", 30, self._tests("test_memory.py")),
            Part("death", "a rank is killed", 45, self._tests("test_death.py", 2)),
        ]

    def second(self) -> list[Part]:
        models = ["--tasks", "gpt", "cifar10_resnet18-like"]
        killed = [sys.executable, ROOT / "tests" / "gpu" / "ranks.py", "killed", "cpu" if self._small else "cuda", 4]
        return [
            Part("nccl", "NCCL among ranks of one GPU", 60, self._tests("test_shared_nccl.py")),
            Part("speed", "a GPT and ResNet-18 beside DDP", 200, self._ranks("speed", *models)),
            Part("four", "four ranks", 110, self._ranks("speed", "--name", "four", "--tasks", "resnet50", ranks=4)),
            Part("rests", "rests with a frozen base of 1 B weights", 90, self._ranks("rests", "--model", "adapter")),
            Part(
                "death", "a rank is killed under MPS", 50, self._sharing((40, 30, 30), *killed, flags="--with-ft ulfm")
            ),
        ]


def markdown(kept: Mapping[str, Any], parts: Sequence[Part], output: Path) -> str:
    heads = ["part", "shows", "verdict", "seconds, of at most", "its last line"]
    rows = [[*map(str, row.values())] for row in kept["parts"]]
    failed = [f"- `{name}`" for name in kept["failed_tests"]]
    found = [(part.name, output / f"{part.name}.md") for part in parts]
    texts = [f"## {name}\n\n{path.read_text().rstrip()}" for name, path in found if path.exists()]
    return "\n\n".join([source("gpu"), table(heads, rows, words=5), *failed, *texts]) + "\n"


def row(part: Part, outcome: Outcome) -> dict[str, Any]:
    seconds = f"{outcome.seconds:.0f} of {part.limit_seconds:.0f}"
    last = outcome.last_line.replace("|", "/")
    return {"part": part.name, "shows": part.shows, "verdict": outcome.verdict.value, "seconds": seconds, "last": last}


def failed_tests(log: Path) -> set[str]:
    """As pytest names them while it goes on: what is late has no summary."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return {name for line in lines if "FAILED" in line for name in re.findall(r"tests/gpu/\S+::\S+", line)}


class Kept:
    """What the visit has come to so far, in its folder."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._parts: list[Part] = []
        self._kept: dict[str, Any] = {"command": command("gpu"), "machine": machine(), "parts": [], "failed_tests": []}

    def forget(self, part: Part) -> None:
        """What another visit has left of it."""
        for suffix in ("json", "md", "log"):
            (self._output / f"{part.name}.{suffix}").unlink(missing_ok=True)

    def add(self, part: Part, outcome: Outcome) -> None:
        self._parts.append(part)
        found = row(part, outcome)
        self._kept["parts"].append(found)
        self._kept["failed_tests"] += sorted(failed_tests(self._output / f"{part.name}.log"))
        print(*list(found.values())[2:], f"({part.name})", flush=True)
        write_atomically(self._output / "gpu.json", json.dumps(self._kept, indent=1) + "\n")
        write_atomically(self._output / "gpu.md", markdown(self._kept, self._parts, self._output))
        self._pack()

    def _pack(self) -> None:
        """One file to take home."""
        names = ["gpu.json", "gpu.md", *(f"{part.name}.{end}" for part in self._parts for end in ("json", "log"))]
        with tarfile.open(self._output / "gpu.tgz", "w:gz") as packed:
            for path in (self._output / name for name in names):
                if path.exists():
                    packed.add(path, f"gpu/{path.name}")


def own_environment() -> dict[str, str]:
    """Parts install nothing, and their tests go by no options of tests around them."""
    return {name: value for name, value in environment().items() if name != "PYTEST_ADDOPTS"} | {"extras": ""}


def visit(parts: Sequence[Part], output: Path, deadline: float, spare: float = 0.0, kept: Kept | None = None) -> bool:
    """Did all parts pass? `deadline` of time.monotonic, `spare` seconds that are left of parts before."""
    kept, passed = kept or Kept(output), True
    for part in parts:
        kept.forget(part)
        outcome = run(part, output, own_environment(), deadline, spare)
        spare = max(0.0, spare + part.limit_seconds - outcome.seconds)
        passed &= outcome.verdict is Verdict.PASSED
        kept.add(part, outcome)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="all of its code on processors, with emulated speeds")
    parser.add_argument("--second", action="store_true", help="what the first visit has no time for")
    parser.add_argument("--list", action="store_true", help="show the parts and their limits, and do nothing")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="these alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"in which it ends (default: {SECONDS:.0f})")
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder for all that is found")
    options = parser.parse_args()
    output: Path = options.output.absolute()
    parts = chosen(parser, options, by_mps=True)
    if options.list:
        rows = [[part.name, part.shows, f"{part.limit_seconds:.0f}"] for part in parts]
        print(table(["part", "shows", "seconds, at most"], rows, words=2))
        return
    if not options.small and not torch.cuda.is_available():
        parser.error("no CUDA device: start it on a machine with a GPU, or give --small")
    deadline = time.monotonic() + options.seconds * (SMALL_FACTOR if options.small else 1) - SUMMARY_SECONDS
    try:
        output.mkdir(parents=True, exist_ok=True)
        sys.exit(not begun(parser, options, output, parts, deadline))
    except (OSError, DiskError) as error:
        parser.error(f"--output {options.output}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def begun(
    parser: argparse.ArgumentParser, options: argparse.Namespace, output: Path, parts: Sequence[Part], deadline: float
) -> bool:
    """As `visit`, once it is known how ranks share the GPU."""
    kept, spare = Kept(output), 0.0
    if not options.small and which("nvidia-cuda-mps-control"):
        probe = Visit(False, output).mps()
        outcome = run(probe, output, own_environment(), deadline)
        kept.add(probe, outcome)
        parts = chosen(parser, options, by_mps=outcome.verdict is Verdict.PASSED)
        spare = probe.limit_seconds - outcome.seconds
    elif not options.small:
        parts = chosen(parser, options, by_mps=False)
    return visit(parts, output, deadline, spare, kept)


def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace, by_mps: bool) -> list[Part]:
    parts = Visit(options.small, options.output.absolute(), by_mps).parts(options.second)
    if unknown := set(options.parts or ()) - {part.name for part in parts}:
        parser.error(f"no part {min(unknown)}: there are {', '.join(part.name for part in parts)}")
    return [part for part in parts if options.parts is None or part.name in options.parts]


if __name__ == "__main__":
    main()
