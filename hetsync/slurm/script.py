"""A batch script for SLURM, from what a job asks for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from hetsync.errors import UserError, brief, did_you_mean

TRAIN = "hetsync-train"

Launcher = Literal["mpirun", "srun"]

KEYS = ("ranks", "gpus", "cpus", "memory", "partition", "constraint")
MOST_NODES = 100_000
FORMS = {
    "gpus": (r"([\w.-]+:)?[1-9]\d{0,3}", "a number or KIND:NUMBER, such as a100:4"),
    "memory": (r"[1-9]\d*[KMGT]?", "a number with K, M, G or T, such as 64G"),
    "partition": (r"[\w.,-]+", "the name of a partition, or several with commas"),
    "constraint": (r"[\w.,:&|*()\[\]-]+", "features of nodes, such as a100 or [a100*2&v100*1]"),
}
TIME = r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?"


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind: a job of one group is a plain one, of several a heterogeneous one, with a component each.

    Args:
        nodes: How many.
        ranks: On each of them.
        gpus: On each of them, as SLURM has it: `4` or `a100:4`.
        cpus: Cores of each rank.
        memory: Of each node, as SLURM has it: `64G`.
        partition: Where they are; None takes the cluster's default.
        constraint: Features that they have.
    """

    nodes: int
    ranks: int
    gpus: str | None = None
    cpus: int | None = None
    memory: str | None = None
    partition: str | None = None
    constraint: str | None = None

    def options(self) -> list[str]:
        """Of sbatch. GPUs are those of nodes: `--gpus-per-task` would give all ranks of a node one GPU under mpirun."""
        told = {
            "nodes": self.nodes,
            "ntasks": self.nodes * self.ranks,
            "ntasks-per-node": self.ranks,
            "gpus-per-node": self.gpus,
            "cpus-per-task": self.cpus,
            "mem": self.memory,
            "partition": self.partition,
            "constraint": f'"{self.constraint}"' if self.constraint else None,
        }
        return [f"--{name}={value}" for name, value in told.items() if value is not None]


def parse_nodes(text: str) -> NodeGroup:
    """`COUNT[,key=value...]`, with keys of `KEYS`; UserError otherwise. There is a rank for each GPU, or one a node."""
    count, *settings = re.split(r",(?=[^,=]*=)", text)
    given = dict(setting.partition("=")[::2] for setting in settings)
    for key in given:
        if key not in KEYS:
            near = did_you_mean(key, KEYS)
            raise UserError(f"--nodes {brief(text)}: there is no {brief(key)}{near}: use {', '.join(KEYS)}")
    for key, (form, what) in FORMS.items():
        if key in given and not re.fullmatch(form, given[key], re.ASCII):
            raise UserError(f"--nodes {brief(text)}: {key} is {brief(given[key])!r}: give {what}")
    gpus = given.get("gpus")
    return NodeGroup(
        nodes=_whole(text, "the number of nodes", count),
        ranks=_whole(text, "ranks", given.get("ranks", gpus.rpartition(":")[2] if gpus else "1")),
        gpus=gpus,
        cpus=_whole(text, "cpus", given["cpus"]) if "cpus" in given else None,
        memory=given.get("memory"),
        partition=given.get("partition"),
        constraint=given.get("constraint"),
    )


def _whole(text: str, what: str, number: str) -> int:
    if not re.fullmatch(r"\d{1,9}", number, re.ASCII) or not 1 <= int(number) <= MOST_NODES:
        raise UserError(f"--nodes {brief(text)}: {what} is {brief(number)!r}: give a number from 1 to {MOST_NODES}")
    return int(number)


