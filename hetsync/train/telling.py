"""What the first rank tells while a job runs: people, trackers, and the script's own callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetsync.balance.profile import RankProfile
from hetsync.shortage import killed_for_memory
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.messages import NO_BOUND, Settings
from hetsync.sync.observation import mean_staleness
from hetsync.telemetry import Telemetry
from hetsync.train.display import Shows, make_display
from hetsync.train.evaluation import record
from hetsync.train.session import Session
from hetsync.train.summary import Join, Rollback
from hetsync.train.terminal import Display, Progress, Silence
from hetsync.train.tracking import Tracking

Callbacks = Mapping[str, Sequence[Callable[[Any], None]]]  # by the event's name


class Telling:
    """Attributes:
    display: Shows nothing before `begin`, which only the first rank calls.
    tracking: Where the first rank tracks something.
    solo: Samples/s that each rank reaches alone, where that is known.
    """

    def __init__(
        self,
        session: Session,
        profiles: Sequence[RankProfile],
        telemetry: Telemetry,
        callbacks: Callbacks,
        total: int | None,
        goes_back: bool,
    ) -> None:
        """`total`: samples to train on, if that is known. `goes_back`: to a checkpoint, where something is not finite.
        A rank that joins later has its place in `profiles`, too."""
        self.display: Display = Silence()
        self.tracking: Tracking | None = None
        self.solo: Sequence[float] | None = None
        self._session = session
        self._profiles = profiles
        self._telemetry = telemetry
        self._callbacks = callbacks
        self._total = total
        self._goes_back = goes_back
        self._round = -1  # that callbacks have been told of
        self._settings: Settings | None = None  # that have been told, as the next two
        self._deaths = self._left_out = 0

    def solo_of(self, rank: int) -> float | None:
        return None if self.solo is None else self.solo[rank]

    def begin(self, shows: Shows) -> None:
        self.display = make_display(shows, self._total, self._session.terms.applied)

    def leave_to_others(self) -> None:
        """Ranks that have died since have told what has been left out so far."""
        self._left_out = len(self._session.left_out)

    def say(self, text: str) -> None:
        self.display.say(text)

    def ranks(self) -> None:
        self.display.ranks(self._profiles, self._session.shares, self.solo)

    # Between batches.

    def between_batches(self) -> None:
        coordinator = self._session.coordinator
        if coordinator is not None:
            if self.display.due():
                self.display.progress(self._moment(coordinator))
            self.losses()
            if coordinator.settings is not self._settings:
                self._tell_settings(coordinator.settings)
            if self._callbacks.get("round") and coordinator.machine.version > self._round + 1:
                self._round = coordinator.machine.version - 1
                self.call_back("round", self._round)
        if self.tracking is not None:
            self.tracking.between_batches()

    def _moment(self, coordinator: Coordinator) -> Progress:
        """While the communication thread goes on counting."""
        machine = coordinator.machine
        return Progress(
            samples_applied=machine.ledger.applied,
            samples_expected=self._total,
            already=self._session.terms.applied,
            seconds=self._session.seconds_training(),
            loss=coordinator.take_loss(),
            staleness=mean_staleness(dict(machine.staleness)),  # a copy, made in one step
            capable=coordinator.device_rate(),
            slowest=None if self.solo is None else coordinator.speeds.slowest(),
        )

    def _tell_settings(self, settings: Settings) -> None:
        """What a controller or the rule has decided, once it is asked for."""
        if self._settings is not None:
            now = settings.in_force
            bound = "none" if now.delay_bound == NO_BOUND else now.delay_bound
            self.say(
                f"from now on accumulation {now.accumulation}, quorum {now.quorum:g}, delay bound {bound}{now.besides}"
            )
        self._settings = settings

    # What happens.

    def losses(self) -> None:
        """Ranks that have died, and samples that were left out, since this was called last."""
        self._tell_deaths()
        self.left_out()

    def _tell_deaths(self) -> None:
        session = self._session
        ranks = session.plane.size
        go_on = "1 rank goes on" if ranks == 1 else f"{ranks} ranks go on"
        for death, _ in session.deaths[self._deaths :]:
            self.say(
                f"rank {death.rank} ({self._host(death.rank)}) has died in round {death.round}:"
                f" {go_on}, and its {death.samples_returned} samples go out again"
            )
        if session.deaths[self._deaths :] and (killed := killed_for_memory()) is not None:
            self.say(killed)
        self._deaths = len(session.deaths)

    def left_out(self) -> None:
        for left in self._session.left_out[self._left_out :]:
            then = "all go back to a checkpoint" if self._goes_back else f"{left.samples} samples go out once more"
            self.say(
                f"gradients were not finite on rank {left.rank} ({self._host(left.rank)}) in round {left.round}:"
                f" they are left out, and {then}"
            )
            self._left_out += 1

    def _host(self, rank: int) -> str:
        return self._profiles[rank].host

    def evaluation(self, applied: int, seconds_before: float, seconds: float, metrics: dict[str, float]) -> None:
        """At so many samples, after so many seconds of training, and those of the jobs that this one goes on from."""
        sentence = record(self._telemetry, applied, seconds_before + seconds, metrics)
        if self.tracking is not None:
            self.tracking.log_metrics(metrics, applied, seconds)
        self.display.evaluated(sentence, applied, metrics)
        self.call_back("evaluation", metrics)

    def join(self, join: Join) -> None:
        ranks = self._session.plane.size
        self.say(f"rank {join.rank} ({join.host}) has joined before round {join.round}: {ranks} ranks")

    def rollback(self, rollback: Rollback) -> None:
        self.left_out()
        again = f"{rollback.samples} are trained on again"
        if rollback.told is not None:
            self.say(
                f"{rollback.told}: all ranks go back to {rollback.checkpoint_samples} samples, without delay; {again}"
            )
        else:
            self.say(f"all ranks go back to the checkpoint of {rollback.checkpoint_samples} samples: {again}")

    def call_back(self, event: str, value: Any) -> None:
        if self._session.plane.leads:
            for callback in self._callbacks.get(event, ()):
                callback(value)
