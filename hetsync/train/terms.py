"""By what one job differs from another: its terms, and what a session is given to evaluate and to be tuned by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hetsync.balance.profile import RankProfile
from hetsync.sync.coordinator import Control
from hetsync.sync.messages import Settings
from hetsync.sync.milestones import Evaluation, Marks, Milestones, no_marks
from hetsync.sync.rounds_rule import RoundsChange
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.telemetry import Telemetry


class Entry(NamedTuple):
    """What a rank must know that joins the others at a rest: buffers that travel in rounds, and the number of meetings
    that they have held."""

    travel: Sequence[int]
    held: int


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all ranks agree on before they start.

    Args:
        batch_size: B, samples of one slice of all ranks.
        total_samples: Samples to train on, over all ranks.
        ranks: One profile a rank.
        milestones: Where all ranks come to rest.
        seed: Of sample order and of each rank's random numbers.
        applied: Samples applied before (a resumed run).
        version: Rounds completed before.
        shares: Shares to start with; None computes them from the profiles.
        settings: Settings to start with; None takes those of the recipe.
        begun: Why these are others than the recipe's, where that was seen before the first slice.
        evaluations: Where the shared weights are evaluated while training goes on.
        entry: Of a rank that joins while the job runs; None where all begin together.
    """

    batch_size: int
    total_samples: int
    ranks: Sequence[RankProfile]
    milestones: Milestones
    seed: int = 0
    applied: int = 0
    version: int = 0
    shares: tuple[int, ...] | None = None
    settings: Settings | None = None
    begun: RoundsChange | None = None
    evaluations: Marks = no_marks
    entry: Entry | None = None


class Scorer(Protocol):
    """What a session does where the terms want an evaluation."""

    def score(self, shares: Sequence[int]) -> Any:
        """On every rank, between two tasks: what it finds on its part of the test data, of the model as it is.

        `shares` are the ranks' of a slice, the same on all ranks.
        """

    def report(self, evaluation: Evaluation, train_seconds: float) -> None:
        """On rank 0, from its communication thread, once all ranks have scored the weights of that moment."""


class NoEvaluation:
    def score(self, shares: Sequence[int]) -> Any:
        return None

    def report(self, evaluation: Evaluation, train_seconds: float) -> None: ...


@dataclass(frozen=True)
class ControlledJob:
    """What a control may look at, and write to, in rank 0's communication thread. `clock`: seconds of training."""

    machine: RoundStateMachine
    clock: Callable[[], float]
    telemetry: Telemetry


class JobControl(Control, Protocol):
    """A control with an end."""

    def summary(self) -> dict[str, Any]:
        """What it did, for the run's summary."""

    def close(self) -> None: ...


ControlFactory = Callable[[ControlledJob], JobControl]  # called where the coordinator is: on rank 0, while it lives
