"""Tensors between single ranks by Gloo, whose own threads move them on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hetsync.errors import cause
from hetsync.plane.base import Channels, LateError, LostError, named
from hetsync.plane.parcels import empty_parcel, packed

TAG = 0


class GlooChannels(Channels):
    """Over a group that nobody else uses. `timeout_seconds` bounds each wait."""

    def __init__(self, group: Any, timeout_seconds: float = 600.0) -> None:
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._sending: deque[tuple[dist.Work, torch.Tensor, int]] = deque()
        self._closed = False

    def send(self, note: Any, tensors: Sequence[torch.Tensor], to: int) -> None:
        header, *parts = packed(note, tensors)
        for part in (torch.tensor([len(header)]), header, *parts):
            self._sending.append((_posted(partial(self._group.send, [part], to, TAG), named([to])), part, to))

    def receive(self, source: int) -> tuple[Any, list[torch.Tensor]]:
        length = torch.zeros(1, dtype=torch.long)
        self._fill(length, source)
        header = torch.empty(int(length), dtype=torch.uint8)
        self._fill(header, source)
        note, tensors, parts = empty_parcel(header)
        for part in parts:
            self._fill(part, source)
        return note, tensors

    def flush(self) -> None:
        while self._sending:
            work, _, to = self._sending[0]
            self._wait(work, named([to]))
            self._sending.popleft()

    def close(self) -> None:
        if not self._closed:
            self.flush()
            self._wait(self._group.barrier(), "the others to close")
            self._closed = True

    def _fill(self, part: torch.Tensor, source: int) -> None:
        whom = named([source])
        self._wait(_posted(partial(self._group.recv, [part], source, TAG), whom), whom)

    def _wait(self, work: dist.Work, whom: str) -> None:
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            if time.monotonic() - started < self._timeout_seconds:
                raise _lost(whom, error) from error
            raise LateError(
                f"waited {self._timeout_seconds:.0f} s for {whom}"
                " (raise run.timeout_seconds if the work takes that long)"
            ) from error


def _posted(post: Callable[[], dist.Work], whom: str) -> dist.Work:
    """Gloo refuses at once what goes to where a connection has broken already."""
    try:
        return post()
    except RuntimeError as error:
        raise _lost(whom, error) from error


def _lost(whom: str, error: RuntimeError) -> LostError:
    return LostError(f"lost {whom}, which has most likely ended ({cause(error)})")
