"""Public scripts, converted by the guide alone: equal to themselves at D = 0, and as good at D = 4?

    python -m benchmarks.public_scripts [NAME ...] [--sources DIR] [--seeds 3] [--output results]

A script is taken from its repository, at a commit, into a temporary folder, and edited as a user would: edits/NAME.ed
keeps the new lines. It runs as it stands in one process; converted, on 2 ranks with unequal shares at D = 0, whose
weights have to be the same; and on 3 ranks with the default delay bound and at D = 4, whose held-out metrics have to be
within the seeds of one process. Where weights differ at D = 0, the script runs once more as it stands, its first
weights changed by a rounding, which some magnify.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file

from benchmarks.common.local_job import ROOT
from benchmarks.common.processes import environment, mpirun
from benchmarks.common.report import keep, publish, spread
from benchmarks.public_scripts.cases import CASES, Case
from benchmarks.public_scripts.edits import edited
from docs.changed_lines import changed

EDITS = Path(__file__).parent / "edits"
LIMIT_SECONDS = 900.0
ROUNDING = 4e-16  # of float64
AS_NUDGED = 10  # times what a rounding of first weights comes to


@dataclass(frozen=True)
class Arm:
    """A way of running a script.

    Attributes:
        ranks: Processes.
        bound: D, or None for the script as it stands.
        shares: Does each rank have about twice the next one's samples? Else they go by speed.
        nudge: By how much first weights are longer.
    """

    ranks: int
    bound: int | Literal["auto"] | None
    shares: bool = False
    nudge: float = 0.0


PLAIN, NUDGED = Arm(1, None), Arm(1, None, nudge=ROUNDING)
SYNCHRONOUS, DEFAULT, DELAYED = Arm(2, 0, shares=True), Arm(3, "auto"), Arm(3, 4)


@dataclass(frozen=True)
class Result:
    """Of one run: the last held-out metric that it printed, and where its weights are."""

    metric: float
    weights: Path


def repository(case: Case, sources: Path) -> Path:
    """A clone of it in `sources`, fetched where there is none."""
    name, _ = case.source
    clone = sources / name.replace("/", "+")
    if not clone.exists():
        subprocess.run(["git", "clone", "-q", f"https://github.com/{name}", clone], check=True)
    return clone


def laid_out(case: Case, sources: Path, into: Path) -> tuple[Path, Path]:
    """The script as it stands and as it was converted, each with the files beside it."""
    _, commit = case.source
    paths = [case.folder, f":(exclude){case.folder}/data/"]  # the exam has data of its own
    words = ["git", "-C", str(repository(case, sources)), "archive", commit, *paths]
    packed = subprocess.run(words, check=True, capture_output=True).stdout
    folders = []
    for name in ("plain", "converted"):
        (into / name).mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", into / name], input=packed, check=True)
        folders.append(into / name / case.folder / case.script)
    plain, converted = folders
    commands = (EDITS / f"{case.name}.ed").read_text(encoding="utf-8")
    converted.write_text(edited(plain.read_text(encoding="utf-8"), commands), encoding="utf-8")
    return plain, converted


def shares(batch: int, ranks: int) -> dict[int, int]:
    """Each rank has about twice the next one's samples."""
    parts = [2 ** (ranks - rank) for rank in range(ranks)]
    found = [max(2, batch * part // sum(parts)) for part in parts]
    found[0] += batch - sum(found)
    return dict(enumerate(found))


def with_values(case: Case, arm: Arm, script: Path) -> tuple[Path, list[str]]:
    """The script, with the values that it has no option for, and its command line."""

    def filled(text: str) -> str:
        batch = case.batch // arm.ranks if case.per_rank else case.batch
        return text.replace("{batch}", str(batch)).replace("{ranks}", str(arm.ranks))

    text = script.read_text(encoding="utf-8")
    for before, after in case.values.items():
        if before not in text:
            sys.exit(f"{case.script} of {case.name} has no {before!r}")
        text = text.replace(before, filled(after))
    changed = script.with_name(f"{arm.ranks}_{arm.bound}_{script.name}")
    changed.write_text(text, encoding="utf-8")
    return changed, shlex.split(filled(case.words))


def run(case: Case, arm: Arm, script: Path, seed: int, scratch: Path) -> Result:
    """One job of the script, in a copy of its folder.

    Raises:
        SystemExit: It failed; what it said stands before.
    """
    place = scratch / f"{case.name}-{arm.ranks}-{arm.bound}-{seed}{'-nudged' * bool(arm.nudge)}"
    here = place / "here"
    shutil.copytree(script.parent, here)
    if case.material is not None:
        case.material(here)
    job = None
    if arm.bound is not None:
        pins = shares(case.batch, arm.ranks) if arm.shares else {}
        job = {"delay_bound": arm.bound, "pins": pins, **case.settings}
    played, words_of_it = with_values(case, arm, script)
    told = {
        "script": str(played),
        "words": words_of_it,
        "seed": seed,
        "nudge": arm.nudge,
        "dtype": case.dtype,
        "job": job,
        "around": case.around,
        "weights": str(place / "weights.safetensors"),
    }
    (place / "told.json").write_text(json.dumps(told))
    starter = mpirun(arm.ranks) if job is not None else []
    words = [*starter, sys.executable, "-m", "benchmarks.public_scripts.played", place / "told.json"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = environment() | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        list(map(str, words)), cwd=here, env=env, text=True, capture_output=True, timeout=LIMIT_SECONDS, check=False
    )
    (place / "said.txt").write_text(done.stdout + done.stderr)
    found = re.findall(case.metric, done.stdout + done.stderr)
    if done.returncode or not found:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-6000:]}\n{case.name} on {arm} ended with {done.returncode}")
    return Result(float(found[-1]), Path(told["weights"]))


