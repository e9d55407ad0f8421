"""Faults that are put into a job on order (`fault.inject`), to see what becomes of it.

Each waits for its moment on its rank: a round that the communication thread joins, an evaluation, a checkpoint, a
drain, a recovery. What concerns the main thread's work strikes at its next slice, what concerns messages at the next
one that the rank sends. A job without such faults has none of this.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from hetsync.balance.device import Device
from hetsync.config.faults import InjectedFault, When
from hetsync.config.schema import WireFormat
from hetsync.errors import announce
from hetsync.files import DiskError
from hetsync.plane.base import Handle, Plane, Residual
from hetsync.plane.faulty import Damage, Delay, Drop, Fault, FaultyPlane, NeverStruckError
from hetsync.sync.messages import StartRound

EXIT_STATUS = 3
TOO_MANY_BYTES = 1 << 50


class Injection:
    """Those of one rank."""

    def __init__(self, faults: Sequence[InjectedFault], plane: Plane, model: torch.nn.Module) -> None:
        """`faults` of all ranks."""
        self.plane = _InjectedPlane(plane, self)
        self._model = model
        self._waiting = [fault for fault in faults if fault.rank == plane.rank]  # for their moment
        self._ordered: list[InjectedFault] = []  # for what they are to strike
        self._of_plane: list[tuple[Fault, InjectedFault]] = []
        self._joining: StartRound | None = None  # the round of which nothing is posted yet

    def never_struck(self) -> list[InjectedFault]:
        late = [fault for ordered, fault in self._of_plane if ordered not in self.plane.fired]
        return [*self._waiting, *self._ordered, *late]

    # Moments.

    def at(self, when: When, number: int | None = None) -> None:
        for fault in [fault for fault in self._waiting if (fault.when, fault.round) == (when, number)]:
            self._waiting.remove(fault)
            announce(f"fault fired: {fault}")
            self._strike(fault)

    def around(self, start: StartRound, steps: Iterator[None]) -> Iterator[None]:
        """The steps of a round, with its moments."""
        self._joining = start
        self.at("before", start.number)
        yield from steps
        self.posted()  # a rank alone posts nothing
        self.at("after", start.number)

    def posted(self) -> None:
        """A sum is under way."""
        start, self._joining = self._joining, None
        if start is not None:
            self.at("during", start.number)
            if start.drain is not None:
                self.at("drain")

    # What happens.

    def _strike(self, fault: InjectedFault) -> None:
        match fault.kind:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                stop_here(fault.seconds)
            case "exit":
                sys.exit(EXIT_STATUS)
            case "raise":
                raise RuntimeError(f"injected: {fault}")
            case "memory":
                torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=next(self._model.parameters()).device)
            case "corrupt":
                self._order(Damage(fault.rank, self.plane.sent), fault)
            case "drop":
                self._order(Drop(fault.rank, self.plane.sent), fault)
            case "delay":
                assert fault.seconds is not None
                self._order(Delay(fault.rank, self.plane.collectives, fault.seconds), fault)
            case "slow" | "not_finite" | "disk_full":
                self._ordered.append(fault)

    def _order(self, of_plane: Fault, fault: InjectedFault) -> None:
        self._of_plane.append((of_plane, fault))
        self.plane.add(of_plane)

    def take(self, kind: str) -> InjectedFault | None:
        """The first that waits to strike now."""
        for fault in self._ordered:
            if fault.kind == kind:
                self._ordered.remove(fault)
                return fault
        return None

    def checkpoint(self) -> None:
        """One is about to be written. DiskError where that is to fail."""
        self.at("checkpoint")
        if self.take("disk_full") is not None:
            raise DiskError(f"cannot write the checkpoint: {os.strerror(errno.ENOSPC)} (injected)")

    def spoil_gradients(self) -> None:
        """The next backward pass brings nan, if that is to be."""
        if self.take("not_finite") is None:
            return
        weight = next(parameter for parameter in self._model.parameters() if parameter.requires_grad)

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * torch.nan

        handle = weight.register_hook(spoil)


class _InjectedPlane(FaultyPlane):
    """Around another plane."""

    def __init__(self, plane: Plane, injection: Injection) -> None:
        super().__init__(plane, ())
        self._injection = injection

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        handle = super().allreduce(tensor, wire, residual)
        self._injection.posted()
        return handle

    def mend(self) -> None:
        super().mend()
        self._injection.at("recovery")


class InjectedDevice(Device):
    """A device whose rank may become slow, and its gradients nan."""

    def __init__(self, device: Device, injection: Injection) -> None:
        super().__init__()
        self.on_host = device.on_host
        self._device = device
        self._injection = injection
        self._factor = 1.0

    def begin_slice(self, samples: int) -> None:
        self._injection.spoil_gradients()
        self._device.begin_slice(samples)

    def pace(self, fraction: float) -> None:
        self._device.pace(fraction)

    def end_slice(self, stepped: bool = False) -> None:
        self._device.end_slice(stepped)

    def begin_step(self) -> None:
        self._device.begin_step()

    def end_step(self) -> None:
        self._device.end_step()

    def take_seconds(self) -> float:
        seconds = self._device.take_seconds()
        fault = self._injection.take("slow")
        if fault is not None and fault.factor is not None:
            self._factor *= fault.factor
        if self._factor > 1:
            time.sleep((self._factor - 1) * seconds)
        return self._factor * seconds


def stop_here(seconds: float | None) -> None:
    """Stop this process, for ever or until another wakes it."""
    if seconds is not None:
        waking = f"sleep {seconds}; kill -CONT {os.getpid()}"
        quiet = subprocess.DEVNULL
        subprocess.Popen(["sh", "-c", waking], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def require_struck(asked: Iterable[InjectedFault], waiting: Iterable[InjectedFault], members: Collection[int]) -> None:
    """Raise NeverStruckError unless all have struck that were asked for: none is `waiting` on the ranks that are left,
    and those that have gone had one that ends them."""
    asked = list(asked)
    ended = {fault.rank for fault in asked if fault.deadly}
    never = [*waiting, *(fault for fault in asked if fault.rank not in members and fault.rank not in ended)]
    if never:
        raise NeverStruckError(
            f"fault.inject: {'; '.join(map(str, never))}: never struck, since its moment did not come, so the job ends"
            " with status 1: name a round that it has (summary.json says how many), or a moment that comes"
        )
