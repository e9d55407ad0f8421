"""Tables and verdicts of `benchmarks.planner`, from its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.report import Record, grouped, spread
from hetsync.plan.search.registry import BEST

NEAR = 1.05
RESAMPLES = 2000
CELL = ("form", "weights", "model", "cluster")


class Claim(NamedTuple):
    """Of two searches over the same cells: `of` is compared with `to`. A ratio below 1 speaks for `of`."""

    of: str
    to: str
    figure: str  # objective, one of COSTS, or evaluations to 5 %
    target: float | None  # the most that the ratio may be
    says: str
    models: tuple[str, ...] = ()  # all


COSTS = {"time": "seconds_per_sample", "bytes": "bytes_per_sample", "memory": "memory_fraction"}
CLAIMS = (
    Claim("trinity", "hierarchical", "objective", 1 / 1.05, "P1: up to 5 % less; target: 5 % better"),
    *(Claim("trinity", "hierarchical", cost, None, "what the objective is made of") for cost in COSTS),
    Claim("trinity", "hierarchical", "evaluations", 1 / 1.4, "P1: up to 40 % faster; target: 1.4 times fewer"),
    Claim("trinity", "trinity-nothing", "objective", None, "what the plan is worth that Trinity begins with"),
    Claim("trinity-nothing", "hierarchical", "objective", None, "and what Trinity is without it"),
    Claim("trinity-nothing", "hierarchical", "evaluations", None, "and what Trinity is without it"),
    Claim("trinity-pretrained", "trinity", "evaluations", 0.5, "target: half as many"),
    Claim("trinity-nothing-pretrained", "trinity-nothing", "evaluations", 0.5, "the same from nothing: half as many"),
    Claim("tapp", "exact", "objective", 1.02, "target: within 2 % on chains", ("chain",)),
    Claim("trinity", "hierarchical-multi", "objective", None, "ablation: what PPO is worth"),
    Claim("trinity", "ppo-time", "objective", None, "ablation: what the three costs are worth to PPO"),
    Claim("hierarchical-multi", "hierarchical", "objective", None, "ablation: and to REINFORCE"),
    Claim("trinity", "local", "objective", None, "beside local search"),
    Claim("trinity", "random", "objective", None, "beside chance"),
)


def evaluations_near(record: Record, best: float) -> float:
    """After how many a search was within 5 % of the best; infinite where it never was."""
    return next((number for number, value in record.get("course", ()) if value <= NEAR * best), math.inf)


def best_of(cell: Iterable[Record]) -> float:
    """The least objective that any search of a cell reached."""
    return min((one["objective"] for one in cell if "missing" not in one), default=math.inf)


def middle(values: Sequence[float]) -> float:
    """The median; where more than half of them are infinite, so is it."""
    ordered = sorted(values)
    return statistics.median(ordered) if math.isfinite(ordered[len(ordered) // 2]) else math.inf


# Verdicts.


def verdicts(records: Sequence[Record]) -> list[str]:
    lines = ["| weights | search | against | figure | median ratio | 95 % interval | cells | says |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for weights, claim in product(dict.fromkeys(one["weights"] for one in records), CLAIMS):
        cells = [
            cell
            for (form, weighed, model, _), cell in grouped(records, *CELL).items()
            if form == "one replica" and weighed == weights and (not claim.models or model in claim.models)
        ]
        if ratios := [ratio for cell in cells if (ratio := _ratio(cell, claim)) is not None]:
            lines.append(_verdict(weights, claim, ratios))
    return [*lines, "", *beaten(records)]


def _ratio(cell: Sequence[Record], claim: Claim) -> float | None:
    """Of medians over seeds. None where one of the two was not run, neither came near, or neither sends any bytes."""
    best = best_of(cell)
    of_record: Callable[[Record], float]
    if claim.figure == "evaluations":
        of_record = lambda one: evaluations_near(one, best)  # noqa: E731
    else:
        of_record = lambda one: one.get(COSTS.get(claim.figure, claim.figure), math.inf)  # noqa: E731
    figures = {(arm,): middle([of_record(one) for one in runs]) for (arm,), runs in grouped(cell, "arm").items()}
    one, other = figures.get((claim.of,)), figures.get((claim.to,))
    if one is None or other is None or one == other in (0.0, math.inf):
        return None
    if other == 0.0:
        return math.inf
    return one / other


def _verdict(weights: str, claim: Claim, ratios: Sequence[float]) -> str:
    found = middle(ratios)
    low, high = interval(ratios)
    told = [weights, claim.of, claim.to, claim.figure, f"{found:.3g}", f"{low:.3g} to {high:.3g}", f"{len(ratios)}"]
    met = "" if claim.target is None else ": missed"
    if claim.target is not None and found <= claim.target:
        met = ": met" if high <= claim.target else ": met in the median only"
    return f"| {' | '.join(told)} | {claim.says}{met} |"


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of their median: 95 % of resampled ones are within."""
    draws = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = sorted(middle([ratios[index] for index in row]) for row in draws)
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def beaten(records: Sequence[Record]) -> list[str]:
    """Where `best` was worse than another search, by medians over seeds."""
    lines, cells = [], 0
    for key, cell in grouped([one for one in records if "missing" not in one], *CELL).items():
        arms = grouped(cell, "arm").items()
        medians = {arm: statistics.median(one["objective"] for one in runs) for (arm,), runs in arms}
        if BEST in medians:
            cells += 1
            least = min(medians, key=lambda arm: medians[arm])
            if medians[BEST] > medians[least] * (1 + 1e-9):
                lines.append(f"- {', '.join(key)}: best {medians[BEST]:.4g}, {least} {medians[least]:.4g}")
    return [f"By medians, best is worse than another search in {len(lines)} of {cells} cells.", "", *lines]


