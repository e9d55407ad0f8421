"""A job loads what it needs while nobody looks for garbage; from then on it is collected as ever."""

from __future__ import annotations

from pathlib import Path

import in_process

MINE = """
import gc
import torch

collected = []

class Watched(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        collected.append(gc.isenabled())
        super().__init__(*args, **kwargs)

    def step(self, closure=None):
        collected.append(gc.isenabled())
        super().step(closure)
"""


def test_garbage_is_collected_from_the_first_step_on(here: Path) -> None:
    assert in_process.train("--run.dir", "run", "--run.samples", 128, "--optimizer.name", "mine:Watched") == 0
    import mine  # type: ignore[import-not-found]

    first, *steps = mine.collected
    assert not first
    assert steps
    assert all(steps)
