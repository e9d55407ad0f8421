"""Hosts behind a slow link: time to a target, and the bytes that an interface counts. Only the link is made up.

    python -m benchmarks.slow_hosts [--hosts 2] [--rates 10mbit 100mbit] [--seeds 3] [--output FOLDER]

Digits, AdamW, batch 40, on so many network namespaces of this machine (tests/fault/namespaces_lab.sh: root, iproute2),
each with a rank and a link of that rate. As it comes (`sync` by rule), and delayed with top64 from the start, beside
rivals that are settings of the engine: a sum a batch in bfloat16 and in 8 bits (DistributedDataParallel with a hook),
and DiLoCo with K local steps. Jobs take turns within a repetition. Bytes are h0's, both ways, over those of a float32
allreduce a batch, ring or direct: 4 (N - 1) / N times the values, both ways, of N hosts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import RECIPES, ROOT, summary_of, with_curves
from benchmarks.common.report import evaluations, grouped, keep, publish, spread, until_target
from hetsync.config.parser import read_recipe
from hetsync.simulate.recipe import build

LAB = ROOT / "tests" / "fault" / "namespaces_lab.sh"
BATCH, SAMPLES, LEARNING_RATES = 40, 8_000, (0.0025, 0.005)
TARGET, JOB_SECONDS = 0.95, 300
DILOCO = ["--sync.delay_bound", "1", "--sync.quorum", "1.0", "--sync.grace", "0", "--sync.wire", "bfloat16"]
DILOCO += ["--sync.outer.name", "nesterov", "--sync.outer.learning_rate", "0.3", "--sync.outer.momentum", "0.5"]
RIVALS = {
    "DDP, bfloat16": ["--sync.delay_bound", "0", "--sync.wire", "bfloat16"],
    "DDP, int8": ["--sync.delay_bound", "0", "--sync.wire", "int8"],
    "DiLoCo, K = 8": [*DILOCO, "--sync.accumulation", "8"],
    "DiLoCo, K = 32": [*DILOCO, "--sync.accumulation", "32"],
}
ARMS = {
    **RIVALS,
    "by rule": [],
    "by rule, float32": ["--sync.wire", "float32"],
    "D = 4, top64": ["--sync.delay_bound", "4", "--sync.wire", "top64"],
}


@contextmanager
def hosts(count: int, rate: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([LAB, "up", folder, str(count), rate], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([LAB, "down", folder], check=True)


def carried(lab: Path) -> int:
    """Bytes of h0's link so far, both ways."""
    return int(subprocess.run([LAB, "carried", lab, "h0"], capture_output=True, text=True, check=True).stdout)


def job(lab: Path, count: int, arm: str, rate: float, seed: int) -> dict[str, Any]:
    train = [Path(sys.executable).with_name("hetsync-train"), "--run.samples", SAMPLES, "--run.seed", seed]
    train += ["--run.evaluate_every", SAMPLES // 20, "--run.profile_seconds", 1, "--data.batch_size", BATCH]
    train += ["--optimizer.name", "adamw", "--optimizer.momentum", 0, "--optimizer.learning_rate", rate, *ARMS[arm]]
    with tempfile.TemporaryDirectory() as run:
        before = carried(lab)
        words = [lab / "mpirun", "-np", count, *train, "--run.dir", run]
        summary = with_curves(summary_of(words, Path(run), JOB_SECONDS), Path(run))
        sent = carried(lab) - before
    told = {key: summary[key] for key in ("rounds", "rounds_changes", "bytes_of_ddp", "samples_per_second")}
    return {
        "points": evaluations(summary["evaluations"]),
        "bytes": sent,
        **told,
    }


def seconds(record: dict[str, Any]) -> float | None:
    return until_target(record["points"], "accuracy", TARGET, falling=False)


def markdown(jobs: Sequence[dict[str, Any]]) -> str:
    _, model = build(read_recipe(RECIPES / "digits.yaml"))
    values = sum(weight.numel() for weight in model.parameters())
    lines = ["| link | way | rate | s to 0.95 | interface bytes, of DDP's | accuracy at the end |", "| --- " * 6 + "|"]
    for (link, arm, rate), records in grouped(jobs, "link", "arm", "rate").items():
        count = records[0]["hosts"]
        of_sum = 4 * (count - 1) / count * 4 * values
        of_ddp = [record["bytes"] / (SAMPLES / BATCH * of_sum) for record in records]
        ends = [record["points"][-1]["accuracy"] for record in records]
        figures = [spread(list(map(seconds, records)), ".1f"), spread(of_ddp, ".2f"), spread(ends, ".3f")]
        lines.append(f"| {link} | {arm} | {rate:g} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["10mbit", "100mbit"], help="of links, as tc has them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args()
    jobs: list[dict[str, Any]] = []
    for link in options.rates:
        with hosts(options.hosts, link) as lab:
            for seed, arm, rate in product(range(options.seeds), options.arms, LEARNING_RATES):
                found = job(lab, options.hosts, arm, rate, seed)
                jobs.append({"link": link, "hosts": options.hosts, "arm": arm, "rate": rate, "seed": seed, **found})
                print(json.dumps({key: jobs[-1][key] for key in ("link", "arm", "rate", "seed")}), seconds(jobs[-1]))
                keep(options.output, "slow_hosts", jobs=jobs)
    publish(options.output, "slow_hosts", markdown(jobs))


if __name__ == "__main__":
    main()
