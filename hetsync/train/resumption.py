"""What a resumed run takes over from where it stood, and what today's recipe decides."""

from __future__ import annotations

from hetsync.config.schema import Config, RunConfig
from hetsync.control.actions import Actions, Limits
from hetsync.errors import UserError
from hetsync.sync.messages import Settings, settings_of
from hetsync.train.checkpoint import Progress


class FinishedError(Exception):
    """A run that was to be resumed has nothing left to do; the sentence says so."""


def check_samples_left(run: RunConfig, total: int, applied: int, finished: bool, ended_early: bool) -> None:
    """May a run of `applied` samples go on to `total`? UserError, or FinishedError, where not."""
    if applied > total:
        key = "run.epochs" if run.samples is None else "run.samples"
        value = run.epochs if run.samples is None else run.samples
        raise UserError(
            f"{key} is {value}, but this run has trained on {applied} samples, more than these {total}: raise it"
        )
    if applied == total and finished:
        raise FinishedError(f"this run is finished after {applied} samples: raise run.samples or run.epochs to go on")
    if finished and ended_early:
        raise FinishedError(f"this run has ended early after {applied} samples, by run.early_stop: begin another run")


def kept_shares(config: Config, progress: Progress | None, ranks: int) -> tuple[int, ...] | None:
    """The shares of the run so far, where ranks, batch and pins are as before; others follow from the recipe alone."""
    if progress is None or progress.ranks != ranks or config.sync.shares != "speed":
        return None
    as_before = sum(progress.shares) == config.data.batch_size
    pinned = all(progress.shares[rank] == share for rank, share in config.sync.pins.items() if rank < ranks)
    return progress.shares if as_before and pinned else None


def first_settings(config: Config, progress: Progress | None) -> Settings:
    """The recipe's K, D and q; in a resumed run that is controlled, the K and D that were in force."""
    settings = settings_of(config.sync)
    if progress is None or config.control.name == "fixed":
        return settings
    kept = Settings(progress.delay_bound, settings.quorum, progress.accumulation)
    return Actions(Limits.of(config.control)).clipped(kept)
