"""What the data told of itself as a run began, in RUN/data.safetensors: means and deviations, a graph, counts. A model
means these, so that they hold where the run is gone on with or tested, whatever has become of the data since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hetsync.errors import UserError
from hetsync.files import write_atomically

FILE, PLAIN = "data.safetensors", "plain"


def keep(folder: Path, facts: Mapping[str, Any]) -> None:
    """Arrays and plain values; what else own data tell is asked of them anew. DiskError."""
    arrays = {name: value for name, value in facts.items() if isinstance(value, np.ndarray | torch.Tensor)}
    tensors = {name: torch.as_tensor(value).contiguous() for name, value in arrays.items()}
    plain = {name: value for name, value in facts.items() if name not in arrays and _is_plain(value)}
    write_atomically(folder / FILE, save(tensors, {PLAIN: json.dumps(plain)}))


def kept(folder: Path) -> dict[str, Any]:
    """{} where an older version has kept none. UserError where they cannot be read."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            plain = json.loads((file.metadata() or {})[PLAIN])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): give the folder of another run") from error
    return {**plain, **tensors}


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
