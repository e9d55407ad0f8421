"""Graph WaveNet and DCRNN: predictions of a sample are its own, and a graph's order of sensors does not matter."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import batch_norm, conv2d

from hetsync import models
from hetsync.data.sets.sensor_network import Batch
from hetsync.errors import UserError
from hetsync.models.dcrnn import DCRNN, DiffusionGRU
from hetsync.models.graph_wavenet import GraphWaveNet
from hetsync.models.sensor_inputs import DiffusionConvolution, Walks, diffuse

MEAN, DEVIATION = 50.0, 10.0
SENSORS, STEPS, HORIZON = 6, 12, 4
SMALL: dict[str, dict[str, Any]] = {
    "graph_wavenet": {"residual": 8, "dilated": 8, "skip": 16, "end": 16, "dropout": 0.0, "norm": "layer"},
    "dcrnn": {"hidden": 8},
}
each_model = pytest.mark.parametrize("name", SMALL)
dense_or_sparse = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


def roads(sensors: int = SENSORS, seed: int = 0) -> np.ndarray:
    """Weights of a directed graph; no road leaves its last sensor, and none leads to its first."""
    generator = np.random.default_rng(seed)
    weights = generator.uniform(0.1, 1, (sensors, sensors)) * (generator.random((sensors, sensors)) < 0.5)
    weights[-1], weights[:, 0] = 0, 0
    return weights


def random_batch(samples: int, steps: int = STEPS, sensors: int = SENSORS, missing: float = 0.1) -> Batch:
    generator = torch.Generator().manual_seed(1)

    def readings(count: int) -> torch.Tensor:
        values = MEAN + DEVIATION * torch.randn(samples, count, sensors, generator=generator)
        return values.masked_fill(torch.rand(values.shape, generator=generator) < missing, math.nan)

    return {
        "values": readings(steps),
        "day_time": torch.rand(samples, steps, generator=generator),
        "weekday": torch.randint(7, (samples, steps), generator=generator),
        "future_day_time": torch.rand(samples, HORIZON, generator=generator),
        "future_weekday": torch.randint(7, (samples, HORIZON), generator=generator),
        "targets": readings(HORIZON),
    }


def in_double(batch: Batch) -> Batch:
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def build(name: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    given = {"sensors": SENSORS, "horizon": HORIZON, "mean": MEAN, "deviation": DEVIATION, "adjacency": roads()}
    return models.build(name, **{**given, **SMALL[name], **options})


def error(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean absolute error over the readings that are there."""
    present = ~batch["targets"].isnan()
    return (model(batch) - batch["targets"])[present].abs().mean()


@each_model
@dense_or_sparse
@pytest.mark.parametrize("steps", [1, 12, 20])
def test_predictions_are_of_each_step_and_sensor(name: str, sparse: bool, steps: int) -> None:
    model = build(name, sparse=sparse)
    predicted = model(random_batch(3, steps))
    assert predicted.shape == (3, HORIZON, SENSORS)
    assert predicted.dtype == torch.float32
    assert predicted.isfinite().all()


@each_model
@dense_or_sparse
def test_a_network_of_one_sensor_and_a_step(name: str, sparse: bool) -> None:
    batch = random_batch(1, steps=1, sensors=1, missing=0.0)
    batch["targets"] = batch["targets"][:, :1]
    for adjacency in ([[1.0]], torch.zeros(1, 1)):
        model = build(name, sensors=1, horizon=1, adjacency=adjacency, sparse=sparse, **norm_of(name, "batch"))
        assert model(batch).shape == (1, 1, 1)
        assert model(batch).isfinite().all()


def norm_of(name: str, norm: str) -> dict[str, Any]:
    return {"norm": norm} if name == "graph_wavenet" else {}


@each_model
@dense_or_sparse
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_prediction_depends_on_its_sample_alone(name: str, sparse: bool, training: bool) -> None:
    """While training with norm "layer", and without lessons, which are drawn."""
    options = norm_of(name, "layer" if training else "batch") or {"sampling_decay": 0}
    model = build(name, sparse=sparse, **options).double().train(training)
    batch = in_double(random_batch(5))
    with torch.no_grad():
        together = model(batch)
        alone = torch.cat([model({key: value[[n]] for key, value in batch.items()}) for n in range(5)])
    assert together.std(0).min() > 1e-4
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


