"""What PPO-controlled gradient accumulation is worth: the test of "DeepTTE in parallel" (Qingdao, 2021; P2 in short).

    python -m benchmarks.studies.accumulation --output results [--quick] [--seeds 3]

DeepTTE on the synthetic city, real gradients on the simulator's clock (`hetsync.simulate.replicas`), synchronous, on
one device and on four. Only the number of accumulated micro-batches, α (our K), differs: fixed at 1, 2, 4 or 8;
doubled by hand at a half and at three quarters of the samples; drawn from the papers' actions; from an untrained
policy; and from PPO, trained beforehand on simulated jobs in the papers' environment with their reward and their
settings of PPO2.

Accumulating α micro-batches is a batch α times as large, and nothing else. So each arm gets the learning rate that
served it best among the same few (one seed each), and is judged at equal samples and at equal time. The papers' own
claim stands beside it: other hardware and data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.common.local_job import RECIPES
from benchmarks.common.report import source
from benchmarks.studies.papers import PapersEnvironment, papers_settings, papers_vector
from hetsync.config.parser import read_recipe
from hetsync.config.schema import Config, EmulationConfig, SyncConfig
from hetsync.control.actions import Limits
from hetsync.control.baselines import Fixed
from hetsync.control.controller import Controller, Decision
from hetsync.control.learning.jobs import Job, JobDraw, devices
from hetsync.control.learning.ppo import learned
from hetsync.emulation.cluster import Cluster
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.replicas import ReplicaLearner
from hetsync.simulate.simulation import Simulation
from hetsync.sync.observation import Observation

RECIPE = RECIPES / "deeptte_synthetic_city.yaml"
DEVICE_RATE = 100.0  # samples/s of one device
PLACES = {"one device": 1, "four devices": 4}
LIMITS = Limits(1, 8, 0, 0)
WINDOWS = 40  # decisions in a job
EVALUATIONS = 8
RATES = (0.0015, 0.003, 0.006, 0.012)
CLAIM = "RMSE -50.12 %, MAPE -62.3 %, MAE -56.02 % for data parallel with accumulation by PPO2"
# PPO2's defaults of its time.
PPO2: dict[str, Any] = {
    "n_steps": 128,
    "batch_size": 32,
    "n_epochs": 4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "ent_coef": 0.01,
    "learning_rate": 2.5e-4,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "clip_range": 0.2,
}


# Arms.


class Doubling:
    """α = 1, 2, 4 by hand."""

    def decide(self, seen: Observation) -> Decision:
        slices = 4 if seen.progress >= 0.75 else 2 if seen.progress >= 0.5 else 1
        return Decision(replace(seen.settings, accumulation=slices), "by hand")


class Drawn:
    """Any of the papers' actions."""

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def decide(self, seen: Observation) -> Decision:
        action = self._dice.uniform((0, 0), (3, 1)).astype(np.float32)
        return Decision(papers_settings(seen.settings, action, LIMITS), "drawn")


class Papers:
    """The mean action of a policy for the papers' environment."""

    def __init__(self, model: PPO) -> None:
        self._model = model
        self._unit: float | None = None

    def decide(self, seen: Observation) -> Decision:
        self._unit, vector = papers_vector(seen, self._unit)
        action, _ = self._model.predict(vector, deterministic=True)
        return Decision(papers_settings(seen.settings, action, LIMITS), "the policy's")


def papers_jobs(recipe: Config) -> Callable[[np.random.Generator], Job]:
    """Synchronous jobs with the recipe on one to four like devices."""

    def draw(random: np.random.Generator) -> Job:
        ranks = int(random.integers(1, 5))
        job = JobDraw(Cluster("like", "made up", devices([1.0] * ranks)), recipe)(random)
        return replace(job, script=())

    return draw


def policy(recipe: Config, steps: int, seed: int) -> PPO:
    """Trained for so many decisions; 0 leaves it as it was made."""
    environments = DummyVecEnv([lambda: PapersEnvironment(papers_jobs(recipe), LIMITS)])
    if not steps:
        return PPO("MlpPolicy", environments, seed=seed, device="cpu", **PPO2)
    return learned(environments, steps, seed, **PPO2)


FIRST = {"α = 1": 1, "α = 2": 2, "α = 4": 4, "α = 8": 8}  # of the arms that never change it
ARMS = (*FIRST, "by hand", "random", "untrained", "PPO")
Weights = dict[str, torch.Tensor]


def controller_of(arm: str, recipe: Config, seed: int, learned_weights: Weights) -> Controller:
    if arm in FIRST:
        return Fixed()
    if arm == "by hand":
        return Doubling()
    if arm == "random":
        return Drawn(seed)
    model = policy(recipe, 0, 0)
    if arm == "PPO":
        model.policy.load_state_dict(learned_weights)
    return Papers(model)


# Runs.


@dataclass(frozen=True)
class Run:
    """One training. It has one thread: a core for each."""

    place: str
    arm: str
    rate: float
    seed: int

    def of(self, recipe: Config, learned_weights: Weights) -> dict[str, Any]:
        torch.set_num_threads(1)
        config = replace(
            recipe,
            optimizer=replace(recipe.optimizer, learning_rate=self.rate),
            run=replace(recipe.run, seed=self.seed),
        )
        controller = controller_of(self.arm, recipe, self.seed, learned_weights)
        return trained_model(config, PLACES[self.place], FIRST.get(self.arm, 1), controller)


