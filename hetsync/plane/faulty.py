"""Faults on order: each is addressed by rank and by count, and records that it fired."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetsync.config.schema import WireFormat
from hetsync.plane.base import Handle, Plane, Residual
from hetsync.plane.codec import Encoded, dumps


class NeverStruckError(RuntimeError):
    """A fault was to strike, and its moment has not come: the job has shown nothing."""


@dataclass(frozen=True)
class Fault:
    """Strikes `rank` at its `nth` collective (`Drop` and `Damage`: its nth message), counted from 0."""

    rank: int
    nth: int


@dataclass(frozen=True)
class Delay(Fault):
    """The handle becomes done no earlier than `seconds` after posting, on this rank only."""

    seconds: float


@dataclass(frozen=True)
class Drop(Fault):
    """The message is never delivered."""


@dataclass(frozen=True)
class Damage(Fault):
    """The message arrives with a bit flipped."""


OF_MESSAGES = (Drop, Damage)


@dataclass(frozen=True)
class Kill(Fault):
    """The rank kills itself with SIGKILL instead of posting."""


@dataclass(frozen=True)
class Stall(Fault):
    """The handle is never done on this rank, although the others finish the collective."""


@dataclass(frozen=True)
class Corrupt(Fault):
    """The rank's addend starts with nan."""


class _StalledHandle(Handle):
    def __init__(self, inner: Handle) -> None:
        self._inner = inner

    def done(self) -> bool:
        self._inner.done()  # the others need this rank's progress
        return False


class _DelayedHandle(Handle):
    def __init__(self, inner: Handle, clock: Callable[[], float], due: float) -> None:
        self._inner = inner
        self._clock = clock
        self._due = due

    def done(self) -> bool:
        return self._inner.done() and self._clock() >= self._due


class FaultyPlane(Plane):
    """A plane whose rank suffers those of `faults` that are addressed to it.

    `fired` lists those that struck here; each is also announced on stderr, as `fault fired: ...`, which is
    all that is left of a killed rank.
    """

    def __init__(self, plane: Plane, faults: Sequence[Fault], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(plane, plane)
        self.fired: list[Fault] = []
        self._faults = [fault for fault in faults if fault.rank == self.rank]
        self._clock = clock
        self.collectives = self.sent = 0  # posted, and messages sent, so far

    def add(self, fault: Fault) -> None:
        """One more, from now on."""
        self._faults.append(fault)

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        struck = [f for f in self._faults if f.nth == self.collectives and not isinstance(f, OF_MESSAGES)]
        self.collectives += 1
        for fault in struck:
            self._fire(fault)
            if isinstance(fault, Kill):
                os.kill(os.getpid(), signal.SIGKILL)
            if isinstance(fault, Corrupt):
                tensor[:1] = torch.nan
        handle = super().allreduce(tensor, wire, residual)
        for fault in struck:
            if isinstance(fault, Stall):
                handle = _StalledHandle(handle)
            if isinstance(fault, Delay):
                handle = _DelayedHandle(handle, self._clock, self._clock() + fault.seconds)
        return handle

    def send(self, message: Any, to: int) -> None:
        struck = [f for f in self._faults if f.nth == self.sent and isinstance(f, OF_MESSAGES)]
        self.sent += 1
        for fault in struck:
            self._fire(fault)
        if any(isinstance(fault, Drop) for fault in struck):
            return
        super().send(damaged(message) if struck else message, to)

    def _fire(self, fault: Fault) -> None:
        self.fired.append(fault)
        print(f"fault fired: {fault}", file=sys.stderr, flush=True)


def damaged(message: Any) -> Encoded:
    """As it arrives where a bit of it has flipped on its way."""
    data = bytearray(dumps(message))
    data[len(data) // 2] ^= 1
    return Encoded(data)
