"""Whether a data set is still as it was sent to data workers."""

from __future__ import annotations

import hashlib
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Content:
    """What pickling makes of something. Of tensors it is only which they are: workers share their memory, and see what
    is changed in place.

    Attributes:
        digest: The same for the same content.
    """

    def __init__(self, thing: Any) -> None:
        """Raises what pickling raises. Takes about a second for a GB of arrays, or a million paths with labels."""
        written = hashlib.sha256()
        writer = _Writer(SimpleNamespace(write=written.update))
        start = SimpleNamespace(duplicate_for_child=int, DupFd=int)  # of a process, which alone takes locks along
        set_spawning_popen(start)  # type: ignore[arg-type]
        try:
            writer.dump(thing)
        finally:
            set_spawning_popen(None)
        self.digest = written.digest()
        self._shared = writer.shared  # while they are kept, no others lie at their addresses


class _Writer(ForkingPickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, 5)  # which copies no arrays
        self.shared: list[Any] = []

    def reducer_override(self, thing: Any) -> Any:
        place: tuple[Any, ...]
        if type(thing) in PLAIN and thing.layout is torch.strided and not thing.is_nested:
            place = (thing.data_ptr(), tuple(thing.shape), thing.stride(), str(thing.dtype), thing.requires_grad)
        elif isinstance(thing, torch.UntypedStorage | torch.storage.TypedStorage):  # of all others
            storage = getattr(thing, "_untyped_storage", thing)
            place = (storage.data_ptr(), storage.nbytes(), str(getattr(thing, "dtype", None)))
        else:
            return NotImplemented
        self.shared.append(thing)
        return tuple, (place,)
