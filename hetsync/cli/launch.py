"""`hetsync launch slurm`: a batch script for the user's cluster, shown or submitted."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hetsync.cli.shared import Verbs, on_one_process
from hetsync.cli.train import parse
from hetsync.config.yaml_files import load_yaml
from hetsync.errors import UserError, brief, one_sentence
from hetsync.slurm.script import TRAIN, BatchJob, NodeGroup, parse_nodes, script_of, seconds_of

LEAD_SECONDS = 60
LEAST_LEAD_SECONDS = 30
SAFETY = 3  # times what saving has taken
MOST_JOBS = 1000  # of a sweep
NODES = "COUNT[,ranks=N][,gpus=[KIND:]N][,cpus=N][,memory=SIZE][,partition=NAME][,constraint=FEATURES]"


def add_to(verbs: Verbs) -> None:
    what = "submit a job to a cluster's queue"
    launch = verbs.add_parser("launch", help=what, description=f"{what[0].upper()}{what[1:]}.")
    queues = launch.add_subparsers(dest="queue", metavar="QUEUE", required=True, title="queues")
    parser = queues.add_parser(
        "slurm",
        help="as a batch script for SLURM",
        description="Write a batch script for SLURM and submit it. It saves before the time limit and at a pre-emption"
        " that SLURM warns of, is requeued, and resumes.",
        usage="hetsync launch slurm --nodes COUNT[,...] [OPTION ...] [-- PROGRAM ...]",
    )
    add = parser.add_argument
    add(
        "--nodes", metavar="NODES", action="append", required=True, help=f"nodes of one kind: {NODES}; again for others"
    )
    add("--time", metavar="TIME", help="limit of each start, such as 12:00:00 (default: the partition's)")
    add("--name", metavar="NAME", default="hetsync", help="of the job (default: hetsync)")
    add("--launcher", choices=["mpirun", "srun"], help="what starts ranks (default: mpirun; srun for several --nodes)")
    add("--venv", metavar="DIR", type=Path, help="Python environment that all nodes see (default: this one)")
    add("--apptainer", metavar="IMAGE", help="run in this image by Apptainer")
    add("--pyxis", metavar="IMAGE", help="run in this image by Pyxis")
    add(
        "--run",
        dest="run_folder",
        metavar="DIR",
        type=Path,
        help="run folder of a program of your own; a recipe's is --run.dir",
    )
    add("--lead", metavar="SECONDS", type=int, help=f"time to save before an end (default: {LEAD_SECONDS})")
    add("--lead-of", metavar="RUN", type=Path, help=f"{SAFETY} times as long as this run took to save")
    add("--max-restarts", metavar="N", type=int, default=100, help="requeue no more often (default: 100)")
    add("--max-crashes", metavar="N", type=int, default=3, help="give up after so many without progress (default: 3)")
    add(
        "--sweep", metavar="KEY=VALUES", action="append", default=[], help="a job for each of the values, such as 1,2,4"
    )
    add(
        "--sbatch", metavar="OPTION", action="append", default=[], help="another option of sbatch: --sbatch=--account=x"
    )
    add("--setup", metavar="LINE", action="append", default=[], help="shell before all: --setup 'module load openmpi'")
    add("--dry-run", action="store_true", help="print the script, and submit nothing")
    add("program", metavar="PROGRAM", nargs="*", help=f"what a rank runs, behind -- (default: {TRAIN})")
    parser.set_defaults(run=launch_slurm)


def launch_slurm(told: argparse.Namespace) -> None:
    with on_one_process():
        script = script_of(batch_job(told))
        if told.dry_run:
            sys.stdout.write(script)
        else:
            submit(script)


def batch_job(told: argparse.Namespace) -> BatchJob:
    """What was asked for; UserError for what cannot be."""
    groups = [parse_nodes(text) for text in told.nodes]
    program = told.program or [TRAIN]
    sweep = combinations(told.sweep)
    lead = lead_of(told.lead, told.lead_of)
    _check_plain(told)
    if told.time is not None and seconds_of(told.time) <= lead:
        raise UserError(f"--time is {told.time}, of which saving takes {lead} s: give more")
    if sweep and len(groups) > 1:
        raise UserError(
            "--sweep makes a job array, which SLURM has for one --nodes only: give one, or submit each alone"
        )
    return BatchJob(
        groups=groups,
        program=program,
        run_folder=run_folder_of(program, told.run_folder, sweep),
        name=told.name,
        time=told.time,
        lead_seconds=lead,
        launcher=launcher_of(told, groups),
        venv=None if told.apptainer or told.pyxis else environment_of(told.venv),
        apptainer=told.apptainer,
        pyxis=told.pyxis,
        max_restarts=told.max_restarts,
        max_crashes=told.max_crashes,
        sweep=sweep,
        options=told.sbatch,
        setup=told.setup,
    )


def _check_plain(told: argparse.Namespace) -> None:
    if not re.fullmatch(r"[\w.-]{1,100}", told.name, re.ASCII):
        raise UserError(f"--name is {brief(told.name)!r}: give letters, digits, dots and dashes")
    for option, value, least in (("restarts", told.max_restarts, 0), ("crashes", told.max_crashes, 1)):
        if value < least:
            raise UserError(f"--max-{option} is {value}: give {least} or more")
    for option in told.sbatch:
        if not re.fullmatch(r"-[^\n]+", option):
            raise UserError(f"--sbatch is {brief(option)!r}: give an option of sbatch, as in --sbatch=--account=mine")
    images = [f"--{name}" for name in ("venv", "apptainer", "pyxis") if getattr(told, name)]
    if len(images) > 1:
        raise UserError(f"{' and '.join(images)} exclude each other: give one of them")


def launcher_of(told: argparse.Namespace, groups: Sequence[NodeGroup]) -> Any:
    """The one asked for, or that fits. mpirun reaches one group of nodes only, and starts nothing in a container."""
    needs = (
        "several --nodes" if len(groups) > 1 else "--apptainer" if told.apptainer else "--pyxis" if told.pyxis else None
    )
    if needs is not None and told.launcher == "mpirun":
        raise UserError(f"--launcher is mpirun, which {needs} cannot have: give srun, or leave it out")
    return told.launcher or ("mpirun" if needs is None else "srun")


def environment_of(given: Path | None) -> Path:
    folder = Path(sys.prefix) if given is None else given.absolute()
    if not (folder / "bin" / "python").exists():
        raise UserError(f"--venv is {folder}, which has no bin/python: give a Python environment that has HetSync")
    return folder


def run_folder_of(program: Sequence[str], given: Path | None, sweep: Sequence[dict[str, str]]) -> Path | None:
    """UserError also where a recipe's words, with each of the sweep's, are none that training takes."""
    if program[0] != TRAIN:
        return given.absolute() if given else None
    if given is not None:
        raise UserError(f"--run is {given}, which is for programs of your own: give {TRAIN} --run.dir {given}")
    folders = set()
    for values in sweep or [{}]:
        words = [word for key, value in values.items() for word in (f"--{key}", value)]
        config, resume, _ = parse([*program[1:], *words])
        if resume is not None:
            raise UserError(f"--resume is {resume}: give --run.dir {resume}, with which the job goes on by itself")
        folders.add(config.run.dir)
    if len(folders) > 1:
        raise UserError("--sweep run.dir is not needed: each job of a sweep has a run folder of its own")
    folder = folders.pop()
    return Path(folder).absolute() if folder is not None else None


def combinations(sweeps: Sequence[str]) -> list[dict[str, str]]:
    """All of them, of `key=value,value` each; values are YAML."""
    axes: dict[str, list[str]] = {}
    for text in sweeps:
        key, equals, values = text.partition("=")
        try:
            found = load_yaml(f"[{values}]")
        except (UserError, yaml.YAMLError):
            found = []
        if not equals or not re.fullmatch(r"\w[\w.-]*", key, re.ASCII) or not found:
            raise UserError(f"--sweep is {brief(text)!r}: give KEY=VALUE,VALUE, such as sync.delay_bound=1,2,4")
        if key in axes:
            raise UserError(f"--sweep {key} is there twice: give all its values at once")
        axes[key] = [value if isinstance(value, str) else json.dumps(value) for value in found]
    jobs = math.prod(map(len, axes.values()))
    if jobs > MOST_JOBS:
        raise UserError(f"--sweep makes {jobs} jobs: give fewer values, for at most {MOST_JOBS}")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())] if axes else []


def lead_of(seconds: int | None, run: Path | None) -> int:
    """Seconds before an end at which a job is asked to save."""
    if run is None:
        seconds = LEAD_SECONDS if seconds is None else seconds
        if not 1 <= seconds <= 65535:  # SLURM has 16 bits
            raise UserError(f"--lead is {seconds}: give 1 to 65535 seconds")
        return seconds
    if seconds is not None:
        raise UserError("--lead and --lead-of exclude each other: give one of them")
    saving = seconds_to_save(run)
    return min(65535, max(LEAST_LEAD_SECONDS, math.ceil(SAFETY * saving)))


def seconds_to_save(run: Path) -> float:
    """The longest rest of a run at which it saved; UserError where it tells of none."""
    from hetsync.report.run import read_run

    found = [
        record["seconds"]
        for lines in read_run(run).ranks.values()
        for record in lines.of("rest")
        if record["reason"] == "checkpoint"
    ]
    if not found:
        raise UserError(
            f"--lead-of is {run}, which has saved nothing but its end: give --lead SECONDS, or a run with"
            " run.checkpoint_every or checkpoint_seconds"
        )
    return float(max(found))


def submit(script: str) -> None:
    """By sbatch, which says the job's number."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError(
            "there is no sbatch here: start this where jobs are submitted, or give --dry-run for the script"
        )
    # What a job around this one has set would count as this job's.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    done = subprocess.run([sbatch], input=script, env=outside | kept, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch refuses the job: {one_sentence(done.stderr)}; look at the script by --dry-run")
    print(done.stdout.strip())