def seconds_of(time: str) -> int:
    """Of a time as SLURM has it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    found = re.fullmatch(TIME, time, re.ASCII)
    if found is None or len(time) > 20:
        raise UserError(f"--time is {brief(time)}: give minutes, HOURS:MINUTES:SECONDS, or DAYS-HOURS")
    parts = [int(part) for part in (found["first"], found["second"], found["third"]) if part is not None]
    if found["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return (hours * 60 + minutes) * 60 + seconds


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What the script is to do; see `batch.sh` for its settings.

    Args:
        program: What a rank runs. One that begins with `hetsync-train` is told its run folder, and resumes.
        run_folder: None: runs/NAME-NUMBER of a recipe, unknown of a program of the user's. The jobs of a sweep have
            folders in it.
        lead_seconds: Before the time limit that USR1 is sent: time to save.
        sweep: A job array, if there are any: what each of its jobs has behind the program.
        options: More of sbatch.
        setup: Lines of shell before everything, such as `module load openmpi`.
    """

    groups: Sequence[NodeGroup]
    program: Sequence[str]
    run_folder: Path | None = None
    name: str = "hetsync"
    time: str | None = None
    lead_seconds: int = 60
    launcher: Launcher = "mpirun"
    venv: Path | None = None
    apptainer: str | None = None
    pyxis: str | None = None
    max_restarts: int = 100
    max_crashes: int = 3
    sweep: Sequence[Mapping[str, str]] = ()
    options: Sequence[str] = ()
    setup: Sequence[str] = ()

    @property
    def trains(self) -> bool:
        """A recipe, and no program of the user's."""
        return self.program[0] == TRAIN


def script_of(job: BatchJob) -> str:
    """The whole script: what it asks for, its settings, and what every job does."""
    lines = [
        "#!/usr/bin/env bash",
        "# Written by hetsync launch slurm.",
        *_head(job),
        *job.setup,
        "set -euo pipefail",
        "",
    ]
    body = (files("hetsync.slurm") / "batch.sh").read_text(encoding="utf-8")
    return "\n".join([*lines, *_settings(job), *_swept(job), "", body])


def _head(job: BatchJob) -> Iterator[str]:
    time = [f"--time={job.time}"] if job.time else []
    number = "%A_%a" if job.sweep else "%j"
    own = [
        f"--job-name={job.name}",
        f"--output={job.name}-{number}.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.lead_seconds}",
        *([f"--array=0-{len(job.sweep) - 1}"] if job.sweep else []),
    ]
    for number_of_group, group in enumerate(job.groups):
        if number_of_group:
            yield "#SBATCH hetjob"
        for option in [*(() if number_of_group else own), *time, *group.options(), *job.options]:
            yield f"#SBATCH {option}"


def _settings(job: BatchJob) -> Iterator[str]:
    yield f"program=({shlex.join(job.program)})"
    yield f"run_dir={_run_folder(job)}"
    yield f"launcher={job.launcher}"
    yield f"venv={shlex.quote(str(job.venv or ''))}"
    yield f"apptainer={shlex.quote(job.apptainer or '')}"
    yield f"pyxis={shlex.quote(job.pyxis or '')}"
    yield f"max_restarts={job.max_restarts}"
    yield f"max_crashes={job.max_crashes}"


def _run_folder(job: BatchJob) -> str:
    """For the shell. A requeued job keeps its number, and so its folder."""
    if job.run_folder is None and not job.trains:
        return ""
    number, task = ("$SLURM_ARRAY_JOB_ID", '/"$SLURM_ARRAY_TASK_ID"') if job.sweep else ("$SLURM_JOB_ID", "")
    own = f'"$PWD"/runs/{job.name}-"{number}"'
    return (own if job.run_folder is None else shlex.quote(str(job.run_folder))) + task


def _swept(job: BatchJob) -> Iterator[str]:
    if job.sweep:
        yield "case $SLURM_ARRAY_TASK_ID in"
        for number, values in enumerate(job.sweep):
            words = shlex.join(word for key, value in values.items() for word in (f"--{key}", value))
            yield f"    {number}) program+=({words}) ;;"
        yield "esac"
