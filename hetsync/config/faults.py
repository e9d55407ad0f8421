"""What becomes of a job when something fails, and faults that are put into one on order, to see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hetsync.config.checks import at_least, listed
from hetsync.config.records import record
from hetsync.errors import UserError

Kind = Literal["die", "stop", "slow", "exit", "raise", "memory", "not_finite", "corrupt", "drop", "delay", "disk_full"]
When = Literal["before", "during", "after", "evaluation", "checkpoint", "drain", "recovery"]
OF_A_ROUND = ("before", "during", "after")
NEEDS = {"slow": "factor", "delay": "seconds"}  # a key of its own
TAKES = {**NEEDS, "stop": "seconds"}


@dataclass(frozen=True)
class InjectedFault:
    """A fault that is put into the job.

    Args:
        kind: What happens.
        rank: To whom.
        when: Before, during or after round `round`, or without one at the rank's first evaluation, checkpoint, drain or
            recovery.
        round: Number of the round.
        seconds: How long a rank stops (None: for ever), or how much later its part of a sum comes.
        factor: Times as slow from then on.
    """

    kind: Kind
    rank: int
    when: When = "during"
    round: int | None = None
    seconds: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        at_least("rank", self.rank, 0)
        at_least("round", self.round, 0)
        at_least("seconds", self.seconds, 0, above=True)
        at_least("factor", self.factor, 1, above=True)
        if self.when in OF_A_ROUND and self.round is None:
            raise UserError(f"round is missing, and when is {self.when}: give the number of a round")
        if self.when not in OF_A_ROUND and self.round is not None:
            raise UserError(
                f"round is {self.round}, but when is {self.when}, which takes none: leave it out, or use"
                f" {listed(list(OF_A_ROUND))}"
            )
        if self.kind == "disk_full" and self.rank != 0:
            raise UserError(f"rank is {self.rank}, but kind is disk_full: use 0, which alone writes checkpoints")
        for key in ("seconds", "factor"):
            given = getattr(self, key) is not None
            if given and TAKES.get(self.kind) != key:
                raise UserError(
                    f"{key} is {getattr(self, key)}, but kind is {self.kind}, which takes none: leave it out"
                )
            if not given and NEEDS.get(self.kind) == key:
                raise UserError(f"{key} is missing, which kind {self.kind} needs: add it")

    @property
    def deadly(self) -> bool:
        """Can the rank not tell any more whether it has struck?"""
        return self.kind in ("die", "stop")

    def __str__(self) -> str:
        place = self.when if self.round is None else f"{self.when} round {self.round}"
        return f"{self.kind} on rank {self.rank}, {place}"


@dataclass(frozen=True)
class FaultConfig:
    """What becomes of the job when something fails.

    Args:
        tolerate: Go on with the others when a rank dies: auto (where that can be: with an MPI that tells of deaths, by
            mpirun --with-ft ulfm; or with sums by Gloo under a launcher that leaves the others alone, such as one
            torchrun a node, while rank 0 lives), true (refuse to start elsewhere) or false (end the job).
        least_ranks: With fewer ranks left the job saves and ends with status 86; null takes more than half of the last
            ranks. Where whole hosts have gone whose ranks would be enough, they may live behind a cut link, and go on:
            then those who are too few end without saving. With a number of at most half both sides may go on.
        not_finite: Gradients that are not finite end the job (stop), or are left out before they are in any round. Then
            their samples go out once more (skip), and the job ends where the same samples spoil gradients again, and
            names them; or all ranks go back to the newest checkpoint (rollback), at once and without a new start, and
            train on from there: the job ends at the third failure after the same checkpoint, and names the samples.
            rollback needs a run folder and checkpoints on the way.
        silent_seconds: A rank that gives no sign of life for so many seconds (the first rank: half as many again) is
            excluded: another rank of its host kills it, which is a death, that the others outlive or that ends the job.
            Nothing happens where it is alone on its host, where all of its host are silent, where the second rank is
            silent together with the first, or by a plan that cuts the model: there run.timeout_seconds ends the job.
            null never.
        slow: A rank whose last three tasks each took `slow_factor` times its own median is waited for (wait), or
            excluded in the same way (exclude). Where slices have grown with its share, so has its median.
        slow_factor: Times its own median from which a rank's task is slow.
        replace: A process is started in the place of a rank that has died, with its number, or, without MPI, whoever
            calls hetsync join may start one. It measures its own speed while the others go on, and joins them at a
            rest, from the checkpoint that is written there. Where none can join (where a rank's death ends the job,
            with a controller, without a run folder, by a plan) true is refused: there requeue the job and resume with
            more ranks.
        inject: Faults to put into the job, to see what becomes of it, each {kind: die, rank: 3, round: 40, when:
            during}. Kinds are die, stop (with `seconds`, or for ever), slow (`factor`), exit, raise, memory,
            not_finite, corrupt and drop (a message), delay (`seconds`) and disk_full; `when` is before, during (the
            default) or after the round, or evaluation, checkpoint, drain or recovery without one. A job in which one
            never struck ends with status 1. Resumed jobs inject nothing unless they are told to.
    """

    tolerate: Literal["auto"] | bool = "auto"
    least_ranks: int | None = None
    not_finite: Literal["stop", "skip", "rollback"] = "stop"
    # Long: who is killed by mistake does not come back, and who hangs costs this much once. A storage that hangs for a
    # minute or two, or C code that keeps Python's lock, is no rank that hangs.
    silent_seconds: float | None = 300.0
    slow: Literal["wait", "exclude"] = "wait"
    slow_factor: float = 10.0
    replace: bool = False
    inject: list[dict[str, Any]] = field(default_factory=list)

    @property
    def goes_back(self) -> bool:
        return self.not_finite == "rollback"

    def __post_init__(self) -> None:
        at_least("fault.least_ranks", self.least_ranks, 1)
        at_least("fault.silent_seconds", self.silent_seconds, 1)
        at_least("fault.slow_factor", self.slow_factor, 1, above=True)
        if self.slow == "exclude" and self.tolerate is False:
            raise UserError("fault.slow is exclude, but fault.tolerate is false: use wait, or let the others go on")
        if self.replace and self.tolerate is False:
            raise UserError("fault.replace is true, but fault.tolerate is false: let the others go on, or give false")
        self.injected()

    def injected(self) -> tuple[InjectedFault, ...]:
        """UserError for a fault that cannot be."""
        return tuple(record(InjectedFault, each, f"fault.inject[{place}]") for place, each in enumerate(self.inject))

    def check_uninjected(self, what: str) -> None:
        """UserError where faults are to be injected into what takes none."""
        if self.inject:
            raise UserError(
                f"fault.inject has {len(self.inject)} entries, but {what} takes none: leave fault.inject out"
            )

    def check_ranks(self, ranks: int) -> None:
        """UserError for a rank that the job has not."""
        for place, fault in enumerate(self.injected()):
            if fault.rank >= ranks:
                raise UserError(
                    f"fault.inject[{place}].rank is {fault.rank}, but the job has {ranks} ranks: use 0 to {ranks - 1}"
                )
