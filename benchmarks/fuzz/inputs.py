"""What HetSync reads: for each kind a sound input, and what its readers make of it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from benchmarks.fuzz.mutations import mutate
from hetsync import data, models
from hetsync.cli import data_sets, simulate, train
from hetsync.config.recipe_file import shipped_recipes
from hetsync.control.policy_network import load_network, load_policy, save_policy
from hetsync.emulation.cluster import load_cluster
from hetsync.emulation.jitter import jitter_sampler
from hetsync.errors import UserError
from hetsync.files import sha256_of
from hetsync.plan.plan_file import read_plan
from hetsync.report.live import LiveRun, slowest
from hetsync.report.page import page_of
from hetsync.report.run import read_run
from hetsync.report.trace import trace_of
from hetsync.simulate.script import load_script
from hetsync.sync.optimizers import build_optimizer
from hetsync.train import checkpoint

Damage = Callable[[Path, random.Random], None]


def damage_one_file(folder: Path, source: random.Random) -> None:
    mutate(source.choice(sorted(path for path in folder.rglob("*") if path.is_file())), source)


@dataclass(frozen=True)
class Kind:
    """Of input: `make` fills an empty folder, and `read` does with it what a user would. `weight`: of all cases."""

    make: Callable[[Path], None]
    read: Callable[[Path], None]
    damage: Damage = damage_one_file
    weight: int = 1


# Recipes.


def _make_recipe(folder: Path) -> None:
    config, *_ = train.parse([str(shipped_recipes()["digits"])])
    (folder / "recipe.yaml").write_text(yaml.safe_dump(asdict(config)))


def _read_recipe(folder: Path) -> None:
    """As far as ranks would begin to measure."""
    config, *_ = train.parse([str(folder / "recipe.yaml")])
    config.schedule.check(1000)
    if config.emulation.profile is not None:
        load_cluster(config.emulation.profile)
    samples = data.build(config.data.name, config.data.options)
    data.check_batch_size(samples, config.data.batch_size)
    build_optimizer(config.optimizer, models.build_for(samples, config.model.name, config.model.options))


# Cluster profiles with the traces that they name, scripts of changes, plans, policies.

PROFILE = """
name: mixed
source: made up
devices:
  - {name: fast, count: 2, memory_gib: 16, speed: 4.0, samples_per_second: {digits_cnn: 1200}, host: one}
  - {name: slow, count: 2, fixed_seconds: 0.01}
link: {latency_seconds: 0.001, bytes_per_second: 1.0e+8}
links: [{between: [fast, slow], bytes_per_second: 1.0e+7}]
jitter: {distribution: trace, path: trace.csv, hold: 3}
events: [{rank: 1, factor: 2.0, after_samples: 100, until_samples: 200}]
"""
SCRIPT = """
- {at_seconds: 1, rank: 1, slow_by: 2.5}
- {at_seconds: 2, rank: 1, recover: true}
- {at_seconds: 3, rank: 1, leave: true}
"""
PLAN = """
format: 1
model: {name: digits_cnn}
batch_size: 64
replicas:
  - {share: 24, micro_batches: 4, stages: [{ranks: [0], blocks: [a, b]}, {ranks: [2, 3], blocks: ["*"], in_flight: 2}]}
  - {stages: [{ranks: [1], blocks: ["*"]}]}
