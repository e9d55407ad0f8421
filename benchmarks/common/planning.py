"""What plans are searched for in benchmarks: models of the papers in small, and clusters of their devices."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hetsync.balance.profile import StepTime
from hetsync.config.parser import recipe_of
from hetsync.data import Data
from hetsync.data.sets.multi30k import multi30k
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, PairLink
from hetsync.plan.evaluate import Evaluator
from hetsync.plan.recipe import PlannableModel, plannable_model
from hetsync.plan.search.search import LEAST_SAMPLES, Problem, micro_batch_numbers
from hetsync.simulate.recipe import build

BATCH = 128
ETHERNET = Link(5e-5, 1.25e9)  # of 10 Gbit/s
SLOWEST = 20.0  # samples a second of the slowest device
FIXED_SECONDS = 2e-3  # of each micro-batch on any device, so that many small ones are not free


class Workload(NamedTuple):
    model: str
    options: dict[str, Any]
    data: str
    data_options: dict[str, Any]


def random_images(size: int = 32) -> Data:
    """Of three channels and ten classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2 * BATCH, 3, size, size, generator=generator)
    labels = torch.randint(10, (2 * BATCH,), generator=generator)
    both = TensorDataset(images, labels)
    return Data(both, both, model_options={"classes": 10})


def random_text(words: int = 2000) -> Data:
    """Pairs of sentences of 4 to 24 words."""
    generator = torch.Generator().manual_seed(0)

    def sentence() -> str:
        length = int(torch.randint(4, 25, (), generator=generator))
        return " ".join(f"w{word}" for word in torch.randint(words, (length,), generator=generator).tolist())

    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val", "test_2016_flickr"):
            for language in ("en", "de"):
                lines = [sentence() for _ in range(2 * BATCH)]
                (Path(folder) / f"{split}.lc.norm.tok.{language}").write_text("\n".join(lines) + "\n")
        return multi30k(folder, vocabulary=words)


def chain_of_convolutions(classes: int, width: int = 32) -> nn.Module:
    """A model in which each block needs the one before only: what dynamic programming solves exactly."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for stage in range(3):
        channels = width * 2**stage
        for _ in range(3):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))


CIFAR_CELLS = {"cells": 2, "filters": 16, "auxiliary": False, "drop_path": 0.0}
IMAGES, TEXT = "benchmarks.common.planning:random_images", "benchmarks.common.planning:random_text"
WORKLOADS = {
    "inception_v3": Workload("inception_v3", {"width": 0.25, "image_size": 75}, IMAGES, {"size": 75}),
    "nmt": Workload("nmt", {"layers": 2, "hidden": 128}, TEXT, {}),
    "nasnet": Workload("nasnet_a_cifar", CIFAR_CELLS, IMAGES, {}),
    "pnasnet": Workload("pnasnet5_cifar", CIFAR_CELLS, IMAGES, {}),
    "deeptte": Workload("deeptte", {"hidden_size": 64}, "synthetic_city", {"trips": 400, "drivers": 10}),
    "chain": Workload("benchmarks.common.planning:chain_of_convolutions", {}, IMAGES, {}),
    "digits": Workload("digits_cnn", {}, "digits", {}),
}
CLUSTERS = {
    "v100-p100-k80": Cluster(
        "v100-p100-k80",
        "devices of the profile of this name; 10 Gbit/s",
        (
            DeviceGroup("V100", 2, 7.10, memory_gib=16),
            DeviceGroup("P100", 2, 4.23, memory_gib=16),
            DeviceGroup("K80", 4, 1.00, memory_gib=12),
        ),
        ETHERNET,
    ),
    "t4-v100-a100": Cluster(
        "t4-v100-a100",
        "devices of the profile of this name; 10 Gbit/s",
        (
            DeviceGroup("T4", 4, 1.00, memory_gib=16),
            DeviceGroup("V100", 2, 2.45, memory_gib=32),
            DeviceGroup("A100", 2, 3.13, memory_gib=40),
        ),
        ETHERNET,
    ),
    "two-hosts": Cluster(
        "two-hosts",
        "made up: NVLink-like within, 1 Gbit/s between",
        (
            DeviceGroup("V100", 2, 2.45, memory_gib=32, host="one"),
            DeviceGroup("T4", 2, 1.00, memory_gib=16, host="two"),
        ),
        Link(1e-5, 1e10),
        links=(PairLink(("one", "two"), 1e-3, 1.25e8),),
    ),
}


def plannable(name: str, ranks: int, profile_seconds: float) -> PlannableModel:
    """A workload's blocks and their costs: those in the user's cache, or measured now on one thread."""
    workload = WORKLOADS[name]
    config = recipe_of(
        {
            "run": {"profile_seconds": profile_seconds},
            "model": {"name": workload.model, "options": workload.options},
            "data": {"name": workload.data, "batch_size": BATCH, "options": workload.data_options},
        }
    )
    torch.set_num_threads(1)
    built, model = build(config)
    return plannable_model(config, built, model, ranks)


def problem_on(cluster: Cluster, model: PlannableModel, one_replica: bool) -> Problem:
    """On all devices of the cluster. `one_replica`: the model once, placed on all of them; else searches choose."""
    slowest = min(group.speed for group in cluster.devices)
    speeds = [cluster.device_of(rank).speed / slowest for rank in range(cluster.size)]
    times = [StepTime(FIXED_SECONDS, 1 / (SLOWEST * speed)) for speed in speeds]
    evaluator = Evaluator(model.cut.graph, model.costs, cluster, times, model.training)
    replicas = (tuple(range(cluster.size)),) if one_replica else None
    return Problem(evaluator, micro_batch_numbers(None, BATCH, 1), replicas, least_samples=LEAST_SAMPLES)


def problems(
    models: Iterable[str], clusters: Iterable[str], profile_seconds: float, one_replica: bool
) -> dict[tuple[str, str], Problem]:
    """By model and cluster."""
    clusters = list(clusters)
    found = {}
    for name in models:
        model = plannable(name, max(CLUSTERS[cluster].size for cluster in clusters), profile_seconds)
        for cluster in clusters:
            found[name, cluster] = problem_on(CLUSTERS[cluster], model, one_replica)
    return found
