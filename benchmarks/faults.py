"""Faults put into HetSync's jobs on this machine, and what becomes of these.

    python -m benchmarks.faults [--ranks 8] [--kinds die stop ...] [--moments during ...] [--bounds 0 4 null]
    python -m benchmarks.faults --deaths 60         a death every so many seconds until half of the ranks are left
    python -m benchmarks.faults --soak 30 --seed 1  a fault every 20 s, for so many minutes: memory, descriptors

By default every kind at every moment in every mode, on rank 1; deaths also of rank 0, and two at once. A row says how
the job ended, how many samples were applied, the greatest staleness, in how many seconds a death was noticed and
recovered from, and its samples/s as part of those of a job without faults. A job that ends says why, and within how
many seconds of the fault. Deaths are told of by Open MPI 5 with ULFM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from benchmarks.common.local_job import launched
from benchmarks.common.report import machine, source
from hetsync.config.faults import OF_A_ROUND, TAKES, Kind, When
from hetsync.files import write_atomically

KINDS, MOMENTS = get_args(Kind), get_args(When)
BOUNDS = ("0", "4", "null")
RATE = 1200  # samples/s of the emulated cluster
SECONDS = 6  # of training, undisturbed
ROUND = 12  # that faults strike at
LIMIT_SECONDS = 120
TIMEOUT_SECONDS = 15  # of the job's own
VALUES = {"factor": 5.0, "seconds": 2.0}
SOAK_EVERY_SECONDS = 20.0
SAMPLE_SECONDS = 5.0
HARMLESS = ("stop", "slow", "not_finite", "delay")  # kinds that end neither rank nor job

Fault = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One job."""

    name: str
    when: str
    bound: str
    faults: tuple[Fault, ...] = ()


@dataclass
class Told:
    """What one job has shown."""

    status: int
    seconds: float
    summary: dict[str, Any]
    sentences: list[str]


def fault(kind: str, rank: int, when: str, number: int = ROUND) -> Fault:
    made: Fault = {"kind": kind, "rank": 0 if kind == "disk_full" else rank, "when": when}
    if when in OF_A_ROUND:
        made["round"] = number
    if kind in TAKES:
        made[TAKES[kind]] = VALUES[TAKES[kind]]
    return made


def cases(options: argparse.Namespace) -> Iterator[Case]:
    last = options.ranks - 1
    for bound in options.bounds:
        yield Case("none", "", bound)
        for when in options.moments:
            # A recovery takes a death before it.
            before = (fault("die", last, "during", ROUND - 4),) if when == "recovery" else ()
            for kind in options.kinds:
                yield Case(kind, when, bound, (*before, fault(kind, 1, when)))
            if "die" in options.kinds:
                yield Case("die (rank 0)", when, bound, (*before, fault("die", 0, when)))
                yield Case("die (two)", when, bound, (*before, fault("die", 1, when), fault("die", 2, when)))


