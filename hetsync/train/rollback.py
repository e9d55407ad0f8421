"""Where all ranks go back to, once what one has brought was not finite (`fault.not_finite: rollback`), nobody is left
who kept the books, or delay has lost training (`sync/delay_guard.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hetsync.config.faults import FaultConfig
from hetsync.errors import UserError
from hetsync.plane.base import LostError, Messages, decided_by_first
from hetsync.sync.delay_guard import Lost
from hetsync.sync.lost_books import BOOKS_LOST
from hetsync.sync.messages import TaskLeftOut
from hetsync.sync.recovery import Death
from hetsync.train import checkpoint
from hetsync.train.last_good import LastGood, to_go_back_to
from hetsync.train.session import Session
from hetsync.train.summary import Rollback

_KINDS: dict[type, Literal["not_finite", "books_lost", "delay"]] = {
    TaskLeftOut: "not_finite",
    Death: "books_lost",
    Lost: "delay",
}
MOST_TIMES = 2  # to the same checkpoint, by what was not finite

Cause = TaskLeftOut | Death | Lost


class Rollbacks:
    """How often all ranks have gone back, as this one knows: `known`."""

    def __init__(self, fault: FaultConfig, folder: Path | None) -> None:
        """UserError where there will be no checkpoint to go back to."""
        if fault.goes_back and folder is None:
            raise UserError(
                "fault.not_finite is rollback, but there is no run folder, and so no checkpoint to go back to: give"
                " hetsync.join a run, or use skip"
            )
        self.known: list[Rollback] = []
        self._folder = folder

    def decide(
        self,
        messages: Messages,
        session: Session,
        hosts: Sequence[str],
        epoch_from: int,
        kept: LastGood,
    ) -> tuple[checkpoint.Loaded, Rollback | None]:
        """Collective, at rest: the checkpoint that all go back to, or a copy that all have `kept` in memory, and what
        there is to tell, once. Known from here on: where a rank dies on the way, all go back once more for the same
        failure. See `destination`."""
        folder, self.known = self._folder, agreed(messages, self.known)
        held = messages.gather_objects(kept.positions)
        in_memory = sorted(set.intersection(*map(set, held)))

        def decide() -> tuple[Path | int, Rollback | None]:
            return destination(folder, session, hosts, self.known, epoch_from, in_memory)

        place, newest = decided_by_first(messages, decide)
        self.known += [] if newest is None else [newest]
        return kept.at(place) if isinstance(place, int) else checkpoint.load(place), newest


def agreed(messages: Messages, known: Sequence[Rollback]) -> list[Rollback]:
    """Collective, at rest: the times that all have gone back so far, of which this rank knows these. Where one has died
    while it told of the newest, only some know it."""
    told: list[list[Rollback]] = messages.gather_objects(list(known))
    return max(told, key=len)


def destination(
    folder: Path | None,
    session: Session,
    hosts: Sequence[str],
    before: Sequence[Rollback],
    epoch_from: int,
    in_memory: Sequence[int] = (),
) -> tuple[Path | int, Rollback | None]:
    """On the first rank, at rest: the newest sound checkpoint of the run `folder`, or the samples that a copy is of
    which all ranks have in memory; and what there is to tell, once.

    Args:
        in_memory: samples of each of these. A script's lines at that rest had been run.
        hosts: of the ranks, by number.
        before: times that all have gone back so far.
        epoch_from: where the epoch began that a script is in: its lines before that are not run again.

    Raises UserError where nothing is gained by going back, or nothing is there; LostError where that is no mistake.
    """
    lost = session.lost[-1] if session.lost else None
    of_epoch = [each for each in in_memory if each >= epoch_from]  # that hold what lines before it have done
    if lost is not None and of_epoch and all(lost.round >= left.round for left in session.left_out):
        there = to_go_back_to(of_epoch, lost.good)
        told = bool(before) and before[-1].cause == "delay" and before[-1].round == lost.round
        return there, None if told else _told(lost, session, hosts, there)
    known: list[Cause] = [*session.left_out, *session.books_lost, *session.lost]
    if not known:
        raise LostError("who knew why all go back has died: go on with --resume (in a script: resume='auto')")
    causes = [cause for cause in known if not before or cause.round >= before[-1].next_round]
    cause = causes[0] if causes else known[-1]
    if folder is None:
        without = "in memory, which was short" if not in_memory else "of this epoch's beginning that is sound"
        raise _nowhere(cause, session, f"there is no copy {without}, and no run folder to go back to")
    if not checkpoint.complete(folder / "checkpoints"):
        look = "" if isinstance(cause, Death | Lost) else "look at the samples, lower optimizer.learning_rate, or "
        raise _nowhere(
            cause,
            session,
            f"there is no checkpoint yet to go back to: {look}save sooner (run.checkpoint_every)",
        )
    loaded = checkpoint.load_newest(folder)
    applied = loaded.progress.samples_applied
    if isinstance(cause, TaskLeftOut) and causes and _times(before, applied) >= MOST_TIMES:
        raise UserError(
            f"{_failure(cause, session)}, for the third time since the checkpoint of {applied} samples: look at the"
            " samples, or lower optimizer.learning_rate"
        )
    if 0 < epoch_from >= applied:
        raise _nowhere(
            cause,
            session,
            f"the newest checkpoint, of {applied} samples, is of before this epoch, whose lines in the script are not"
            " run again: go on with --resume (in a script: resume='auto'), or save more often (run.checkpoint_every)",
        )
    if not causes:
        return loaded.path, None
    return loaded.path, _told(cause, session, hosts, applied)


def _told(cause: Cause, session: Session, hosts: Sequence[str], applied: int) -> Rollback:
    return Rollback(
        cause=_KINDS[type(cause)],
        rank=cause.rank,
        host=hosts[cause.rank],
        round=cause.round,
        next_round=session.version,
        samples=session.applied - applied,
        checkpoint_samples=applied,
        told=str(cause) if isinstance(cause, Lost) else None,
    )


def _times(before: Sequence[Rollback], applied: int) -> int:
    """All have gone back to the checkpoint of so many samples by what was not finite."""
    return sum(known.checkpoint_samples == applied and known.cause == "not_finite" for known in before)


def _nowhere(cause: Cause, session: Session, why: str) -> Exception:
    """A death is nobody's mistake: another start may well go on."""
    kind = LostError if isinstance(cause, Death) else UserError
    return kind(f"{_failure(cause, session)}, and {why}")


def _failure(cause: Cause, session: Session) -> str:
    if isinstance(cause, Death):
        return BOOKS_LOST
    if isinstance(cause, Lost):
        return f"{cause}; sync.delay_bound 0 stands higher rates"
    return (
        f"gradients were not finite on rank {cause.rank} in round {cause.round}, with these samples of the data set:"
        f" {session.named(cause.spans)}"
    )
