"""Checkpoints: what is saved comes back, and whatever happens while saving, the newest complete one is whole."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetsync.errors import UserError
from hetsync.sync.digests import weights_sha256
from hetsync.train import checkpoint
from hetsync.train.checkpoint import Progress, complete, load_newest, restore, save

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def progress(samples: int) -> Progress:
    return Progress(
        samples_applied=samples,
        version=samples // 10,
        ranks=3,
        shares=(5, 3, 2),
        delay_bound=4,
        quorum=0.25,
        accumulation=2,
        train_seconds=1.5,
    )


class Run:
    """A run folder and something to save in it."""

    def __init__(self, folder: Path, optimizer: str = "momentum") -> None:
        self.folder = folder
        self.make = OPTIMIZERS[optimizer]
        self.model = make_model()
        self.optimizer = self.make(self.model)

    def save(self, samples: int, keep: int = 3, outer: torch.Tensor | None = None) -> Path:
        return save(self.folder / "checkpoints", progress(samples), self.model, [self.optimizer], outer, keep)

    def again(self) -> Run:
        """Another process: fresh weights, restored from the newest checkpoint."""
        other = Run(self.folder)
        other.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        other.optimizer = self.make(other.model)
        restore(load_newest(self.folder), other.model, [other.optimizer])
        return other


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_saved_comes_back(tmp_path: Path, optimizer: str) -> None:
    run = Run(tmp_path, optimizer)
    steps(run.model, run.optimizer, 3)
    run.save(30)
    other = run.again()
    assert same(run.model, other.model)
    steps(run.model, run.optimizer, 3, seed=1)
    steps(other.model, other.optimizer, 3, seed=1)
    assert same(run.model, other.model)


def test_where_the_run_stands_comes_back(run: Run) -> None:
    velocity = torch.arange(5.0)
    path = run.save(30, outer=velocity)
    loaded = load_newest(run.folder)
    assert path.name == "samples-000000000030"
    assert loaded.progress == progress(30)
    assert loaded.outer is not None
    assert torch.equal(loaded.outer, velocity)
    assert loaded.optimizer == {}  # momentum has no state before its first step, and `outer` is none of its


def test_weights_that_share_memory_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps(model, optimizer, 2)
    save(tmp_path / "checkpoints", progress(10), model, [optimizer], None, 3)
    loaded = load_newest(tmp_path)
    assert torch.equal(loaded.model["0.weight"], loaded.model["1.weight"])


SPARSE = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.cdouble])
def test_sparse_buffers_come_back(tmp_path: Path, layout: torch.layout, dtype: torch.dtype) -> None:
    model, other, graph = nn.Linear(3, 2), nn.Linear(3, 2), torch.eye(3, dtype=dtype) * 2
    model.register_buffer("graph", graph.to_sparse(layout=layout))
    other.register_buffer("graph", (graph * 2).to_sparse(layout=layout))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, other)]
    state = {"registered": {"graph": model.graph}}
    save(tmp_path / "checkpoints", progress(10), model, optimizers[:1], None, 3, state)
    loaded = load_newest(tmp_path)
    restore(loaded, other, optimizers[1:])
    for found in (other.graph, loaded.state["registered"]["graph"]):
        assert found.layout is layout
        assert torch.equal(found.to_dense(), graph)
    assert weights_sha256([other.graph]) == weights_sha256([model.graph])
    assert weights_sha256([other.graph]) != weights_sha256([(graph * 3).to_sparse(layout=layout)])


@pytest.mark.parametrize("dtype", [torch.cfloat, torch.cdouble])
def test_complex_weights_and_their_state_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=dtype)
        model.register_buffer("angles", torch.randn(2, dtype=dtype))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, dtype=dtype)).abs().sum().backward()
        optimizer.step()

    (model, optimizer), (other, its) = made(), made()
    step(model, optimizer)
    state = {"averages": [{"shadow": torch.randn(3, dtype=dtype)}]}
    save(tmp_path / "checkpoints", progress(10), model, [optimizer], None, 3, state)
    loaded = load_newest(tmp_path)
    restore(loaded, other, [its])
    assert torch.equal(loaded.state["averages"][0]["shadow"], state["averages"][0]["shadow"])
    assert same(model, other)
    step(model, optimizer)
    step(other, its)
    assert same(model, other)


def test_state_lies_in_memory_as_its_weights_do(tmp_path: Path) -> None:
    """Fused optimizers do not look at strides: a resumed run would step on other weights' moments."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer, 1)
    save(tmp_path / "checkpoints", progress(10), model, [optimizer], None, 3)
    other, its = make()
    restore(load_newest(tmp_path), other, [its])
    for one, each in ((model, optimizer), (other, its)):
        step(one, each, 2)
    assert same(model, other)


