"""What learned searches see: groups, devices, and each pair of these, as figures without units. Pure.

Times are over those of a step that keeps all of a replica's devices busy, bytes over the model's, so that what is
learned on one model and cluster holds for others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hetsync.plan.search.contiguous import first_shares
from hetsync.plan.search.group_figures import group_figures
from hetsync.plan.search.search import Problem
from hetsync.plan.slices import BACKWARD, FORWARD, SAVED, WEIGHTS

VERSION = 1
KINDS = ("conv", "linear", "lstm", "norm", "embed", "attention", "pool")  # parts of a module's type
GROUPS = (*KINDS, "seconds", "backward", "output", "weights", "saved", "position", "needs", "needed")
DEVICES = ("speed", "memory", "link", "load", "held")
PAIRS = ("here", "seconds", "load", "load_change", "carrying", "needs_here", "needed_here", "room")

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """Of N assignments of G groups to D devices: `groups` (G, F), `devices` (N, D, F), `pairs` (N, G, D, F)."""

    groups: Floats
    devices: Floats
    pairs: Floats


class Features:
    """Of the groups of a problem on the devices of its replicas. A device is the ranks that hold one stage.

    Attributes:
        step_seconds: (R, D) of a replica's whole share on one of its devices; infinite where there is no such device.
        need_bytes: (R, G) of a group with one sample in flight, which no plan of it can do without.
        limit_bytes: (R, D) that a device may use; minus infinity where there is none, as some groups need nothing.
    """

    def __init__(self, problem: Problem, replicas: Sequence[Sequence[Ranks]]) -> None:
        self._problem, self._replicas = problem, replicas
        self.count = max(map(len, replicas))
        evaluator = problem.evaluator
        self._figures = group_figures(evaluator, problem.groups)
        shares = first_shares(evaluator, [[rank for ranks in devices for rank in ranks] for devices in replicas])
        self.step_seconds = np.full((len(replicas), self.count), np.inf)
        self.limit_bytes = np.full((len(replicas), self.count), -np.inf)
        for index, (devices, share) in enumerate(zip(replicas, shares, strict=True)):
            for place, ranks in enumerate(devices):
                rate = sum(1 / max(evaluator.times[rank].seconds(share), 1e-12) for rank in ranks)
                self.step_seconds[index, place] = 1 / rate
                self.limit_bytes[index, place] = float(min(evaluator.limit_bytes[rank] for rank in ranks))
        self._ideal_seconds = 1 / (1 / self.step_seconds).sum(1)  # (R,)
        self._carrying = self._carrying_parts(shares)
        held = evaluator.held_bytes(self._figures[:, WEIGHTS], len(replicas))
        self.need_bytes = held + self._figures[:, SAVED]
        self.seconds = self._figures[:, FORWARD] + self._figures[:, BACKWARD]  # (G,) parts of a step

    def _carrying_parts(self, shares: Sequence[int]) -> npt.NDArray[np.float64]:
        """(R, D, D): of an ideal step, that a byte a sample takes from device to device."""
        parts = np.zeros((len(self._replicas), self.count, self.count))
        for index, (devices, share) in enumerate(zip(self._replicas, shares, strict=True)):
            for i, one in enumerate(devices):
                for j, other in enumerate(devices):
                    if i != j:
                        parts[index, i, j] = self._problem.evaluator.link(one[0], other[0])[1] * share
            parts[index] /= self._ideal_seconds[index]
        return parts

    @property
    def edges(self) -> Collection[tuple[int, int]]:
        """Of groups: (source, target)."""
        return self._problem.groups.edges

    @cached_property
    def _edge_bytes(self) -> Floats:
        """(G, G): a sample's, from group to group."""
        found = np.zeros((len(self.seconds), len(self.seconds)), np.float32)
        for pair, size in self._problem.groups.edges.items():
            found[pair] = size
        return found

    @cached_property
    def joined(self) -> Floats:
        """(G, G): 1 where a group is needed by another."""
        found = np.zeros((len(self.seconds), len(self.seconds)), np.float32)
        for pair in self.edges:
            found[pair] = 1
        return found

    @cached_property
    def groups(self) -> Floats:
        """(G, F)."""
        seconds, count, figures = self.seconds, len(self.seconds), self._figures
        output = np.array(self._problem.groups.output_bytes)
        largest = np.abs(self._carrying).max() or 1.0
        columns = [
            *self._kinds().T,
            np.log1p(count * seconds),
            figures[:, BACKWARD] / np.maximum(seconds, 1e-12),
            np.log1p(count * output * largest),
            np.log1p(count * figures[:, WEIGHTS] / (figures[:, WEIGHTS].sum() or 1.0)),
            np.log1p(count * figures[:, SAVED] / (figures[:, SAVED].sum() or 1.0)),
            np.arange(count) / count,
            np.log1p(self.joined.sum(0)),
            np.log1p(self.joined.sum(1)),
        ]
        return np.stack(columns, 1).astype(np.float32)

    def _kinds(self) -> Floats:
        """(G, kinds): parts of a group's seconds."""
        evaluator, found = self._problem.evaluator, np.zeros((len(self.seconds), len(KINDS)), np.float32)
        for group in range(len(found)):
            for block in self._problem.groups.blocks(group):
                kind = evaluator.graph.blocks[block].kind.lower()
                own = evaluator.figures[block, FORWARD] + evaluator.figures[block, BACKWARD]
                for column, part in enumerate(KINDS):
                    found[group, column] += own * (part in kind)
        parts: npt.NDArray[Any] = found / np.maximum(self.seconds, 1e-12)[:, None]
        return parts

    def of(self, devices: Indices, replicas: Indices) -> Seen:
        """Of assignments (N, G), each of a replica (N,)."""
        on = (devices[:, :, None] == np.arange(self.count)).astype(np.float64)
        ideal = self._ideal_seconds[replicas][:, None]
        relative = np.where(np.isfinite(self.step_seconds), self.step_seconds, 0.0)[replicas] / ideal  # (N, D)
        taken = self.seconds[None, :, None] * relative[:, None, :]  # (N, G, D)
        load = (on * taken).sum(1)
        limit = np.maximum(self.limit_bytes[replicas], 1.0)
        held = (on * self.need_bytes[None, :, None]).sum(1)
        after = load[:, None, :] + (1 - on) * taken
        own_load = (on * load[:, None, :]).sum(2, keepdims=True)
        carrying = self._carried(on, replicas)
        before, behind = self._shares_of_neighbours(on)
        room = (limit[:, None, :] - held[:, None, :] - (1 - on) * self.need_bytes[None, :, None]) / limit[:, None, :]
        pairs = [on, np.log1p(len(self.seconds) * taken) / 3, np.log1p(after), np.tanh(after - own_load)]
        pairs += [np.log1p(8 * carrying), before, behind, np.clip(room, -1, 1)]
        total = self.need_bytes.sum()
        slowest_link = self._carrying[replicas].max(2) * self._edge_bytes.sum()
        columns = [1 / np.maximum(relative, 1.0), np.log1p(limit / total).clip(max=3), np.log1p(slowest_link)]
        columns += [np.log1p(load), np.minimum(held / limit, 2.0)]
        return Seen(self.groups, np.stack(columns, 2).astype(np.float32), np.stack(pairs, 3).astype(np.float32))

    def _carried(self, on: npt.NDArray[np.float64], replicas: Indices) -> npt.NDArray[np.float64]:
        """(N, G, D): of an ideal step, what a group's edges would take with the group on each device."""
        parts = self._carrying[replicas]
        incoming = (self._edge_bytes.T @ on) @ parts
        outgoing = (self._edge_bytes @ on) @ parts.transpose(0, 2, 1)
        found: npt.NDArray[np.float64] = incoming + outgoing
        return found

    def _shares_of_neighbours(
        self, on: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(N, G, D): of the groups that one needs, and of those that need it, the part on each device."""
        before = (self.joined.T @ on) / np.maximum(self.joined.sum(0), 1)[:, None]
        behind = (self.joined @ on) / np.maximum(self.joined.sum(1), 1)[:, None]
        return before, behind
