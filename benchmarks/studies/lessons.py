"""What either half of pre-training is worth: policies that learn by example only, by reward only, and by both.

    python -m benchmarks.studies.lessons --output results [--steps 40000] [--seed 0]

Each learns from as many decisions as the policy that comes along, which has both, on jobs that are drawn alike; all
are judged on those of `studies/unseen_jobs.py`. By reward only, PPO begins with larger steps than it makes after
examples. Policies already in the output folder are not made again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from benchmarks.studies.unseen_jobs import compared
from hetsync.control.actions import Limits
from hetsync.control.learning.expert import Expert
from hetsync.control.learning.imitation import imitate
from hetsync.control.learning.jobs import random_job
from hetsync.control.learning.ppo import MINIBATCH, PROCESSES, ROLLOUT, Curve, learned, simulated_jobs
from hetsync.control.policy_network import Specification, save_policy
from hetsync.control.ppo_model import HIDDEN, new_model, weights_of
from hetsync.control.rewards import FallOfLogLoss

say = partial(print, flush=True)
simulated = partial(simulated_jobs, random_job, Limits(), FallOfLogLoss, PROCESSES)


def by_example(steps: int, seed: int) -> PPO:
    with closing(simulated(baseline=None, make_expert=Expert)) as shown:
        model = new_model(shown, seed)
        imitate(model, shown, steps, seed, say)
    return model


def by_reward(steps: int, seed: int) -> PPO:
    with closing(VecMonitor(simulated())) as rewarding:
        rewarding.seed(seed)
        return learned(rewarding, steps, seed, Curve(say), n_steps=ROLLOUT, batch_size=MINIBATCH)


LESSONS: dict[str, Callable[[int, int], PPO]] = {"by example only": by_example, "by reward only": by_reward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for the policies")
    parser.add_argument("--steps", type=int, default=40_000, help="decisions to learn from")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn while learning")
    parser.add_argument("--jobs", type=int, default=64, help="how many are drawn to judge by")
    options = parser.parse_args()
    arms: dict[str, tuple[str, str | None]] = {}
    for name, lesson in LESSONS.items():
        path = options.output / f"{name.replace(' ', '-')}-{options.seed}.safetensors"
        if not path.exists():
            say(f"## {name}")
            weights = weights_of(lesson(options.steps, options.seed))
            told = Specification(HIDDEN, Limits(), "FallOfLogLoss", "lessons.py", options.seed, options.steps, ())
            save_policy(path, weights, told)
        arms[name] = ("ppo", str(path))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        compared(pool, {**arms, "by both": ("ppo", None)}, options.jobs)


if __name__ == "__main__":
    main()
