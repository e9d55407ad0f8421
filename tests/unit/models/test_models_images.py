"""Image models: published sizes, shapes, gradients, learning, and independence of who else is in the batch."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from hetsync import models
from hetsync.config.parser import read_recipe
from hetsync.config.schema import ModelConfig
from hetsync.data import Data
from hetsync.data.metrics import cross_entropy
from hetsync.errors import UserError
from hetsync.models.image_layers import AuxiliaryHead, BatchNorm2d
from hetsync.models.nas_cells import DropPath, FactorizedReduction

RECIPES = Path(models.__file__).parent / "recipes"
CLASSES = 10

NAS = {"cells": 1, "filters": 8, "drop_path": 0.0, "dropout": 0.0}
TINY = {
    "resnet18-cifar": ("resnet18", {"stem": "cifar", "width": 4}),
    "resnet18-imagenet": ("resnet18", {"stem": "imagenet", "width": 4}),
    "resnet50": ("resnet50", {"stem": "cifar", "width": 4}),
    "inception_v3": ("inception_v3", {"width": 0.05, "image_size": 75, "dropout": 0.0}),
    "nasnet_a_cifar": ("nasnet_a_cifar", {**NAS, "filters": 4}),
    "nasnet_a_mobile": ("nasnet_a_mobile", NAS),
    "nasnet_a_large": ("nasnet_a_large", NAS),
    "pnasnet5_cifar": ("pnasnet5_cifar", {**NAS, "filters": 4}),
    "pnasnet5_mobile": ("pnasnet5_mobile", NAS),
    "pnasnet5_large": ("pnasnet5_large", {**NAS, "auxiliary": False}),
}
tiny = pytest.mark.parametrize("case", TINY)


def make(case: str) -> torch.nn.Module:
    torch.manual_seed(0)
    name, options = TINY[case]
    return models.build(name, classes=CLASSES, **options)


def batch(samples: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, size, size, generator=generator), torch.arange(samples) % CLASSES


def with_frozen_norms(model: torch.nn.Module) -> torch.nn.Module:
    """In training mode but for its normalisations, the one place where samples of a batch meet."""
    model.train()
    for module in model.modules():
        if isinstance(module, BatchNorm2d):
            module.eval()
    return model


def gradient(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    cross_entropy(model, (images, labels)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@functools.cache
def build_unallocated(name: str, **options) -> torch.nn.Module:
    """Of full size, without memory or time."""
    with torch.device("meta"):
        return models.build(name, **options)


def weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Published sizes.


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("resnet18", {}, 11_689_512),
        ("resnet50", {}, 25_557_032),
        ("inception_v3", {"auxiliary": False}, 23_834_568),
        ("inception_v3", {}, 27_161_264),
    ],
)
def test_weights_as_published_to_the_last(name, options, published):
    assert weights(build_unallocated(name, **options)) == published


@pytest.mark.parametrize(
    ("name", "published", "features"),
    [
        ("nasnet_a_mobile", 5.3e6, 1056),
        ("nasnet_a_large", 88.9e6, 4032),
        ("nasnet_a_cifar", 3.3e6, 768),
        ("pnasnet5_mobile", 5.1e6, 20 * 54),
        ("pnasnet5_large", 86.1e6, 4320),
        ("pnasnet5_cifar", 3.2e6, 20 * 48),
    ],
)
def test_weights_of_searched_networks_as_published_to_one_percent(name, published, features):
    model = build_unallocated(name)
    assert weights(model) - weights(model.auxiliary) == pytest.approx(published, rel=0.01)
    assert model.classifier.in_features == features


@pytest.mark.parametrize(
    ("case", "size", "middle"),
    [
        ("inception_v3", 299, 17),
        ("nasnet_a_mobile", 224, 14),
        ("nasnet_a_large", 331, 21),
        ("nasnet_a_cifar", 32, 16),
        ("pnasnet5_mobile", 224, 14),
        ("pnasnet5_cifar", 32, 16),
    ],
)
def test_auxiliary_head_sees_the_papers_map(case, size, middle):
    """Sizes at which the head's pooling and convolution leave exactly one pixel."""
    name, options = TINY[case]
    model = models.build(name, **{**options, **({"image_size": size} if name == "inception_v3" else {})})
    seen = []
    model.auxiliary.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[2:]))
    with torch.no_grad():
        model(batch(1, size)[0])
    assert seen == [(middle, middle)]
    assert (middle - 5) // 3 + 1 == model.auxiliary.map_size


# Every model.


@tiny
def test_scores_and_auxiliary_scores(case):
    model = make(case)
    images, _ = batch(2)
    out = model(images)
    if getattr(model, "auxiliary", None) is None:
        assert out.shape == (2, CLASSES)
    else:
        assert [scores.shape for scores in out] == [(2, CLASSES)] * 2
    assert model.eval()(images).shape == (2, CLASSES)


@tiny
def test_gradient_reaches_every_weight_tensor(case):
    model = make(case)
    gradient(model, *batch(4, 48))
    assert [name for name, p in model.named_parameters() if not p.grad.count_nonzero()] == []


@pytest.mark.each_value(4)
@tiny
def test_learns_sixteen_images_by_heart(case):
    model = make(case)
    examples = batch(16, 16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    while len(losses) < 25 and (not losses or losses[-1] > losses[0] / 2):
        optimizer.zero_grad()
        loss = cross_entropy(model, examples)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] <= losses[0] / 2, losses


