"""What ranks tell the coordinator (events) and what it tells them (instructions). Plain data, a few bytes each.

What comes with every piece of work or round is a named tuple: made, sent and read in less than half of a dataclass's
time, which is what bounds the number of ranks (docs/scale.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetsync.data.ledger import Span

NO_BOUND = 2**31  # a delay bound that no run reaches: fully asynchronous


@dataclass(frozen=True)
class Settings:
    """How much work a contribution holds and how stale it may be. Changeable at any round boundary.

    Args:
        delay_bound: D, the greatest staleness in rounds; 0 is synchronous, `NO_BOUND` fully asynchronous.
        quorum: q, fraction of a full contribution set (in samples) that may start a round when D > 0;
            1 waits for a piece of every rank and keeps all within D pieces of the slowest: stale synchronous
            parallel with bound D.
        accumulation: K, slices in one contribution.
    """

    delay_bound: int = 4
    quorum: float = 0.25
    accumulation: int = 1

    @property
    def synchronous(self) -> bool:
        return self.delay_bound == 0


class Piece(NamedTuple):
    """Work for one contribution of one rank: K slices, each a few spans of the sample stream.

    `synchronous_round` is the round that all ranks' pieces of a synchronous step share, None in delayed mode;
    `round_samples` that step's samples over all ranks. `position`, in samples, drives the learning rate, as does
    `share`, the samples of a full slice of this rank.
    A rank begins the piece only once it has applied version `not_before`.
    """

    number: int
    slices: tuple[tuple[Span, ...], ...]
    delay_bound: int
    position: int
    not_before: int
    synchronous_round: int | None = None
    round_samples: int = 0
    share: int = 0

    @property
    def samples(self) -> int:
        return sum([stop - start for spans in self.slices for start, stop in spans])


# Events: from a rank's engine to the coordinator.


class Began(NamedTuple):
    """Compute on a piece started from anchor version `version`."""

    rank: int
    piece: int
    version: int


class Finished(NamedTuple):
    """A piece is computed and waits for a round. `loss_sum` is summed over samples; seconds are device time."""

    rank: int
    piece: int
    samples: int
    seconds: float = 0.0
    loss_sum: float = 0.0


class Took(NamedTuple):
    """The rank's contribution to a round holds every piece that it finished up to and including `piece`."""

    rank: int
    round: int
    piece: int


class Weighed(NamedTuple):
    """What the rank puts into a round's sum has this squared norm: progress of `samples` in so many inner steps, or,
    with 0 steps, the sum of their gradients."""

    rank: int
    round: int
    samples: int
    steps: int
    squared_norm: float


class Completed(NamedTuple):
    """The round's sum has arrived on rank 0; its squared norm, where norms are asked for."""

    round: int
    squared_norm: float = 0.0


class Scored(NamedTuple):
    """The rank has evaluated its part of the test data at the anchor of `round`: sums of metrics by name."""

    rank: int
    round: int
    sums: Mapping[str, float]


@dataclass(frozen=True)
class Tuned:
    """New settings, in force for the work handed out from now on."""

    settings: Settings


@dataclass(frozen=True)
class Reshared:
    """New shares by rank, in force for the work handed out from now on."""

    shares: dict[int, int]


@dataclass(frozen=True)
class DrainRequested:
    """Bring all ranks to rest at the next possible moment (checkpoint on request, pre-emption)."""

    reason: str


@dataclass(frozen=True)
class Left:
    """The rank is gone; what it held goes out again."""

    rank: int


@dataclass(frozen=True)
class Joined:
    """The rank is here, with the anchor of version `version`, and its share."""

    rank: int
    version: int
    share: int


Event = Began | Finished | Took | Weighed | Completed | Scored | Tuned | Reshared | DrainRequested | Left | Joined


# Instructions: from the coordinator to the engines.


class Give(NamedTuple):
    """Here is the rank's next piece of work."""

    rank: int
    piece: Piece


class StartRound(NamedTuple):
    """All ranks join round `number`; the contributors put in what they have finished, the others zeros.

    `drain` names why everybody has come to rest, if they have; `final` says that no work will follow.
    `applied` is the number of samples applied before this round. With `evaluate` the weights that all share once the
    round has landed are to be evaluated.
    """

    number: int
    contributors: frozenset[int]
    applied: int
    synchronous: bool = False
    drain: str | None = None
    final: bool = False
    evaluate: bool = False


Instruction = Give | StartRound


# Between engines, when a round takes too long.


@dataclass(frozen=True)
class Probe:
    """Rank 0 asks for a sign of life."""


@dataclass(frozen=True)
class Alive:
    """The rank's communication thread runs and has joined all rounds below `joined`; does its main thread wait?"""

    rank: int
    joined: int
    waiting: bool
