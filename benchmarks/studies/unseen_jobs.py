"""Controllers on jobs that are drawn as for pre-training, from seeds that it did not see.

    python -m benchmarks.studies.unseen_jobs [--jobs 64] [--policy FILE]

Every job begins at the defaults (K = 1, D = 4) and is compared with itself left alone there, in virtual time: the
logarithm of the loss, as a mean over the time and when the time is up (mean of the last window). Below zero is better.
`expert` knows the landscape: how much there is to be gained.

There are two tables: within the bounds that recipes have unless they say otherwise (D from 1: never synchronous), and
with `control.min_delay_bound` 0, as the policy that comes along was trained.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from benchmarks.studies.controllers import DEFAULT, LIMITS, named
from hetsync.config.schema import ControlConfig
from hetsync.control.actions import Limits
from hetsync.control.baselines import Fixed
from hetsync.control.controller import Controller
from hetsync.control.learning.episodes import LOSS_SAMPLES, Episode, run_episode
from hetsync.control.learning.expert import Expert
from hetsync.control.learning.jobs import random_job, with_settings
from hetsync.control.policy_network import SURE, PolicyController, load_network

TRAINED_WITHIN = LIMITS
SHIPPED = replace(Limits.of(ControlConfig()), interval_seconds=LIMITS.interval_seconds)
FIRST_SEED = 4_000_000  # none that pre-training used, nor anybody who worked on it
LEAST_LOSS = 1e-8
UNSURE = "ppo, unsure"  # does what is likeliest, however unlikely
ARMS = ("schedule", "random", "proportional", "goodput", UNSURE, "ppo", "expert")
WORSE = 0.02  # at the end: worth mentioning


def controller_of(arm: str, episode: Episode, policy: str | None, limits: Limits) -> Controller:
    batch = episode.job.batch_size
    if arm == "fixed":
        return Fixed()
    if arm == "expert":
        return Expert(episode, limits)
    if arm in ("ppo", UNSURE):
        return PolicyController(load_network(policy), limits, batch, 0.0 if arm == UNSURE else SURE)
    make: Callable[[int, int], Controller] = named(arm, limits)
    return make(episode.job.config.run.seed, batch)


def judged(arm: str, seed: int, policy: str | None, limits: Limits) -> tuple[float, float, int]:
    """Logarithm of the loss, mean over the time and when it is up; changes of settings."""
    torch.set_num_threads(1)
    episode = Episode(with_settings(random_job(np.random.default_rng(FIRST_SEED + seed)), DEFAULT))
    result = run_episode(episode, controller_of(arm, episode, policy, limits), limits)
    timely = zip(result.seconds, result.losses, strict=True)
    losses = [math.log(max(loss, LEAST_LOSS)) for at, loss in timely if at <= result.time_limit * (1 + 1e-9)]
    changes = sum(before != after for before, after in pairwise((DEFAULT, *result.settings)))
    return statistics.fmean(losses), statistics.fmean(losses[-LOSS_SAMPLES:]), changes


def compared(
    pool: Executor, arms: Mapping[str, tuple[str, str | None]], jobs: int, limits: Limits = TRAINED_WITHIN
) -> None:
    """Prints a table; an arm is a controller's name and, of ppo, the policy."""
    print("| controller | mean over the time | at the end | worse at the end | worst | changes |\n|" + " --- |" * 6)
    seeds = range(jobs)
    alone = list(pool.map(partial(judged, "fixed", policy=None, limits=limits), seeds))
    for label, (arm, policy) in arms.items():
        told = list(pool.map(partial(judged, arm, policy=policy, limits=limits), seeds))
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
    parser.add_argument(
        "--jobs", type=int, choices=range(2, 10_000), metavar="N", default=64, help="how many are drawn"
    )
    parser.add_argument("--policy", help="of ppo; default: the one that comes along")
    options = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for limits in (SHIPPED, TRAINED_WITHIN):
            print(f"\nD from {limits.min_delay_bound}:\n")
            compared(pool, {arm: (arm, options.policy) for arm in ARMS}, options.jobs, limits)


if __name__ == "__main__":
    main()