@tiny
def test_evaluation_does_not_depend_on_the_rest_of_the_batch(case):
    model = make(case)
    images, _ = batch(5)
    model(images)  # running statistics other than the initial ones
    model.eval()
    with torch.no_grad():
        together, apart = model(images), torch.cat([model(images[:2]), model(images[2:])])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@tiny
def test_unequal_parts_weighted_by_samples_give_the_whole_gradient(case):
    model = make(case).double()
    images, labels = batch(4, 16)
    images = images.double()
    model(images)
    with_frozen_norms(model)
    whole = gradient(model, images, labels)
    parts = [gradient(model, images[part], labels[part]) * len(labels[part]) for part in (slice(1), slice(1, 4))]
    torch.testing.assert_close(sum(parts) / 4, whole, rtol=1e-8, atol=1e-10)


@tiny
def test_trains_on_a_single_sample(case):
    """The 1×1 maps of small images leave one value a channel, which nn.BatchNorm2d refuses."""
    assert gradient(make(case), *batch(1)).isfinite().all()


# Layers.


def test_one_value_is_normalised_by_running_statistics_and_leaves_them():
    norm = BatchNorm2d(3)
    norm(torch.randn(8, 3, 2, 2) + 5)
    before = copy.deepcopy(norm.state_dict())
    value = torch.randn(1, 3, 1, 1, requires_grad=True)
    trained = norm(value)
    trained.sum().backward()
    torch.testing.assert_close(norm.state_dict(), before)
    torch.testing.assert_close(trained, norm.eval()(value))
    assert value.grad.count_nonzero() == 3


def test_normalisation_is_pytorchs_elsewhere():
    ours, theirs = BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    features = torch.randn(2, 3, 1, 1)
    torch.testing.assert_close(ours(features), theirs(features))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@settings(deadline=None, max_examples=20)
@given(side=st.integers(1, 30), map_size=st.integers(4, 6))
def test_auxiliary_head_takes_any_map(side, map_size):
    head = AuxiliaryHead(4, 5, map_size, width=0.05)
    assert head(torch.randn(2, 4, side, side)).shape == (2, 5)


@settings(deadline=None, max_examples=20)
@given(side=st.integers(2, 9), outputs=st.integers(2, 5))
def test_factorized_reduction_halves_and_sees_both_diagonals(side, outputs):
    reduction = FactorizedReduction(2, outputs).eval()
    features = torch.randn(1, 2, side, side, requires_grad=True)
    reduced = reduction(features)
    assert reduced.shape == (1, outputs, (side + 1) // 2, (side + 1) // 2)
    reduced.square().sum().backward()
    used = features.grad[0, 0] != 0
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    assert torch.equal(used, rows % 2 == columns % 2)


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    drop = DropPath(0.25)
    dropped = drop(torch.ones(4000, 2, 3, 3))
    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert torch.equal(dropped, dropped[:, :1, :1, :1].expand_as(dropped))
    assert dropped.mean().item() == pytest.approx(1, abs=0.04)
    assert drop.eval()(dropped) is dropped


def test_drop_path_grows_over_depth_to_its_full_rate():
    model = build_unallocated("nasnet_a_cifar", drop_path=0.4)
    rates = [{1 - module.keep for module in cell.modules() if isinstance(module, DropPath)} for cell in model.cells]
    assert [rate for cell in rates for rate in cell] == pytest.approx([0.4 * (i + 1) / 20 for i in range(20)])


# Mistakes and recipes.


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("resnet18", {"stem": "mnist"}, "stem"),
        ("resnet18", {"width": 0}, "width"),
        ("resnet50", {"classes": "ten"}, "classes"),
        ("inception_v3", {"image_size": 32}, "image_size"),
        ("inception_v3", {"width": "wide"}, "width"),
        ("nasnet_a_cifar", {"cells": 0}, "cells"),
        ("nasnet_a_mobile", {"filters": 4}, "filters"),
        ("pnasnet5_cifar", {"drop_path": 1.0}, "drop_path"),
        ("pnasnet5_large", {"dropout": 1.5}, "dropout"),
    ],
)
def test_wrong_options_are_said_in_a_sentence(name, options, key):
    with pytest.raises(UserError, match=rf"^model\.options\.{key} is "):
        build_unallocated(name, **options)


def test_inception_says_how_to_train_on_small_images():
    with pytest.raises(UserError, match=r"model\.options\.image_size is null.*32×32.*75"):
        models.build("inception_v3", width=0.05)(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("cifar10_*.yaml")), ids=lambda path: path.stem)
def test_recipes_make_their_models(path):
    read_recipe(path)
    model = ModelConfig(**yaml.safe_load(path.read_text())["model"])
    assert build_unallocated(model.name, classes=CLASSES, **model.options).classifier.out_features == CLASSES


@pytest.mark.parametrize(("key", "name"), [("classes", "resnet18"), ("vocabulary", "ptb_lstm")])
def test_too_few_classes_or_words_for_the_data_are_refused(key: str, name: str) -> None:
    data = Data(TensorDataset(torch.zeros(4)), TensorDataset(torch.zeros(4)), model_options={key: 30})
    sentence = rf"model\.options\.{key} is 29, but the data has 30: leave it out, or give 30 or more"
    with pytest.raises(UserError, match=sentence):
        models.build_for(data, name, {key: 29})
    models.build_for(data, name, {key: 31})
