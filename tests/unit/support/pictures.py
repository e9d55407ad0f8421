"""Files of images for the data sets' tests, and what the sets make of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hetsync.data.findings import Findings
from hetsync.data.sets.images import Images

RED, GREEN, BLUE = (200, 10, 20), (10, 200, 20), (10, 20, 200)


def made(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels of all classes, and pixels of shape (count, 3072)."""
    return np.arange(count) % 10, np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)


def write_binary(file: Path, labels_N: np.ndarray, pixels_NP: np.ndarray) -> None:
    file.write_bytes(np.concatenate([labels_N[:, None].astype(np.uint8), pixels_NP], 1).tobytes())


def checked(check: Callable[[Path, Findings], None], path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    findings = Findings(lambda where, what: told.append((where, what)))
    check(path, findings)
    assert sum(findings.problems.values()) == len(told)
    return dict(findings.counts), told


def pixels(data: Images) -> np.ndarray:
    """The stored bytes, from what the data set gives."""
    images, _ = data.__getitems__(range(len(data)))
    return (images * data._deviation_C11 + data._mean_C11).round().to(torch.uint8).numpy()


def picture(color: tuple[int, int, int], size: tuple[int, int] = (20, 10), form: str = "PNG") -> bytes:
    image_module = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image_module.new("RGB", size, color).save(out, form)
    return out.getvalue()


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def archive(file: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(file, "w:gz") as out:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
