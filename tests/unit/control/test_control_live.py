"""What becomes of a live controller's decisions, death and silence: fake clock, fake process, real state machine."""

from __future__ import annotations

import json
import signal
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from virtual import make_machine

from hetsync.balance.profile import StepTime
from hetsync.balance.speed_tracker import Speeds
from hetsync.config.schema import ControlConfig
from hetsync.control.controller import Decision
from hetsync.control.live import POLL_SECONDS, SILENCE_SECONDS, SILENCE_WINDOWS, LiveControl
from hetsync.control.process import Answer, Decided, Failed, Ready
from hetsync.control.window_meter import WindowMeter
from hetsync.errors import UserError
from hetsync.sync.coordinator import Coordinator, as_messages
from hetsync.sync.messages import (
    NO_BOUND,
    Contributed,
    RoundCompleted,
    Settings,
    SettingsChanged,
    StartRound,
    TaskFinished,
    TaskStarted,
)
from hetsync.sync.observation import Observation
from hetsync.telemetry import Telemetry

D4 = Settings(4, 0.25, 1)
D0 = replace(D4, delay_bound=0)
INTERVAL = 5.0
CONFIG = ControlConfig("random", interval_seconds=INTERVAL, max_accumulation=4, min_delay_bound=0)


# Decisions.


