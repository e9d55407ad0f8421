"""Learning on the virtual clock: replicas against one process, the noisy quadratic against replicas, calibration."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_simulate_clock import scenario
from torch.utils.data import TensorDataset

from hetsync.config.schema import (
    Config,
    DataConfig,
    EmulationConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    SyncConfig,
)
from hetsync.data import Data
from hetsync.data.loader import EpochOrder
from hetsync.emulation.cluster import Link, load_cluster
from hetsync.errors import UserError
from hetsync.models.steps import GoesBySteps
from hetsync.simulate import Change, Learner, Runtime, Simulation, Traffic, replicas
from hetsync.simulate.calibrate import Noise, fit, losses_of, measure_noise, noise_power, simulated_curve
from hetsync.simulate.quadratic import Landscape, NoisyQuadratic
from hetsync.simulate.recipe import scenario_of
from hetsync.simulate.replicas import ReplicaLearner, average_states
from hetsync.sync import rounds_rule
from hetsync.sync.messages import Task

RATES = [40.0, 20.0, 10.0]
BATCH, TOTAL = 28, 560


class Centred(torch.nn.Module):
    """Keeps a running mean, as batch normalisation does, but of slices of one sample too."""

    buffer_rules: ClassVar = {"mean": "mean"}

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(values.detach().mean(0), 0.1)
        return values - self.mean


def regression(running_mean: bool = False) -> tuple[Data, torch.nn.Module]:
    torch.manual_seed(1)
    inputs = torch.randn(200, 6)
    targets = inputs @ torch.randn(6, 1) + 0.1 * torch.randn(200, 1)
    norm = [Centred(8)] if running_mean else []
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), *norm, torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def metrics(model: torch.nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": loss(model, batch).item() * len(batch[0])}

    data = TensorDataset(inputs, targets)
    return Data(data, data, loss, metrics), model


def recipe(optimizer: OptimizerConfig | None = None, **sync: Any) -> Config:
    optimizer = optimizer or OptimizerConfig("sgd", 0.05, 0.9)
    return Config(
        run=RunConfig(samples=TOTAL), data=DataConfig(batch_size=BATCH), optimizer=optimizer, sync=SyncConfig(**sync)
    )


def trained(
    config: Config, data: Data, model: torch.nn.Module, script=(), **job: Any
) -> tuple[Simulation, ReplicaLearner]:
    sync = dataclasses.asdict(config.sync)
    sync["outer"] = config.sync.outer
    plan = scenario(RATES, total=TOTAL, batch=BATCH, jitter=0.4, runtime=Runtime(), **{**sync, **job})
    learner = ReplicaLearner(config, data, model, len(RATES), TOTAL)
    simulation = Simulation(plan, learner, script=script)
    simulation.advance()
    assert simulation.machine.ledger.applied == TOTAL
    return simulation, learner


@pytest.mark.parametrize(
    "optimizer",
    [OptimizerConfig("sgd", 0.05, 0.9), OptimizerConfig("adamw", 0.01), OptimizerConfig("sgd", 0.1, max_grad_norm=0.2)],
)
def test_synchronous_replicas_equal_one_process(optimizer: OptimizerConfig) -> None:
    data, model = regression()
    alone = copy.deepcopy(model)
    _, learner = trained(recipe(optimizer, delay_bound=0, accumulation=2), data, model)
    options = {"momentum": 0.9} if optimizer.name == "sgd" else {"weight_decay": 0.0}
    kind = torch.optim.SGD if optimizer.name == "sgd" else torch.optim.AdamW
    step = kind(alone.parameters(), lr=optimizer.learning_rate, **options)
    order = EpochOrder(200, 0)
    for start in range(0, TOTAL, 2 * BATCH):
        indices = order.indices([(start, start + 2 * BATCH)])
        step.zero_grad()
        data.loss(alone, data.train[indices]).backward()
        if optimizer.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), optimizer.max_grad_norm)
        step.step()
    for ours, theirs in zip(learner._replicas[2].model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_evaluations_are_of_the_validation_part() -> None:
    data, model = regression()
    few = torch.utils.data.Subset(data.test, range(7))
    _, learner = trained(recipe(delay_bound=0), dataclasses.replace(data, validation=few), model)
    with torch.no_grad():
        expected = data.loss(learner._replicas[0].model, few[list(range(7))])
    assert learner.evaluate()["loss"] == pytest.approx(expected.item(), rel=1e-5)


class Counting(GoesBySteps, torch.nn.Linear):
    """Keeps the steps that it was told."""

    told: ClassVar[list[int]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.told.append(self.step_count)
        return super().forward(inputs)


def test_a_model_that_goes_by_steps_is_told_those_of_the_job() -> None:
    data, model = regression()
    counting = torch.nn.Sequential(Counting(6, 6), model)
    Counting.told.clear()
    trained(recipe(OptimizerConfig("sgd", 0.01), delay_bound=0), data, counting)
    assert sorted(set(Counting.told)) == list(range(TOTAL // BATCH))


@pytest.mark.parametrize(
    "sync",
    [
        {"delay_bound": 4},
        {"delay_bound": 2, "accumulation": 3, "outer": OuterConfig("nesterov", 0.7, 0.5)},
        {"delay_bound": 4, "wire": "int8"},
        {"delay_bound": 4, "wire": "top64"},
        {"delay_bound": 0, "wire": "int2"},
        {"delay_bound": 0, "wire": "bfloat16"},
        {"delay_bound": None, "quorum": 0.1},
    ],
)
def test_replays_are_equal_bit_for_bit_and_ranks_end_alike(sync: dict[str, Any]) -> None:
    hashes = set()
    for _ in range(2):
        data, model = regression(running_mean=True)
        first = data.loss(model, data.test[:]).item()
        simulation, learner = trained(recipe(**sync), data, model, every=210)
        hashes.add(learner.anchor_sha256)
        states = [replica.model.state_dict() for replica in learner._replicas.values()]
        for state in states[1:]:
            assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items() if tensor.dim())
        assert learner.evaluate()["loss"] < 0.5 * first
        assert len(simulation.losses) > 10
    assert len(hashes) == 1


def test_a_seed_of_the_jitter_changes_what_is_learnt() -> None:
    ends = [trained(recipe(), *regression(), seed=seed)[1].anchor_sha256 for seed in (0, 1)]
    assert ends[0] != ends[1]


def test_learning_does_not_change_the_clock() -> None:
    with_gradients, _ = trained(recipe(), *regression())
    silent = Simulation(with_gradients.scenario, Learner())
    silent.advance()
    quadratic = Simulation(with_gradients.scenario, NoisyQuadratic(Landscape(2, 1, 1, 9), recipe(), 3, TOTAL))
    quadratic.advance()
    for other in (silent, quadratic):
        assert other.now == with_gradients.now
        assert other.machine.staleness == with_gradients.machine.staleness


@pytest.mark.parametrize("gradients", [True, False])
def test_controllers_see_the_schedule(gradients: bool) -> None:
    config = dataclasses.replace(recipe(delay_bound=4), schedule=ScheduleConfig("linear"))
    quadratic = NoisyQuadratic(Landscape(1.0, 0.0, 1.0, 1.0), config, len(RATES), TOTAL)
    learner = ReplicaLearner(config, *regression(), len(RATES), TOTAL) if gradients else quadratic
    simulation = Simulation(scenario(RATES, total=TOTAL, batch=BATCH, delay_bound=4), learner)
    for _ in range(3):
        simulation.advance(rounds=5)
        seen = simulation.observe()
        assert 0 < seen.progress < 1
        assert seen.learning_rate == pytest.approx(1 - seen.progress)


def test_ranks_that_leave_and_join_do_not_disturb_the_anchor() -> None:
    script = [Change(2.0, 2, "leave"), Change(3.0, 1, "leave"), Change(5.0, 2, "join")]
    simulation, learner = trained(recipe(delay_bound=4), *regression(), script=script)
    assert set(simulation.ranks) == {0, 2}
    first, last = (learner._replicas[rank].model for rank in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), last.parameters(), strict=True))
    assert learner.evaluate()["loss"] < 1.0


def test_gradients_are_for_64_ranks() -> None:
    data, model = regression()
    with pytest.raises(UserError, match="64 ranks at most, not 65"):
        ReplicaLearner(recipe(), data, model, 65, TOTAL)


def test_optimizer_states_are_averaged_by_samples() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], 0.1, momentum=0.9) for weight in weights]
    for value, weight, optimizer in zip((1.0, 4.0), weights, optimizers, strict=False):  # the third has not stepped
        weight.grad = torch.full((2,), value)
        optimizer.step()
    average_states(optimizers, [10, 20, 5])
    for optimizer, weight in zip(optimizers, weights, strict=True):
        assert optimizer.state[weight]["momentum_buffer"].tolist() == [3.0, 3.0]


# The noisy quadratic.


class Bowl(torch.nn.Module):
    def __init__(self, landscape: Landscape) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor(landscape.first_weights, dtype=torch.float32))
        self.register_buffer("curvatures", torch.tensor(landscape.curvatures).int())  # not a float buffer

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weights


@pytest.mark.parametrize(
    "sync",
    [
        {"delay_bound": 4},
        {"delay_bound": 3, "accumulation": 2, "outer": OuterConfig("nesterov", 0.7, 0.5)},
        {"delay_bound": 0},
    ],
)
def test_without_noise_the_quadratic_equals_replicas_of_it(sync: dict[str, Any]) -> None:
    landscape = Landscape(3.0, 0.5, 1.0, 0.0)
    curvatures = torch.tensor(landscape.curvatures, dtype=torch.float32)
    samples = TensorDataset(torch.zeros(200, 1))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return 0.5 + 0.5 * (curvatures * model(batch) ** 2).sum()

    data = Data(samples, samples, loss, lambda model, batch: {"loss": loss(model, batch).item() * len(batch[0])})
    config = recipe(OptimizerConfig("sgd", 0.02, 0.8), **sync)
    simulation, replicas = trained(config, data, Bowl(landscape), every=210)
    twin = NoisyQuadratic(landscape, config, 3, TOTAL)
    other = Simulation(simulation.scenario, twin)
    other.advance()
    assert twin.evaluate()["loss"] == pytest.approx(replicas.evaluate()["loss"], rel=1e-4)
    ours, theirs = ([loss for _, loss in each.losses] for each in (other, simulation))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert 2.9 < ours[0] <= 3.0


def end_of(landscape: Landscape, config: Config, total: int = 20_000, **job: Any) -> float:
    plan = scenario(RATES, total=total, batch=config.data.batch_size, runtime=Runtime(), **job)
    losses = []
    for seed in range(5):
        learner = NoisyQuadratic(landscape, dataclasses.replace(config, run=RunConfig(seed=seed)), len(RATES), total)
        Simulation(plan, learner).advance()
        losses.append(learner.evaluate()["loss"])
    return float(np.mean(losses))


@pytest.mark.thorough
def test_laws_of_the_quadratic() -> None:
    """More noise, a smaller batch at the same learning rate, and more steps between merges cost progress."""
    config = recipe(OptimizerConfig("sgd", 0.05, 0.0))
    quiet, noisy = Landscape(3.0, 0.0, 1.0, 10.0), Landscape(3.0, 0.0, 1.0, 1000.0)
    assert end_of(quiet, config, delay_bound=0) < end_of(noisy, config, delay_bound=0)
    large = dataclasses.replace(config, data=DataConfig(batch_size=4 * BATCH))
    assert end_of(noisy, large, delay_bound=0) < end_of(noisy, config, delay_bound=0)
    short = {"total": 1_000, "delay_bound": 0}
    assert end_of(quiet, config, **short) < end_of(quiet, config, accumulation=4, **short)


def test_the_noise_scale_grows_as_the_loss_falls() -> None:
    config = recipe(OptimizerConfig("sgd", 0.05, 0.0))
    learner = NoisyQuadratic(Landscape(3.0, 0.5, 1.0, 50.0), config, 3, TOTAL)
    assert learner.noise_scale == pytest.approx(50.0)
    Simulation(scenario(RATES, total=TOTAL, batch=BATCH), learner).advance()
    assert learner.evaluate()["loss"] < 3.0
    assert learner.noise_scale > 60.0


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_noise_of_gradients_goes_with_a_power_of_the_loss(power: float) -> None:
    config = recipe(OptimizerConfig("sgd", 0.05, 0.0))
    learner = NoisyQuadratic(Landscape(3.0, 0.5, 1.0, 50.0, power), config, 3, TOTAL, runs=4)
    assert learner.noise_scale == pytest.approx(50.0)
    squared_norm = float(((learner.landscape.curvatures * learner.landscape.first_weights) ** 2).sum())
    weights = np.concatenate([distance * learner.landscape.first_weights for distance in (1.0, 0.5, 0.0, 0.1)])
    losses = learner._losses(weights)
    assert losses == pytest.approx(0.5 + 2.5 * np.array([1.0, 0.25, 0.0, 0.01]))
    variances = (learner._deviations(losses) ** 2).reshape(4, -1).sum(1)
    assert variances == pytest.approx(50.0 * squared_norm * (losses / 3.0) ** power)


# Calibration.


def test_a_fit_finds_the_landscape_that_made_the_curve() -> None:
    config = recipe(OptimizerConfig("sgd", 0.05, 0.5))
    plan = scenario(RATES, total=TOTAL, batch=BATCH)
    true = Landscape(2.3, 0.4, 3.0, 40.0)
    found = fit(simulated_curve(true, config, plan), Noise(40.0, 0.0), config, plan)
    assert found.curvature == pytest.approx(true.curvature, rel=0.3)
    assert found.first_loss == pytest.approx(true.first_loss, rel=0.1)
    assert found.floor == pytest.approx(true.floor, abs=0.15)


def test_the_measured_noise_scale_is_that_of_the_data() -> None:
    """Gradient of ½(w − x)² summed over dimensions: mean w − E x, variance that of x."""
    torch.manual_seed(0)
    deviation, distance, dimensions = 2.0, 1.0, 20
    samples = TensorDataset(distance + deviation * torch.randn(5000, dimensions))

    class Point(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = torch.nn.Parameter(torch.zeros(dimensions))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return 0.5 * (model.place - batch[0]).square().sum(1).mean()

    data = Data(samples, samples, loss)
    config = dataclasses.replace(recipe(OptimizerConfig("sgd", 1e-9)), data=DataConfig(batch_size=64))
    measured = measure_noise(config, data, Point(), 50_000)
    assert measured.scale == pytest.approx((deviation / distance) ** 2, rel=0.15)
    assert measured.power == 0  # the loss does not fall


def linear_data(misfits: float) -> Data:
    """Labels that a linear model can fit, or off at random."""
    torch.manual_seed(0)
    inputs = torch.randn(2000, 4)
    labels = inputs @ torch.tensor([3.0, -2.0, 1.0, 2.0]) + misfits * torch.randn(2000)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return 0.5 * (model(batch[0])[:, 0] - batch[1]).square().mean()

    return Data(TensorDataset(inputs, labels), TensorDataset(inputs, labels), loss)


@pytest.mark.parametrize("misfits", [0.0, 1.0])
def test_noise_falls_with_the_loss_where_every_sample_can_be_fitted(misfits: float) -> None:
    data = linear_data(misfits)
    config = dataclasses.replace(recipe(OptimizerConfig("sgd", 0.02)), data=DataConfig(batch_size=64))
    measured = measure_noise(config, data, torch.nn.Linear(4, 1), 20_000)
    if misfits:
        assert measured.power > 0.7  # the loss falls, and noise with it, until both stand still
    else:
        assert measured.power > 0.9
    assert 1 < measured.scale < 20


def test_noise_is_measured_along_the_recipes_schedule() -> None:
    """Which here is still warming up when the measurement ends: nothing is learned, so no loss falls."""
    config = dataclasses.replace(
        recipe(OptimizerConfig("sgd", 0.02)),
        data=DataConfig(batch_size=64),
        schedule=ScheduleConfig(warmup_samples=10**9),
    )
    assert measure_noise(config, linear_data(0.0), torch.nn.Linear(4, 1), 20_000).power == 0


def start_of(minute: int, samples_applied: int) -> list[dict[str, Any]]:
    """A process goes on from there."""
    profile = {"host": "a", "device": "cpu", "share": 10, "solo_samples_per_second": 1.0, "solo_uncertainty": 0.0}
    return [
        {"kind": "start", "at": 0.0, "wall_clock": f"2026-01-01T00:{minute:02}:00.000000+00:00", "format": 2},
        {"kind": "profile", "at": 0.5, **profile, "samples_applied": samples_applied}
        | {"delay_bound": 4, "accumulation": 1},
    ]


def tasks_of(losses: list[float]) -> list[dict[str, Any]]:
    """One a second, of ten samples each."""
    seconds = {f"{name}_seconds": 0.0 for name in ("compute", "data", "wait")}
    told = [
        {"piece": number, "samples": 10, "slices": 1, "version": 0, "loss": loss} for number, loss in enumerate(losses)
    ]
    return [{"kind": "piece", "at": 1.0 + number, **seconds, **task} for number, task in enumerate(told)]


def told_by(folder: Path, ranks: list[list[dict[str, Any]]]) -> list[tuple[int, float]]:
    (folder / "telemetry").mkdir()
    for rank, records in enumerate(ranks):
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / "telemetry" / f"rank-{rank:04d}.jsonl").write_text("".join(lines))
    return losses_of(folder)


def test_losses_of_a_resumed_run_are_in_the_order_of_its_starts(tmp_path: Path) -> None:
    """Each of which begins its clock at 0."""
    resumed = [*start_of(0, 0), *tasks_of([4.0, 3.0, 2.0]), *start_of(5, 60), *tasks_of([1.9, 1.5, 1.0])]
    told = told_by(tmp_path, [resumed, resumed])
    assert [loss for _, loss in told] == sorted([4.0, 3.0, 2.0, 1.9, 1.5, 1.0] * 2, reverse=True)
    assert {samples for samples, _ in told} == {10}


def test_losses_of_tasks_that_were_done_again_count_once(tmp_path: Path) -> None:
    """After a crash, from the newest checkpoint; and in place."""
    back = {"kind": "rollback", "at": 3.5, "rank": 0, "checkpoint_samples": 60}
    tasks = tasks_of([2.9, 2.0, 1.9, 1.8, 1.7])
    first = [*start_of(0, 0), *tasks_of([4.0, 3.0, 2.5]), *start_of(5, 40), *tasks[:3], back, *tasks[3:]]
    second = [*start_of(0, 0), *tasks_of([4.0, 3.0, 2.5]), *start_of(5, 40), *tasks]
    assert [loss for _, loss in told_by(tmp_path, [first, second])] == [
        loss for loss in (4.0, 3.0, 2.9, 1.8, 1.7) for _ in range(2)
    ]


def test_the_power_is_that_of_the_settled_part() -> None:
    losses = np.geomspace(4.0, 0.1, 100)
    assert noise_power(losses, 7 * losses**0.6) == pytest.approx(0.6)
    assert noise_power(losses, 7 * losses**-0.6) == 0
    assert noise_power(losses, 7 * losses**3) == 1
    rising = np.where(losses > 2, 1 / losses, losses**0.6)
    assert noise_power(losses, rising) == pytest.approx(0.6)
    assert noise_power(np.full(100, 2.0), losses) == 0
    assert noise_power(losses[:3], losses[:3]) == 0


@pytest.mark.parametrize("delay_bound", [0, 4])
def test_replicas_measure_the_noise_scale_that_calibration_measures(delay_bound: int) -> None:
    """In steps so short that it hardly changes. Momentum would need more than these twenty batches."""
    data, model = regression()
    config = recipe(OptimizerConfig("sgd", 1e-3, 0.0), delay_bound=delay_bound, quorum=1.0)
    direct = measure_noise(config, data, copy.deepcopy(model), 100 * TOTAL).scale
    _, learner = trained(config, data, model)
    assert learner.noise_scale == pytest.approx(direct, rel=0.5)


@pytest.mark.parametrize("fragments", [1, 3])
def test_replicas_that_sum_fragments_end_with_one_model(fragments):
    data, model = regression(running_mean=True)
    config = recipe(delay_bound=4, quorum=0.25, fragments=fragments)
    job = scenario(RATES, TOTAL, BATCH, delay_bound=4, quorum=0.25, fragments=fragments)
    learner = ReplicaLearner(config, data, model, len(RATES), TOTAL)
    Simulation(job, learner).advance()
    digests = {tuple(replica.delayed().anchor.tolist()) for replica in learner._replicas.values()}
    assert len(digests) == 1
    assert len(learner._replicas[0].delayed().parts) == fragments
    assert learner.evaluate()["loss"] < 0.5 * data.loss(regression(running_mean=True)[1], data.train[:]).item()


def test_a_round_of_one_fragment_takes_a_part_of_the_links_time():
    seconds = {}
    for fragments in (1, 4):
        job = scenario(RATES, 40 * BATCH, BATCH, link=Link(0.0, 1e6), delay_bound=4, quorum=0.25, fragments=fragments)
        simulation = Simulation(dataclasses.replace(job, traffic=Traffic(4000, (4000,))))
        simulation.advance()
        seconds[fragments] = simulation.totals.communication_seconds / simulation.machine.version
    assert seconds[4] == pytest.approx(seconds[1] / 4, rel=0.1)


@pytest.mark.parametrize("optimizer", [OptimizerConfig("sgd", 0.05, 0.9), OptimizerConfig("adamw", 0.01)])
def test_ranks_go_back_where_delay_has_lost_training(
    optimizer: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have then is what synchronous training has, to rounding."""
    for name in ("DELAY_COSTS", "ADAPTIVE_DELAY_COSTS"):
        monkeypatch.setattr(rounds_rule, name, 0.0)
    compute, spoiled = ReplicaLearner.compute_slice, []

    def spoil(learner: ReplicaLearner, rank: int, task: Task, index: int) -> float:
        loss = compute(learner, rank, task, index)
        spoiled.append(task.synchronous_round is None)
        return math.nan if spoiled[-1] else loss

    data, model = regression()
    _, plain = trained(recipe(optimizer, delay_bound=0), data, copy.deepcopy(model))
    monkeypatch.setattr(ReplicaLearner, "compute_slice", spoil)
    simulation, learner = trained(recipe(optimizer, delay_bound="auto"), data, model)
    assert any(spoiled)
    bounds = [change.delay_bound for change in simulation.rounds_changes]
    assert bounds == [4, 0]
    for ours, theirs in zip(
        learner._replicas[2].model.parameters(), plain._replicas[2].model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_replicas_average_at_rest_is_a_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(optimizers: Sequence[torch.optim.Optimizer], samples: Sequence[int]) -> None:
        seen.extend(group["eps"] for optimizer in optimizers for group in optimizer.param_groups)
        average_states(optimizers, samples)

    monkeypatch.setattr(replicas, "average_states", look)
    trained(recipe(OptimizerConfig("adamw", 0.01), delay_bound=4), *regression())
    assert seen == [1e-8] * len(RATES)


def test_the_quadratic_goes_back_to_what_it_kept() -> None:
    config = recipe(delay_bound=4)
    learner = NoisyQuadratic(Landscape(3.0, 0.5, 1.0, 50.0), config, len(RATES), TOTAL)
    simulation = Simulation(scenario(RATES, total=TOTAL, batch=BATCH, delay_bound=4), learner)
    simulation.advance(rounds=5)
    learner.reset_to_anchor()
    kept = learner.anchor.copy()
    learner.keep()
    simulation.advance(rounds=5)
    assert not np.array_equal(learner.anchor, kept)
    learner.go_back(0)
    assert np.array_equal(learner.anchor, kept)


@pytest.mark.parametrize(("name", "adaptive"), [("sgd", False), ("adamw", True)])
def test_the_rule_knows_the_optimizer(name: str, adaptive: bool) -> None:
    config = dataclasses.replace(recipe(OptimizerConfig(name, 0.01)), emulation=EmulationConfig("quickstart", 400.0))
    data, model = regression()
    assert scenario_of(config, load_cluster("quickstart"), None, data, model).adaptive == adaptive