@each_model
def test_sparse_graphs_are_as_dense_ones(name: str) -> None:
    batch = random_batch(3)
    results = []
    for sparse in (False, True):
        model = build(name, sparse=sparse)
        walk = model.get_buffer("walks.along")
        assert walk.is_sparse is sparse
        torch.manual_seed(2)  # of the lessons
        loss = error(model, batch)
        loss.backward()
        results.append([model.eval()(batch), *(weight.grad for weight in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@each_model
@dense_or_sparse
def test_half_precision_is_for_what_is_inside(name: str, sparse: bool) -> None:
    """Readings of about 50 would be known to 0.25 only."""
    model, batch = build(name, sparse=sparse).eval(), random_batch(8)
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(batch)
        error(model, batch).backward()
    assert predicted.dtype == torch.float32
    assert not torch.equal(predicted, predicted.bfloat16().float())
    assert not torch.equal(predicted, model(batch))
    torch.testing.assert_close(predicted, model(batch), rtol=0, atol=0.2)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@each_model
@dense_or_sparse
def test_missing_readings_are_as_the_mean_and_gradients_stay_finite(name: str, sparse: bool) -> None:
    model = build(name, sparse=sparse)
    batch = random_batch(4, missing=0.4)
    error(model, batch).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    values = torch.where(batch["values"].isnan(), MEAN, batch["values"])
    with torch.no_grad():
        assert torch.equal(model.eval()(batch | {"values": values}), model(batch))


@each_model
def test_every_weight_and_every_feature_counts(name: str) -> None:
    model = build(name)
    batch = random_batch(4)
    error(model, batch).backward()
    assert all(weight.grad is not None and weight.grad.norm() > 0 for weight in model.parameters())
    model.eval()
    for feature in ("values", "day_time"):
        assert not torch.equal(model(batch | {feature: batch[feature] + 0.1}), model(batch))


@each_model
def test_predictions_have_the_units_of_readings(name: str) -> None:
    batch = random_batch(4)
    model, in_other_units = build(name).eval(), build(name, mean=10 * MEAN, deviation=10 * DEVIATION).eval()
    with torch.no_grad():
        predicted = in_other_units(batch | {"values": 10 * batch["values"]})
        torch.testing.assert_close(predicted, 10 * model(batch), rtol=1e-5, atol=1e-2)


@dense_or_sparse
def test_diffusion_is_as_by_hand(sparse: bool) -> None:
    weights = roads()
    walks = Walks(SENSORS, weights.tolist(), sparse).double()()
    assert [walk.is_sparse for walk in walks] == [sparse, sparse]
    nodes = torch.randn(SENSORS, 2, 3, dtype=torch.float64)
    by_hand = [nodes]
    for along in (weights, weights.T):
        before = nodes
        for _ in range(2):
            after = torch.zeros_like(before)
            for i in range(SENSORS):
                for j in range(SENSORS):
                    if along[i, j]:
                        after[i] += along[i, j] / along[i].sum() * before[j]
            by_hand.append(after)
            before = after
    diffused = diffuse(nodes, walks, 2)
    torch.testing.assert_close(diffused, torch.cat(by_hand, 2), rtol=1e-6, atol=1e-6)
    convolution = DiffusionConvolution(3, 4, 2, 2).double()
    torch.testing.assert_close(convolution(nodes, walks), convolution.mix(diffused))


@each_model
@dense_or_sparse
def test_the_order_of_sensors_does_not_matter(name: str, sparse: bool) -> None:
    order = torch.randperm(SENSORS, generator=torch.Generator().manual_seed(3))
    model = build(name, sparse=sparse).double().eval()
    permuted = build(name, sparse=sparse, adjacency=roads()[order][:, order]).double().eval()
    state = model.state_dict()
    permuted.load_state_dict({key: value[order] if "learnt_walk" in key else value for key, value in state.items()})
    batch = in_double(random_batch(3))
    with torch.no_grad():
        predicted, again = model(batch), permuted(batch | {"values": batch["values"][:, :, order]})
    torch.testing.assert_close(again, predicted[:, :, order], rtol=1e-9, atol=1e-9)
    assert (again - predicted).abs().max() > 1e-3


@each_model
@dense_or_sparse
def test_graphs_move_with_the_model_and_are_no_part_of_it(name: str, sparse: bool) -> None:
    model = build(name, sparse=sparse)
    walks = {"walks.along", "walks.against"}
    assert walks <= dict(model.named_buffers()).keys()
    assert walks.isdisjoint(model.state_dict())
    assert walks.isdisjoint(dict(model.named_parameters()))
    assert {walk.dtype for walk in copy.deepcopy(model).double().get_submodule("walks")()} == {torch.float64}
    assert {walk.device.type for walk in model.to("meta").get_submodule("walks")()} == {"meta"}


def test_the_graph_is_used() -> None:
    batch = random_batch(3)
    for name in SMALL:
        model, other = build(name).eval(), build(name, adjacency=roads(seed=1)).eval()
        assert not torch.allclose(model(batch), other(batch))


@dense_or_sparse
def test_graph_wavenet_learns_a_graph_where_none_is_given(sparse: bool) -> None:
    model = build("graph_wavenet", adjacency=None, sparse=sparse)
    assert not list(model.buffers())
    batch = random_batch(3)
    error(model, batch).backward()
    gradient = model.get_parameter("learnt_walk.source").grad
    assert gradient is not None
    assert gradient.norm() > 0
    torch.testing.assert_close(model.get_submodule("learnt_walk")().sum(1), torch.ones(SENSORS))


def test_graph_wavenet_reads_thirteen_steps() -> None:
    model = build("graph_wavenet").double().eval()
    batch = in_double(random_batch(2, steps=14, missing=0.0))

    def differs(step: int) -> bool:
        values = batch["values"].clone()
        values[:, step] += DEVIATION
        return not torch.equal(model(batch | {"values": values}), model(batch))

    assert [differs(step) for step in (0, 1, 13)] == [False, True, True]


def test_graph_wavenet_is_that_of_the_paper() -> None:
    """Which convolves (N, C, S, T), and has a skip of each step of each layer, of which the last step remains."""
    model = build("graph_wavenet", norm="batch").double().eval()
    assert isinstance(model, GraphWaveNet)
    batch = in_double(random_batch(2, missing=0.0))
    values_NTS = (batch["values"] - MEAN) / DEVIATION
    features_NCTS = torch.stack([values_NTS, batch["day_time"][:, :, None].expand_as(values_NTS)], 1)
    x = model.start(torch.cat([torch.zeros_like(features_NCTS[:, :, :1]), features_NCTS], 2).permute(0, 3, 2, 1))
    x, skips_NSTC = x.permute(0, 3, 1, 2), torch.empty(0)
    supports = [*model.walks(), model.learnt_walk()]
    for number, dilation in enumerate([1, 2] * 4):
        layer = model.temporal[number].convolution
        kernels = layer.weight.unflatten(1, (2, 8)).transpose(1, 2)[:, :, None]
        filtered, gates = conv2d(x, kernels, layer.bias, dilation=(1, dilation)).chunk(2, 1)
        gated = filtered.tanh() * gates.sigmoid()
        skip_NSTC = model.skips[number](gated.movedim(1, 3))
        skips_NSTC = skip_NSTC if number == 0 else skips_NSTC[:, :, -skip_NSTC.shape[2] :] + skip_NSTC
        if number < 7:
            powers = [torch.eye(SENSORS).double(), *(power for each in supports for power in (each, each @ each))]
            diffused = torch.cat([torch.einsum("ij,ncjt->ncit", power, gated) for power in powers], 1)
            mix, norm = model.spatial[number].diffusion.mix, model.spatial[number].norm
            x = mix(diffused.movedim(1, 3)).movedim(3, 1) + x[..., -gated.shape[3] :]
            x = batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    assert skips_NSTC.shape[2] == 1
    expected_NHS = model.end(skips_NSTC.squeeze(2)).transpose(1, 2) * DEVIATION + MEAN
    torch.testing.assert_close(model(batch), expected_NHS)


def test_a_diffusing_gru_is_that_of_the_paper() -> None:
    """Its maps are of [x, h] at once, with 5 matrices each: none, and 1 and 2 steps along and against the roads."""
    walks = Walks(SENSORS, roads(), False)()
    matrices = [torch.eye(SENSORS), *(matrix for walk in walks for matrix in (walk, walk @ walk))]
    torch.manual_seed(0)
    gru = DiffusionGRU(3, 4, 2)
    x, h = torch.randn(SENSORS, 2, 3), torch.randn(SENSORS, 2, 4)

    def diffused(first: int, last: int, h: torch.Tensor, of_h: DiffusionConvolution) -> torch.Tensor:
        of_x = gru.reading.mix.weight[first:last]
        weights = torch.cat([of_x.unflatten(1, (5, 3)), of_h.mix.weight.unflatten(1, (5, 4))], 2)
        both = torch.stack(matrices), torch.cat([x, h], 2), weights
        return torch.einsum("kij,jnc,okc->ino", *both) + gru.reading.mix.bias[first:last]

    reset, update = torch.sigmoid(diffused(0, 8, h, gru.gates)).split(4, 2)
    candidate = torch.tanh(diffused(8, 12, reset * h, gru.candidate))
    expected = update * h + (1 - update) * candidate
    torch.testing.assert_close(gru(x[:, :, None], walks, h).squeeze(2), expected)
    states = gru(torch.stack([x, 2 * x], 2), walks)  # from zero
    first = gru(x[:, :, None], walks, torch.zeros_like(h))
    second = gru(2 * x[:, :, None], walks, first.squeeze(2))
    torch.testing.assert_close(states, torch.cat([first, second], 2))


def taught(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Of each sample, whether its targets but the last change its second prediction while training."""
    with torch.no_grad():
        predicted = []
        for targets in (batch["targets"], batch["targets"] + 5 * DEVIATION):
            torch.manual_seed(0)
            predicted.append(model.train()(batch | {"targets": targets}))
    differs = (predicted[0] != predicted[1]).any(2)
    assert not differs[:, 0].any()
    return differs[:, 1]


@dense_or_sparse
def test_scheduled_sampling_fades(sparse: bool) -> None:
    model = build("dcrnn", hidden=4, layers=1, sampling_decay=1000, sparse=sparse)
    assert isinstance(model, DCRNN)
    batch = random_batch(400, steps=2, missing=0.0)
    assert model.step_count == 0
    assert taught(model, batch).float().mean() > 0.98
    model.step_count = round(1000 * math.log(1000))
    assert taught(model, batch).float().mean() == pytest.approx(0.5, abs=0.1)
    model.step_count = 10**9
    assert not taught(model, batch).any()


def test_lessons_are_true_targets_normalised() -> None:
    """A target that is as the model would have predicted teaches nothing; where none is known, it reads its own."""
    model = build("dcrnn", sampling_decay=1e9)
    batch = random_batch(3, missing=0.0)
    with torch.no_grad():
        own = model.eval()(batch)
        model.train()
        torch.testing.assert_close(model(batch | {"targets": own}), own)
        torch.testing.assert_close(model(batch | {"targets": torch.full_like(own, math.nan)}), own)
        some = torch.where(torch.rand_like(own) < 0.5, math.nan, own)
        torch.testing.assert_close(model(batch | {"targets": some}), own)
        assert not torch.allclose(model(batch | {"targets": own + DEVIATION}), own)


@each_model
def test_targets_are_no_inputs(name: str) -> None:
    model = build(name)
    blind = random_batch(3)
    del blind["targets"]
    assert model.eval()(blind).isfinite().all()
    model = build(name, **({"sampling_decay": 0} if name == "dcrnn" else {}))
    assert model.train()(blind).isfinite().all()


def test_sizes_of_the_papers() -> None:
    """The authors' programs have 309,400 (of which 15,712 get no gradient) and 372,353."""
    graph = roads(207)
    sizes = {name: sum(weight.numel() for weight in models.build(name, adjacency=graph).parameters()) for name in SMALL}
    assert sizes == {"graph_wavenet": 309_400 - 8 * (32 * 32 + 32) - (7 * 32 * 32 + 32) - 2 * 32, "dcrnn": 372_353}


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        *((name, options, key) for name in SMALL for options, key in [
            ({"sensors": 0}, "sensors"),
            ({"horizon": 1.5}, "horizon"),
            ({"mean": math.nan}, "mean"),
            ({"deviation": 0.0}, "deviation"),
            ({"deviation": math.inf}, "deviation"),
            ({"adjacency": [[1.0, 2.0]]}, "adjacency"),
            ({"adjacency": [[1.0], [1.0, 2.0]]}, "adjacency"),
            ({"adjacency": "roads"}, "adjacency"),
            ({"adjacency": -np.ones((SENSORS, SENSORS))}, "adjacency"),
            ({"adjacency": torch.full((SENSORS, SENSORS), math.inf)}, "adjacency"),
            ({"order": 0}, "order"),
            ({"layers": 0}, "layers"),
            ({"sparse": "yes"}, "sparse"),
        ]),
        ("graph_wavenet", {"norm": "group"}, "norm"),
        ("graph_wavenet", {"dropout": 2}, "dropout"),
        ("graph_wavenet", {"embedding": 0}, "embedding"),
        ("dcrnn", {"adjacency": None}, "adjacency"),
        ("dcrnn", {"hidden": 0}, "hidden"),
        ("dcrnn", {"sampling_decay": -1}, "sampling_decay"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(name: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"model\.options\.{key}"):
        build(name, **options)


def diffusing_series(steps: int, sensors: int = 8) -> torch.Tensor:
    """(steps, S): what each sensor of a ring reads is mostly what the one before it has read, and noise."""
    generator = torch.Generator().manual_seed(4)
    state, series = torch.zeros(sensors), []
    for _ in range(steps):
        state = 0.3 * state + 0.65 * state.roll(1) + torch.randn(sensors, generator=generator)
        series.append(MEAN + DEVIATION * state)
    return torch.stack(series)


def windows(series: torch.Tensor) -> Batch:
    steps = len(series) - STEPS - HORIZON + 1
    part = torch.stack([series[start : start + STEPS + HORIZON] for start in range(steps)])
    times = torch.arange(steps)[:, None] + torch.arange(STEPS)
    return {"values": part[:, :STEPS], "day_time": times % 288 / 288, "targets": part[:, STEPS:]}


@pytest.mark.each_value
@each_model
@dense_or_sparse
def test_it_learns_diffusion(name: str, sparse: bool) -> None:
    ring = np.roll(np.eye(8), 1, 1)  # of each sensor to the next
    series = diffusing_series(700)
    train, test = windows(series[:500]), windows(series[500:])
    model = build(name, sensors=8, adjacency=ring, sparse=sparse, deviation=series.std().item())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(60):
        if isinstance(model, DCRNN):
            model.step_count = step
        rows = torch.randint(len(train["values"]), (64,))
        optimizer.zero_grad()
        error(model, {key: value[rows] for key, value in train.items()}).backward()
        optimizer.step()
    last, mean = ((test["targets"] - guess).abs().mean() for guess in (test["values"][:, -1:], series.mean()))
    with torch.no_grad():
        assert error(model.eval(), test) < 0.85 * min(last, mean)  # 0.66 of it is the least that can be


@each_model
def test_with_a_week_the_day_counts(name: str) -> None:
    model, batch = build(name, week=True).eval(), random_batch(3)
    other = {**batch, "weekday": (batch["weekday"] + 1) % 7}
    assert not torch.allclose(model(batch), model(other), atol=1e-4)
    plain = build(name).eval()
    torch.testing.assert_close(plain(batch), plain(other))


def test_dropout_is_of_training_alone() -> None:
    model, batch = build("graph_wavenet", dropout=0.5), random_batch(3)
    assert not torch.allclose(model(batch), model(batch), atol=1e-4)
    model.eval()
    torch.testing.assert_close(model(batch), model(batch))


def test_states_last_at_first() -> None:
    """Gates of reset and update are open to the state (Jozefowicz et al. 2015)."""
    layer = DiffusionGRU(2, 5, 2)
    assert layer.reading.mix.bias[:10].tolist() == [1.0] * 10
    assert layer.reading.mix.bias[10:].tolist() == [0.0] * 5
