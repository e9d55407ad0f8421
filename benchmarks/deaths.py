"""What a rank's death costs a job: HetSync beside DDP under torchrun, torchft, Horovod Elastic; on four equal devices.

    python -m benchmarks.deaths [--output results] [--repetitions 3] [--arms …] [--torchft-python PYTHON]
                                [--horovod-python PYTHON]

Every arm trains the digits CNN for 300 steps of 64 samples, 0.1 s each, twice: undisturbed, and with rank 1 killed by
SIGKILL within step 125. DDP saves every 50 steps (5 s), so half of that is trained again; torchft's dead replica group
is started again at once, as a scheduler would; Horovod's three others go back to what they have committed in memory
(every 10 steps) and go on; HetSync goes on with three ranks (`hetsync`) or replaces the fourth
(`hetsync-replace`), at D = 0 and D = 4, there with q = 1, so that its rounds count steps. Devices are emulated:
HetSync's by a profile, the others' by sleeping for what is left of a step.

Three figures: seconds that the death costs, which is the whole command's, start-up included, less that of the
undisturbed job of the same repetition; samples that were trained twice; samples of the job that no weight has ever
seen. Three ranks need 4/3 of the time for what is left, which is 5.8 s here, and no cost of the death itself.

All processes are on one host, whose mpirun and torchrun see a death at once; no host dies, and no first rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import RECIPES, ROOT, launched, summary_of
from benchmarks.common.processes import end_session, environment, free_port
from benchmarks.common.report import Record, grouped, keep, publish, spread
from benchmarks.peers.mortal import DYING_HOST, DYING_RANK, FIRST_HOST, STEP_SECONDS, SUMS_TIMEOUT
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, save_cluster

RANKS, BATCH = 4, 64
HOSTS = (f"{FIRST_HOST}:1", f"{DYING_HOST}:1", f"{socket.gethostname()}:{RANKS - 2}")
STEPS, DYING_STEP = 300, 125
LIMIT_SECONDS = 240
MODULE = "benchmarks.peers.mortal"
HETSYNC = {
    "hetsync, D = 0": ("--tolerate", "0"),
    "hetsync, D = 4": ("--tolerate", "4"),
    "hetsync-replace, D = 0": ("--replace", "0"),
    "hetsync-replace, D = 4": ("--replace", "4"),
}
TORCHFT = {  # how long its lighthouse waits for who is missing: as in its example, and as short as it works here
    "torchft": ("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
    "torchft, quick": ("--quorum_tick_ms", "50", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"),
}
HOROVOD = "horovod"
ARMS = ("ddp", *TORCHFT, HOROVOD, *HETSYNC)


def hetsync_job(arm: str, steps: int, dying_step: int | None, folder: Path) -> dict[str, Any]:
    """Figures of a job of ours. In delayed mode rounds are not steps: the death comes after as many samples."""
    flag, bound = HETSYNC[arm]
    profile = folder / "equal.yaml"
    save_cluster(Cluster("equal", "made up", (DeviceGroup("equal", RANKS),), Link()), profile)
    words = [RECIPES / "digits.yaml", "--emulate", profile, "--emulation.samples_per_second", BATCH / STEP_SECONDS]
    words += ["--run.samples", steps * BATCH, "--sync.delay_bound", bound, "--run.dir", folder / "run"]
    words += ["--sync.quorum", 1] if bound != "0" else []
    if flag == "--replace":
        words += ["--fault.replace", "true"]
    if dying_step is not None:
        fault = {"kind": "die", "rank": DYING_RANK, "round": dying_step, "when": "during"}
        words += ["--fault.inject", json.dumps([fault])]
    program, *rest = launched(RANKS, words)
    summary = summary_of([program, flag, *rest], folder / "run", LIMIT_SECONDS)
    assert len(summary["failures"]) == (dying_step is not None), summary["failures"]
    computed = sum(rank["samples"] for rank in summary["per_rank"])
    return {"again": computed - summary["samples_applied"], "unseen": steps * BATCH - summary["samples_applied"]}


def peer_job(arm: str, steps: int, dying_step: int | None, folder: Path, python: str) -> dict[str, Any]:
    words = [arm.split(",")[0], str(folder), str(steps), *([] if dying_step is None else [str(dying_step)])]
    if arm == "ddp":
        ddp_run(words, folder, python)
    elif arm == HOROVOD:
        horovod_run(words, folder, python)
    else:
        torchft_run(words, folder, python, TORCHFT[arm])
    assert (folder / "died.json").exists() == (dying_step is not None)
    told = [read_lines(path) for path in sorted(folder.glob("steps-*.jsonl"))]
    return covered(told, steps) if arm == HOROVOD else counted(told, steps)


def counted(everyones: Sequence[Sequence[Record]], steps: int) -> dict[str, Any]:
    """Of what processes have told: samples trained again after going back, and those that no step has brought.

    The steps that count are the last of their number; that of a rank which was behind says as much as any other's.
    """
    times: dict[int, int] = {}
    samples: dict[int, int] = {}
    for lines in everyones:
        mine: dict[int, int] = {}
        for line in lines:
            mine[line["step"]] = mine.get(line["step"], 0) + 1
            samples[line["step"]] = line["samples"]
        times = {step: max(times.get(step, 0), mine.get(step, 0)) for step in times.keys() | mine.keys()}
    again = sum((count - 1) * samples[step] for step, count in times.items())
    return {"again": again, "unseen": steps * BATCH - sum(samples.values())}


def covered(everyones: Sequence[Sequence[Record]], steps: int) -> dict[str, Any]:
    """The same of Horovod's processes, whose steps are told by the position of their first sample: after going back
    they have other sizes. Who has done most has lived to the end."""
    longest = max(everyones, key=lambda lines: sum(line["samples"] for line in lines))
    seen = {at for line in longest for at in range(line["step"], line["step"] + line["samples"])}
    return {"again": sum(line["samples"] for line in longest) - len(seen), "unseen": steps * BATCH - len(seen)}


def ddp_run(words: Sequence[str], folder: Path, python: str) -> None:
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    torchrun += ["--max-restarts", "1", "-m", MODULE]
    with (folder / "out.log").open("w") as log:
        # Restarted processes would find the addresses of those before in a store that is the same.
        told = environment() | {"PEERS_SIZE": str(RANKS), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        line = [*torchrun, *words]
        done = subprocess.run(line, env=told, cwd=ROOT, stdout=log, stderr=log, timeout=LIMIT_SECONDS)
    if done.returncode:
        sys.exit(f"torchrun ended with {done.returncode}:\n{(folder / 'out.log').read_text()[-3000:]}")


def horovod_run(words: Sequence[str], folder: Path, python: str) -> None:
    """As three hosts, which Horovod leaves out as a whole where one process of theirs has died."""
    script = folder / "hosts"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {host}\n" for host in HOSTS))
    script.chmod(0o755)
    line = [str(Path(python).with_name("horovodrun")), "--gloo", "--network-interface", "lo"]
    line += ["--min-np", str(RANKS - 1), "-np", str(RANKS), "--max-np", str(RANKS)]
    line += ["--host-discovery-script", str(script), python, "-m", MODULE, *words]
    with (folder / "out.log").open("w") as log:
        told = environment() | {"PEERS_SIZE": str(RANKS)}
        told["HOROVOD_GLOO_TIMEOUT_SECONDS"] = f"{SUMS_TIMEOUT.total_seconds():.0f}"
        with subprocess.Popen(line, env=told, cwd=ROOT, stdout=log, stderr=log, start_new_session=True) as run:
            try:
                status: object = run.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                status = f"nothing within {LIMIT_SECONDS} s"
                end_session(run.pid)  # it hands TERM on, and waits
    if status:
        sys.exit(f"horovodrun ended with {status}:\n{(folder / 'out.log').read_text()[-3000:]}")


def torchft_run(words: Sequence[str], folder: Path, python: str, waits: Sequence[str]) -> None:
    """Four replica groups of one process each; one that dies is started again."""
    with lighthouse(folder, python, waits) as address, (folder / "out.log").open("w") as log:
        started_at = time.monotonic()

        def start(rank: int) -> subprocess.Popen[bytes]:
            told = {"RANK": str(rank), "PEERS_SIZE": str(RANKS), "TORCHFT_LIGHTHOUSE": address}
            line = [python, "-m", MODULE, *words]
            return subprocess.Popen(line, env=environment() | told, cwd=ROOT, stdout=log, stderr=log)

        groups = {rank: start(rank) for rank in range(RANKS)}
        restarts = 1
        try:
            while any(group.poll() is None for group in groups.values()):
                for rank, group in groups.items():
                    if group.poll() and restarts:
                        groups[rank], restarts = start(rank), restarts - 1
                if time.monotonic() - started_at > LIMIT_SECONDS:
                    sys.exit(f"torchft's job did not end within {LIMIT_SECONDS} s: {folder / 'out.log'}")
                time.sleep(0.05)
        finally:
            for group in groups.values():
                group.kill()
                group.wait()
        statuses = [group.returncode for group in groups.values()]
        if any(statuses):
            sys.exit(f"torchft's replica groups ended with {statuses}:\n{(folder / 'out.log').read_text()[-3000:]}")


@contextmanager
def lighthouse(folder: Path, python: str, waits: Sequence[str]) -> Iterator[str]:
    port = free_port()
    program = Path(python).with_name("torchft_lighthouse")
    flags = ["--bind", f"127.0.0.1:{port}", "--min_replicas", "1", *waits]
    with (
        (folder / "lighthouse.log").open("w") as log,
        subprocess.Popen([program, *flags], stdout=log, stderr=log) as it,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            it.kill()


def read_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def job(arm: str, steps: int, dying_step: int | None, python: str) -> dict[str, Any]:
    """Figures, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        if arm in HETSYNC:
            figures = hetsync_job(arm, steps, dying_step, Path(scratch))
        else:
            figures = peer_job(arm, steps, dying_step, Path(scratch), python)
        return {**figures, "seconds": time.monotonic() - began}


