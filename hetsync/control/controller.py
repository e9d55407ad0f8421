"""The interface of everything that sets accumulation steps and delay bound, of live and of simulated jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation


@dataclass(frozen=True)
class Decision:
    """What shall hold from now on, and why in a few words (for telemetry)."""

    settings: Settings
    reason: str


class Controller(Protocol):
    """Looks at windows of a job, one after the other. It may keep what it has seen; it knows no clock but theirs."""

    def decide(self, seen: Observation) -> Decision: ...
