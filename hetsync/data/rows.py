"""Rows that `hetsync predict` writes, of classifiers: what was said of each sample, and pictures of wrong answers."""

from __future__ import annotations

import base64
import io
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

LARGEST_PICTURE = 64  # pixels on a side: larger ones are scaled down
SURE = 0.5  # probability from which a wrong answer gets a picture


def labelled(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    """A row a sample: its label, the most probable one, and that one's probability. Where samples are pictures, and
    Pillow is there, `image` has those of wrong answers: PNG in base64, None elsewhere."""
    inputs, labels = batch
    probability, found = model(inputs).float().softmax(1).max(1)
    rows = {"label": labels, "predicted_label": found, "probability": probability}
    if not _are_pictures(inputs) or find_spec("PIL") is None:
        return rows
    shown = ((found != labels) & (probability >= SURE)).tolist()
    images = [_png(picture) if wanted else None for picture, wanted in zip(inputs, shown, strict=True)]
    return {**rows, "image": np.array(images, object)}


def _are_pictures(inputs: Any) -> bool:
    return isinstance(inputs, torch.Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def _png(picture_CYX: torch.Tensor) -> str:
    """From its darkest to its brightest value: how it was normalised is not known."""
    from PIL import Image

    picture_CYX = picture_CYX.detach().float().cpu()
    least, greatest = picture_CYX.aminmax()
    picture_CYX = (picture_CYX - least) / (greatest - least).clamp(min=1e-12)
    if max(picture_CYX.shape[1:]) > LARGEST_PICTURE:
        factor = LARGEST_PICTURE / max(picture_CYX.shape[1:])
        picture_CYX = interpolate(picture_CYX[None], scale_factor=factor, mode="area")[0]
    pixels_YXC = (255 * picture_CYX).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels_YXC.squeeze(2) if pixels_YXC.shape[2] == 1 else pixels_YXC).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
