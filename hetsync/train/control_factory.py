"""Makes the control of a live job: a controller's process beside rank 0, and what it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetsync.balance.profile import RankProfile
from hetsync.control.live import LiveControl
from hetsync.control.process import ControlProcess
from hetsync.control.window_meter import WindowMeter
from hetsync.sync.optimizers import momentum_of
from hetsync.train.terms import ControlFactory, ControlledJob


def control_factory(
    process: Callable[[], ControlProcess],
    profiles: Sequence[RankProfile],
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
) -> ControlFactory:
    """Control by a process, which is asked for where the control is made. `learning_rate` is what a stream position
    multiplies the rate by."""

    def make(job: ControlledJob) -> LiveControl:
        times = [profile.time for profile in profiles]
        solo = sum(times[rank].rate(member.share) for rank, member in job.machine.members.items())
        meter = WindowMeter(job.machine, times, solo, momentum=momentum_of(optimizer), learning_rate=learning_rate)
        return LiveControl(process(), meter, job.clock, job.telemetry)

    return make
