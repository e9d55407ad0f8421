"""Checkpoints that are not what was saved are never used, and weights that are not finite never saved."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import Run, progress, same, steps

from hetsync.errors import UserError
from hetsync.train import checkpoint
from hetsync.train.checkpoint import UnsoundError, complete, load, load_newest, save, verify

FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    steps(run.model, run.optimizer, 1)
    return run


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.3, 0.6, 0.99])
def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(
    run: Run, name: str, place: float, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save(10)
    flip(run.save(20) / name, place)
    assert load_newest(run.folder).progress == progress(10)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("hetsync: checkpoint samples-000000000020 ")
    assert said.endswith("; going on from samples-000000000010\n")
    assert name in said


@pytest.mark.parametrize("books", ["[" * 200_000, '{"format": ' + "[" * 5000 + "]" * 5000 + "}"])
def test_books_that_nobody_reads_hide_no_checkpoint_before(run: Run, books: str) -> None:
    run.save(10)
    (run.save(20) / "state.json").write_text(books)
    assert load_newest(run.folder).progress == progress(10)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_is_noticed(run: Run, name: str) -> None:
    first = run.save(10)
    steps(run.model, run.optimizer, 1, seed=1)
    second = run.save(20)
    (second / name).write_bytes((first / name).read_bytes())
    with pytest.raises(UnsoundError, match="samples-000000000020"):
        load(second)


def test_a_checkpoint_under_another_name_is_noticed(run: Run) -> None:
    path = run.save(10)
    moved = path.rename(path.with_name("samples-000000000070"))
    with pytest.raises(UnsoundError, match=r"samples-000000000070 .*is of 10 samples"):
        load(moved)


def test_where_none_is_sound_there_is_one_sentence(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for samples in (10, 20):
        flip(run.save(samples) / "model.safetensors", 0.9)
    both = r"samples-0+20 is damaged: model.*; samples-0+10 is damaged: model.*"
    with pytest.raises(UserError, match=rf"no checkpoint there can be used \({both}\); start afresh"):
        load_newest(run.folder)
    assert capsys.readouterr().err == ""


def test_a_damaged_checkpoint_is_replaced_when_training_comes_there_again(run: Run) -> None:
    flip(run.save(20) / "model.safetensors", 0.9)
    run.save(20)
    assert same(run.model, run.again().model)


def test_a_damaged_newest_one_does_not_cost_the_good_ones(run: Run) -> None:
    flip(run.save(30) / "model.safetensors", 0.9)
    for samples in (10, 20):
        run.save(samples, keep=1)
        assert load_newest(run.folder).progress.samples_applied == samples


def rewrite(path: Path, number: int, **changes: Any) -> None:
    """As a checkpoint of another format, and without digests."""
    state = json.loads((path / "state.json").read_text())
    state["format"] = number
    del state["sha256"], state["digests"]
    state["progress"].update(changes)
    (path / "state.json").write_text(json.dumps(state))


def test_checkpoints_without_digests_are_read(run: Run) -> None:
    path = run.save(10)
    rewrite(path, 1)
    assert load(path).progress == progress(10)
    assert same(run.model, run.again().model)


def test_checkpoints_of_the_second_format_are_read(run: Run) -> None:
    """Nothing was kept apart there."""
    path = run.save(10) / "state.json"
    state = json.loads(path.read_text())
    del state["sha256"]
    state["format"] = 2
    path.write_text(json.dumps({**state, "sha256": checkpoint._digest_of(state)}))
    assert verify(run.folder) == [("samples-000000000010", True, "is as it was saved")]
    assert same(run.model, run.again().model)


def test_digests_may_not_be_missing_where_they_belong(run: Run) -> None:
    path = run.save(10)
    rewrite(path, 2)
    with pytest.raises(UnsoundError, match="sha256"):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_applied": -10},
        {"samples_applied": 10.0},
        {"samples_applied": "10"},
        {"version": -1},
        {"version": None},
        {"version": 10**30},
        {"ranks": 0},
        {"ranks": True},
        {"shares": [5, 3]},
        {"shares": [5, 3, -1]},
        {"shares": [5, 3, 2.5]},
        {"shares": "532"},
        {"shares": [0, 0, 0]},
        {"delay_bound": -1},
        {"quorum": 0},
        {"quorum": "half"},
        {"accumulation": 0},
        {"fragments": 0},
        {"grace": -1},
        {"wire": "float16"},
        {"train_seconds": -1.0},
        {"train_seconds": math.nan},
    ],
    ids=str,
)
def test_values_out_of_range_are_a_sentence(run: Run, changes: dict[str, Any]) -> None:
    path = run.save(10)
    rewrite(path, 1, **changes)
    (key,) = changes
    with pytest.raises(UnsoundError, match=rf"samples-000000000010 .*{key}"):
        load(path)


# Verifying.


def test_verify_tells_of_each_checkpoint(run: Run) -> None:
    run.save(10)
    flip(run.save(20) / "optimizer.safetensors", 0.9)
    rewrite(run.save(30), 1)
    found = verify(run.folder)
    assert [name for name, _, _ in found] == [f"samples-{samples:012d}" for samples in (10, 20, 30)]
    assert [sound for _, sound, _ in found] == [True, False, True]
    assert "optimizer.safetensors" in found[1][2]
    assert "without digests" in found[2][2]


def test_verify_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no complete checkpoint in"):
        verify(tmp_path)


# What may not be saved.


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_saved(run: Run, value: float) -> None:
    run.save(10)
    with torch.no_grad():
        run.model[0].weight[0, 0] = value  # type: ignore[index]
    with pytest.raises(UserError, match=r"0\.weight .*not finite.* after 20 samples.*samples-000000000010"):
        run.save(20)
    assert [path.name for path in complete(run.folder / "checkpoints")] == ["samples-000000000010"]


def test_nor_is_an_optimizer_that_holds_nan(run: Run) -> None:
    next(iter(run.optimizer.state.values()))["momentum_buffer"].fill_(math.nan)
    with pytest.raises(UserError, match=r"optimizer's 0\.momentum_buffer is not finite.* after 20 .*no checkpoint"):
        run.save(20)


def test_a_mask_of_infinities_is_no_mistake(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = save(tmp_path / "checkpoints", progress(10), model, [optimizer], None, 3)
    assert load(path).model["mask"][1] == -math.inf
    model.mask.fill_(math.nan)
    with pytest.raises(UserError, match="mask is not finite"):
        save(tmp_path / "checkpoints", progress(20), model, [optimizer], None, 3)


def test_a_disk_that_is_full_is_told_apart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may go on without this checkpoint, where others will follow."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(checkpoint.DiskError):
        run.save(20)


# What does not fit.


def test_a_model_that_does_not_fit_is_named_by_its_first_difference(run: Run) -> None:
    run.save(10)
    other = Run(run.folder)
    other.model[0] = torch.nn.Linear(5, 8)  # type: ignore[index]
    other.optimizer = other.make(other.model)
    with pytest.raises(UserError, match=r"does not fit the model \(0\.weight is of shape \(8, 4\), not"):
        checkpoint.restore(load_newest(run.folder), other.model, [other.optimizer])


def test_an_optimizer_of_fewer_weights_does_not_fit(run: Run) -> None:
    run.save(10)
    fewer = torch.optim.SGD([next(run.model.parameters())], lr=0.1, momentum=0.9)
    with pytest.raises(UserError, match="does not fit the optimizer"):
        checkpoint.restore(load_newest(run.folder), run.model, [fewer])
