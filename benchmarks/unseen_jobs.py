"""Controllers on jobs that are drawn as for pre-training, from seeds that it did not see.

    python benchmarks/unseen_jobs.py [--jobs 64] [--policy FILE]

Every job begins at the defaults (K = 1, D = 4) and is compared with itself left alone there, in virtual time: the
logarithm of the loss, as a mean over the time and when the time is up (mean of the last window). Below zero is better.
`planner` knows the landscape: how much there is to be gained.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from controllers import DEFAULT, LIMITS, named

from hetsync.control.baselines import Fixed
from hetsync.control.controller import Controller
from hetsync.control.jobs import LOOKS, Course, random_job, with_settings
from hetsync.control.planner import Planner
from hetsync.control.policy import SURE, PolicyController, load_network
from hetsync.control.trial import run_course

FIRST_SEED = 4_000_000  # none that pre-training used, nor anybody who worked on it
LEAST_LOSS = 1e-8
UNSURE = "ppo, unsure"  # does what is likeliest, however unlikely
ARMS = ("schedule", "random", "proportional", "goodput", UNSURE, "ppo", "planner")
WORSE = 0.02  # at the end: worth mentioning


def controller_of(arm: str, course: Course, policy: str | None) -> Controller:
    batch = course.job.batch_size
    if arm == "fixed":
        return Fixed()
    if arm == "planner":
        return Planner(course, LIMITS)
    if arm in ("ppo", UNSURE):
        return PolicyController(load_network(policy), LIMITS, batch, 0.0 if arm == UNSURE else SURE)
    make: Callable[[int, int], Controller] = named(arm)
    return make(course.job.config.run.seed, batch)


def judged(arm: str, seed: int, policy: str | None) -> tuple[float, float, int]:
    """Logarithm of the loss, mean over the time and when it is up; changes of settings."""
    torch.set_num_threads(1)
    course = Course(with_settings(random_job(np.random.default_rng(FIRST_SEED + seed)), DEFAULT))
    trial = run_course(course, controller_of(arm, course, policy), LIMITS)
    timely = zip(trial.seconds, trial.losses, strict=True)
    losses = [math.log(max(loss, LEAST_LOSS)) for at, loss in timely if at <= trial.time_limit * (1 + 1e-9)]
    changes = sum(before != after for before, after in pairwise((DEFAULT, *trial.settings)))
    return statistics.fmean(losses), statistics.fmean(losses[-LOOKS:]), changes


def compared(pool: Executor, arms: Mapping[str, tuple[str, str | None]], jobs: int) -> None:
    """Prints a table; an arm is a controller's name and, of ppo, the policy."""
    print("| controller | mean over the time | at the end | worse at the end | worst | changes |\n|" + " --- |" * 6)
    seeds = range(jobs)
    alone = list(pool.map(partial(judged, "fixed", policy=None), seeds))
    for label, (arm, policy) in arms.items():
        told = list(pool.map(partial(judged, arm, policy=policy), seeds))
        over_time = [mine[0] - theirs[0] for mine, theirs in zip(told, alone, strict=True)]
        at_end = [mine[1] - theirs[1] for mine, theirs in zip(told, alone, strict=True)]
        worse = sum(value > WORSE for value in at_end) / len(at_end)
        figures = f"{interval(over_time)} | {interval(at_end)} | {worse:.0%} | {max(at_end):+.2f}"
        changes = statistics.fmean(mine[2] for mine in told)
        print(f"| {label} | {figures} (job {at_end.index(max(at_end))}) | {changes:.1f} |", flush=True)


def interval(values: list[float]) -> str:
    return f"{statistics.fmean(values):+.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=64, help="how many are drawn")
    parser.add_argument("--policy", help="of ppo; default: the one that comes along")
    options = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        compared(pool, {arm: (arm, options.policy) for arm in ARMS}, options.jobs)


if __name__ == "__main__":
    main()
