"""Frames: files, windows, splits without overlap, errors a pixel, and the synthetic clips' known best."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from told import Told
from torch.utils.data import default_collate

from hetsync.data import Data, build
from hetsync.data.findings import Findings
from hetsync.data.sets.frame_prediction import LastFrame, frame_loss, frame_rows, frame_sums
from hetsync.data.sets.frames import (
    MOVING_MNIST,
    FrameWindows,
    Stored,
    check,
    frames,
    windows_in_time,
    windows_of_clips,
)
from hetsync.data.sets.parts import split
from hetsync.data.sets.synthetic_frames import BestFrames, synthetic_frames
from hetsync.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels(*shape: int, kind: Any = np.uint8) -> np.ndarray:
    values = np.random.default_rng(0).uniform(0, 256, shape)
    return values.astype(kind)


def saved(folder: Path, values: np.ndarray, name: str = "mine.npy") -> str:
    folder.mkdir()
    np.save(folder / name, values)
    return str(folder)


def sizes(data: Data) -> list[int]:
    return [len(part) for part in (data.train, data.validation, data.test)]  # type: ignore[arg-type]


# Files.


def test_clips(tmp_path: Path) -> None:
    values = pixels(20, 9, 6, 5)
    data = frames(saved(tmp_path / "clips", values), steps=4, horizon=3)
    assert sizes(data) == [16 * 3, 2 * 3, 2 * 3]
    assert data.model_options == {"horizon": 3, "largest": 255.0}
    sample = data.test[4]  # the second window of the last clip
    assert sample["frames"].shape == (4, 1, 6, 5)
    assert sample["frames"].dtype == torch.float32
    np.testing.assert_allclose(sample["frames"][:, 0], values[19, 1:5] / 255, rtol=1e-6)
    np.testing.assert_allclose(sample["targets"][:, 0], values[19, 5:8] / 255, rtol=1e-6)


def test_moving_mnist_is_as_published(tmp_path: Path) -> None:
    values = pixels(20, 30, 8, 8)
    published = frames(saved(tmp_path / "published", values, MOVING_MNIST))
    renamed = frames(saved(tmp_path / "renamed", values), clips_axis=1)
    for data in (published, renamed):
        assert sizes(data) == [24, 3, 3]
        np.testing.assert_allclose(data.train[7]["targets"][:, 0], values[10:, 7] / 255, rtol=1e-6)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_unpacked_once(save: Callable[..., None], tmp_path: Path) -> None:
    values = pixels(20, 4, 6, 5)
    save(tmp_path / "mine.npz", values)
    data = frames(str(tmp_path), steps=2, horizon=2)
    stored = data.train.dataset.stored  # type: ignore[attr-defined]
    np.testing.assert_array_equal(stored.open(), values)
    written = stored.path.stat().st_mtime_ns
    frames(str(tmp_path), steps=2, horizon=2)
    assert stored.path.stat().st_mtime_ns == written


def test_the_largest_value_comes_from_the_training_part(tmp_path: Path) -> None:
    series = pixels(50, 4, 4, kind=np.float64)
    series[39, 1, 1], series[40:, 0, 0] = 300.0, 900.0
    folder = saved(tmp_path / "series", series)
    data = frames(folder, steps=3, horizon=2)
    assert data.train.dataset.largest == 300  # type: ignore[attr-defined]
    assert frames(folder, steps=3, horizon=2, largest=10).train.dataset.largest == 10  # type: ignore[attr-defined]
    assert data.train[0]["frames"].dtype == torch.float32


def nothing(folder: Path) -> None:
    folder.mkdir()


def several_files(folder: Path) -> None:
    saved(folder, pixels(20, 20, 4, 4), "a.npy")
    np.savez(folder / "b.npz", one=pixels(3, 4, 4), two=pixels(3, 4, 4))
    (folder / "c.npy").write_bytes(b"no array")
    (folder / "d.npz").write_bytes(b"no archive")
    np.save(folder / "e.npy", pixels(20, 4))
    np.save(folder / "f.npy", np.zeros((40, 4, 4)))
    np.save(folder / "h.npy", np.where(np.arange(640) == 300, np.nan, 1).reshape(40, 4, 4))


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (nothing, {}, "files of frames are none: name one by data.options.file"),
        (several_files, {}, "a.npy, b.npz, c.npy, d.npz, e.npy, f.npy, h.npy: name one by data.options.file"),
        (several_files, {"file": "g.npy"}, "data.options.file is g.npy, which is no .npy or .npz in"),
        (several_files, {"file": "b.npz"}, "b.npz holds arrays one, two: save the frames alone"),
        (several_files, {"file": "c.npy"}, "c.npy cannot be read as frames"),
        (several_files, {"file": "d.npz"}, "d.npz cannot be read as frames"),
        (several_files, {"file": "e.npy"}, "e.npy holds uint8 of 20 × 4: give numbers of (clips, frames, Y, X)"),
        (
            several_files,
            {"file": "f.npy"},
            "of the training part is 0.0: mend the frames, or give data.options.largest",
        ),
        (several_files, {"file": "h.npy"}, "of the training part is nan: mend the frames"),
        (several_files, {"file": "f.npy", "largest": -1}, "data.options.largest is -1: it must be greater than 0"),
        (several_files, {"file": "a.npy", "clips_axis": 2}, "data.options.clips_axis is 2: give 0 or 1, or null"),
        (several_files, {"file": "a.npy", "horizon": 17}, "has 20 frames a clip, too few for windows of 4 and 17 more"),
        (several_files, {"file": "a.npy", "horizon": 0}, "data.options.horizon is 0: it must be at least 1"),
        (several_files, {"file": "a.npy", "test_fraction": 0.01}, "there are 20 clips, which leave none to train"),
        (several_files, {"file": "a.npy", "test_fraction": 1}, "which leave none to train"),
        (several_files, {"file": "f.npy", "horizon": 5, "largest": 1}, "has 40 frames, too few for windows of 4 and 5"),
    ],
)
def test_mistakes_are_one_sentence(
    make: Callable[[Path], None], options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    make(tmp_path / "files")
    with pytest.raises(UserError) as told:
        frames(str(tmp_path / "files"), **{"steps": 4, "horizon": 4, **options})
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


def test_a_checker_tells_of_frames_that_are_not_finite(tmp_path: Path) -> None:
    values = pixels(20, 6, 4, 5, kind=np.float32)
    values[3, 4, 0, 0], values[19, 5] = np.nan, np.inf
    folder = saved(tmp_path / "clips", values)
    for path in (Path(folder), Path(folder) / "mine.npy"):
        counted = Findings()
        check(path, counted)
        assert dict(counted.counts) == {"clips": 20, "frames of each": 6, "pixels high": 4, "pixels wide": 5}
        assert counted.problems["frames that are not finite"] == 2
    counted = Findings()
    check(tmp_path / "nowhere", counted)
    assert sum(counted.problems.values()) == 1


# Windows.


def test_a_series_is_cut_in_time(tmp_path: Path) -> None:
    series = np.arange(100, dtype=np.float32)[:, None, None] * np.ones((2, 2), np.float32)
    data = frames(saved(tmp_path / "series", series), steps=6, horizon=4, largest=1)

    def seen(part: Any, keys: tuple[str, ...]) -> set[float]:
        return {float(number) for sample in part for key in keys for number in sample[key][:, 0, 0, 0]}

    assert seen(data.train, ("frames", "targets")) == set(range(80))
    assert seen(data.validation, ("targets",)) == set(range(80, 90))
    assert seen(data.test, ("targets",)) == set(range(90, 100))
    assert seen(data.test, ("frames",)) == set(range(84, 96))  # which may look back


@given(st.integers(0, 3000), st.floats(0.01, 0.98), st.floats(0.01, 0.98), st.integers(1, 20), st.integers(1, 20))
def test_targets_of_a_part_are_in_no_window_of_an_earlier_one(
    count: int, validation: float, test: float, steps: int, horizon: int
) -> None:
    try:
        cut = split(count, "frames", validation, test)
    except UserError:
        return
    assert [number for part in cut for number in part] == list(range(count))
    parts = windows_in_time(cut, steps, horizon)
    for earlier, later in pairwise(parts):
        if earlier and later:
            assert earlier[-1] + steps + horizon <= later[0] + steps
    for part, own in zip(parts, cut, strict=True):
        if part:
            assert part[0] >= 0
            assert part[0] + steps >= own.start
            assert part[-1] + steps + horizon == own.stop


def test_windows_stay_in_their_clips() -> None:
    parts = windows_of_clips((range(3), range(3, 4), range(4, 6)), 7, 2, 3)
    assert parts == (range(9), range(9, 12), range(12, 18))


def test_other_processes_open_the_frames_and_are_not_sent_them(tmp_path: Path) -> None:
    folder = saved(tmp_path / "clips", pixels(50, 20, 16, 16))
    windows = FrameWindows(Stored.find(Path(folder), None, None), 5, 5, 255)
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    torch.testing.assert_close(pickle.loads(sent)[17], windows[17])


# Errors.


def random_batch(samples: int = 5, steps: int = 3, horizon: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "frames": torch.rand(samples, steps, 1, 6, 7, generator=generator),
        "targets": torch.rand(samples, horizon, 1, 6, 7, generator=generator),
    }


def test_errors_are_a_pixel_of_all_frames_and_of_the_first_and_last() -> None:
    batch = random_batch()
    predicted = torch.rand_like(batch["targets"])
    errors = (predicted - batch["targets"]).double().numpy()
    sums: dict[str, float] = {}
    for part in (slice(0, 2), slice(2, 5)):  # as two ranks would
        found = frame_sums(Told(predicted[part]), {"targets": batch["targets"][part]})
        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
    wanted = {
        "mse": (errors**2).mean(),
        "mae": np.abs(errors).mean(),
        "mse_first": (errors[:, 0] ** 2).mean(),
        "mse_last": (errors[:, -1] ** 2).mean(),
    }
    report = synthetic_frames(clips=20).report({**sums, "samples": 5})
    assert report == pytest.approx(wanted, rel=1e-6)
    assert frame_loss(Told(predicted), batch).item() == pytest.approx(wanted["mse"], rel=1e-6)


def test_predictions_that_would_be_broadcast_are_refused() -> None:
    batch = random_batch()
    for wrong in (batch["targets"][:, :1], batch["targets"][..., :1], batch["targets"].squeeze(2)):
        with pytest.raises(UserError, match=r"the model returned predictions of shape .* for targets of shape"):
            frame_loss(Told(wrong), batch)


def test_a_row_is_a_predicted_frame() -> None:
    batch = random_batch()
    predicted = torch.rand_like(batch["targets"])
    rows = frame_rows(Told(predicted), batch)
    assert {len(column) for column in rows.values()} == {5 * 4}
    at = 2 * 4 + 1  # the third sample's second frame
    errors = predicted[2, 1] - batch["targets"][2, 1]
    assert rows["steps_ahead"].tolist() == [1, 2, 3, 4] * 5
    torch.testing.assert_close(rows["error"][at], errors.square().mean().sqrt())


def test_the_last_frame_stays() -> None:
    batch = random_batch()
    found = LastFrame()(batch)
    assert found.shape == batch["targets"].shape
    for step in range(4):
        torch.testing.assert_close(found[:, step], batch["frames"][:, 2])


# The synthetic clips.


def batch_of(data: Data) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = default_collate([data.train[index] for index in range(len(data.train))])  # type: ignore[arg-type]
    return found


def test_they_are_the_same_each_time_and_others_by_their_seed() -> None:
    made, again, other = (synthetic_frames(clips=20, seed=seed) for seed in (3, 3, 4))
    assert sizes(made) == [16, 2, 2]
    torch.testing.assert_close(again.test[1], made.test[1])
    assert not torch.allclose(other.test[1]["frames"], made.test[1]["frames"])
    assert not torch.allclose(made.test[0]["frames"], made.test[1]["frames"])


def test_the_best_predictor_errs_by_the_noise_alone() -> None:
    data = synthetic_frames(clips=300, noise=0.1)
    batch = batch_of(data)
    found = {name: frame_loss(model, batch).item() for name, model in data.baselines.items()}
    assert found["best known"] == pytest.approx(0.01, rel=0.02)
    assert found["last frame"] > 0.03
    for key, change in (
        ("places", [1, 1, 0, 0, 0, 0]),
        ("speeds", [0, 0, 0.2, 0.2, 0, 0]),
        ("widths", [0] * 4 + [1, 0]),
    ):
        changed = {**batch, "hidden": batch["hidden"] + torch.tensor(change)}
        assert frame_loss(BestFrames(), changed) > 0.0105, key


def test_blobs_move_on_a_torus() -> None:
    """After as many frames as there are pixels, at one pixel a frame, a blob is where it was; each frame is the one
    before it, shifted."""
    hidden = torch.tensor([[[1.0, 14.0, 1.0, -1.0, 1.5, 0.8]]])
    batch = {"hidden": hidden, "frames": torch.zeros(1, 1, 1, 16, 16), "targets": torch.zeros(1, 16, 1, 16, 16)}
    moved = BestFrames()(batch)[0, :, 0]
    for before, after in pairwise(moved):
        torch.testing.assert_close(after, before.roll((1, -1), (0, 1)))
    assert moved[-1].max().item() == pytest.approx(0.8)
    assert divmod(int(moved[-1].argmax()), 16) == (1, 14)


def test_clips_have_two_or_three_blobs() -> None:
    hidden = batch_of(synthetic_frames(clips=200))["hidden"]
    there = (hidden[:, :, 5] > 0).sum(1)
    assert set(there.tolist()) == {2, 3}
    assert (hidden[:, :2, 5] >= 0.5).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clips": 5}, "there are 5 clips, which leave none to train"),
        ({"clips": 0}, "data.options.clips is 0: it must be at least 1"),
        ({"size": 4}, "data.options.size is 4: it must be at least 8"),
        ({"seed": -1}, "data.options.seed is -1: it must be at least 0"),
        ({"noise": -1}, "data.options.noise is -1: it must be at least 0"),
        ({"horizon": 0}, "data.options.horizon is 0: it must be at least 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        synthetic_frames(**options)


def test_a_run_that_goes_on_keeps_the_value_that_stood_for_1(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).uniform(0, 5, (20, 12, 4, 4)))
    options = {"path": str(tmp_path), "steps": 3, "horizon": 3}
    began = build("frames", options).model_options
    np.save(tmp_path / "a.npy", np.random.default_rng(0).uniform(0, 9, (20, 12, 4, 4)))
    assert build("frames", options).model_options["largest"] > 8
    again = build("frames", options, began)
    assert again.model_options == began
    assert again.train.dataset.largest == began["largest"] < 5  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="the data has horizon 2, and had 3 as the run began: give it those data"):
        build("frames", {**options, "horizon": 2}, began)
