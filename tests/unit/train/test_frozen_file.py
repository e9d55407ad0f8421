"""Weights that are not trained: written once, in each checkpoint, and always those of that moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import make_model, progress, same, steps
from torch import nn

from hetsync.errors import UserError
from hetsync.sync.digests import Digests
from hetsync.train import checkpoint
from hetsync.train.checkpoint import UnsoundError, load, restore, save
from hetsync.train.frozen_file import FrozenFile

FILES = ["frozen.safetensors", "model.safetensors", "optimizer.safetensors", "state.json"]


class Job:
    """With a first layer that is not trained."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_model()
        self.base = self.model.get_submodule("0")
        self.base.requires_grad_(False)
        self.optimizer = torch.optim.SGD([w for w in self.model.parameters() if w.requires_grad], 0.1, momentum=0.9)
        self.frozen = FrozenFile(Digests())

    def save(self, samples: int, keep: int = 9, **more: Any) -> Path:
        steps(self.model, self.optimizer, 1, seed=samples)
        to, stands = self.folder / "checkpoints", progress(samples)
        return save(to, stands, self.model, [self.optimizer], None, keep, frozen=self.frozen, **more)

    def comes_back(self, path: Path) -> bool:
        other = Job(self.folder)
        nn.init.zeros_(other.base.get_parameter("weight"))
        restore(load(path), other.model, [other.optimizer])
        return same(self.model, other.model)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def written(paths: list[Path]) -> int:
    """Files of frozen weights that there are on disk."""
    return len({(path / "frozen.safetensors").stat().st_ino for path in paths})


def test_they_are_written_once(job: Job) -> None:
    paths = [job.save(samples) for samples in (10, 20, 30)]
    assert written(paths) == 1
    assert [sorted(file.name for file in path.iterdir()) for path in paths] == [FILES] * 3
    assert job.comes_back(paths[-1])


def test_each_checkpoint_is_complete_without_the_others(job: Job) -> None:
    for samples in (10, 20, 30):
        path = job.save(samples, keep=1)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert job.comes_back(path)


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.detach().mul_(2),
    "through data": lambda weight: weight.data.mul_(2),  # as loops make a target network follow
    "other memory": lambda weight: setattr(weight, "data", weight.data + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_written_anew(job: Job, change: str) -> None:
    first = job.save(10)
    before = load(first).model["0.weight"]
    CHANGES[change](job.base.get_parameter("weight"))
    assert written([first, second := job.save(20)]) == 2
    assert job.comes_back(second)
    assert torch.equal(load(first).model["0.weight"], before)


def test_a_checkpoint_that_came_to_nothing_is_not_linked_to(job: Job) -> None:
    def refuse() -> None:
        raise UserError("a rank has gone")

    job.save(10)
    CHANGES["in place"](job.base.get_parameter("weight"))
    with pytest.raises(UserError, match="has gone"):
        job.save(20, agree=refuse)
    assert job.comes_back(job.save(30))


def test_weights_are_thawed_and_frozen_again(job: Job) -> None:
    paths = []
    for samples, trained in ((10, False), (20, True), (30, False)):
        job.base.requires_grad_(trained)
        paths.append(job.save(samples))
        assert (paths[-1] / "frozen.safetensors").exists() != trained
        assert job.comes_back(paths[-1])
    assert written([paths[0], paths[2]]) == 1


def test_a_disk_without_links_has_copies(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    paths = [job.save(samples) for samples in (10, 20)]
    assert written(paths) == 2
    assert job.comes_back(paths[-1])


def test_a_file_that_somebody_removed_is_written_again(job: Job) -> None:
    (job.save(10) / "frozen.safetensors").unlink()
    assert job.comes_back(job.save(20))


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damage_is_noticed(job: Job, damage: str) -> None:
    path = job.save(10)
    file = path / "frozen.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UnsoundError, match=r"samples-000000000010 .*frozen\.safetensors"):
        load(path)


def test_what_is_not_finite_is_not_saved(job: Job) -> None:
    job.save(10)
    job.base.get_parameter("weight").data[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"the weight 0\.weight is not finite"):
        job.save(20)


def test_weights_that_share_memory_come_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    path = save(tmp_path / "checkpoints", progress(10), model, [optimizer], None, 3)
    loaded = load(path)
    checkpoint.check_model(loaded, model)
    assert torch.equal(loaded.model["0.weight"], loaded.model["1.weight"])
