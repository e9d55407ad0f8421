"""Rank 0's spokesman of the policy: turns messages into events, instructions into messages, and watches speeds.

It runs inside rank 0's communication thread and knows neither tensors nor planes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hetsync.errors import UserError
from hetsync.slicing import rebalanced
from hetsync.sync.messages import Event, Finished, Give, Instruction, Reshared, Settings, Tuned
from hetsync.sync.milestones import Evaluation
from hetsync.sync.policy import Policy
from hetsync.sync.speeds import LEAST_OBSERVATIONS, Speeds

Send = Callable[[Mapping[int, Sequence[Instruction]]], None]


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
        self._reconsider_from = policy.version + LEAST_OBSERVATIONS  # the version from which on shares are reconsidered

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
        self._watch_speed(event)
        self.device_seconds[event.rank] += event.seconds
        self.loss_sum += event.loss_sum
        self.loss_samples += event.samples

    def _watch_speed(self, event: Finished) -> None:
        work = self.policy.members[event.rank].current
        # The small pieces before a rest would tell of a step's fixed costs rather than of the device.
        if work is None or event.samples < len(work.piece.slices) * work.piece.share:
            return
        if self.speeds.observe(event.rank, event.samples, len(work.piece.slices), event.seconds):
            self._reconsider_from = self.policy.version

    def _balance(self) -> None:
        """New shares where these would make slices at least 5 % shorter; looked at once a few rounds, or when a rank's
        speed has jumped."""
        if self.policy.version < self._reconsider_from:
            return
        if not self.speeds.settled(self.policy.members):
            return
        ranks = list(self.policy.members)
        self._reconsider_from = self.policy.version + LEAST_OBSERVATIONS
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