def trained_model(config: Config, ranks: int, alpha: int, controller: Controller) -> dict[str, Any]:
    """With real gradients: metrics on the way, by virtual seconds and samples."""
    sync = replace(config.sync, delay_bound=0, accumulation=alpha)
    cluster = Cluster("like", "made up", devices([1.0] * ranks))
    config = replace(config, sync=sync, emulation=EmulationConfig(cluster.name, DEVICE_RATE * ranks))
    built, model = build(config)
    scenario = scenario_of(config, cluster, ranks, built, model)
    learner = ReplicaLearner(config, built, model, ranks, scenario.total_samples)
    points: list[dict[str, float]] = []

    def on_evaluation(applied: int, seconds: float, metrics: dict[str, float]) -> None:
        points.append({"seconds": seconds, "samples": applied, **metrics})

    simulation = Simulation(scenario, learner, on_evaluation=on_evaluation)
    window = scenario.total_samples / (DEVICE_RATE * ranks) / WINDOWS
    cost, chosen = 0.0, []
    while not simulation.ended:
        simulation.advance(seconds=window)
        began = time.process_time()
        decision = controller.decide(simulation.observe())
        cost += time.process_time() - began
        chosen.append(decision.settings.accumulation)
        if decision.settings != simulation.machine.settings and not simulation.ended:
            simulation.tune(decision.settings)
    return {"points": points, "alphas": chosen, "controller_seconds": cost}


def at_time(result: dict[str, Any], seconds: float) -> dict[str, float]:
    """The last evaluation by then, or the first."""
    points: list[dict[str, float]] = result["points"]
    return next((point for point in reversed(points) if point["seconds"] <= seconds), points[0])


class Bench:
    """Results of runs, which are kept in the output folder and not repeated."""

    def __init__(self, options: argparse.Namespace) -> None:
        recipe = read_recipe(RECIPE)
        run = replace(recipe.run, samples=options.samples, evaluate_every=options.samples // EVALUATIONS)
        self.recipe = replace(recipe, run=run, sync=SyncConfig(delay_bound=0))
        began = time.process_time()
        self.learned_weights: Weights = policy(recipe, options.steps, 0).policy.state_dict()
        self.training_seconds = time.process_time() - began
        self.path: Path = options.output / f"accumulation-{options.samples}-{options.steps}.json"
        self.results: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def make(self, runs: Iterable[Run], pool: Executor) -> None:
        missing = [run for run in runs if str(run) not in self.results]
        under_way = {pool.submit(run.of, self.recipe, self.learned_weights): run for run in missing}
        for future in as_completed(under_way):
            run = under_way[future]
            self.results[str(run)] = future.result()
            print(run, self[run]["points"][-1], flush=True)
            self.path.write_text(json.dumps(self.results))

    def __getitem__(self, run: Run) -> dict[str, Any]:
        result: dict[str, Any] = self.results[str(run)]
        return result

    def best_rate(self, place: str, arm: str, rates: tuple[float, ...]) -> float:
        return min(rates, key=lambda rate: self[Run(place, arm, rate, 0)]["points"][-1]["mape"])

    def make_all(self, rates: tuple[float, ...], seeds: int, pool: Executor) -> dict[tuple[str, str], list[Run]]:
        """By place and arm: the runs at the learning rate that served best, by seed."""
        cells = list(product(PLACES, ARMS))
        self.make((Run(*cell, rate, 0) for cell in cells for rate in rates), pool)
        best = {cell: self.best_rate(*cell, rates) for cell in cells}
        chosen = {cell: [Run(*cell, rate, seed) for seed in range(seeds)] for cell, rate in best.items()}
        self.make((run for runs in chosen.values() for run in runs), pool)
        return chosen


def markdown(bench: Bench, rates: tuple[float, ...], seeds: int, pool: Executor) -> str:
    lines = [f"The papers claim {CLAIM} (8 GPUs, other data). Ours, medians of {seeds} seeds; tried learning rates"]
    lines += [f"{', '.join(map(str, rates))}; PPO's training took {bench.training_seconds:.0f} s of CPU beforehand.\n"]
    lines += ["| where | α | learning rate | MAPE | RMSE | MAE | MAPE in time of α = 1 | mean α | decisions, CPU s |"]
    lines += ["| --- |" + " --- |" * 8]
    limits: dict[str, float] = {}  # by place: how long α = 1 takes
    for (place, arm), runs in bench.make_all(rates, seeds, pool).items():
        results = [bench[run] for run in runs]
        ends = [result["points"][-1] for result in results]
        limit = limits.setdefault(place, statistics.median(end["seconds"] for end in ends))
        metrics = [statistics.median(end[name] for end in ends) for name in ("mape", "rmse", "mae")]
        mapes = [end["mape"] for end in ends]
        timely = statistics.median(at_time(result, limit * 1.001)["mape"] for result in results)
        mean = statistics.mean(alpha for result in results for alpha in result["alphas"])
        cost = statistics.median(result["controller_seconds"] for result in results)
        figures = " | ".join(f"{value:.2f}" for value in (*metrics[1:], timely, mean, cost))
        spread = f"{metrics[0]:.2f} ({min(mapes):.2f} to {max(mapes):.2f})"
        lines.append(f"| {place} | {arm} | {runs[0].rate} | {spread} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--samples", type=int, default=12_000, help="to train on in each")
    parser.add_argument("--steps", type=int, default=20_480, help="decisions that PPO learns from beforehand")
    parser.add_argument("--quick", action="store_true", help="one seed, one learning rate, 4,000 samples")
    options = parser.parse_args()
    rates: tuple[float, ...] = RATES
    if options.quick:
        options.seeds, options.samples, options.steps, rates = 1, 4_000, 5_120, (0.003,)
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        text = f"{source('studies.accumulation')}\n\n{markdown(bench, rates, options.seeds, pool)}"
    (options.output / "accumulation.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
