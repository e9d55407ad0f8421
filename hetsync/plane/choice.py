"""What carries sums, once it is known which device each rank has."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetsync.errors import UserError
from hetsync.plane.base import Messages, Plane, Sums, made_by_all, named
from hetsync.plane.groups import TorchSums
from hetsync.plane.rendezvous import Rendezvous, rendezvous_by_messages


@dataclass(frozen=True)
class DeviceOf:
    """The device of one rank. `unit` is the same for ranks that share it, and None on CPUs."""

    host: str
    name: str
    unit: str | None

    @staticmethod
    def here(device: torch.device) -> DeviceOf:
        host = socket.gethostname()
        if device.type != "cuda":
            return DeviceOf(host, str(device), None)
        # Its number says nothing where each rank sees devices of its own (CUDA_VISIBLE_DEVICES).
        unit = getattr(torch.cuda.get_device_properties(device), "uuid", device)
        return DeviceOf(host, str(device), f"{host} {unit}")


def reason_against_nccl(devices: Sequence[DeviceOf]) -> str | None:
    """Why it cannot sum over ranks with these devices; None where it can."""
    without = [rank for rank, device in enumerate(devices) if device.unit is None]
    if without:
        return f"{named(without)} has no CUDA device"
    users = defaultdict(list)
    for rank, device in enumerate(devices):
        users[device.unit].append(rank)
    for ranks in users.values():
        if len(ranks) > 1:
            first = devices[ranks[0]]
            return f"{named(ranks)} share {first.name} of {first.host}"
    if not dist.is_available() or not dist.is_nccl_available():
        return "this torch is built without NCCL"
    return None


def torch_sums(messages: Messages, rendezvous: Rendezvous) -> TorchSums:
    """Collective. UserError, on every rank, where one of them does not reach the others."""
    store = made_by_all(messages, rendezvous.connect)
    return made_by_all(
        messages, lambda: TorchSums(store, messages.rank, messages.size, rendezvous.timeout_seconds, rendezvous.server)
    )


class ChosenPlane(Plane):
    """A plane that was opened by its name, "mpi", "torch" or "auto"; `why` says what for."""

    def __init__(self, messages: Messages, sums: Sums, name: str, why: str, timeout_seconds: float) -> None:
        super().__init__(messages, sums)
        self.why = why
        self._name = name
        self._timeout_seconds = timeout_seconds

    def settle(self, device: torch.device) -> None:
        if self._name == "mpi":
            return
        devices = self.gather_objects(DeviceOf.here(device))
        if all(each.unit is None for each in devices):
            return
        reason = reason_against_nccl(devices)
        if reason is None:
            self._use_nccl(device)
        elif self._name == "torch":
            raise UserError(
                f"run.plane is torch, which sums CUDA tensors by NCCL, but {reason}: give every rank a CUDA device of"
                " its own, or use run.plane auto or mpi"
            )
        else:
            self.why += f"; no NCCL, as {reason}"

    def _use_nccl(self, device: torch.device) -> None:
        if not isinstance(self.sums, TorchSums):
            try:
                sums = torch_sums(self.messages, rendezvous_by_messages(self.messages, self._timeout_seconds))
            except UserError as mistake:
                self.why += f"; no NCCL, as {mistake}"
                return
            self.sums.close()
            self.sums = sums
        self.sums.use_nccl(device)
        self.why += "; every rank has a CUDA device of its own"