class FakeProcess:
    """Answers when told to."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.log = Path("control.log")
        self.exit_code: int | None = None
        self.full = False
        self.offered: list[Observation] = []
        self.inbox: deque[Answer] = deque([Ready(2.5)])
        self.polls = 0
        self.end: list[float | str] = []

    def offer(self, seen: Observation) -> bool:
        if not self.full:
            self.offered.append(seen)
        return not self.full

    def answers(self) -> list[Answer]:
        self.polls += 1
        out = list(self.inbox)
        self.inbox.clear()
        return out

    def kill(self) -> None:
        self.end.append("killed")

    def close(self, patience_seconds: float) -> None:
        self.end.append(patience_seconds)


class Job:
    """A coordinator of two ranks, with a clock; each task takes a second, and its round no time."""

    def __init__(self, folder: Path, config: ControlConfig = CONFIG, settings: Settings = D4) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.process = FakeProcess(config)
        self.telemetry = Telemetry(folder / "rank-0000.jsonl")
        self.machine = make_machine([4, 4], settings, 100_000)
        times = [StepTime(0.0, 0.25)] * 2
        meter = WindowMeter(self.machine, times, 8.0)
        self.control = LiveControl(self.process, meter, lambda: self.now, self.telemetry, self.said.append)  # type: ignore[arg-type]
        self.messages: list[Any] = []
        self.coordinator = Coordinator(
            self.machine,
            Speeds(dict(enumerate(times))),
            as_messages(self.machine, lambda messages: self.messages.extend(messages.items())),
            rebalance=False,
            control=self.control,
        )
        self.coordinator.start()
        self.file = folder / "rank-0000.jsonl"

    def work(self, seconds: float = 1.0) -> None:
        """Each rank does its next task, and whatever rounds result are complete at once."""
        ready = [rank for rank, member in self.machine.members.items() if member.queued]
        for rank in ready:
            self.coordinator.handle(
                [TaskStarted(rank, self.machine.members[rank].queued[0].task.number, self.machine.version)]
            )
        self.now += seconds
        for rank in ready:
            work = self.machine.members[rank].current
            assert work is not None
            if work.task.synchronous_round is not None and rank == ready[0]:
                self.coordinator.handle([RoundCompleted(work.task.synchronous_round)])
            sent = len(self.messages)
            self.coordinator.handle([TaskFinished(rank, work.task.number, work.task.samples, seconds, 1.0)])
            self._complete(sent)

    def _complete(self, sent: int) -> None:
        for start in [i for to, message in self.messages[sent:] if to == 0 for i in message]:
            if isinstance(start, StartRound) and (not start.synchronous or start.drain):
                again = len(self.messages)
                for rank in start.contributors if not start.synchronous else ():
                    last = self.machine.members[rank].ready[-1].task.number
                    self.coordinator.handle([Contributed(rank, start.number, last)])
                self.coordinator.handle([RoundCompleted(start.number)])
                self._complete(again)

    def work_until_asked(self, times: int) -> None:
        while len(self.process.offered) < times:
            self.work()
            assert self.now < 1000

    def decide(self, settings: Settings, reason: str = "so") -> None:
        self.process.inbox.append(Decided(Decision(settings, reason), 2.6))
        self.work()

    def records(self) -> list[dict[str, Any]]:
        self.telemetry.close()
        told = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [record for record in told if record["kind"] != "start"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_window_closes_once_an_interval_and_not_before_a_round_is_over(job: Job) -> None:
    for second in range(1, 21):
        job.work()
        assert len(job.process.offered) == second // 5
    assert [seen.seconds for seen in job.process.offered] == [5.0] * 4
    assert all(seen.settings == D4 and seen.rounds for seen in job.process.offered)
    job.now += 2 * INTERVAL  # nothing moves
    job.coordinator.handle([SettingsChanged(D4)])
    assert len(job.process.offered) == 5
    job.now += 2 * INTERVAL  # and no round has completed since
    job.coordinator.handle([SettingsChanged(D4)])
    assert len(job.process.offered) == 5


def test_nothing_is_put_before_the_controller_is_ready(job: Job) -> None:
    job.process.inbox.clear()
    for _ in range(12):
        job.work()
    assert job.process.offered == []
    job.process.inbox.append(Ready(2.5))
    job.work()
    assert [seen.seconds for seen in job.process.offered] == [13.0]  # all that was seen meanwhile


def test_a_decision_comes_into_force_and_into_telemetry(job: Job) -> None:
    job.work_until_asked(1)
    wanted = replace(D4, accumulation=2, delay_bound=8)
    job.decide(wanted, "the network is busy")
    assert job.machine.settings == wanted == job.coordinator.settings
    job.work_until_asked(2)
    assert job.process.offered[1].settings == wanted
    job.decide(wanted, "all is well")
    summary = job.control.summary()
    assert {key: summary[key] for key in ("name", "decisions", "changes", "dropped", "died")} == {
        "name": "random",
        "decisions": 2,
        "changes": 1,
        "dropped": 0,
        "died": None,
    }
    assert (summary["accumulation"], summary["delay_bound"]) == ([1, 2], [4, 8])
    assert (summary["start_cpu_seconds"], summary["cpu_seconds"]) == (2.5, 2.6)
    first, second = job.records()
    assert (first["kind"], first["reason"], second["reason"]) == ("control", "the network is busy", "all is well")
    others = {"quorum": 0.25, "fragments": 1, "grace": 0, "wire": "float32"}
    assert first["settings"] == {"delay_bound": 4, "accumulation": 1, **others}
    assert first["decision"] == second["decision"] == {"delay_bound": 8, "accumulation": 2, **others}
    assert (first["seconds"], first["samples"], first["loss"]) == (5.0, 32, 0.25)


def test_a_change_of_mode_drains_first_and_counts_as_asked_for(job: Job) -> None:
    job.work_until_asked(1)
    job.process.inbox.append(Decided(Decision(D0, "so"), 2.6))
    job.now += POLL_SECONDS
    job.coordinator.handle([TaskStarted(0, job.machine.members[0].queued[0].task.number, job.machine.version)])
    assert job.machine.settings == D4  # until it has drained
    assert job.coordinator.settings == D0
    assert job.control.summary()["delay_bound"] == [0, 4]
    job.now += INTERVAL
    job.coordinator.handle([TaskStarted(1, job.machine.members[1].queued[0].task.number, job.machine.version)])
    assert job.machine.settings == D4
    assert [seen.settings for seen in job.process.offered] == [D4, D0]


@pytest.mark.parametrize(
    ("proposed", "taken"),
    [
        (replace(D4, accumulation=99, delay_bound=NO_BOUND), replace(D4, accumulation=4, delay_bound=16)),
        (replace(D4, accumulation=0, delay_bound=4), D4),
    ],
)
def test_what_is_out_of_bounds_is_clipped(job: Job, proposed: Settings, taken: Settings) -> None:
    job.work_until_asked(1)
    job.decide(proposed)
    assert job.machine.settings == taken


def test_a_decision_about_settings_of_the_past_is_void(job: Job) -> None:
    job.work_until_asked(1)
    other = replace(D4, accumulation=2)
    job.coordinator.handle([SettingsChanged(other)])  # somebody else's
    job.decide(replace(D4, delay_bound=8))
    assert job.machine.settings == other
    assert job.control.summary()["changes"] == 0
    assert job.records()[0]["reason"].startswith("void")


def test_a_full_queue_loses_the_observation_and_nothing_else(job: Job) -> None:
    job.process.full = True
    for _ in range(11):
        job.work()
    assert job.control.summary()["dropped"] == 2
    job.process.full = False
    job.work_until_asked(1)
    assert job.process.offered[0].seconds == 5.0  # the window since the one that was dropped
    assert job.said == []


def test_queues_are_polled_seldom(job: Job) -> None:
    for _ in range(100):
        job.work(POLL_SECONDS / 10)
    assert 8 <= job.process.polls <= 12
    job.now += POLL_SECONDS
    assert job.control.steer(D4) is None  # nothing is asked for, rather than the same again


# Ends.


def test_a_death_is_said_once_and_the_last_settings_stay(job: Job) -> None:
    job.work_until_asked(1)
    job.process.exit_code = -signal.SIGKILL
    wanted = replace(D4, delay_bound=2)
    job.decide(wanted)  # its last words, which it said before
    assert job.machine.settings == wanted
    applied = job.machine.ledger.applied
    for _ in range(20):
        job.work()
    assert job.said == [
        "the controller was ended by SIGKILL: training goes on without it, with accumulation 1 and delay bound 2"
    ]
    assert job.machine.settings == wanted
    assert job.machine.ledger.applied > applied + 100
    assert len(job.process.offered) == 1
    assert job.control.summary()["died"] == job.records()[-1]["died"] == "was ended by SIGKILL"
    job.control.close()
    assert job.process.end == ["killed", 0.0]


def test_an_error_in_the_controller_is_told_with_where_to_look(job: Job) -> None:
    job.work_until_asked(1)
    job.process.inbox.append(Failed("ZeroDivisionError: no progress", mistake=False))
    job.process.exit_code = 0
    job.work()
    job.work()
    (sentence,) = job.said
    assert "failed (ZeroDivisionError: no progress; more in control.log): training goes on without it" in sentence


def test_a_mistake_in_the_recipe_ends_the_job_at_its_start_only(job: Job, tmp_path: Path) -> None:
    mistake = Failed("control.policy is x: there is no such file", mistake=True)
    job.work()
    job.process.inbox.append(mistake)
    job.work()
    assert len(job.said) == 1
    fresh = Job(tmp_path)
    fresh.process.inbox = deque([mistake])
    with pytest.raises(UserError, match=r"control\.policy is x"):
        fresh.work()


@pytest.mark.parametrize("ready", [True, False])
def test_long_silence_is_a_death(job: Job, ready: bool) -> None:
    if ready:
        job.work_until_asked(1)
    else:
        job.process.inbox.clear()
    asked_at = job.now
    while job.now <= asked_at + SILENCE_SECONDS:
        assert job.said == []
        job.work()
    assert job.said == [
        f"the controller has not answered for {SILENCE_SECONDS:g} s:"
        " training goes on without it, with accumulation 1 and delay bound 4"
    ]
    assert job.process.end == ["killed"]
    job.decide(replace(D4, delay_bound=8))  # too late
    assert job.machine.settings == D4


def test_patience_grows_with_the_windows(tmp_path: Path) -> None:
    job = Job(tmp_path, replace(CONFIG, interval_seconds=SILENCE_SECONDS))
    job.work_until_asked(1)
    for _ in range(round(SILENCE_WINDOWS * SILENCE_SECONDS)):
        job.work()
    assert job.said == []
    job.work()
    job.work()
    assert len(job.said) == 1


def test_who_answers_is_not_silent(job: Job) -> None:
    for _ in range(60):
        job.work_until_asked(len(job.process.offered) + 1)
        job.decide(D4)
    assert job.now > 2 * SILENCE_SECONDS
    assert job.said == []
    job.control.close()
    (patience,) = job.process.end
    assert isinstance(patience, float)
    assert patience > 0
