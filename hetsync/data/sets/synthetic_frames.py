"""Clips of soft blobs that move, made on the spot, whose best predictor is known.

Two or three Gaussians keep their velocities on a torus: what leaves a frame on one side comes back on the other. Every
pixel of every frame has noise of its own, which nobody can predict: no mean squared error is below its variance, which
is that of who knows where all blobs are and go (`BestPredictor`). No figure on them says anything about real frames.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from hetsync.config.checks import at_least
from hetsync.data import Data
from hetsync.data.sets.frame_prediction import Batch, frame_data
from hetsync.data.sets.parts import require_counts, split

BLOBS = 3  # of which the last is not there in every other clip
LEAST_SIZE = 8  # pixels: a blob shall not meet itself around the torus
SPEED = 1.0  # pixels a frame along each axis, at most
WIDTHS = (1.0, 2.0)  # deviations in pixels
HEIGHTS = (0.5, 1.0)  # of a blob's peak


def synthetic_frames(
    clips: int = 1200,
    size: int = 16,
    steps: int = 5,
    horizon: int = 5,
    seed: int = 0,
    noise: float = 0.05,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> Data:
    """Clips of one window each, always alike for the same arguments. A batch also has `hidden`, which `move` takes and
    only the best predictor reads.

    Args:
        clips: Their number.
        size: Height and width in pixels.
        steps: Frames that a prediction is made from (T).
        horizon: Frames that are predicted (H).
        seed: Of the clips.
        noise: Deviation of a pixel's noise.
        validation_fraction: Part of the clips to evaluate on while training: those before the test part.
        test_fraction: Part of the clips to test on: the last.
    """
    require_counts(clips=clips, steps=steps, horizon=horizon)
    for name, value, least in (("size", size, LEAST_SIZE), ("seed", seed, 0), ("noise", noise, 0)):
        at_least(f"data.options.{name}", value, least)
    parts = split(clips, "clips", validation_fraction, test_fraction)
    made = Clips(clips, size, steps, horizon, seed, noise)
    return frame_data(made, parts, horizon, {"best known": BestFrames()})


class Clips(Dataset[Batch]):
    """Each made when it is asked for."""

    def __init__(self, clips: int, size: int, steps: int, horizon: int, seed: int, noise: float) -> None:
        self._clips, self._size, self._steps, self._horizon = clips, size, steps, horizon
        self._seed, self._noise = seed, noise

    def __len__(self) -> int:
        return self._clips

    def __getitem__(self, index: int) -> Batch:
        rng = np.random.default_rng([self._seed, index])
        hidden_B6 = torch.from_numpy(self._hidden(rng))
        moved_F1YX = move(hidden_B6[None], range(self._steps + self._horizon), (self._size, self._size))[0]
        noise_F1YX = self._noise * rng.standard_normal(moved_F1YX.shape, np.float32)
        seen_F1YX = moved_F1YX + torch.from_numpy(noise_F1YX)
        return {"frames": seen_F1YX[: self._steps], "targets": seen_F1YX[self._steps :], "hidden": hidden_B6}

    def _hidden(self, rng: np.random.Generator) -> np.ndarray:
        """Of each blob (B, 6): its place in the first frame and its velocity, (y, x) both; its width; its height."""
        places_B2 = rng.uniform(0, self._size, (BLOBS, 2))
        velocities_B2 = rng.uniform(-SPEED, SPEED, (BLOBS, 2))
        widths_B1, heights_B1 = rng.uniform(*WIDTHS, (BLOBS, 1)), rng.uniform(*HEIGHTS, (BLOBS, 1))
        heights_B1[-1] *= rng.integers(2)
        return np.concatenate([places_B2, velocities_B2, widths_B1, heights_B1], 1).astype(np.float32)


def move(hidden_NB6: torch.Tensor, times: range, size: tuple[int, int]) -> torch.Tensor:
    """Frames (N, F, 1, Y, X) without noise at these times, counted from the first frame of a clip."""
    places_NB2, velocities_NB2, widths_NB1, heights_NB1 = hidden_NB6.split([2, 2, 1, 1], 2)
    times_F = torch.arange(times.start, times.stop, dtype=hidden_NB6.dtype, device=hidden_NB6.device)
    at_NBF2 = places_NB2[:, :, None] + velocities_NB2[:, :, None] * times_F[:, None]
    along = []  # each axis by itself, as a Gaussian is a product
    for axis, pixels in enumerate(size):
        pixels_P = torch.arange(pixels, dtype=hidden_NB6.dtype, device=hidden_NB6.device)
        away_NBFP = (pixels_P - at_NBF2[..., axis, None] + pixels / 2) % pixels - pixels / 2
        along.append(torch.exp(-((away_NBFP / widths_NB1[..., None]) ** 2) / 2))
    return torch.einsum("nb,nbfy,nbfx->nfyx", heights_NB1.squeeze(2), *along)[:, :, None]


class BestFrames(nn.Module):
    """The frames to come without their noise, by what is hidden from all others."""

    def forward(self, batch: Batch) -> torch.Tensor:
        steps, (horizon, _, *size) = batch["frames"].shape[1], batch["targets"].shape[1:]
        height, width = size
        return move(batch["hidden"], range(steps, steps + horizon), (height, width))
