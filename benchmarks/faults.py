"""Faults put into HetSync's jobs on this machine, and what becomes of these.

    python -m benchmarks.faults [--ranks 8] [--kinds die stop ...] [--moments during ...] [--bounds 0 4 null]
    python -m benchmarks.faults --deaths 60         a death every so many seconds until half of the ranks are left
    python -m benchmarks.faults --deaths 60 --replace       as many, and another process takes each one's place
    python -m benchmarks.faults --soak 30 --seed 1  a fault every 20 s, for so many minutes: memory, descriptors

By default every kind at every moment in every mode, on rank 1; deaths also of rank 0, and two at once. A kind that ends
neither rank nor job strikes at all moments of one job. A row says how the job ended, how many samples were applied, the
greatest staleness, and in how many seconds a death was noticed and recovered from; of a job that ends, within how many
seconds of the fault. Its last column is empty where all is as it should be: every sample applied once, no staleness
beyond D, the failure listed, at D = 0 the weights of the job without faults; or the fault's own status at once. Deaths
are told of by Open MPI 5 with ULFM.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import yaml

from benchmarks.common.local_job import launched
from benchmarks.common.processes import end_session
from benchmarks.common.report import command, machine, source
from hetsync.config.faults import OF_A_ROUND, TAKES, Kind, When
from hetsync.files import write_atomically
from hetsync.train.checkpoint import load_newest

KINDS, MOMENTS = get_args(Kind), get_args(When)
BOUNDS = ("0", "4", "null")
RATE = 1200  # samples/s of the emulated cluster
SECONDS = 2.5  # of training, undisturbed
ROUND = 12  # that faults strike at
ROUNDS_BETWEEN = 4  # faults of one job
LIMIT_SECONDS = 240
TIMEOUT_SECONDS = 30  # of the job's own
VALUES = {"factor": 1.2, "seconds": 0.5}
SOAK_EVERY_SECONDS = 20.0
SAMPLE_SECONDS = 5.0
HARMLESS = ("stop", "slow", "not_finite", "delay")  # kinds that end neither rank nor job
REPEATED = ("stop", "slow", "delay", "corrupt", "drop", "disk_full")  # that a job is to bear as often as they come
ENDS = {"exit": 3, "raise": 1, "memory": 2}  # kinds that end the job, with this status
ENDS_SECONDS = 5.0  # from the fault to the end of all ranks
NEAR = 1e-5  # weights that differ by rounding only

Fault = dict[str, Any]
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One job."""

    name: str
    when: str
    bound: str
    faults: tuple[Fault, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.split(" (")[0]

    @property
    def dead(self) -> list[int]:
        return sorted(each["rank"] for each in self.faults if each["kind"] == "die")


@dataclass
class Told:
    """What one job has shown."""

    status: int
    seconds: float
    summary: dict[str, Any]
    lines: list[str]
    ended_seconds: float | None = None  # from the first fault to its end
    weights: Weights | None = None

    @property
    def sentences(self) -> list[str]:
        told = [line.strip(" \0\n") for line in self.lines]
        return [line.removeprefix("hetsync: ") for line in told if line.startswith("hetsync:")]


def fault(kind: str, rank: int, when: str, number: int = ROUND) -> Fault:
    made: Fault = {"kind": kind, "rank": 0 if kind == "disk_full" else rank, "when": when}
    if when in OF_A_ROUND:
        made["round"] = number
    if kind in TAKES:
        made[TAKES[kind]] = VALUES[TAKES[kind]]
    return made


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for bound in options.bounds:
        yield Case("none", "", bound)
        for kind in options.kinds:
            if kind in REPEATED:
                yield repeated(kind, bound, options)
                continue
            for when in options.moments:
                before = first_death(when, options)
                yield Case(kind, when, bound, (*before, fault(kind, 1, when)))
                if kind == "die":
                    yield Case("die (rank 0)", when, bound, (*before, fault("die", 0, when)))
                    yield Case("die (two)", when, bound, (*before, fault("die", 1, when), fault("die", 2, when)))


def first_death(when: str, options: argparse.Namespace) -> tuple[Fault, ...]:
    """A recovery takes a death before it."""
    return (fault("die", options.ranks - 1, "during", ROUND - ROUNDS_BETWEEN),) if when == "recovery" else ()


def repeated(kind: str, bound: str, options: argparse.Namespace) -> Case:
    """At all moments of one job; what is full is so for one checkpoint, of which there are few."""
    moments = options.moments if kind != "disk_full" else [when for when in options.moments if when == "checkpoint"]
    before = [each for when in moments for each in first_death(when, options)]
    faults = [fault(kind, 1, when, ROUND + ROUNDS_BETWEEN * place) for place, when in enumerate(moments)]
    return Case(kind, ", ".join(moments), bound, (*before, *faults))


def words(options: argparse.Namespace, bound: str, seconds: float, faults: Sequence[Fault]) -> list[object]:
    samples = int(seconds * RATE)
    return [
        *("digits", "--emulate", options.emulate, "--emulation.samples_per_second", RATE, "--run.samples", samples),
        *("--run.evaluate_every", samples // 3, "--run.checkpoint_every", samples // 2, "--run.profile_seconds", 0.2),
        *("--sync.delay_bound", bound, "--run.timeout_seconds", TIMEOUT_SECONDS, "--fault.not_finite", "skip"),
        *("--optimizer.name", "sgd", "--optimizer.momentum", 0.9, "--fault.least_ranks", 1),
        *("--fault.inject", yaml.safe_dump(list(faults), default_flow_style=True, width=10**6).strip(), "--quiet"),
        *("--fault.replace", str(options.replace).lower()),
    ]


def run(ranks: int, told: Sequence[object], limit_seconds: float, watch: Sampler | None = None) -> Told:
    """A job in a run folder of its own."""
    env = {**os.environ, "MPIRUN_FLAGS": "--with-ft ulfm", "OMP_NUM_THREADS": "1"}
    pipe, nowhere, struck, lines = subprocess.PIPE, subprocess.DEVNULL, None, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        line = list(map(str, launched(ranks, [*told, "--run.dir", folder])))
        began = time.monotonic()
        with subprocess.Popen(line, env=env, stdout=nowhere, stderr=pipe, text=True, start_new_session=True) as job:
            alarm = threading.Timer(limit_seconds, end_session, [job.pid])
            alarm.start()
            if watch is not None:
                watch.start(job.pid)
            assert job.stderr is not None
            for said in job.stderr:
                lines.append(said)
                if "fault fired" in said and struck is None:
                    struck = time.monotonic()
            status = job.wait()
            alarm.cancel()
        ended = time.monotonic()
        if ended - began > limit_seconds:
            lines.append(f"hetsync: it did not end within {limit_seconds:.0f} s")
        path = Path(folder) / "summary.json"
        summary = json.loads(path.read_text()) if path.is_file() else {}
        weights = load_newest(Path(folder)).model if status == 0 else None
    return Told(status, ended - began, summary, lines, None if struck is None else ended - struck, weights)


def shortcomings(case: Case, told: Told, undisturbed: Weights | None) -> list[str]:
    """What is not as it should be."""
    summary, listed = told.summary, [(each["rank"], each["kind"]) for each in told.summary.get("failures", ())]
    if (status := ENDS.get(case.kind)) is not None:
        late = told.ended_seconds is None or told.ended_seconds > ENDS_SECONDS
        found = [f"status {told.status}"] if told.status != status else []
        return found + ([f"ended only after {told.ended_seconds} s"] if late else [])
    if told.status != 0:
        return [f"status {told.status}: {told.sentences[-1] if told.sentences else ''}"]
    found = []
    if summary["samples_applied"] != summary["samples_expected"]:
        found.append("samples lack")
    if case.bound != "null" and summary["staleness"]["max"] > int(case.bound):
        found.append(f"staleness {summary['staleness']['max']}")
    if sorted(rank for rank, kind in listed if kind == "died") != case.dead:
        found.append(f"listed: {listed}")
    if case.bound == "0" and case.kind != "not_finite":  # which come in another order
        assert undisturbed is not None
        assert told.weights is not None
        off = max(float((told.weights[name] - value).abs().max()) for name, value in undisturbed.items())
        if off > NEAR:
            found.append(f"weights off by {off:.1e}")
    return found


def record(case: Case, told: Told, undisturbed: Weights | None) -> dict[str, Any]:
    summary, deaths = told.summary, [each for each in told.summary.get("failures", ()) if each["kind"] == "died"]
    wrong = shortcomings(case, told, undisturbed)
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
        "seconds": round(told.seconds, 1),
        "ended_seconds": None if told.ended_seconds is None else round(told.ended_seconds, 2),
        "shortcomings": wrong,
        "said": told.sentences,
        **({"lines": told.lines[-60:]} if wrong else {}),
    }


def row(found: dict[str, Any]) -> str:
    def shown(value: Any, form: str = "") -> str:
        return "–" if value is None else f"{value:{form}}"

    samples = f"{shown(found['samples_applied'])}/{shown(found['samples_expected'])}"
    went_on = found["status"] == 0
    cells = [
        found["kind"],
        found["when"] or "–",
        found["delay_bound"],
        str(found["status"]),
        samples if found["ended"] == "finished" else "–",
        shown(found["staleness"]),
        shown(found["noticed_seconds"], ".2f"),
        shown(found["recovered_seconds"], ".2f"),
        "–" if went_on else shown(found["ended_seconds"], ".1f"),
        "; ".join(found["shortcomings"])[:200],
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| kind | when | D | status | samples applied/expected | staleness | noticed, s | recovered, s | ended, s"
    " | falls short |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
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
        **record(Case("soak", "", bound, tuple(faults)), told, None),
        "seed": options.seed,
        "faults": len(faults),
        "growth": sampler.growth(),
        "solo_fraction": told.summary.get("solo_fraction"),
    }


def deaths(options: argparse.Namespace) -> dict[str, Any]:
    """One every so many seconds, from the last rank on, of half of the ranks, which others may take the place of."""
    bound, half = options.bounds[-1], options.ranks // 2
    # Rounds slow down as ranks go: the last death comes somewhat later.
    each = rounds_a_second(options, bound) * options.deaths
    faults = [fault("die", options.ranks - 1 - place, "during", int((place + 1) * each)) for place in range(half)]
    seconds = (half + 1) * options.deaths
    told = run(options.ranks, words(options, bound, seconds, faults), 4 * seconds + LIMIT_SECONDS)
    found = record(Case("deaths", "during", bound, tuple(faults)), told, None)
    joins = told.summary.get("joins", ())
    if options.replace and len(joins) < half:
        found["shortcomings"].append(f"{len(joins)} of {half} have been replaced")
    return {
        **found,
        "solo_fraction": told.summary.get("solo_fraction"),
        "recovered": [each["recovered_seconds"] for each in told.summary.get("failures", ())],
        "joins": joins,
    }


def keep(options: argparse.Namespace, found: Sequence[dict[str, Any]]) -> None:
    if options.output is not None:
        content = {"command": command("faults"), "machine": machine(), "jobs": found}
        options.output.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output / "faults.json", json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--emulate", default="v100-p100-k80")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--bounds", nargs="+", choices=BOUNDS, default=list(BOUNDS))
    parser.add_argument("--deaths", type=float, metavar="SECONDS")
    parser.add_argument("--replace", action="store_true", help="fault.replace")
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
        undisturbed: Weights | None = None
        print(HEAD)
        for case in cases(options):
            told = run(options.ranks, words(options, case.bound, SECONDS, case.faults), LIMIT_SECONDS)
            undisturbed = told.weights if case.name == "none" else undisturbed
            found.append(record(case, told, undisturbed))
            print(row(found[-1]), flush=True)
            keep(options, found)
    keep(options, found)


if __name__ == "__main__":
    main()
