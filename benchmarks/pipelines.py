"""Plans that are run: pipelines, replicas and data parallelism on emulated clusters of three link speeds.

    python -m benchmarks.pipelines --output results --data DIR [--quick] [--seeds 3] [--steps 16] [--seconds 25]

Every cell is a job of its own under mpirun, started by launch/local, by a plan, on four emulated devices of three
kinds; gradients and what travels are real. Data parallelism is by plans of whole models, so that devices are alike in
all arms. A link is so fast that a round of the whole model takes a quarter, one or four slices. Each workload's speed
is what this machine affords, found out once and kept under `--output`, as plans are. Within a seed all arms run one
after the other. Jobs are kept in jobs.jsonl: a run that is begun again goes on there.

Models are small and jobs short: `--steps` batches, the same for all arms of a cell, or fewer where equal shares take
longer than `--seconds` for them; only an arm whose plan is predicted to take longer has fewer than the others. Jobs
evaluate once, at their end, since replicas by a plan rest for it, and on few samples, since what stages of a pipeline
send for each of them crosses the emulated links as well. The target is one of the training loss: what the weakest arm
has in its last fifth.

`--data` is a folder with cifar10_lossless, ptb and multi30k_en_de; digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.common.kept import require_same
from benchmarks.common.local_job import RECIPES, launched, with_curves
from benchmarks.common.planning import FIXED_SECONDS
from benchmarks.common.report import Record, command, grouped, machine, source, spearman, spread, until_target
from hetsync.balance.shares import equal_shares
from hetsync.config.parser import recipe_of
from hetsync.errors import USER_ERROR
from hetsync.files import write_atomically
from hetsync.plan.plan_file import Predicted, read_plan
from hetsync.simulate.recipe import build

DEVICES = {"A100": (1, 3.13), "V100": (1, 2.45), "T4": (2, 1.00)}
RANKS = 4
ROUND_SLICES = {"fast": 0.25, "middle": 1.0, "slow": 4.0}  # by link: how long a round takes
EQUAL_SLICES = 1.9  # how long equal shares take to compute one: the slowest device has a quarter of it
AFFORDABLE = 0.35  # of the speed that a job chooses for itself: planned jobs pad pass by pass, and none may overrun
BUCKETS = 8  # of gradients, about, so that synchronous arms overlap their sums with backward, however small the model
TEST_SAMPLES = 16
PLAN_EVALUATIONS = 300
LEAST_STEPS = 4  # of a job for which there is less time
MOST_STEP_SECONDS = 15  # of a plan that is run: more says no more
TARGET_BINS = 4  # of twenty of a curve, over which the loss is a mean
JOB_SECONDS = 300
BSP, BEST = "synchronous, equal shares", "best, D = 0"
WHOLE = ["--search", "data", "--micro-batches", "1"]  # models, with shares by speed
ARMS = {  # how its plan is searched for, and the bound on delay that it is run with
    BSP: (WHOLE, 0),  # with other shares
    "synchronous, by speed": (WHOLE, 0),
    "delayed, D = 4": (WHOLE, 4),
    "pipeline, exact": (["--search", "exact", "--replicas", "0,1,2,3"], 0),
    "pipeline, tapp": (["--search", "tapp", "--replicas", "0,1,2,3"], 0),
    BEST: (["--search", "best"], 0),
    "best, D = 4": (["--search", "best"], 4),
}
BESTS = tuple(arm for arm in ARMS if arm.startswith("best"))
PIPELINED = tuple(arm for arm in ARMS if arm.startswith("pipeline")) + BESTS
TARGETS = {"rate": 1.37, "waiting": -0.4892, "best": 0.98, "spearman": 0.9}


class Workload(NamedTuple):
    """`model`, `data`: options that differ from the recipe's."""

    recipe: str
    folder: str | None
    batch: int
    model: dict[str, Any]
    data: dict[str, Any]


WORKLOADS = {
    "digits": Workload("digits", None, 64, {}, {}),
    "nasnet": Workload("cifar10_nasnet_a", "cifar10_lossless", 8, {"filters": 4}, {}),
    "ptb": Workload("ptb_lstm_small", "ptb", 12, {"hidden": 64}, {"window": 10, "context": 10}),
    "nmt": Workload("nmt_multi30k", "multi30k_en_de", 16, {"hidden": 64}, {"vocabulary": 2000}),
}


