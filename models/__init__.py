"""Models of the field: single-device modules that know nothing of ranks. Imported as `hetsync.models`."""

from __future__ import annotations

from typing import Any

import torch

from hetsync.config import call_with_options, import_object
from hetsync.errors import UserError

BUILT_IN = {
    "digits_cnn": "hetsync.models.digits_cnn:DigitsCNN",
}


def build(name: str, **options: Any) -> torch.nn.Module:
    """A model by its recipe name, or by the import path of a callable that returns one."""
    if name not in BUILT_IN and ":" not in name:
        known = ", ".join(sorted(BUILT_IN))
        raise UserError(f"model.name is {name}: use one of {known}, or package.module:name for your own")
    model = call_with_options("model", import_object("model.name", BUILT_IN.get(name, name)), options)
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"model.name is {name}, which returned {type(model).__name__}: return a torch.nn.Module"
        )
    return model
