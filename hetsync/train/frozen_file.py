"""Frozen weights in checkpoints: a job writes them once, and what follows holds the same file by a hard link."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from hetsync.sync.digests import Digests


def frozen_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of its state_dict that no step trains."""
    weights = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name in frozen}


class Kept(NamedTuple):
    """A file of frozen weights: its digest, and those of the weights in it."""

    path: Path
    sha256: str
    weights: dict[str, str]


class FrozenFile:
    """Of one job, on the rank that saves: `look`, then `link`, or write the file anew, and `keep` what is there now."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._kept: Kept | None = None
        self._now: dict[str, str] = {}

    def look(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Are they what this job has written last?"""
        self._now = self._digests.of(weights, weights)
        return self._kept is not None and self._kept.weights == self._now

    def link(self, path: Path) -> str | None:
        """Put what was written last here, too. Its digest; None where it is other weights', or gone, or the disk knows
        no such links."""
        if self._kept is None or self._kept.weights != self._now:
            return None
        try:
            os.link(self._kept.path, path)
        except OSError:
            return None
        return self._kept.sha256

    def keep(self, path: Path, sha256: str) -> None:
        """What was looked at lies there now."""
        self._kept = Kept(path, sha256, self._now)
