"""What carries sums, once it is known which device each rank has."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import torch
import torch.distributed as dist

from hetsync.balance.gpu import gpu_identity
from hetsync.errors import UserError, one_sentence
from hetsync.plane.base import LateError, Messages, Plane, Sums, made_by_all, named
from hetsync.plane.groups import GroupLane, NcclLane, TorchSums, gloo_sums, open_gloo, sum_one
from hetsync.plane.hierarchical import HierarchicalSums
from hetsync.plane.rendezvous import Rendezvous, rendezvous_by_messages
from hetsync.processes import boot_id

MOST_TOLD = 200  # characters of a library's words

Lane = TypeVar("Lane", bound=GroupLane)


@dataclass(frozen=True)
class DeviceOf:
    """The device of one rank. `unit` is the same for ranks that share it, and None on CPUs."""

    host: str
    name: str
    unit: str | None
    vendor: str = "NVIDIA"

    @staticmethod
    def here(device: torch.device) -> DeviceOf:
        host = socket.gethostname()
        if device.type != "cuda":
            return DeviceOf(host, str(device), None)
        unit = f"{host} {boot_id()} {gpu_identity(device)}"
        return DeviceOf(host, str(device), unit, "AMD" if torch.version.hip else "NVIDIA")


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
    vendors = {device.vendor: rank for rank, device in enumerate(devices)}
    if len(vendors) > 1:
        return " and ".join(f"rank {rank} has a device of {vendor}" for vendor, rank in vendors.items())
    if not dist.is_available() or not dist.is_nccl_available():
        return "this torch is built without NCCL"
    return None


def groups_of(devices: Sequence[DeviceOf]) -> list[list[int]]:
    """All ranks: together where NCCL can sum over them, though not over all, and alone where it cannot."""
    kinds = defaultdict(list)
    for rank, device in enumerate(devices):
        kinds[device.vendor if device.unit is not None else None].append(rank)
    groups = []
    for ranks in kinds.values():
        joined = reason_against_nccl([devices[rank] for rank in ranks]) is None
        groups += [ranks] if joined else [[rank] for rank in ranks]
    return sorted(groups)


def torch_sums(messages: Messages, rendezvous: Rendezvous) -> TorchSums:
    """Collective. UserError, on every rank, where one of them does not reach the others."""
    store = made_by_all(messages, rendezvous.connect)
    place = messages.rank, messages.size, rendezvous.timeout_seconds

    def made() -> TorchSums:
        gloo = gloo_sums(lambda name: open_gloo(store, name, *place, rendezvous.address), *place)
        return TorchSums(gloo, store, *place, rendezvous.server, rendezvous.address)

    return made_by_all(messages, made)


@contextmanager
def joining(device: torch.device) -> Iterator[None]:
    """What a library says inside is a mistake that a job can do without."""
    try:
        yield
    except RuntimeError as error:
        told = one_sentence(str(error.__cause__ or error).rpartition("Last error:")[2])  # NCCL's, after many others
        raise UserError(f"{device} of {socket.gethostname()} is not joined ({told[:MOST_TOLD]})") from error


def joined(messages: Messages, open_lane: Callable[[], Lane], device: torch.device, timeout_seconds: float) -> Lane:
    """Collective: the lane of this rank's group, once it has summed a value on this rank's `device`: only there some
    libraries connect ranks. UserError, on every rank, where that fails on one."""

    def opened() -> Lane:
        with joining(device):
            return open_lane()

    lane, own, late = made_by_all(messages, opened), None, False
    try:
        with joining(device):
            sum_one(lane, device, timeout_seconds / 3)  # before others, who have failed, wait too long
    except UserError as mistake:
        own, late = mistake, isinstance(mistake.__cause__, LateError)
    told: list[tuple[bool, UserError | None]] = messages.gather_objects((late, own))
    for _, failed in sorted(told, key=itemgetter(0)):  # who has waited in vain knows least
        if failed is not None:
            lane.abort()
            raise failed
    return lane


def hierarchical_sums(
    by: str,
    messages: Messages,
    flat: Sums,
    rendezvous: Rendezvous,
    groups: Sequence[Sequence[int]],
    device: torch.device,
) -> HierarchicalSums:
    """Collective: sums within groups of ranks, by NCCL where CUDA devices make a group, and between their first ranks
    by what carries `flat`, the sums over all ranks. UserError, on every rank, where one does not reach the others.
    """
    store = made_by_all(messages, rendezvous.connect)
    rank, timeout_seconds, address = messages.rank, rendezvous.timeout_seconds, rendezvous.address
    (group,) = (group for group in groups if rank in group)
    leaders = [group[0] for group in groups]

    def open_lane() -> GroupLane:
        name, place = f"group of {group[0]}", group.index(rank)
        if len(group) > 1 and device.type == "cuda":
            return NcclLane(store, name, place, len(group), device, timeout_seconds, address)
        return GroupLane(open_gloo(store, name, place, len(group), timeout_seconds, address))

    def sums_between() -> Sums | None:
        if rank not in leaders:
            return None
        if isinstance(flat, TorchSums):
            place = leaders.index(rank), len(leaders), timeout_seconds
            return gloo_sums(lambda name: open_gloo(store, f"leaders {name}", *place, address), *place)
        from hetsync.plane.mpi import MpiMessages, MpiSums

        assert isinstance(messages, MpiMessages)
        return MpiSums(messages.mpi, timeout_seconds, ranks=leaders)

    # Before what leaders make, who would wait for one that cannot.
    within = joined(messages, open_lane, device, timeout_seconds)
    between = made_by_all(messages, sums_between)
    return HierarchicalSums(by, rank, messages.size, flat, within, between, rendezvous.server)


class ChosenPlane(Plane):
    """A plane that was opened by its name, "mpi", "torch", "horovod" or "auto"; `why` says what for."""

    def __init__(self, messages: Messages, sums: Sums, name: str, why: str, timeout_seconds: float) -> None:
        super().__init__(messages, sums)
        self.why = why
        self._name = name
        self._timeout_seconds = timeout_seconds

    def settle(self, device: torch.device) -> None:
        if self._name in ("mpi", "horovod") or self.newcomer is not None:  # whose sums are those that the others have
            return
        devices = self.gather_objects(DeviceOf.here(device))
        if all(each.unit is None for each in devices):
            return
        reason = reason_against_nccl(devices)
        groups = groups_of(devices)
        if reason is None:
            self._take(lambda: self._use_nccl(device), "every rank has a CUDA device of its own")
        elif self._name == "torch":
            raise UserError(
                f"run.plane is torch, which sums CUDA tensors by NCCL, but {reason}: give every rank a CUDA device of"
                " its own, or use run.plane auto or mpi"
            )
        elif len(groups) < self.size:
            self._take(lambda: self._use_groups(groups, device), f"NCCL not over all, as {reason}")
        else:
            self.why += f"; no NCCL, as {reason}"

    def _take(self, use: Callable[[], None], why: str) -> None:
        try:
            use()
            self.tolerant = self.messages.tolerant and self.sums.tolerant
        except UserError as mistake:
            why = f"no NCCL, as {mistake}"
        self.why += f"; {why}"

    def _use_nccl(self, device: torch.device) -> None:
        sums = self.sums
        if not isinstance(sums, TorchSums):
            sums = torch_sums(self.messages, rendezvous_by_messages(self.messages, self._timeout_seconds))
        elif sums.by_nccl:  # a second job on the same plane
            return
        sums.use_nccl(joined(self.messages, lambda: sums.open_nccl(device), device, self._timeout_seconds))
        if sums is not self.sums:
            self.sums.close()
            self.sums = sums

    def _use_groups(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        if isinstance(self.sums, HierarchicalSums):  # a second job on the same plane
            return
        rendezvous = rendezvous_by_messages(self.messages, self._timeout_seconds)
        joined = " and ".join(named(group) for group in groups if len(group) > 1)
        by = f"NCCL within {joined}, {self.sums.sums_by} between"
        self.sums = hierarchical_sums(by, self.messages, self.sums, rendezvous, groups, device)