def devices(fixed_seconds: float = 0.0) -> list[dict[str, Any]]:
    """Of a cluster profile. `fixed_seconds`: of each micro-batch, without which the smallest would seem best."""
    return [
        {"name": kind, "count": count, "speed": speed, "fixed_seconds": fixed_seconds}
        for kind, (count, speed) in DEVICES.items()
    ]


class Bench:
    """Where results are, and what jobs are told."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output, self.data = options.output, options.data
        self.steps, self.seconds = options.steps, options.seconds
        self.output.mkdir(parents=True, exist_ok=True)

    def content(self, name: str) -> dict[str, Any]:
        """The recipe of a workload, with its data."""
        workload = WORKLOADS[name]
        content: dict[str, Any] = yaml.safe_load((RECIPES / f"{workload.recipe}.yaml").read_text())
        options = {**content["data"].get("options", {}), **workload.data}
        if workload.folder is not None:
            options["path"] = str((self.data / workload.folder).resolve())
        content["data"] = {
            "name": "benchmarks.common.few_tests:few_tests",
            "batch_size": workload.batch,
            "options": {"name": content["data"]["name"], "options": options, "samples": TEST_SAMPLES},
        }
        content["model"]["options"] = {**content["model"].get("options", {}), **workload.model}
        return content

    def recipe(self, name: str) -> Path:
        """The same as a file."""
        path = self.output / f"{name}.yaml"
        write_atomically(path, yaml.safe_dump(self.content(name), sort_keys=False))
        return path

    def cluster(self, name: str, link: str) -> Path:
        """The profile of this link for this workload, written."""
        path = self.output / f"{name}-{link}.yaml"
        if not path.exists():
            slice_seconds = self.batch(name) / self.rate(name)
            carried = 2 * (RANKS - 1) / RANKS * self.weight_bytes(name)
            profile = {
                "name": f"{name}-{link}",
                "source": f"made up: a round takes {ROUND_SLICES[link]} slices",
                "devices": devices(FIXED_SECONDS),
                "link": {"latency_seconds": 1e-4, "bytes_per_second": carried / (ROUND_SLICES[link] * slice_seconds)},
            }
            path.write_text(yaml.safe_dump(profile, sort_keys=False))
        return path

    def batch(self, name: str) -> int:
        return recipe_of(self.content(name)).data.batch_size

    @cache  # noqa: B019 (as long as the benchmark)
    def weight_bytes(self, name: str) -> int:
        _, model = build(recipe_of(self.content(name)))
        return sum(weight.numel() * weight.element_size() for weight in model.parameters())

    def rate(self, name: str) -> float:
        """Samples a second of all devices together: what a job found that this machine affords, and less."""
        path = self.output / f"{name}-rate.json"
        if not path.exists():
            profile = self.output / f"{name}-devices.yaml"
            profile.write_text(yaml.safe_dump({"name": "devices", "source": "made up", "devices": devices()}))
            words = [self.recipe(name), "--emulate", profile, "--run.samples", 4 * RANKS * 16]
            summary = self.job([*words, "--sync.delay_bound", "0"])
            if "missing" in summary:
                sys.exit(summary["missing"])
            path.write_text(json.dumps(AFFORDABLE * summary["solo_samples_per_second_sum"]))
        rate: float = json.loads(path.read_text())
        return rate

    def plan(self, name: str, link: str, arm: str) -> Path:
        """The arm's plan, searched for; equal shares are given by hand."""
        path = self.output / f"{name}-{link}-{arm.replace(', ', '-').replace(' ', '')}.yaml"
        if not path.exists() and arm == BSP:
            batch, stages = self.batch(name), [[{"ranks": [rank], "blocks": ["*"]}] for rank in range(RANKS)]
            shares = equal_shares(RANKS, batch)
            replicas = [{"share": share, "stages": own} for share, own in zip(shares, stages, strict=True)]
            path.write_text(yaml.safe_dump({"format": 1, "batch_size": batch, "replicas": replicas}, sort_keys=False))
        if not path.exists():
            search, bound = ARMS[arm]
            words = [self.recipe(name), *self.emulated(name, link), *search, "--sync.delay_bound", bound]
            words += ["--evaluations", PLAN_EVALUATIONS]
            asked = [Path(sys.executable).with_name("hetsync"), "plan", *words, "--output", path]
            done = subprocess.run(list(map(str, asked)), capture_output=True, text=True, timeout=JOB_SECONDS)
            if done.returncode:
                sys.exit(f"no plan for {name}, {link}, {arm}:\n{done.stdout}{done.stderr}")
            print(f"{name}, {link}, {arm}:\n{done.stdout}", flush=True)
        return path

    def emulated(self, name: str, link: str) -> list[object]:
        buckets = ["--sync.bucket_bytes", max(1, self.weight_bytes(name) // BUCKETS)]
        return ["--emulate", self.cluster(name, link), "--emulation.samples_per_second", self.rate(name), *buckets]

    def measured(self, name: str, link: str, arm: str, seed: int) -> dict[str, Any]:
        """What one job told."""
        if arm != BSP and (step := self.predicted(name, link, arm).step_seconds) > MOST_STEP_SECONDS:
            return {"missing": f"not run: a step is predicted to take {step:.0f} s"}
        samples = self.samples(name, link, arm)
        words = [self.recipe(name), *self.emulated(name, link), "--run.seed", seed, "--run.samples", samples]
        words += ["--run.evaluate_every", samples]
        words += ["--plan", self.plan(name, link, arm), "--sync.delay_bound", ARMS[arm][1]]
        summary = self.job(words)
        if "missing" in summary:
            return summary
        told = figures(summary)
        return {**told, "samples": samples, "step_seconds": self.batch(name) / told["samples_per_second"]}

    def predicted(self, name: str, link: str, arm: str) -> Predicted:
        predicted = read_plan(self.plan(name, link, arm)).predicted
        assert predicted is not None
        return predicted

    def samples(self, name: str, link: str, arm: str) -> int:
        """Of a job: those for which equal shares have the time, or fewer where there is none for them by the plan."""
        batch = self.batch(name)
        equal_seconds = (EQUAL_SLICES + ROUND_SLICES[link]) * batch / self.rate(name)
        wanted = min(self.steps, max(LEAST_STEPS, round(self.seconds / equal_seconds)))
        if arm != BSP:
            possible = round(self.seconds / self.predicted(name, link, arm).step_seconds)
            wanted = min(wanted, max(LEAST_STEPS, possible))
        return wanted * batch

    def job(self, words: Sequence[object]) -> dict[str, Any]:
        """A job's summary; `missing`, in its own words, where it is refused. One that fails ends the benchmark."""
        with tempfile.TemporaryDirectory() as run:
            told = list(map(str, launched(RANKS, [*words, "--run.dir", run])))
            done = subprocess.run(told, capture_output=True, text=True, timeout=JOB_SECONDS)
            if done.returncode == USER_ERROR:
                return {"missing": next(line for line in done.stderr.splitlines() if line.startswith("hetsync: "))}
            if done.returncode:
                sys.exit(f"{' '.join(told)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            return with_curves(json.loads((Path(run) / "summary.json").read_text()), Path(run))


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """What a table needs of a summary. `wait_fraction`: of the ranks' time, for others, links and empty pipelines."""
    ranks, plan = summary["per_rank"], summary["plan"]
    samples, seconds = summary["samples_applied"], summary["train_seconds"]
    waited = statistics.mean(rank["wait_fraction"] for rank in ranks)
    whole = all(len(stages) == 1 for stages in plan["replicas"])
    sent = sum(rank["bytes_sent"] for rank in ranks) / samples
    return {
        "samples_per_second": summary["samples_per_second"],
        "wait_fraction": waited,
        "wait_seconds_per_sample": waited * seconds / samples,
        "bytes_per_sample": 2 * (RANKS - 1) / RANKS * sent if whole else plan["bytes_per_sample"],
        "memory_bytes": max(rank["predicted_memory_bytes"] for rank in ranks),
        "overrun_fraction": summary["overrun_fraction"],
        "predicted_step_seconds": plan["predicted_step_seconds"],
        "measured_step_seconds": plan["measured_step_seconds"],
        "replicas": plan["replicas"],
        "train_seconds": seconds,
        "losses": summary["losses"],
    }


def run(options: argparse.Namespace, kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Jobs that are not among these, interleaved."""
    bench = Bench(options)
    done = {tuple(record[key] for key in ("workload", "link", "arm", "seed")) for record in kept}
    for seed in range(options.seeds):
        for name in options.workloads:
            for link in options.links:
                for arm in options.arms:
                    if (name, link, arm, seed) not in done:
                        told = {"workload": name, "link": link, "arm": arm, "seed": seed}
                        yield {**told, **bench.measured(name, link, arm, seed)}


# Tables.

COLUMNS = ("arm", "samples/s", "of BSP", "s a step", "waiting", "ms a sample", "kB a sample", "MiB", "overruns")


def curve(record: Record) -> list[dict[str, float]]:
    """The training loss, a mean over the last fifth, by seconds of training."""
    there = [(place, loss) for place, loss in enumerate(record["losses"], 1) if math.isfinite(loss)]
    points = []
    for place, _ in there:
        last = [loss for other, loss in there if place - TARGET_BINS < other <= place]
        if place >= TARGET_BINS:
            seconds = record["train_seconds"] * place / len(record["losses"])
            points.append({"seconds": seconds, "loss": statistics.fmean(last)})
    return points


def target_of(cell: Sequence[Record]) -> float:
    """The training loss that the weakest arm ends with, by medians: all can reach it that were not cut short."""
    most = max(one["samples"] for one in cell)
    whole_length = grouped([one for one in cell if one["samples"] == most], "arm")
    return max(statistics.median(curve(one)[-1]["loss"] for one in runs) for runs in whole_length.values())


def seconds_to(record: Record, target: float) -> float | None:
    return until_target(curve(record), "loss", target, falling=True)


def markdown(records: Sequence[Record]) -> str:
    lines: list[str] = []
    for (name, link), cell in grouped(records, "workload", "link").items():
        done = [one for one in cell if "missing" not in one]
        target = target_of(done) if done else math.nan
        lines += [f"### {name}, {link} link: a round takes {ROUND_SLICES[link]:g} slices", ""]
        lines += [f"| {' | '.join([*COLUMNS, f's to loss {target:.4g}'])} |"]
        lines += ["| --- |" + " --- |" * len(COLUMNS)]
        base = middle(done, BSP, "samples_per_second")
        for (arm,), runs in grouped(cell, "arm").items():
            row = [runs[0]["missing"]] if "missing" in runs[0] else row_of(runs, base)
            if "missing" not in runs[0]:
                row += [spread([seconds_to(one, target) for one in runs], ".1f")]
            lines.append(f"| {arm} | {' | '.join(row)} |" + " |" * (len(COLUMNS) - len(row)))
        lines.append("")
    return "\n".join([*lines, *verdicts(records), "", *planned_and_measured(records)])


def row_of(runs: Sequence[Record], base: float | None) -> list[str]:
    """One arm's figures. `base`: the samples a second of BSP."""
    rates = [one["samples_per_second"] for one in runs]
    return [
        spread(rates, ".1f"),
        f"{statistics.median(rates) / base:.2f}" if base else "–",
        spread([one["step_seconds"] for one in runs], ".3f"),
        spread([one["wait_fraction"] for one in runs], ".1%"),
        spread([1e3 * one["wait_seconds_per_sample"] for one in runs], ".2f"),
        spread([one["bytes_per_sample"] / 1e3 for one in runs], ".1f"),
        spread([one["memory_bytes"] / 2**20 for one in runs], ".1f"),
        spread([one["overrun_fraction"] for one in runs], ".1%"),
    ]


def middle(cell: Sequence[Record], arm: str, figure: str) -> float | None:
    """The median of an arm; None where it was not run."""
    return statistics.median(found) if (found := [one[figure] for one in cell if one["arm"] == arm]) else None


def verdicts(records: Sequence[Record]) -> list[str]:
    """What was aimed at, cell by cell: pipelines and replicas against BSP, the better `best` against all other arms."""
    lines = [
        "### Targets",
        "",
        f"A rate of {TARGETS['rate']} and waiting {TARGETS['waiting']:+.2%} against BSP, at slow links;"
        f" that `best` which is predicted to be the faster at {TARGETS['best']} of the best other arm, at all.",
        "",
        "| | arm | figure | found | |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for (name, link), cell in grouped([one for one in records if "missing" not in one], "workload", "link").items():
        rates = {arm: rate for arm in ARMS if (rate := middle(cell, arm, "samples_per_second")) is not None}
        others = [rate for arm, rate in rates.items() if arm not in BESTS]
        if (planned := [arm for arm in BESTS if arm in rates]) and others:
            chosen = min(planned, key=lambda arm: middle(cell, arm, "predicted_step_seconds") or math.inf)
            part = rates[chosen] / max(others)
            lines.append(f"| {name}, {link} | {chosen} | rate | {part:.3f} | {verdict(part >= TARGETS['best'])} |")
        waiting = middle(cell, BSP, "wait_fraction")
        for arm in (arm for arm in PIPELINED if link == "slow" and arm in rates and waiting):
            part = rates[arm] / rates[BSP]
            lines.append(f"| {name}, {link} | {arm} | rate, of BSP | {part:.3f} | {verdict(part >= TARGETS['rate'])} |")
            change = (middle(cell, arm, "wait_fraction") or 0.0) / waiting - 1  # type: ignore[operator]
            met = verdict(change <= TARGETS["waiting"])
            lines.append(f"| {name}, {link} | {arm} | waiting, against BSP | {change:+.1%} | {met} |")
    return lines


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def planned_and_measured(records: Sequence[Record]) -> list[str]:
    """How far predicted steps are from measured ones, and whether both have the same order."""
    pairs = [
        (*key, statistics.median(one["predicted_step_seconds"] for one in runs), runs)
        for key, runs in grouped(records, "workload", "link", "arm").items()
        if "missing" not in runs[0]
    ]
    if len(pairs) < 2:
        return []
    lines = [
        "### Planned against measured",
        "",
        "| plan | predicted s | measured s | off by |",
        "| --- | --- | --- | --- |",
    ]
    measured = [statistics.median(one["measured_step_seconds"] for one in runs) for *_, runs in pairs]
    errors = []
    for (name, link, arm, seconds, _), real in zip(pairs, measured, strict=True):
        errors.append(abs(seconds / real - 1))
        lines.append(f"| {name}, {link}, {arm} | {seconds:.4g} | {real:.4g} | {seconds / real - 1:+.1%} |")
    correlation = spearman([pair[3] for pair in pairs], measured)
    told = f"Off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
    goal = f"(target: {TARGETS['spearman']}, {verdict(correlation >= TARGETS['spearman'])})"
    return [*lines, "", f"{told}; rank correlation {correlation:.3f} over {len(pairs)} plans {goal}."]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for plans, jobs and tables")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with the data sets")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--links", nargs="+", choices=ROUND_SLICES, default=list(ROUND_SLICES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", default=list(ARMS), help="; ".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of a job, at most")
    parser.add_argument("--seconds", type=float, default=25.0, help=f"of a job, about, but for {LEAST_STEPS} steps")
    parser.add_argument("--quick", action="store_true", help="digits alone, one seed, four steps")
    options = parser.parse_args(words)
    if options.quick:
        options.workloads, options.seeds, options.steps = ["digits"], 1, 4
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """By which jobs, rates and plans were made."""
    made_up = {"devices": devices(FIXED_SECONDS), "rounds": ROUND_SLICES, "affordable": AFFORDABLE, "buckets": BUCKETS}
    searches = {"plans": ARMS, "evaluations": PLAN_EVALUATIONS}
    sizes = {"steps": options.steps, "seconds": options.seconds, "test_samples": TEST_SAMPLES}
    return {**sizes, **made_up, **searches, "workloads": {name: one._asdict() for name, one in WORKLOADS.items()}}


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    options.output.mkdir(parents=True, exist_ok=True)
    require_same(options.output, settings(options))
    path = options.output / "jobs.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for record in run(options, records):
        records.append(record)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        told = record.get("missing") or f"{record['samples_per_second']:.1f} samples/s"
        print(f"seed {record['seed']}, {record['workload']}, {record['link']}, {record['arm']}: {told}", flush=True)
        kept = {"command": command("pipelines"), "machine": machine(), "jobs": records}
        (options.output / "pipelines.json").write_text(json.dumps(kept, indent=1) + "\n")
        (options.output / "pipelines.md").write_text(f"{source('pipelines')}\n\n{markdown(records)}\n")


if __name__ == "__main__":
    main()
