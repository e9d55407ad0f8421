"""What a resumed run takes over from where it stood, and what today's recipe decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetsync.balance.shares import may_stay, slice_rule
from hetsync.config.schema import Config
from hetsync.control.actions import Actions, Limits
from hetsync.errors import UserError
from hetsync.sync.messages import Settings, settings_of
from hetsync.sync.rounds_rule import found_before
from hetsync.train.checkpoint import Loaded, Progress


class FinishedError(Exception):
    """A run that was to be resumed has nothing left to do; the sentence says so."""


@dataclass(frozen=True)
class Standing:
    """Where a run stands when it is saved, beside its samples.

    Args:
        ended: It goes on no more, though not all samples are used.
        lines_due: It stands at an interval's end, whose last lines in the script have not been run.
    """

    ended: bool = False
    lines_due: bool = False

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Standing:
        """As a checkpoint has it; the first version's say nothing."""
        return cls(bool(state.get("ended")), bool(state.get("reopened")))

    def state(self) -> dict[str, bool]:
        return {"ended": self.ended, "reopened": self.lines_due}

    def finished(self, applied: int, total: int, marked: bool) -> str | None:
        """Why nothing is left to do on the way to `total` samples, or None. `marked`: the summary says finished.

        UserError where the run is beyond them.
        """
        if applied > total:
            raise UserError(
                f"the job is to train on {total} samples, but this run has trained on {applied} already: raise its"
                " epochs or samples, or begin another run"
            )
        if marked and applied == total:
            return f"this run is finished after {applied} samples: raise its epochs or samples to go on"
        if marked and self.ended:
            return f"this run has ended early after {applied} samples: begin another run"
        return None


NAMES_IN_ORDER = {
    "epoch_samples": "samples of an epoch",
    "samples": "samples of the data set",
    "shuffle": "shuffle",
    "seed": "seed",
    "costs": "costs",
    "weights": "weights",
}


def require_order(loaded: Loaded, order: Mapping[str, Any]) -> None:
    """UserError where positions of the stream (see `Source.order`) meant other samples to the run so far: some would be
    used twice in its epoch, others never. Between epochs of one length any order may follow."""
    kept, applied = loaded.state.get("order"), loaded.progress.samples_applied
    if kept is None or applied == 0:  # an older version's has none
        return
    changed = [key for key in NAMES_IN_ORDER if kept.get(key) != order[key]]
    between = kept.get("epoch_samples") == order["epoch_samples"] and applied % order["epoch_samples"] == 0
    if not changed or between:
        return
    key = changed[0]
    told = "other ones than before" if key in ("costs", "weights") else f"{kept.get(key)} before, {order[key]} now"
    raise UserError(
        f"the run stands at sample {applied} of an order that these data do not have ({NAMES_IN_ORDER[key]}: {told}),"
        " so some would be used twice and others never: resume with the data, the seed and, where drop_last leaves"
        " some out, the batch size that it had; or begin another run"
    )


def kept_shares(config: Config, progress: Progress | None, ranks: int) -> tuple[int, ...] | None:
    """The shares of the run so far, where ranks, batch, pins and the least slice allow them; others follow from the
    recipe alone."""
    sync = config.sync
    if progress is None or progress.ranks != ranks or sync.shares != "speed":
        return None
    kept = may_stay(progress.shares, config.data.batch_size, [None] * ranks, sync.pins, slice_rule(sync))
    return progress.shares if kept else None


def first_settings(config: Config, progress: Progress | None, values: int) -> Settings:
    """The recipe's for a model of so many weights; in a resumed run what a rule had found, or the K and D of a
    controller."""
    sync = config.sync.for_model(values)
    settings = settings_of(sync)
    if progress is None:
        return settings
    if config.control.name == "fixed":
        ruled = sync.delay_bound == "auto" or (not settings.synchronous and progress.delay_bound > 0)
        return found_before(sync, progress.settings) if ruled else settings
    kept = replace(settings, delay_bound=progress.delay_bound, accumulation=progress.accumulation)
    return Actions(Limits.of(config.control)).clipped(kept)
