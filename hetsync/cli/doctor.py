"""`hetsync doctor`: what may keep this machine, or the nodes of a job that is started like this one, from training."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.table import Table

from hetsync.cli.shared import Verbs, on_one_process
from hetsync.console import plain_console
from hetsync.doctor.checks import Finding, Verdict
from hetsync.doctor.facts import Facts, gather, nearest
from hetsync.doctor.nodes import Comparison, compare, compare_clocks, compare_folders
from hetsync.errors import UserError
from hetsync.launchers import first_on_host, first_rank, launched_by_mpi, launched_by_torch
from hetsync.plane import open_plane
from hetsync.plane.ending import end_job

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane

STOPS_TRAINING = 1  # exit status
JOIN_SECONDS = 300.0  # for the slowest node's facts

# Where ranks cannot meet, a launcher ends the job with the first that leaves: rank 0, where it can tell as much.
SPEAKS_LATER_SECONDS = 3.0


def add_to(verbs: Verbs) -> None:
    what = "say what may keep this machine, or all nodes of a job, from training"
    parser = verbs.add_parser(
        "doctor",
        help=what,
        description="Find what keeps this machine, or all nodes of a job, from training; status 1 if there is any.",
    )
    parser.add_argument(
        "--run.dir",
        dest="run_dir",
        metavar="DIR",
        type=Path,
        default=Path("runs"),
        help="where runs go (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.set_defaults(run=main)


def main(told: argparse.Namespace) -> NoReturn:
    with on_one_process():
        own = gather(told.run_dir) if first_on_host() else None
        several = launched_by_mpi() or launched_by_torch() > 1
        if several and (own is None or _can_join(own)):
            nodes, found = _joined(own, told.run_dir)
        else:
            nodes, found = [own] if own is not None else [], []
            if several and not first_rank():
                time.sleep(SPEAKS_LATER_SECONDS)
        if not nodes:
            time.sleep(SPEAKS_LATER_SECONDS)
            sys.exit(STOPS_TRAINING)
        sys.exit(report(nodes, [*compare(nodes), *found], told.json))


def _can_join(own: Facts) -> bool:
    """Where MPI does not load, trying it in this process could bring it down before it has spoken."""
    return own.torch.failure is None and (own.launcher == "torchrun" or own.mpi.failure is None)


def _joined(own: Facts | None, run_dir: Path) -> tuple[list[Facts], list[Comparison]]:
    """Collective: facts of all nodes, and what ranks find out together; only on rank 0, unless ranks cannot meet."""
    try:
        plane = open_plane("auto", JOIN_SECONDS, compares=False)
    except UserError as mistake:
        apart = Comparison(Finding("ranks", Verdict.PROBLEM, "they do not reach each other", str(mistake)))
        return ([own], [apart]) if own is not None and first_rank() else ([], [])
    try:
        everyones = plane.gather_objects(own)
        seen = _seen(plane, run_dir)
        sums = _sums(plane)
        plane.barrier()
        clocks = plane.gather_objects(time.time())
        plane.close()
    except BaseException as failure:
        end_job(plane, failure)
    if plane.rank > 0:
        sys.exit(0)
    first = {facts.host: rank for rank, facts in reversed(list(enumerate(everyones))) if facts is not None}
    hosts = sorted(first, key=first.__getitem__)
    together = Comparison(Finding("ranks", Verdict.OK, f"{plane.size} reach each other"))
    found = [together, *sums, compare_clocks({host: clocks[first[host]] for host in hosts})]
    if None not in seen:
        found.append(compare_folders(str(run_dir), {host: seen[first[host]] for host in hosts}))
    return [everyones[first[host]] for host in hosts], found


def _sums(plane: Plane) -> list[Comparison]:
    """Collective: which ranks' gradients NCCL will sum, where any has a GPU."""
    from hetsync.plane.base import named
    from hetsync.plane.choice import DeviceOf, groups_of, reason_against_nccl
    from hetsync.profiling.measure import choose_device, find_place

    place, own = find_place(plane), DeviceOf("", "cpu", None)
    with contextlib.suppress(UserError):  # what it says is a finding about this node
        own = DeviceOf.here(choose_device("auto", place))
    devices = plane.gather_objects(own)
    if all(device.unit is None for device in devices):
        return []
    if (reason := reason_against_nccl(devices)) is None:
        return [Comparison(Finding("sums", Verdict.OK, "by NCCL"))]
    among = [f"among {named(ranks)}" for ranks in groups_of(devices) if len(ranks) > 1]
    by = f"by NCCL {' and '.join(among)}, and between them" if among else "all"
    return [Comparison(Finding("sums", Verdict.OK, f"{by} through host memory: {reason}"))]


def _seen(plane: Plane, run_dir: Path) -> list[bool | None]:
    """Collective: does each rank find what rank 0 writes there for a moment? None where rank 0 cannot."""
    with contextlib.ExitStack() as held:
        path = None
        if plane.rank == 0:
            with contextlib.suppress(OSError):
                folder = nearest(run_dir)
                path = held.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".hetsync-doctor-")).name
        path = plane.broadcast_object(None if path is None else str(Path(path).absolute()))
        return plane.gather_objects(None if path is None else Path(path).exists())


def report(nodes: Sequence[Facts], found: Sequence[Comparison], as_json: bool) -> int:
    """Print it; the exit status."""
    if as_json:
        lines = [
            {**asdict(each.finding), "verdict": each.finding.verdict.name.lower(), "differs": dict(each.differs)}
            for each in found
        ]
        print(json.dumps({"nodes": [asdict(facts) for facts in nodes], "findings": lines}, indent=1))
    else:
        _print_table(nodes, found)
    return STOPS_TRAINING if any(each.finding.verdict == Verdict.PROBLEM for each in found) else 0


def _print_table(nodes: Sequence[Facts], found: Sequence[Comparison]) -> None:
    console = plain_console(force_terminal=False)  # mpirun's is none that people look at
    several = len(nodes) > 1
    where = f"most of {len(nodes)} nodes" if several else nodes[0].host
    table = Table("", "", where, *(["differs"] if several else []))
    for each in found:
        row = [each.finding.subject, each.finding.verdict.name.lower(), each.finding.found]
        differs = "\n".join(f"{host}: {what}" for host, what in each.differs.items())
        table.add_row(*row, *([differs] if several else []))
    console.print(table)
    for each in sorted(found, key=lambda each: -each.finding.verdict):
        if each.finding.verdict > Verdict.OK:
            finding = each.finding
            console.print(f"{finding.verdict.name.lower()}, {finding.subject}: {finding.remedy}", soft_wrap=True)
    if not any(each.finding.verdict == Verdict.PROBLEM for each in found):
        console.print("nothing stops training here")
