"""Nested state (what `state_dict` returns) as plain values for JSON, and tensors for safetensors.

{"best": 0.9, "shadow": [tensor]}   ->   {"best": 0.9, "shadow": [{"tensor": "state.0"}]}, {"state.0": tensor}
{3: 1}               ->   {"items": [[3, 1]]}
Counter({"a": 1})    ->   {"items": {"Counter": {"a": 1}}}
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from hetsync.errors import UserError

PREFIX = "state."
# A dictionary with one of these keys and no other stands for a value.
MARKS = ("tensor", "array", "tuple", "items", "deque")
FACTORIES = (int, float, list, dict)  # of what a defaultdict has where it has nothing


def flatten(state: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Plain values and tensors. UserError for what is neither, with its place."""
    tensors: dict[str, torch.Tensor] = {}
    return _plain(state, "", tensors), tensors


def _plain(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        name = f"{PREFIX}{len(tensors)}"
        tensors[name] = torch.as_tensor(value)
        return {"tensor" if isinstance(value, torch.Tensor) else "array": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"tuple": [_plain(part, f"{where}[{place}]", tensors) for place, part in enumerate(value)]}
    if isinstance(value, deque):
        return {"deque": [value.maxlen, _plain(list(value), where, tensors)]}
    if isinstance(value, list):
        return [_plain(part, f"{where}[{place}]", tensors) for place, part in enumerate(value)]
    if isinstance(value, Mapping):
        if (kind := _kind(value)) is not None:
            return {"items": {kind: _plain(dict(value), where, tensors)}}
        if all(isinstance(key, str) for key in value) and not (len(value) == 1 and set(value) <= set(MARKS)):
            return {key: _plain(part, f"{where}.{key}" if where else key, tensors) for key, part in value.items()}
        parts = [[_plain(key, where, tensors), _plain(part, f"{where}[{key}]", tensors)] for key, part in value.items()]
        return {"items": parts}
    raise UserError(
        f"the state of {where} holds a {type(value).__name__}, which a checkpoint cannot keep: give tensors, arrays,"
        " numbers, text, and lists and dictionaries of these"
    )


def _kind(value: Mapping[Any, Any]) -> str | None:
    """Of a dictionary that does what others do not: schedulers and scripts that get it back may count on that."""
    if type(value) is defaultdict:
        return f"defaultdict of {value.default_factory.__name__}" if value.default_factory in FACTORIES else None
    return type(value).__name__ if type(value) in (Counter, OrderedDict) else None


def _maker(kind: str) -> Callable[[Mapping[Any, Any]], Any]:
    makers: dict[str, Callable[[Mapping[Any, Any]], Any]] = {"Counter": Counter, "OrderedDict": OrderedDict}
    makers |= {f"defaultdict of {factory.__name__}": partial(defaultdict, factory) for factory in FACTORIES}
    return makers[kind]


def unflatten(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state again; takes its tensors out of `tensors`. KeyError, TypeError, ValueError: it is not of `flatten`."""
    if isinstance(plain, list):
        return [unflatten(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((mark, value),) = plain.items()
        if mark == "tensor":
            return tensors.pop(value)
        if mark == "array":
            return tensors.pop(value).numpy()
        if mark == "tuple":
            return tuple(unflatten(part, tensors) for part in value)
        if mark == "deque":
            most, parts = value
            return deque(unflatten(parts, tensors), most)
        if mark == "items" and isinstance(value, dict):
            ((kind, parts),) = value.items()
            return _maker(kind)(unflatten(parts, tensors))
        if mark == "items":
            return {unflatten(key, tensors): unflatten(part, tensors) for key, part in value}
    return {key: unflatten(part, tensors) for key, part in plain.items()}
