"""Values as they travel between ranks: pickled, and read with none of pickle's powers.

Whoever reaches a rank's port could send it a pickle, and a pickle may name any function to be called. Here it may name
what makes plain data and nothing else: records (dataclasses, named tuples, enumerations, mistakes of users) of modules
that are loaded already, tensors, arrays, and a few types of Python's own. Where all ranks give a value at once, those
of the others may also name what this rank's own does: a user's metric is of the same class on every rank.

A checksum follows each value: memory and networks that flip a bit are rare, but what came of it would be in the weights
of all.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any

import torch

from hetsync.errors import UserError
from hetsync.plane.base import DamagedError

PLAIN = {
    "builtins": ("bytearray", "complex", "frozenset", "range", "set", "slice"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath"),  # Python 3.13
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch._utils": ("_rebuild_parameter", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),  # numpy 1
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
}
NOTHING: Mapping[tuple[str, str], Any] = MappingProxyType({})
FACTORIES = ("int", "float", "str", "bool", "list", "dict", "tuple")  # of a defaultdict, and how some types are named


CHECKSUM_BYTES = 4  # of CRC-32, behind the pickle

Names = Mapping[tuple[str, str], Any]  # classes and functions by module and name


class Encoded(bytes):
    """What a value travels as, right or wrong: `dumps` leaves it as it is (`faulty.py`)."""


def dumps(value: Any) -> bytes:
    return value if isinstance(value, Encoded) else _with_checksum(pickle.dumps(value))


def dumps_own(value: Any) -> tuple[bytes, Names]:
    """The same, and the classes and functions that this names."""
    data = io.BytesIO()
    encoder = _Encoder(data)
    encoder.dump(value)
    return _with_checksum(data.getvalue()), encoder.named


def loads(data: bytes | bytearray, own: Names = NOTHING, sender: int | None = None) -> Any:
    """What `dumps` was given. UserError where that has objects of another class, unless this rank's `own` value has,
    too; none of its code is run. DamagedError, which names the sender, where it is not what was sent."""
    if zlib.crc32(memoryview(data)[:-CHECKSUM_BYTES]).to_bytes(CHECKSUM_BYTES, "big") != data[-CHECKSUM_BYTES:]:
        raise DamagedError(
            f"a message {'' if sender is None else f'of rank {sender} '}has arrived damaged, as its checksum tells:"
            " look at memory and network of these hosts, and go on with --resume",
            sender,
        )
    return _Decoder(data, own).load()  # which stops before the checksum


def _with_checksum(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "big")


class _Encoder(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.named: dict[tuple[str, str], Any] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self.named[value.__module__, value.__qualname__] = value
        return NotImplemented


class _Decoder(pickle.Unpickler):
    def __init__(self, data: bytes | bytearray, own: Names) -> None:
        super().__init__(io.BytesIO(data))
        self._own = own

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # whatever this rank's own value names
        if (module, name) in self._own and module != "torch.storage":
            return self._own[module, name]
        return _admitted(module, name)


@cache
def _admitted(module: str, name: str) -> Any:
    if (module, name) == ("torch.storage", "_load_from_bytes"):
        return _storage  # torch's own would unpickle anything
    if (module, name) == ("torch._utils", "_rebuild_sparse_tensor"):
        return _sparse  # torch's own takes any indices
    loaded = sys.modules.get(module)
    found = getattr(loaded, name, None)  # no dotted names: a record's methods are not it
    if found is not None and (name in PLAIN.get(module, ()) or (module == "builtins" and name in FACTORIES)):
        return found
    is_record = isinstance(found, type) and found.__module__ == module and _is_record(found)
    if is_record or isinstance(found, torch.dtype | Enum):
        return found
    raise _refused(f"{module}.{name}")


def _refused(name: str) -> UserError:
    return UserError(
        f"a value of {name} does not travel between ranks: give numbers, text, tensors, dataclasses and named"
        " tuples of modules that all ranks import, or lists and dictionaries of these"
    )


def _member(kind: Any, name: Any) -> Enum:
    """Of an enumeration, as Python 3.11.0 to 3.11.3 pickle it; it stands for `getattr`, which could do more."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in list(kind.__members__):
        return kind[name]
    raise _refused(f"getattr of {kind!r:.100}")


def _is_record(kind: type) -> bool:
    """A mistake is one: rank 0's is everybody's."""
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return named or dataclasses.is_dataclass(kind) or issubclass(kind, Enum | UserError)


def _sparse(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values, size, coalesced = data
        return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=True)
    outer, inner, values, size = data
    return torch.sparse_compressed_tensor(outer, inner, values, size, layout=layout, check_invariants=True)


def _storage(content: bytes) -> Any:
    load: Callable[..., Any] = torch.load
    return load(io.BytesIO(content), weights_only=True)
