"""Frames of one's own, as .npy or .npz: clips, such as Moving MNIST's (Srivastava et al. 2015), or one long series."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hetsync.config.checks import at_least
from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.findings import Findings
from hetsync.data.sets.frame_prediction import frame_data
from hetsync.data.sets.parts import Parts, require_counts, split
from hetsync.errors import UserError, brief

VERSION = "1"  # of the cached layout
UNPACKED = "frames.npy"
MOVING_MNIST = "mnist_test_seq.npy"  # as published: (20 frames, 10,000 clips, 64, 64)
LARGEST_BYTE = 255.0
BLOCK = 1024  # frames that are looked at together


def frames(
    path: str = "data/frames",
    file: str | None = None,
    steps: int = 10,
    horizon: int = 10,
    clips_axis: int | None = None,
    largest: float | None = None,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> Data:
    """Windows of clips or of one long series, at each of their frames, split in their order. Frames stay on disk until
    they are used.

    A series is cut in time: no frame that is to be predicted for the test is in a window to train or to validate on,
    and none that is to be predicted for validation in one to train on.

    Args:
        path: Folder of the file.
        file: .npy or .npz of one array: clips (clips, frames, Y, X), or one series (frames, Y, X). null takes the only
            one.
        steps: Frames that a prediction is made from (T).
        horizon: Frames that are predicted (H).
        clips_axis: Which of clips' axes counts them, 0 or 1; the other counts frames. null takes 1 for Moving MNIST's
            mnist_test_seq.npy, else 0.
        largest: The value that stands for 1; null takes 255 for bytes, else the greatest of the training part.
        validation_fraction: Part of the clips or frames to evaluate on while training: those before the test part.
        test_fraction: Part of the clips or frames to test on: the last.

    Raises:
        UserError: The file is missing or is none of these, or an option is wrong.
    """
    require_counts(steps=steps, horizon=horizon)
    stored = Stored.find(Path(path), file, clips_axis)
    clips = stored.open()
    if stored.holds_clips:
        cut = split(len(clips), "clips", validation_fraction, test_fraction)
        seen, parts = clips[: cut[0].stop], windows_of_clips(cut, clips.shape[1], steps, horizon)
    else:
        cut = split(clips.shape[1], "frames", validation_fraction, test_fraction)
        seen, parts = clips[:, : cut[0].stop], windows_in_time(cut, steps, horizon)
    if not all(parts):
        raise UserError(
            f"{stored.path} has {clips.shape[1]} frames{' a clip' if stored.holds_clips else ''}, too few for windows"
            f" of {steps} and {horizon} more: lower data.options.steps or horizon"
        )
    largest = scale(seen, largest)
    data = frame_data(FrameWindows(stored, steps, horizon, largest), parts, horizon)
    return replace(data, model_options={**data.model_options, "largest": largest})


def check(path: Path, findings: Findings) -> None:
    """Count clips and frames; report what cannot be read, and frames with values that are not finite."""
    try:
        stored = Stored.find(path, None, None)
        clips = stored.open()
    except UserError as error:
        findings.problem(str(path), str(error))
        return
    findings.count("clips" if stored.holds_clips else "series", len(clips))
    findings.count("frames of each", clips.shape[1])
    findings.count("pixels high", clips.shape[2])
    findings.count("pixels wide", clips.shape[3])
    for number, clip in enumerate(clips):
        for start in range(0, len(clip), BLOCK):
            finite = np.isfinite(clip[start : start + BLOCK]).all((1, 2))
            for frame in start + np.flatnonzero(~finite):
                where = f"{stored.path}, clip {number}, frame {frame}"
                findings.problem(where, "has values that are not finite", "frames that are not finite")


class Stored:
    """Frames in a .npy file, which other processes open instead of being sent them.

    Attributes:
        path: The file.
        holds_clips: Or is it one series?
    """

    def __init__(self, path: Path, clips_axis: int) -> None:
        """UserError unless it holds frames."""
        self.path, self._clips_axis = path, clips_axis
        try:
            there = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path} cannot be read as frames: {brief(str(error))}") from error
        if there.ndim not in (3, 4) or not there.size or there.dtype.kind not in "buif":
            shape = " × ".join(map(str, there.shape))
            raise UserError(
                f"{path} holds {there.dtype} of {shape}: give numbers of (clips, frames, Y, X) or (frames, Y, X)"
            )
        self.holds_clips = there.ndim == 4

    @classmethod
    def find(cls, path: Path, file: str | None, clips_axis: int | None) -> Stored:
        """UserError where it is not clear which file it is, or it holds no frames."""
        if clips_axis not in (None, 0, 1):
            raise UserError(f"data.options.clips_axis is {clips_axis}: give 0 or 1, or null")
        found = path if path.is_file() else _only(path, file)
        axis = int(found.name == MOVING_MNIST) if clips_axis is None else clips_axis
        return cls(_unpacked(found) if found.suffix == ".npz" else found, axis)

    def open(self) -> np.ndarray:
        """(clips, frames, Y, X), mapped into memory; a series is one clip."""
        there = np.load(self.path, mmap_mode="r", allow_pickle=False)
        return np.moveaxis(there, self._clips_axis, 0) if self.holds_clips else there[None]


def _only(folder: Path, file: str | None) -> Path:
    if not folder.is_dir():
        raise UserError(f"data.options.path is {folder}, which is no folder: give that of the frames")
    if file is not None:
        if Path(file).suffix not in (".npy", ".npz") or not (folder / file).is_file():
            raise UserError(f"data.options.file is {file}, which is no .npy or .npz in {folder}: name a file there")
        return folder / file
    found = [path for path in sorted(folder.iterdir()) if path.suffix in (".npy", ".npz")]
    if len(found) != 1:
        there = brief(", ".join(path.name for path in found)) or "none"
        raise UserError(
            f"data.options.path is {folder}, where files of frames are {there}: name one by data.options.file"
        )
    return found[0]


def _unpacked(path: Path) -> Path:
    """The one array of a .npz, as a file that can be mapped into memory."""

    def build(folder: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            if len(names) != 1:
                there = brief(", ".join(name.removesuffix(".npy") for name in names)) or "none"
                raise UserError(f"{path} holds arrays {there}: save the frames alone")
            with archive.open(names[0]) as packed, (folder / UNPACKED).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)

    try:
        return cached_folder("frames", [path], VERSION, build) / UNPACKED
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{path} cannot be read as frames: {brief(str(error))}") from error


class FrameWindows(Dataset[dict[str, torch.Tensor]]):
    """All windows of clips, `steps` frames to predict `horizon` more, one for each frame; one clip after the other."""

    def __init__(self, stored: Stored, steps: int, horizon: int, largest: float) -> None:
        self.stored, self.steps, self.horizon, self.largest = stored, steps, horizon, largest
        self._clips = stored.open()

    def __len__(self) -> int:
        return len(self._clips) * self._a_clip

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        clip, start = divmod(index, self._a_clip)
        values_FYX = self._clips[clip, start : start + self.steps + self.horizon]
        scaled_F1YX = torch.from_numpy(values_FYX.astype(np.float32) / self.largest)[:, None]
        return {"frames": scaled_F1YX[: self.steps], "targets": scaled_F1YX[self.steps :]}

    @property
    def _a_clip(self) -> int:
        return max(0, self._clips.shape[1] - self.steps - self.horizon + 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clips": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clips = self.stored.open()


def windows_of_clips(clips: Parts, length: int, steps: int, horizon: int) -> Parts:
    """All windows of each part's clips, which have `length` frames."""
    a_clip = max(0, length - steps - horizon + 1)
    train, validation, test = (range(part.start * a_clip, part.stop * a_clip) for part in clips)
    return train, validation, test


def windows_in_time(frames: Parts, steps: int, horizon: int) -> Parts:
    """Windows that lie in the training frames; and those whose targets lie in the validation or test frames, which may
    look back into what comes before them."""
    first, *later = frames
    validation, test = (range(max(0, part.start - steps), part.stop - steps - horizon + 1) for part in later)
    return range(first.stop - steps - horizon + 1), validation, test


def scale(seen: np.ndarray, largest: float | None) -> float:
    """The value that stands for 1. UserError where it cannot be one."""
    if largest is None and seen.dtype == np.uint8:
        return LARGEST_BYTE
    if largest is not None:
        at_least("data.options.largest", largest, 0, above=True)
        return float(largest)
    blocks = (clip[start : start + BLOCK] for clip in seen for start in range(0, len(clip), BLOCK))
    greatest = float(np.max([block.max() for block in blocks]))
    if not 0 < greatest < np.inf:
        raise UserError(
            f"the greatest value of the training part is {greatest}: mend the frames, or give data.options.largest"
        )
    return greatest
