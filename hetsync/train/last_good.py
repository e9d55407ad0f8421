"""A checkpoint in the host's memory, that every rank keeps of the last rest before delayed training: where delay loses
training, all go back to it (`rollback.py`), though nothing may have been saved to disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetsync.profiling.device import available_host_bytes
from hetsync.sync.optimizer_state import state_by_place
from hetsync.train import state_tree
from hetsync.train.checkpoint import Loaded, Progress, kind_of

MOST_OF_MEMORY = 0.5  # of what the host has left, by all of its ranks


def last_good(
    progress: Progress,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: torch.Tensor | None,
    state: Mapping[str, Any],
    ranks_here: int,
) -> Loaded | None:
    """At rest; as `checkpoint.save`. None where memory is short, of a host with so many ranks."""
    plain, tensors = state_tree.flatten(
        {"model": model.state_dict(), "optimizer": state_by_place(optimizers), "outer": outer, "state": dict(state)}
    )
    free, needed = available_host_bytes(), sum(tensor.nbytes for tensor in tensors.values())
    if free is not None and needed * ranks_here > MOST_OF_MEMORY * free:
        return None
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    kept = state_tree.unflatten(plain, copies)
    return Loaded(Path(), progress, kept["model"], kept["optimizer"], kind_of(optimizers), kept["outer"], kept["state"])