def words(options: argparse.Namespace, bound: str, seconds: float, faults: Sequence[Fault]) -> list[object]:
    samples = int(seconds * RATE)
    return [
        *("digits", "--emulate", options.emulate, "--emulation.samples_per_second", RATE, "--run.samples", samples),
        *("--run.evaluate_every", samples // 3, "--run.checkpoint_every", samples // 2, "--run.profile_seconds", 0.5),
        *("--sync.delay_bound", bound, "--run.timeout_seconds", TIMEOUT_SECONDS, "--fault.not_finite", "skip"),
        *("--fault.inject", yaml.safe_dump(list(faults), default_flow_style=True, width=10**6).strip(), "--quiet"),
    ]


def run(ranks: int, told: Sequence[object], limit_seconds: float, watch: Sampler | None = None) -> Told:
    """A job in a run folder of its own."""
    env = {**os.environ, "MPIRUN_FLAGS": "--with-ft ulfm", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        line = list(map(str, launched(ranks, [*told, "--run.dir", folder])))
        began = time.monotonic()
        with subprocess.Popen(line, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as job:
            if watch is not None:
                watch.start(job.pid)
            try:
                _, said = job.communicate(timeout=limit_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, 9)
                _, said = job.communicate()
                said += f"\nhetsync: it did not end within {limit_seconds:.0f} s"
            seconds = time.monotonic() - began
        path = Path(folder) / "summary.json"
        summary = json.loads(path.read_text()) if path.is_file() else {}
    sentences = [
        sentence.strip(" \0") for sentence in said.splitlines() if sentence.strip(" \0").startswith("hetsync:")
    ]
    return Told(job.returncode, seconds, summary, sentences)


def record(case: Case, told: Told, undisturbed: dict[str, float]) -> dict[str, Any]:
    summary, deaths = told.summary, [each for each in told.summary.get("failures", ()) if each["recovered_seconds"]]
    rate = summary.get("samples_per_second")
    if case.name == "none" and rate is not None:
        undisturbed[case.bound] = rate
    return {
        "kind": case.name,
        "when": case.when,
        "delay_bound": case.bound,
        "status": told.status,
        "ended": summary.get("status"),
        "samples_applied": summary.get("samples_applied"),
        "samples_expected": summary.get("samples_expected"),
        "staleness": summary.get("staleness", {}).get("max"),
        "noticed_seconds": max((death["noticed_seconds"] for death in deaths), default=None),
        "recovered_seconds": max((death["recovered_seconds"] for death in deaths), default=None),
        "failures": [(each["rank"], each["kind"]) for each in summary.get("failures", ())],
        "ratio": None if rate is None or case.bound not in undisturbed else rate / undisturbed[case.bound],
        "seconds": told.seconds,
        "said": told.sentences[-1].removeprefix("hetsync: ") if told.sentences else "",
    }


def row(found: dict[str, Any]) -> str:
    def shown(value: Any, form: str = "") -> str:
        return "–" if value is None else f"{value:{form}}"

    samples = f"{shown(found['samples_applied'])}/{shown(found['samples_expected'])}"
    cells = [
        found["kind"],
        found["when"] or "–",
        found["delay_bound"],
        str(found["status"]),
        samples if found["ended"] == "finished" else "–",
        shown(found["staleness"]),
        shown(found["noticed_seconds"], ".2f"),
        shown(found["recovered_seconds"], ".2f"),
        shown(found["ratio"], ".2f"),
        "went on" if found["status"] == 0 else f"ended: {found['said'][:90]}",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| kind | when | D | status | samples applied/expected | staleness | noticed, s | recovered, s"
    " | samples/s ÷ undisturbed | |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


class Sampler:
    """Resident memory and open files of a job's ranks, every few seconds, by rank."""

    def __init__(self) -> None:
        self.samples: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._over = threading.Event()

    def start(self, launcher: int) -> None:
        threading.Thread(target=self._run, args=(launcher,), daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self, launcher: int) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    if os.getsid(int(process.name)) != launcher:
                        continue
                    told = dict(
                        word.split(b"=", 1) for word in (process / "environ").read_bytes().split(b"\0") if b"=" in word
                    )
                    if b"hetsync-train" not in (process / "cmdline").read_bytes():
                        continue
                    rank = told[b"OMPI_COMM_WORLD_RANK"].decode()
                    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                    self.samples[rank].append((resident, len(list((process / "fd").iterdir()))))
                except (OSError, KeyError, ValueError):
                    continue

    def growth(self) -> list[str]:
        """By rank: medians of the second and of the last quarter."""
        lines = []
        for rank, taken in sorted(self.samples.items()):
            quarter = len(taken) // 4
            if not quarter:
                continue
            middles = [
                [statistics.median(values) for values in zip(*part, strict=True)]
                for part in (taken[quarter : 2 * quarter], taken[-quarter:])
            ]
            (memory, files), (memory_late, files_late) = middles
            lines.append(
                f"rank {rank}: {memory / 2**20:.0f} to {memory_late / 2**20:.0f} MiB,"
                f" {files:.0f} to {files_late:.0f} open files"
            )
        return lines


def rounds_a_second(options: argparse.Namespace, bound: str) -> float:
    told = run(options.ranks, words(options, bound, SECONDS, ()), LIMIT_SECONDS)
    if told.status:
        sys.exit(f"the undisturbed job ended with {told.status}: {told.sentences}")
    return float(told.summary["rounds"] / told.summary["train_seconds"])


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """A long job in which something happens every 20 s; at most a third of the ranks die."""
    draw = random.Random(options.seed)
    bound, seconds = options.bounds[-1], 60 * options.soak
    each = rounds_a_second(options, bound) * SOAK_EVERY_SECONDS
    count = int(0.8 * seconds / SOAK_EVERY_SECONDS)  # slower ones come later
    mortal = draw.sample(range(1, options.ranks), options.ranks // 3)
    deaths = dict(zip(sorted(draw.sample(range(count), min(count, len(mortal)))), mortal, strict=False))
    alive = [rank for rank in range(options.ranks) if rank not in mortal]
    faults = []
    for place in range(count):
        kind = "die" if place in deaths else draw.choice(HARMLESS)
        made = fault(
            kind, deaths.get(place, draw.choice(alive)), draw.choice(OF_A_ROUND), int((place + 1) * each * 0.8)
        )
        faults.append({**made, **({"factor": 1.2} if kind == "slow" else {})})
    print(f"seed {options.seed}: {json.dumps(faults)}", flush=True)
    sampler = Sampler()
    told = run(options.ranks, words(options, bound, seconds, faults), 3 * seconds + LIMIT_SECONDS, sampler)
    sampler.stop()
    return {
        **record(Case("soak", "", bound, tuple(faults)), told, {}),
        "seed": options.seed,
        "faults": len(faults),
        "growth": sampler.growth(),
        "efficiency": told.summary.get("efficiency"),
    }


def deaths(options: argparse.Namespace) -> dict[str, Any]:
    """One every so many seconds, from the last rank on, until half are left."""
    bound, half = options.bounds[-1], options.ranks // 2
    # Rounds slow down as ranks go: the last death comes somewhat later.
    each = rounds_a_second(options, bound) * options.deaths
    faults = [fault("die", options.ranks - 1 - place, "during", int((place + 1) * each)) for place in range(half)]
    seconds = (half + 1) * options.deaths
    told = run(options.ranks, words(options, bound, seconds, faults), 4 * seconds + LIMIT_SECONDS)
    return {
        **record(Case("deaths", "during", bound, tuple(faults)), told, {}),
        "efficiency": told.summary.get("efficiency"),
        "recovered": [each["recovered_seconds"] for each in told.summary.get("failures", ())],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--emulate", default="v100-p100-k80")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--bounds", nargs="+", choices=BOUNDS, default=list(BOUNDS))
    parser.add_argument("--deaths", type=float, metavar="SECONDS")
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    print(source("faults"), flush=True)
    if options.soak is not None or options.deaths is not None:
        found.append(soak(options) if options.soak is not None else deaths(options))
        print(json.dumps(found[0], indent=1))
    else:
        undisturbed: dict[str, float] = {}
        print(HEAD)
        for case in cases(options):
            told = run(options.ranks, words(options, case.bound, SECONDS, case.faults), LIMIT_SECONDS)
            found.append(record(case, told, undisturbed))
            print(row(found[-1]), flush=True)
    if options.output is not None:
        content = json.dumps({"machine": machine(), "command": sys.argv[1:], "jobs": found}, indent=1)
        write_atomically(options.output / "faults.json", content)


if __name__ == "__main__":
    main()