def difference(one: Path, other: Path) -> float:
    """The largest between weights, over the largest weight of their tensor.

    Tensors that stay below a thousandth count as if they had it: where a gradient is 0, as that of an attention's
    biases of keys, they are rounding.
    """
    mine, theirs = load_file(one), load_file(other)
    if mine.keys() != theirs.keys():
        sys.exit(f"{one} has {len(mine)} tensors, {other} {len(theirs)}")
    return max(
        float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-3)) for name in mine
    )


def judged(case: Case, sources: Path, seeds: int, scratch: Path) -> dict[str, Any]:
    """Every arm's runs of a script, and what follows from them."""
    plain, converted = laid_out(case, sources, scratch / "source" / case.name)
    together = run(case, SYNCHRONOUS, converted, 0, scratch)
    alone = [run(case, PLAIN, plain, seed, scratch) for seed in range(seeds)]
    by_default = [run(case, DEFAULT, converted, 0, scratch)]
    delayed = [run(case, DELAYED, converted, seed, scratch) for seed in range(seeds)]
    written, gone = changed(plain, converted)
    metrics = {"plain": alone, "default": by_default, "delayed": delayed}
    found = {
        "name": case.name,
        "source": case.source,
        "door": case.door,
        "written": written,
        "gone": gone,
        "synchronous": together.metric,
        **{name: [result.metric for result in results] for name, results in metrics.items()},
        "difference": difference(alone[0].weights, together.weights),
        "tolerance": case.tolerance,
    }
    found["equal"] = case.tolerance is None or found["difference"] <= case.tolerance
    if not found["equal"]:
        nudged = run(case, NUDGED, plain, 0, scratch)
        found["nudged"] = difference(alone[0].weights, nudged.weights)
        found["equal"] = found["difference"] <= AS_NUDGED * found["nudged"]
    for arm in ("default", "delayed"):
        found[f"{arm}_within_seeds"] = judged_by(found["plain"], found[arm], case.falls)
    return found


def judged_by(alone: list[float], delayed: list[float], falls: bool) -> bool:
    """Whether the median of the delayed is not worse than the worst of one process by more than these differ."""
    sign = -1 if falls else 1
    return sign * statistics.median(delayed) >= min(sign * metric for metric in alone) - (max(alone) - min(alone))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| script | converted by | written | gone | D = 0, largest difference of weights "
        "| metric of one process | by default on 3 ranks | D = 4 on 3 ranks |",
        "| --- " * 8 + "|",
    ]
    for row in rows:
        drawn = " (not compared)" if row["tolerance"] is None else "" if row["equal"] else " **unequal**"
        if "nudged" in row:
            drawn += f" (by a rounding of its first weights: {row['nudged']:.1e})"
        cells = [row["name"], row["door"], row["written"], row["gone"], f"{row['difference']:.1e}{drawn}"]
        cells.append(spread(row["plain"], ".4g"))
        for arm in ("default", "delayed"):
            cells.append(spread(row[arm], ".4g") + ("" if row[f"{arm}_within_seeds"] else " **outside**"))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="scripts; all without one", metavar="NAME")
    parser.add_argument("--sources", type=Path, default=Path("sources"), help="folder of clones, OWNER+NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--keep", type=Path, help="folder for what runs leave; a temporary one otherwise")
    options = parser.parse_args()
    if unknown := set(options.names) - {case.name for case in CASES}:
        sys.exit(
            f"no script is called {', '.join(sorted(unknown))}: there are {', '.join(case.name for case in CASES)}"
        )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            if not options.names or case.name in options.names:
                rows.append(judged(case, options.sources.resolve(), options.seeds, options.keep or Path(temporary)))
                keep(options.output, "public_scripts", rows=rows)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    publish(options.output, "public_scripts", table(rows))
    if not all(row["equal"] and row["default_within_seeds"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
