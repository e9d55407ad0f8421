"""Rank 0's spokesman of the policy: turns messages into events, instructions into messages, and watches speeds.

It runs inside rank 0's communication thread and knows neither tensors nor planes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hetsync.errors import UserError
from hetsync.slicing import StepTime, rebalanced
from hetsync.sync.messages import Event, Finished, Give, Instruction, Reshared, Settings, Tuned
from hetsync.sync.milestones import Evaluation
from hetsync.sync.policy import Policy

Send = Callable[[Mapping[int, Sequence[Instruction]]], None]

# An observation's weight in a rank's smoothed speed: about the last twenty pieces count.
SMOOTHING = 0.1
# Speeds of fewer pieces than this are anecdotes.
LEAST_OBSERVATIONS = 10


@dataclass
class Speeds:
    """Each rank's profiled step time, scaled by how its pieces turn out."""

    profiled: dict[int, StepTime]
    caps: Sequence[int | None] | None = None
    pins: Mapping[int, int] | None = None
    _scale: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def observe(self, rank: int, samples: int, slices: int, seconds: float) -> None:
        """A piece of `samples` in `slices` took `seconds` of device time."""
        if not samples or seconds <= 0:
            return
        profiled = self.profiled[rank]
        ratio = seconds / (slices * profiled.fixed_seconds + samples * profiled.seconds_per_sample)
        self._seen[rank] += 1
        weight = max(SMOOTHING, 1 / self._seen[rank])
        self._scale[rank] = (1 - weight) * self._scale.get(rank, 1.0) + weight * ratio

    def times(self, ranks: Sequence[int]) -> list[StepTime]:
        scales = [self._scale.get(rank, 1.0) for rank in ranks]
        return [
            StepTime(self.profiled[r].fixed_seconds * s, self.profiled[r].seconds_per_sample * s)
            for r, s in zip(ranks, scales, strict=True)
        ]

    def settled(self, ranks: Sequence[int]) -> bool:
        return all(self._seen[rank] >= LEAST_OBSERVATIONS for rank in ranks)


class Control(Protocol):
    """What may turn the settings while the job runs."""

    def hear(self, event: Event) -> None:
        """An event, before the policy takes it in."""

    def steer(self, settings: Settings) -> Settings | None:
        """Other settings than these, if it wants any. Must not wait."""


class Coordinator:
    def __init__(
        self,
        policy: Policy,
        speeds: Speeds,
        send: Send,
        rebalance: bool,
        control: Control | None = None,
        on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    ) -> None:
        """`send` delivers instructions by rank, in order. `rebalance`: shares follow the smoothed speeds.

        `on_evaluation` hears what all ranks together have found at a snapshot.
        """
        self.policy = policy
        self.settings = policy.settings  # asked for last; a change of mode comes into force only at a drain
        self.speeds = speeds
        self.loss_sum = 0.0
        self.loss_samples = 0
        self.device_seconds: dict[int, float] = defaultdict(float)
        self._send = send
        self._rebalance = rebalance
        self._control = control
        self._on_evaluation = on_evaluation
        self._balanced_at = policy.version

    def begin(self) -> None:
        self._deliver(self.policy.begin())

    def on(self, events: Sequence[Event]) -> None:
        """Events of some ranks; those of one in its order."""
        out: list[Instruction] = []
        for event in events:
            if isinstance(event, Finished):
                self._observe(event)
            elif isinstance(event, Tuned):
                self.settings = event.settings
            if self._control is not None:
                self._control.hear(event)
            out += self.policy.on(event)
        self._deliver(out)
        if (evaluation := self.policy.snapshots.take()) is not None:
            self._on_evaluation(evaluation)
        if self._rebalance:
            self._balance()
        if self._control is not None and (settings := self._control.steer(self.settings)) is not None:
            self.on([Tuned(settings)])

    def take_loss(self) -> float | None:
        """Mean training loss of the samples reported since the last call."""
        mean = self.loss_sum / self.loss_samples if self.loss_samples else None
        self.loss_sum, self.loss_samples = 0.0, 0
        return mean

    def _observe(self, event: Finished) -> None:
        if not math.isfinite(event.loss_sum):
            raise UserError(
                f"the training loss became {event.loss_sum} on rank {event.rank} after "
                f"{self.policy.ledger.applied} samples: lower optimizer.learning_rate or look at the data"
            )
        share = max(1, self.policy.members[event.rank].share)
        self.speeds.observe(event.rank, event.samples, -(-event.samples // share), event.seconds)
        self.device_seconds[event.rank] += event.seconds
        self.loss_sum += event.loss_sum
        self.loss_samples += event.samples

    def _balance(self) -> None:
        """New shares where these would make slices at least 5 % shorter; looked at once a few rounds."""
        if self.policy.version < self._balanced_at + LEAST_OBSERVATIONS:
            return
        ranks = list(self.policy.members)
        if not self.speeds.settled(ranks):
            return
        self._balanced_at = self.policy.version
        old = tuple(member.share for member in self.policy.members.values())
        new = rebalanced(old, self.speeds.times(ranks), sum(old), self.speeds.caps, self.speeds.pins)
        if new != old:
            self._deliver(self.policy.on(Reshared(dict(zip(ranks, new, strict=True)))))

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        """One letter a rank, in the order of the decisions."""
        letters: dict[int, list[Instruction]] = defaultdict(list)
        for instruction in instructions:
            for rank in [instruction.rank] if isinstance(instruction, Give) else self.policy.members:
                letters[rank].append(instruction)
        self._send(letters)