def test_nothing_is_pickled(run: Run) -> None:
    steps(run.model, run.optimizer, 1)
    path = run.save(10)
    assert sorted(file.name for file in path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    json.loads((path / "state.json").read_text())


def test_loading_unpickles_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    steps(run.model, run.optimizer, 1)
    run.save(10)
    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    run.save(20)
    run.again()


def test_the_newest_are_kept(run: Run) -> None:
    for samples in (10, 9_000, 20, 300):
        run.save(samples, keep=2)
    names = [path.name for path in complete(run.folder / "checkpoints")]
    assert names == ["samples-000000000300", "samples-000000009000"]
    assert load_newest(run.folder).progress.samples_applied == 9_000


def test_saving_twice_at_one_place_keeps_the_first(run: Run) -> None:
    path = run.save(10)
    written = (path / "state.json").stat().st_mtime_ns
    assert run.save(10) == path
    assert (path / "state.json").stat().st_mtime_ns == written


# A crash anywhere.


class Crash(BaseException):
    """The process is gone: no handler may tidy up after it."""


SINKS = [
    (checkpoint, "save_file"),
    (checkpoint, "flush_to_disk"),
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "rename"),
    (shutil, "rmtree"),
    (os, "unlink"),
    (os, "rmdir"),
]


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int, after: bool) -> list[str]:
    """The process dies at its `step`th change on disk, before it or after it."""
    done: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            number = len(done) - 1
            if number == step and not after:
                raise Crash
            result = real(*args, **kwargs)
            if number == step and after:
                raise Crash
            return result

        return call

    for owner, name in SINKS:
        monkeypatch.setattr(owner, name, wrap(name, getattr(owner, name)))
    return done


def saves_until_no_crash(tmp_path: Path, after: bool, check: Callable[[Run, bool], None]) -> set[str]:
    """Crash at the first step of the second save, at its second, and so on; `check(run, second is whole)`."""
    struck: set[str] = set()
    for step in range(100):
        run = Run(tmp_path / str(step))
        steps(run.model, run.optimizer, 1)
        run.save(10, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            steps(run.model, run.optimizer, 1)
            done = crash_at(patch, step, after)
            try:
                run.save(20, keep=1)
            except Crash:
                struck.add(done[step])
            else:
                assert step > 5
                return struck
        check(run, "rename" in done[: step + after])
    raise AssertionError("saving never came to an end")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_while_saving_leaves_a_whole_checkpoint(tmp_path: Path, after: bool) -> None:
    def check(run: Run, renamed: bool) -> None:
        newest = load_newest(run.folder)
        assert newest.progress.samples_applied == (20 if renamed else 10)
        # What the crash has left does not stand in the way of the next try, and goes with it.
        run.save(30, keep=1)
        assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["samples-000000000030"]

    struck = saves_until_no_crash(tmp_path, after, check)
    assert struck >= {"save_file", "write_text", "flush_to_disk", "mkdir", "rename", "rmtree"}


def test_a_folder_without_its_books_is_not_complete(run: Run) -> None:
    run.save(10)
    torn = run.save(20)
    (torn / "state.json").unlink()
    assert load_newest(run.folder).progress.samples_applied == 10
    run.save(20)  # and does not stand in the way
    assert load_newest(run.folder).progress.samples_applied == 20


# Mistakes and damage.


def test_a_full_disk_is_the_users_to_know(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(10)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        UserError, match=r"cannot write the checkpoint .*No space left.*free space or choose another run folder"
    ):
        run.save(20)
    monkeypatch.undo()
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["samples-000000000010"]
    assert load_newest(run.folder).progress.samples_applied == 10


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "rubbish", "header"])
def test_damage_is_the_users_to_know(run: Run, name: str, damage: str) -> None:
    steps(run.model, run.optimizer, 1)
    path = run.save(10) / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "header":
        path.write_bytes(b"\xff" * 16 + content[16:])
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "rubbish": b"[1, 2]"}[damage])
    with pytest.raises(UserError) as caught:
        run.again()
    message = str(caught.value)
    if name == "state.json" and damage == "missing":
        assert "no complete checkpoint" in message
    else:
        assert "samples-000000000010" in message
        assert name in message
        assert message.endswith("start afresh")
    assert "\n" not in message


def test_a_newer_format_is_neither_begun_afresh_nor_gone_back_from(run: Run) -> None:
    run.save(10)
    path = run.save(20) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))
    with pytest.raises(UserError, match=r"samples-0+20 has format 7, which a newer version .* go on with that one"):
        load_newest(run.folder)
    assert [name for name, sound, _ in checkpoint.verify(run.folder) if not sound] == ["samples-000000000020"]


def test_an_unknown_format_is_damage(run: Run) -> None:
    path = run.save(10) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "x"}))
    with pytest.raises(UserError, match=r"samples-0+10 has format x.*start afresh"):
        load_newest(run.folder)


def test_unknown_books_are_refused(run: Run) -> None:
    path = run.save(10) / "state.json"
    state = json.loads(path.read_text())
    state["progress"]["surprise"] = 1
    state["format"] = 1  # without digests, which would tell
    path.write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"samples-0+10 tells of surprise, which a newer version of HetSync has"):
        load_newest(run.folder)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no complete checkpoint in .*checkpoints; start afresh"):
        load_newest(tmp_path)


def test_another_model_is_refused(run: Run) -> None:
    steps(run.model, run.optimizer, 1)
    run.save(10)
    other = nn.Linear(3, 3)
    with pytest.raises(UserError, match="does not fit the model"):
        restore(load_newest(run.folder), other, [torch.optim.SGD(other.parameters(), lr=0.1)])


@pytest.mark.parametrize(("saved", "other"), [("adamw", "momentum"), ("momentum", "adamw")])
def test_another_optimizer_is_refused(tmp_path: Path, saved: str, other: str) -> None:
    run = Run(tmp_path, saved)
    steps(run.model, run.optimizer, 1)
    run.save(10)
    run.make = OPTIMIZERS[other]
    with pytest.raises(UserError, match="does not fit the optimizer"):
        run.again()


def test_progress_holds_plain_values_only() -> None:
    kinds = {field.type for field in dataclasses.fields(Progress)}
    assert kinds <= {"int", "float", "tuple[int, ...]", "WireFormat"}
