"""Which devices may take a group: those with memory, by which stages do not wait for each other in a circle. Pure.

Many assignments of groups to devices at once, as rows. For circles: before a group moves, its own edges are taken out;
what is left has no circle, so a new one would lead through the group: out of its device and back into it. With the
reach of devices over the edges that are left, each device is tested in a few products.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hetsync.plan.search.features import Features, Indices

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
NOWHERE = -1  # as a device: a group that has none yet


class Masks:
    """Of N assignments that change group by group. A group may always stay where it is."""

    def __init__(self, features: Features, devices: Indices, replicas: Indices, all_used: bool) -> None:
        """`devices` (N, G) without circles, of `replicas` (N,). With `all_used`, no device that has groups loses its
        last."""
        self._circles = _Circles(features.edges, devices, features.count)
        self._devices, self._need, self._all_used = devices.copy(), features.need_bytes, all_used
        on = devices[:, :, None] == np.arange(features.count)
        self._members = on.sum(1)
        self._room = features.limit_bytes[replicas] - (on * self._need[None, :, None]).sum(1)

    def allowed(self, group: int) -> Flags:
        """(N, D): where the group may go, all others staying where they are."""
        here = self._here(group)
        free = self._circles.allowed(group) & (self._room >= self._need[group])
        if self._all_used:
            free &= (self._members * here).sum(1, keepdims=True) != 1
        return free | here

    def put(self, group: int, devices: Indices) -> None:
        """On (N,) devices, which are allowed."""
        before = self._here(group)
        self._devices[:, group] = devices
        change = self._here(group).astype(int) - before
        self._members += change
        self._room -= change * self._need[group]
        self._circles.put(group, devices)

    def _here(self, group: int) -> Flags:
        here: Flags = self._devices[:, group, None] == np.arange(self._members.shape[1])
        return here


class _Circles:
    """`devices` (N, G): of each group in each row, `NOWHERE` for none; no row may have stages in a circle."""

    def __init__(self, edges: Iterable[tuple[int, int]], devices: Indices, count: int) -> None:
        rows, groups = devices.shape
        self._before: list[list[int]] = [[] for _ in range(groups)]
        self._behind: list[list[int]] = [[] for _ in range(groups)]
        self._on = (devices[:, :, None] == np.arange(count)).astype(np.float32)  # (N, G, D)
        self._edges: Floats = np.zeros((rows, count, count), np.float32)  # how many, between devices
        for source, target in edges:
            self._before[target].append(source)
            self._behind[source].append(target)
            self._edges += self._on[:, source, :, None] * self._on[:, target, None, :]
        self._squarings = max(1, (count - 1).bit_length())

    def allowed(self, group: int) -> Flags:
        """(N, D): where the group may go, all others staying where they are. Where it is, it may stay."""
        before, behind = self._neighbours(group)
        reach = self._reach(self._edges - _edges_at(before, self._on[:, group], behind))
        before, behind = np.minimum(before, 1), np.minimum(behind, 1)
        onwards = (reach @ before[:, :, None])[:, :, 0]  # devices before the group that each device reaches
        back = (behind[:, None, :] @ reach)[:, 0, :]
        through = (back * before).sum(1, keepdims=True) - behind * onwards - before * back + before * behind
        circles: Flags = (onwards > before) | (back > behind) | (through > 0)
        return ~circles

    def put(self, group: int, devices: Indices) -> None:
        """On (N,) devices, which are allowed."""
        here: Floats = (devices[:, None] == np.arange(self._on.shape[2])).astype(np.float32)
        change = here - self._on[:, group]
        if change.any():
            before, behind = self._neighbours(group)
            self._edges += _edges_at(before, change, behind)
            self._on[:, group] = here

    def _neighbours(self, group: int) -> tuple[Floats, Floats]:
        """(N, D): groups that it needs, and that need it, by device."""
        return self._on[:, self._before[group]].sum(1), self._on[:, self._behind[group]].sum(1)

    def _reach(self, edges: Floats) -> Floats:
        """(N, D, D): whether a way leads from one device to another; from each to itself."""
        reach: Floats = ((edges > 0) | np.eye(edges.shape[1], dtype=bool)).astype(np.float32)
        for _ in range(self._squarings):
            reach = np.minimum(reach @ reach, 1)
        return reach


def _edges_at(before: Floats, here: Floats, behind: Floats) -> Floats:
    """(N, D, D): of a group that is there, to and from its neighbours."""
    found: Floats = before[:, :, None] * here[:, None, :] + here[:, :, None] * behind[:, None, :]
    return found