predicted: {step_seconds: 0.1, samples_per_second: 640.0, bytes_per_sample: 100.0, memory_bytes: {0: 1000, 1: 2000}}
"""


def _make_cluster(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(PROFILE)
    rows = [f"{'ab'[number % 2]},{number},{10 + number % 3}" for number in range(20)]
    (folder / "trace.csv").write_text("\n".join(["worker,time,batch_time", *rows]))


def _read_cluster(folder: Path) -> None:
    cluster = load_cluster(str(folder / "cluster.yaml"))
    ranks = range(min(cluster.size, 8))
    for rank in ranks:
        cluster.device_of(rank)
        sample = jitter_sampler(cluster.jitter, 0, rank)
        assert all(sample() >= 0 for _ in range(10))
    cluster.ring_link(ranks)


def _make_script(folder: Path) -> None:
    (folder / "script.yaml").write_text(SCRIPT)


def _read_script(folder: Path) -> None:
    load_script(folder / "script.yaml", 2)


def _make_plan(folder: Path) -> None:
    (folder / "plan.yaml").write_text(PLAN)


def _read_plan(folder: Path) -> None:
    read_plan(folder / "plan.yaml")


def _make_policy(folder: Path) -> None:
    save_policy(folder / "policy.safetensors", *load_policy(None))


def _read_policy(folder: Path) -> None:
    load_network(str(folder / "policy.safetensors"))


# Checkpoints.


def _parts() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return model, [torch.optim.AdamW(model.parameters())]


def _make_checkpoint(folder: Path) -> None:
    model, optimizers = _parts()
    model(torch.ones(2, 3)).sum().backward()
    optimizers[0].step()
    progress = checkpoint.Progress(
        samples_applied=64,
        version=2,
        ranks=2,
        shares=(5, 3),
        delay_bound=4,
        quorum=0.25,
        accumulation=1,
        train_seconds=1.0,
    )
    state = {"schedulers": [{"last": 3, "rates": [0.1, None]}], "registered": {"a": torch.ones(2)}}
    checkpoint.save(folder / "checkpoints", progress, model, optimizers, None, 1, state)


def _damage_checkpoint(folder: Path, source: random.Random) -> None:
    """Half of the time with digests that are made anew, or the digests would find it all."""
    damage_one_file(folder, source)
    (state_file,) = folder.rglob(checkpoint.STATE)
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        state = json.loads(state_file.read_bytes())
        if source.random() < 0.5:
            return
        state.pop("sha256", None)
        state["digests"] = {
            name: sha256_of(state_file.with_name(name)) for name in (checkpoint.MODEL, checkpoint.OPTIMIZER)
        }
        digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
        state_file.write_text(json.dumps({**state, "sha256": digest}))


def _read_checkpoint(folder: Path) -> None:
    checkpoint.verify(folder)
    with contextlib.redirect_stderr(io.StringIO()):
        loaded = checkpoint.load_newest(folder)
    checkpoint.restore(loaded, *_parts())


# Run folders.


def _make_run(folder: Path) -> None:
    words = ["digits", "--emulate", "quickstart", "--ranks", 2, "--run.samples", 2000, "--run.evaluate_every", 1000]
    _quietly(simulate.main, [*map(str, words), "--run.dir", str(folder)])


def _read_run(folder: Path) -> None:
    """As `hetsync top` and `hetsync trace` do."""
    run = LiveRun(folder)
    slowest(run.rows())
    run.progress()
    trace_of(read_run(folder))


def _read_page(folder: Path) -> None:
    page_of([folder])


# Data sets.


def _data_set(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        with contextlib.suppress(UserError):
            _quietly(data_sets.check, name, folder, True)
        built = data.build(name, {"path": str(folder)})
        for samples in (built.train, built.test):
            first = [samples[index] for index in range(min(3, len(samples)))]  # type: ignore[arg-type]
            if first and built.collate is not None:
                built.collate(first)

    return read


def _make_cifar10(folder: Path) -> None:
    labels_N, pixels_NP = np.arange(60) % 10, np.random.default_rng(0).integers(0, 256, (60, 3072), np.uint8)
    (folder / "data_batch_1.bin").write_bytes(
        np.concatenate([labels_N[:, None].astype(np.uint8), pixels_NP], 1).tobytes()
    )


def _make_pickled(folder: Path) -> None:
    labels_N, pixels_NP = np.arange(60) % 10, np.zeros((60, 3072), np.uint8)
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"labels": labels_N.tolist(), b"data": pixels_NP}, 4))


def _make_images(folder: Path) -> None:
    from PIL import Image

    for split in ("train", "test"):
        for name, color in (("cats", (200, 10, 20)), ("dogs", (10, 200, 20))):
            (folder / split / name).mkdir(parents=True)
            for number, form in enumerate(("png", "jpeg", "bmp")):
                Image.new("RGB", (20, 10), color).save(folder / split / name / f"{number}.{form}")


def _make_trips(folder: Path) -> None:
    steps = np.arange(4)
    moves = {"lngs": [104.0] * 4, "lats": (30.0 + 0.0045 * steps).tolist(), "states": [1.0] * 4}
    gaps = {"time_gap": (60.0 * steps).tolist(), "dist_gap": (0.5 * steps).tolist(), "dist": 1.5, "time": 180.0}
    trips = [{"driverID": 3, "dateID": day, "weekID": day % 7, "timeID": 548, **moves, **gaps} for day in range(1, 9)]
    (folder / "trips.jsonl").write_text("".join(json.dumps(trip) + "\n" for trip in trips))


def _make_geolife(folder: Path) -> None:
    head = ["Geolife trajectory", "WGS 84", "Altitude is in Feet", "Reserved 3", "0,2,255,My Track,0,0,2,8421376", "0"]
    for user in ("003", "004"):
        (folder / user / "Trajectory").mkdir(parents=True)
        for day in (24, 25):
            points = [
                f"{40 + second * 9e-5:.6f},116.3,0,492,{39744.9375 + day - 24 + second / 86400:.10f},2008-10-{day},22:"
                f"{30 + second // 60}:{second % 60:02}"
                for second in range(0, 900, 10)
            ]
            (folder / user / "Trajectory" / f"{day}.plt").write_text("\r\n".join([*head, *points, ""]))
        labels = "Start Time\tEnd Time\tTransportation Mode\r\n2008/10/24 22:00:00\t2008/10/24 23:00:00\ttaxi\r\n"
        (folder / user / "labels.txt").write_text(labels)


def _make_ptb(folder: Path) -> None:
    for split in ("train", "valid", "test"):
        (folder / f"ptb.{split}.txt").write_text(" the <unk> dog runs \n a cat sleeps here \n" * 20)


def _make_multi30k(folder: Path) -> None:
    for split in ("train", "val", "test_2016_flickr"):
        (folder / f"{split}.lc.norm.tok.en").write_text("a dog runs .\na cat\nthe dog sleeps here .\n")
        (folder / f"{split}.lc.norm.tok.de").write_text("ein hund rennt .\neine katze\nder hund schläft hier .\n")


def _quietly(function: Callable[..., object], *arguments: object) -> None:
    """Without its output, and with any exit status of a command that has found what it looked for."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        function(*arguments)


KINDS = {
    "recipe": Kind(_make_recipe, _read_recipe, weight=6),
    "cluster profile": Kind(_make_cluster, _read_cluster, weight=4),
    "script": Kind(_make_script, _read_script),
    "plan": Kind(_make_plan, _read_plan, weight=2),
    "policy": Kind(_make_policy, _read_policy),
    "checkpoint": Kind(_make_checkpoint, _read_checkpoint, _damage_checkpoint, weight=4),
    "run folder": Kind(_make_run, _read_run, weight=4),
    "page of a run folder": Kind(_make_run, _read_page),
    "cifar10": Kind(_make_cifar10, _data_set("cifar10")),
    "cifar10, pickled": Kind(_make_pickled, _data_set("cifar10")),
    "image_folder": Kind(_make_images, _data_set("image_folder")),
    "deeptte": Kind(_make_trips, _data_set("deeptte"), weight=2),
    "geolife": Kind(_make_geolife, _data_set("geolife")),
    "ptb": Kind(_make_ptb, _data_set("ptb")),
    "multi30k": Kind(_make_multi30k, _data_set("multi30k")),
}
