"""What ranks' loops tell each other of a batch in synchronous mode, in numbers that are summed with its gradients.

At D = 0 all ranks make the same steps. A loop that leaves steps out, has skipped the batch or has no part of it says
so, and what all have said together tells each rank whether others make a step that its own loop does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetsync.errors import UserError

BEHIND = (
    "the loops of {step:.0f} ranks step an optimizer in a batch and those of {others:.0f} do not, as {behind:.0f} ranks"
    " have had no part of some batches before (they are slow, or an epoch's last batch is small), and a count of the"
    " loop's own is behind there: with sync.delay_bound 0 go by job.step_count, which is the same on all ranks"
)
DIFFER = (
    "the loops of {step:.0f} ranks step an optimizer (or look at its gradients) and those of {skip:.0f} do not, with"
    " gradients of this batch, but at sync.delay_bound 0 all ranks make the same steps: skip a batch before its"
    " backward (or multiply its loss by 0), or take a delay bound of 1 or more"
)


@dataclass(frozen=True)
class LoopReport:
    """What a rank's loop says of a task, when it gives the gradients of one that it steps on (`STEPS`), or of all that
    are left, as it adds them up, has skipped the last slice, or has been left.

    Attributes:
        computed: It has had a slice of the task, and not skipped it.
        apart: It has had none, and goes on with the next task.
        skipped: It has had one, and skipped it.
        makes_up: What slices before have brought is stepped on in its place.
        clips_unknown: It has yet to clip.
        looks: It looks at gradients before the step, and has some of its own.
    """

    computed: bool = True
    apart: bool = False
    skipped: bool = False
    makes_up: bool = False
    clips_unknown: bool = False
    looks: bool = False


STEPS = LoopReport()  # says nothing else


class Roles(NamedTuple):
    """Of a stage's gradients: ranks that step on them; those of these that look at them before; that could step and do
    not; that have computed the slice and have nothing for the stage; of all these, those that have had no part of some
    batches before; that have skipped the slice; that do not know how loops clip; that have no slice."""

    step: float
    look: float
    skip: float
    absent: float
    behind: float
    skipped: float
    clips_unknown: float
    apart: float

    @classmethod
    def of(cls, report: LoopReport, *, chosen: bool, has_any: bool, missed: bool) -> Roles:
        """This rank's part. `chosen`: the loop steps on this stage next. `has_any`: the task has brought it gradients.
        `missed`: the rank has had no part of some batches before."""
        step = chosen or (report.makes_up and has_any)
        skip = report.computed and not step and has_any
        absent = report.computed and not step and not has_any
        behind = missed and (step or skip or absent)
        says = report.skipped, report.clips_unknown, report.apart
        return cls(step, step and report.looks, skip, absent, behind, *says)

    def require_alike(self) -> None:
        """UserError, on all ranks, where some step and others, that could, do not."""
        if self.step and self.behind and (self.skip or self.absent):
            raise UserError(BEHIND.format(step=self.step, others=self.skip + self.absent, behind=self.behind))
        if self.step and self.skip:
            raise UserError(DIFFER.format(step=self.step, skip=self.skip))