# Tables.


def markdown(records: Sequence[Record]) -> str:
    """Medians of all searches by form and weights, then a table a model and cluster."""
    parts = ["## Seconds", "", "Of a process of one thread; what draws nothing runs once.", "", *spent(records), ""]
    for (form, weights), part in grouped(records, "form", "weights").items():
        parts += [f"## {form}, weights {weights}", "", "Objectives: medians over seeds.", ""]
        parts += overview(part, lambda one, _: one.get("objective", math.inf), ".4g")
        parts += ["", "Evaluations to within 5 % of the best: medians over seeds; – where most never were.", ""]
        parts += [*overview(part, evaluations_near, ".0f"), ""]
    for (form, weights, model, cluster), cell in grouped(records, *CELL).items():
        parts += [f"### {model}, {cluster}, {form}, weights {weights}", "", f"{cell[0]['blocks']} blocks.", ""]
        parts += [*details(cell), ""]
    return "\n".join(parts)


def spent(records: Sequence[Record]) -> list[str]:
    """A row a form and search, and one of all. What ran once for all weights counts once."""
    lines = ["| form | search | searches | s each | s together |", "| --- | --- | ---: | ---: | ---: |"]
    together = 0.0
    for (form, arm), runs in grouped([one for one in records if "seconds" in one], "form", "arm").items():
        cells = grouped(runs, "model", "cluster", "seed").values()
        each = [seconds for cell in cells for seconds in dict.fromkeys(one["seconds"] for one in cell)]
        together += sum(each)
        lines.append(f"| {form} | {arm} | {len(each)} | {sum(each) / len(each):.2f} | {sum(each):.0f} |")
    return [*lines, f"| all | | | | {together:.0f}: {together / 120:.0f} minutes of two cores |"]


def overview(records: Sequence[Record], figure: Callable[[Record, float], float], form: str) -> list[str]:
    """A row a model and cluster, a column a search; the least is bold."""
    arms = list(dict.fromkeys(one["arm"] for one in records))
    lines = [f"| | {' | '.join(arms)} |", f"| --- |{' ---: |' * len(arms)}"]
    for (model, cluster), cell in grouped(records, "model", "cluster").items():
        best, runs_of = best_of(cell), grouped(cell, "arm")
        found = [middle([figure(one, best) for one in runs_of.get((arm,), ())] or [math.inf]) for arm in arms]
        row = [f"{one:{form}}" if math.isfinite(one) else "–" for one in found]
        least = row[found.index(min(found))]
        row = [f"**{one}**" if one == least != "–" else one for one in row]
        lines.append(f"| {model}, {cluster} | {' | '.join(row)} |")
    return lines


def details(cell: Sequence[Record]) -> list[str]:
    """A row a search: its figures as median and range over seeds."""
    best = best_of(cell)
    lines = ["| search | objective | ms a sample | kB a sample | memory | evaluations | to 5 % | s |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for (arm,), runs in grouped(cell, "arm").items():
        done = [one for one in runs if "missing" not in one]
        if not done:
            lines.append(f"| {arm} | {runs[0]['missing']} |" + " |" * 6)
            continue
        near: list[Any] = [evaluations_near(one, best) for one in runs]
        figures = [
            spread([one["objective"] for one in done], ".4g"),
            spread([1e3 * one["seconds_per_sample"] for one in done], ".4g"),
            spread([one["bytes_per_sample"] / 1e3 for one in done], ".4g"),
            spread([100 * one["memory_fraction"] for one in done], ".3g") + " %",
            spread([one["evaluations"] for one in done], ".0f"),
            spread([one if math.isfinite(one) else None for one in near], ".0f"),
            spread([one["seconds"] for one in done], ".1f"),
        ]
        lines.append(f"| {arm} | {' | '.join(figures)} |")
    return lines
