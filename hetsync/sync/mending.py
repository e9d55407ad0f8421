"""Carries a recovery (`recovery.py`) out on one rank, in its communication thread: the plane is mended, survivors
agree, and who is behind is sent what it lacks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hetsync.plane.base import DamagedError, LostError, MembersLost, Plane, StalledError, named, wait_limit
from hetsync.sync.messages import Ping
from hetsync.sync.recovery import Agreed, CatchUp, Decision, GoOn, Ready, Recovery, Report, Send, Stage

POLL_SECONDS = 1e-3
PING_SECONDS = 2.0  # between messages to those who are waited for: they notice by these what they have missed
MOST_IN_VAIN = 20  # times that a plane is mended without a death
PART_VALUES = 1 << 24  # of an anchor in one message


class Anchor(NamedTuple):
    """What a rank that is behind takes over: the anchor and the outer optimizer's velocity, if there is one, both flat,
    and which buffers travel."""

    values: torch.Tensor
    velocity: torch.Tensor | None
    travel: tuple[int, ...]


class StatePart(NamedTuple):
    """Of what a rank that is behind takes over in synchronous mode, by name: weights, buffers, optimizer state. One of
    these is the last."""

    name: str
    value: Any
    last: bool = False


class AnchorPart(NamedTuple):
    """Of an anchor's values, then of its velocity's. The last one tells how many values are the anchor's, and which
    buffers travel."""

    values: torch.Tensor
    last: tuple[int, tuple[int, ...]] | None = None


def parts_of(anchor: Anchor) -> list[AnchorPart]:
    """The messages that it goes in."""
    whole = [anchor.values] if anchor.velocity is None else [anchor.values, anchor.velocity]
    # Copies: what is sent must not be the whole memory that a part is a view of.
    parts = [part.cpu().clone() for tensor in whole for part in tensor.detach().split(PART_VALUES)]
    return [*map(AnchorPart, parts[:-1]), AnchorPart(parts[-1], (anchor.values.numel(), anchor.travel))]


Part = AnchorPart | StatePart
Adopted = Anchor | Mapping[str, Any]


def parts_of_state(state: Mapping[str, Any]) -> list[StatePart]:
    """The messages that it goes in."""
    *names, last = state
    return [*(StatePart(name, state[name]) for name in names), StatePart(last, state[last], last=True)]


def whole_of(parts: Sequence[Part]) -> Adopted | None:
    """What has come in these messages; None while some lack."""
    if not parts or not parts[-1].last:
        return None
    if isinstance(parts[-1], StatePart):
        return {part.name: part.value for part in parts if isinstance(part, StatePart)}
    size, travel = parts[-1].last
    values = torch.cat([part.values for part in parts if isinstance(part, AnchorPart)])
    return Anchor(values[:size], values[size:] if values.numel() > size else None, travel)


@dataclass
class Recovered:
    """What all have agreed on. `reports` on the first survivor. `early` messages have come from
    ranks that have gone on already."""

    decision: Decision
    reports: Mapping[int, Report]
    adopted: Adopted | None = None
    early: list[tuple[int, Any]] = field(default_factory=list)


class Mending:
    """One rank's part, from MembersLost on, or where another rank joins. A death meanwhile begins it anew."""

    def __init__(
        self,
        plane: Plane,
        report: Callable[[], Report],
        decide: Callable[[Mapping[int, Report]], Decision],
        give: Callable[[], Sequence[Part] | None],
        timeout_seconds: float,
        admit: Callable[[], None] | None = None,
    ) -> None:
        """`report` tells what this rank holds by now; `give` what those behind take over, None while its main thread is
        still to make the step of the newest round; `decide` is asked on the first survivor. `admit` lets another rank
        join, where that is why members change; None mends the plane."""
        self._plane = plane
        self._report = report
        self._decide = decide
        self._give = give
        self._limit_seconds = wait_limit(plane.rank, timeout_seconds)
        self._admit = admit

    def run(self) -> Recovered:
        """Until all can go on. LostError where they cannot, StalledError where a survivor says nothing."""
        admit, in_vain = self._admit, 0
        while True:
            before = self._plane.members
            try:
                if admit is not None:
                    change, admit = admit, None
                    change()
                else:
                    self._plane.mend()
                return self._attempt()
            except (MembersLost, DamagedError) as failure:
                in_vain += self._plane.members == before
                if in_vain > MOST_IN_VAIN:
                    raise LostError(
                        f"the plane has failed {in_vain} times, though nobody has gone: {failure}"
                    ) from failure

    def _attempt(self) -> Recovered:
        recovery = Recovery(self._report(), self._plane.members, self._decide)
        steps = deque(recovery.begin())
        parts: list[Part] = []
        owed: tuple[int, ...] = ()  # ranks that wait for what this one gives
        early: list[tuple[int, Any]] = []
        deadline = time.monotonic() + self._limit_seconds
        self._pinged_at = time.monotonic()
        while True:
            while steps:
                match steps.popleft():
                    case Send(to=to, message=message):
                        self._plane.send(message, to)
                    case CatchUp(donor=donor, behind=behind):
                        owed = behind if donor == self._plane.rank else ()
                    case GoOn(decision=decision):
                        return Recovered(decision, recovery.reports, whole_of(parts), early)
            for sender, message in self._plane.receive():
                if isinstance(message, AnchorPart | StatePart):
                    parts.append(message)
                elif isinstance(message, Report | Decision | Ready | Agreed):
                    steps += recovery.handle(message)
                elif not isinstance(message, Ping):
                    early.append((sender, message))
            # The donor may have been faster than the decision's own message.
            if parts and parts[-1].last and recovery.stage is Stage.CATCHING_UP:
                steps += recovery.caught_up()
            if owed and (given := self._give()) is not None:
                for part in given:
                    for rank in owed:
                        self._plane.send(part, rank)
                owed = ()
            if not steps:
                self._wait(recovery, deadline)

    def _wait(self, recovery: Recovery, deadline: float) -> None:
        if time.monotonic() > deadline:
            told = recovery.reports or self._plane.members[1:]  # the first knows
            silent = [rank for rank in self._plane.members if rank not in told]
            raise StalledError(
                f"after a rank had gone, the others waited {self._limit_seconds:.0f} s for"
                f" {named(silent) if silent else 'each other'}"
            )
        if time.monotonic() > self._pinged_at + PING_SECONDS:
            self._pinged_at = time.monotonic()
            for rank in self._plane.members:
                if rank != self._plane.rank:
                    self._plane.send(Ping(), rank)
        time.sleep(POLL_SECONDS)