def table(records: Sequence[Record]) -> str:
    columns = "s undisturbed | s with the death | s that it costs | trained again | never trained | undisturbed"
    lines = [f"| arm | {columns} |", "| --- " * 7 + "|"]
    for (arm,), runs in grouped(records, "arm").items():
        calm, struck = ([run[kind] for run in runs] for kind in ("undisturbed", "struck"))
        costs = [one["seconds"] - other["seconds"] for one, other in zip(struck, calm, strict=True)]
        cells = [spread([one["seconds"] for one in calm], ".1f"), spread([one["seconds"] for one in struck], ".1f")]
        cells += [spread(costs, ".1f")]
        cells += [spread([one[kind] for one in struck], ".0f") for kind in ("again", "unseen")]
        cells.append(spread([one["unseen"] for one in calm], ".0f"))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--dying-step", type=int, default=DYING_STEP)
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", default=list(ARMS), help="; ".join(ARMS))
    parser.add_argument("--torchft-python", default=None, help="of an environment with torchft and HetSync")
    parser.add_argument("--horovod-python", default=None, help="with Horovod that was built with Gloo, and HetSync")
    options = parser.parse_args()
    if not 0 < options.dying_step < options.steps:
        parser.error(f"--dying-step is {options.dying_step}: give one below the {options.steps} steps")
    for name, arms in (("torchft", TORCHFT), ("horovod", (HOROVOD,))):
        if getattr(options, f"{name}_python") is None:
            if not set(arms).isdisjoint(options.arms) and importlib.util.find_spec(name) is None:
                parser.error(
                    f"{name} is not installed: --{name}-python names an interpreter that has it, or leave the arm out"
                )
            setattr(options, f"{name}_python", sys.executable)
    return options


def python_of(arm: str, options: argparse.Namespace) -> str:
    if arm == HOROVOD:
        return str(options.horovod_python)
    return str(options.torchft_python) if arm in TORCHFT else sys.executable


def main() -> None:
    options = parse()
    records: list[dict[str, Any]] = []
    for repetition in range(options.repetitions):
        for arm in options.arms:
            told = {
                kind: job(arm, options.steps, step, python_of(arm, options))
                for kind, step in (("undisturbed", None), ("struck", options.dying_step))
            }
            records.append({"arm": arm, "repetition": repetition, **told})
            print(json.dumps(records[-1]), flush=True)
            keep(options.output, "deaths", jobs=records)
    publish(options.output, "deaths", table(records))


if __name__ == "__main__":
    main()
