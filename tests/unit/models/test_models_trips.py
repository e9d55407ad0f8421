"""DeepTTE and the trajectory transformer: predictions and gradients of a trip are its own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hetsync import models
from hetsync.config.imports import import_object
from hetsync.config.parser import read_recipe
from hetsync.config.schema import DataConfig, ModelConfig
from hetsync.data import Data
from hetsync.data.catalogue import CATALOGUE
from hetsync.data.sets.trips import TripTable, collate, trip_data
from hetsync.errors import UserError

RECIPES = Path(models.__file__).parent / "recipes"
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("deeptte", {}),
    ("deeptte", {"pooling": "mean", "driver_size": 0, "slot_minutes": 60, "kernel_size": 4}),
    ("trajectory_transformer", {"width": 32, "layers": 2, "dropout": 0.0}),
]
each_model = pytest.mark.parametrize(("name", "options"), MODELS, ids=["attention", "mean", "transformer"])


def random_trips(count: int, seed: int = 0) -> TripTable:
    """Trips of 2 to 30 points, shorter than a window among them, whose speed depends on the driver."""
    generator = np.random.default_rng(seed)

    def trip(number: int) -> dict[str, Any]:
        points = 2 if number == 0 else int(generator.integers(2, 30))
        driver = int(generator.integers(3))
        dist_gap = np.cumsum(generator.uniform(0.1, 0.5, points)) - 0.1
        time_gap = dist_gap * (80, 120, 200)[driver]
        return {
            "driverID": driver,
            "dateID": number % 4,
            "weekID": number % 7,
            "timeID": int(generator.integers(1440)),
            "dist": dist_gap[-1],
            "time": time_gap[-1],
            "lngs": generator.normal(104, 0.05, points),
            "lats": generator.normal(30, 0.05, points),
            "states": generator.integers(0, 2, points),
            "time_gap": time_gap,
            "dist_gap": dist_gap,
        }

    return TripTable.from_records(trip(number) for number in range(count))


@pytest.fixture(scope="module")
def data() -> Data:
    return trip_data(random_trips(24), random_trips(8, seed=1))


def build(data: Data, name: str, options: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    model = models.build_for(data, name, options)
    with torch.no_grad():  # so that zero-initialised layers hide nothing
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double()


def batch_of(data: Data, indices: range | list[int]) -> dict[str, torch.Tensor]:
    batch = collate([data.train[index] for index in indices])
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def gradient(data: Data, model: torch.nn.Module, indices: range | list[int]) -> torch.Tensor:
    model.zero_grad()
    data.loss(model, batch_of(data, indices)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@each_model
def test_a_prediction_depends_on_its_trip_alone(data: Data, name: str, options: dict[str, Any]) -> None:
    model = build(data, name, options).eval()
    with torch.no_grad():
        together = model(batch_of(data, range(24)))
        alone = torch.cat([model(batch_of(data, [index])) for index in range(24)])
    assert together.shape == (24,)
    assert together.std() > 1e-3 * together.abs().mean()
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-7)


@each_model
def test_a_prediction_does_not_depend_on_what_pads_it(data: Data, name: str, options: dict[str, Any]) -> None:
    model = build(data, name, options).eval()
    batch = batch_of(data, range(2))
    longer = dict(batch)
    for key in ("lngs", "lats", "states", "time_gap", "dist_gap"):
        longer[key] = torch.cat([batch[key], batch[key][:, -1:].expand(-1, 5)], 1)
    with torch.no_grad():
        torch.testing.assert_close(model(longer), model(batch), rtol=1e-9, atol=1e-7)
        torch.testing.assert_close(data.loss(model, longer), data.loss(model, batch), rtol=1e-9, atol=1e-9)


@each_model
def test_times_are_labels_and_never_inputs(data: Data, name: str, options: dict[str, Any]) -> None:
    model = build(data, name, options).eval()
    batch = batch_of(data, range(8))
    blind = batch | {"time_gap": torch.zeros_like(batch["time_gap"]), "time": torch.ones_like(batch["time"])}
    with torch.no_grad():
        assert torch.equal(model(blind), model(batch))
        assert data.loss(model, blind) != data.loss(model, batch)


@each_model
def test_gradients_of_unequal_parts_sum_to_the_batch(data: Data, name: str, options: dict[str, Any]) -> None:
    model = build(data, name, options)
    parts = [range(0, 1), range(1, 4), range(4, 15), range(15, 24)]  # the first: one trip, shorter than a window
    whole = gradient(data, model, range(24))
    weighted = sum(len(part) / 24 * gradient(data, model, part) for part in parts)
    assert isinstance(weighted, torch.Tensor)
    assert whole.norm() > 1e-3
    assert (whole - weighted).norm() <= 1e-9 * whole.norm()


@pytest.mark.each_value(1)
@each_model
def test_it_learns(data: Data, name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.build_for(data, name, options)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    batch = collate([data.train[index] for index in range(24)])
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = data.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_sizes_of_the_paper() -> None:
    """Embeddings 24,000×16, 7×3 and 1,440×8; 128 cells; 33 + 28 inputs of the LSTM."""
    model = models.build("deeptte")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["attributes.driver.weight"] == (24_000, 16)
    assert shapes["attributes.week.weight"] == (7, 3)
    assert shapes["attributes.start.weight"] == (1440, 8)
    assert shapes["geo_conv.point.weight"] == (16, 4)
    assert shapes["geo_conv.convolution.weight"] == (32, 16, 3)
    assert shapes["lstm.weight_ih_l0"] == (4 * 128, 33 + 28)
    assert sum(parameter.numel() for parameter in model.parameters()) == 710_923


def test_the_local_loss_has_its_weight_and_its_constant(data: Data) -> None:
    batch = batch_of(data, range(6))

    def loss(**options: Any) -> float:
        return data.loss(build(data, "deeptte", options), batch).item()

    entire, local = loss(local_weight=0.0), loss(local_weight=1.0)
    assert loss() == pytest.approx(0.7 * entire + 0.3 * local)
    halved = loss(local_weight=1.0, mean_points=2 * (data.model_options["mean_points"] - 2) + 2)
    assert halved == pytest.approx(local / 2)


@each_model
def test_a_driver_beyond_the_table_shares_a_row(data: Data, name: str, options: dict[str, Any]) -> None:
    model = build(data, name, {**options, "drivers": 3}).eval()
    batch = batch_of(data, range(4))
    with torch.no_grad():
        assert torch.equal(model(batch | {"driver": batch["driver"] + 3_000_000}), model(batch))


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("deeptte", {"pooling": "max"}, "pooling"),
        ("deeptte", {"kernel_size": 1}, "kernel_size"),
        ("deeptte", {"driver_size": -1}, "driver_size"),
        ("deeptte", {"drivers": 0}, "drivers"),
        ("deeptte", {"dropout": 2}, "dropout"),
        ("deeptte", {"local_weight": "much"}, "local_weight"),
        ("trajectory_transformer", {"width": 30, "heads": 4}, "width"),
        ("trajectory_transformer", {"heads": 0}, "heads"),
        ("trajectory_transformer", {"layers": "two"}, "layers"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"model\.options\.{key}"):
        models.build(name, **options)


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("*.yaml") if not p.stem.startswith("cifar10")))
def test_recipes_make_their_models_and_know_their_data(recipe: str) -> None:
    path = RECIPES / f"{recipe}.yaml"
    read_recipe(path)
    settings = yaml.safe_load(path.read_text())
    model, data = ModelConfig(**settings["model"]), DataConfig(**settings["data"])
    graph = {"adjacency": np.eye(207)} if model.name == "dcrnn" else {}  # the data's, which has none without it
    assert models.build(model.name, **graph, **model.options)
    make = import_object("data.name", CATALOGUE[data.name].make)
    inspect.signature(make).bind(**data.options)
