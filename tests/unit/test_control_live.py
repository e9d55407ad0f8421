"""Windows of a live job, and what becomes of decisions, deaths and silence: fake clock, fake process, real policy."""

from __future__ import annotations

import json
import signal
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import VirtualCluster, make_policy

from hetsync.checkpoint import Progress
from hetsync.config import Config, ControlConfig, SyncConfig
from hetsync.control.controller import Decision
from hetsync.control.live import LOOK_SECONDS, SILENCE_SECONDS, SILENCE_WINDOWS, LiveControl, Meter
from hetsync.control.observation import Observation
from hetsync.control.process import Answer, Decided, Failed, Ready
from hetsync.errors import UserError
from hetsync.slicing import StepTime
from hetsync.sync.coordinator import Coordinator, Speeds
from hetsync.sync.messages import NO_BOUND, Began, Completed, Event, Finished, Settings, StartRound, Took, Tuned
from hetsync.sync.policy import Policy
from hetsync.telemetry import Telemetry
from hetsync.trainer import first_settings

D4 = Settings(4, 0.25, 1)
D0 = replace(D4, delay_bound=0)
INTERVAL = 5.0
CONFIG = ControlConfig("random", interval_seconds=INTERVAL, greatest_accumulation=4, least_delay_bound=0)


# Windows.


def by_hand(settings: Settings = D4, shares: tuple[int, ...] = (4, 4)) -> tuple[Policy, Meter]:
    policy = make_policy(list(shares), settings, 10_000)
    policy.begin()
    return policy, Meter(policy, [StepTime(0.0, 1.0)] * len(shares), solo_samples_per_second=2.0)


def tell(policy: Policy, meter: Meter, now: float, *events: Event) -> None:
    for event in events:
        meter.hear(event, now)
        policy.on(event)


def test_a_window_of_a_delayed_job() -> None:
    """Rank 0 computes for 4 s and waits from then on, rank 1 for 8 s; the sum of both takes 1 s."""
    policy, meter = by_hand(replace(D4, delay_bound=1, quorum=1.0))
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    tell(policy, meter, 4.0, Finished(0, 0, 4, 4.0, 8.0))
    tell(policy, meter, 8.0, Finished(1, 1, 4, 8.0, 4.0), Took(0, 0, 0), Took(1, 0, 1))
    assert meter.rounds == 0
    tell(policy, meter, 9.0, Completed(0))
    assert meter.rounds == 1
    seen = meter.observe(D4, 10.0)
    assert seen == Observation(
        seconds=10.0,
        rounds=1,
        samples=8,
        losses=(2.0, 1.0),
        staleness=0.0,
        efficiency=8 / 10 / 2,
        communication_share=0.1,
        waiting_share=pytest.approx(1 - (4 + 8) / 20),
        jitter=pytest.approx(0.5 / 1.5),  # 1 and 2 times as long as profiled
        noise_scale=None,
        progress=8 / 10_000,
        settings=D4,
    )
    empty = meter.observe(D0, 12.0)
    assert (empty.seconds, empty.rounds, empty.samples, empty.losses) == (2.0, 0, 0, ())
    assert (empty.communication_share, empty.waiting_share, empty.settings) == (0.0, 1.0, D0)


def test_a_sum_that_is_faster_than_a_contributors_word_takes_no_time() -> None:
    policy, meter = by_hand()
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    tell(policy, meter, 4.0, Finished(0, 0, 4, 4.0))  # starts round 0
    tell(policy, meter, 5.0, Completed(0), Took(0, 0, 0))
    tell(policy, meter, 6.0, Began(0, 2, 1))
    tell(policy, meter, 8.0, Finished(1, 1, 4, 8.0), Took(1, 1, 1), Completed(1))
    assert meter.observe(D4, 10.0).communication_share == 0.0


def test_what_a_synchronous_step_takes_beyond_its_slowest_rank_is_communication() -> None:
    policy, meter = by_hand(D0)
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    tell(policy, meter, 6.5, Completed(0), Finished(0, 0, 4, 2.0))
    tell(policy, meter, 7.0, Finished(1, 1, 4, 6.0))  # the step took 1 s longer
    tell(policy, meter, 7.0, Began(0, 2, 1), Began(1, 3, 1))
    tell(policy, meter, 10.0, Completed(1), Finished(0, 2, 4, 3.0), Finished(1, 3, 4, 1.0))  # and this one did not
    seen = meter.observe(D0, 10.0)
    assert seen.communication_share == pytest.approx(0.1)
    assert seen.waiting_share == pytest.approx(1 - (2 + 6 + 3 + 1) / 20)


def test_work_in_progress_is_no_waiting() -> None:
    policy, meter = by_hand()
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    assert meter.observe(D4, 5.0).waiting_share == 0.0
    tell(policy, meter, 8.0, Finished(0, 0, 4, 8.0), Finished(1, 1, 4, 8.0))
    assert meter.observe(D4, 10.0).waiting_share == pytest.approx(2 / 5)


@settings(max_examples=50, deadline=None)
@given(
    bound=st.sampled_from([0, 1, 4]),
    slices=st.integers(1, 3),
    speeds=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=4),
    communication=st.sampled_from([0.0, 0.5, 3.0]),
    every=st.integers(3, 40),
)
def test_windows_of_a_whole_job_add_up_to_what_the_virtual_cluster_has_on_its_books(
    bound: int, slices: int, speeds: list[float], communication: float, every: int
) -> None:
    policy = make_policy([4] * len(speeds), Settings(bound, 0.25, slices), 200)
    meter = Meter(policy, [StepTime(0.0, seconds) for seconds in speeds], 1.0)
    windows = []
    events, closed_at = 0, 0.0

    def metered(event: Event, on=policy.on) -> list[Any]:
        nonlocal events, closed_at
        events += 1
        meter.hear(event, cluster.now)
        out = on(event)
        if events % every == 0 and cluster.now > closed_at:
            closed_at = cluster.now
            windows.append(meter.observe(policy.settings, cluster.now))
        return out

    policy.on = metered  # type: ignore[method-assign]
    cluster = VirtualCluster(policy, lambda rank, samples: samples * speeds[rank], communicate=lambda: communication)
    cluster.run()
    seconds = cluster.now + 1.0  # nothing follows in the last one
    windows.append(meter.observe(policy.settings, seconds))
    assert sum(w.seconds for w in windows) == pytest.approx(seconds)
    assert sum(w.samples for w in windows) == 200
    assert sum(w.rounds for w in windows) == policy.version
    assert all(w.efficiency * w.seconds == pytest.approx(w.samples) for w in windows)
    assert all(0 <= share <= 1 for w in windows for share in (w.waiting_share, w.communication_share))
    assert windows[-1].progress == 1.0
    if bound:  # its pieces in progress do nothing but compute
        waited = sum(w.waiting_share * w.seconds for w in windows) * len(speeds)
        assert waited == pytest.approx(seconds * len(speeds) - sum(cluster.busy.values()), abs=1e-6)
    sums = [start for start in cluster.starts if start.contributors and not (start.synchronous and start.drain)]
    if all(w.communication_share < 1 for w in windows):  # a sum counts where it ends, and windows may be shorter
        summed = sum(w.communication_share * w.seconds for w in windows)
        assert summed == pytest.approx(len(sums) * communication, abs=1e-6)


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
        self.looks = 0
        self.end: list[float | str] = []

    def offer(self, seen: Observation) -> bool:
        if not self.full:
            self.offered.append(seen)
        return not self.full

    def answers(self) -> list[Answer]:
        self.looks += 1
        out = list(self.inbox)
        self.inbox.clear()
        return out

    def kill(self) -> None:
        self.end.append("killed")

    def close(self, patience_seconds: float) -> None:
        self.end.append(patience_seconds)


class Job:
    """A coordinator of two ranks, with a clock; each piece takes a second, and its round no time."""

    def __init__(self, folder: Path, config: ControlConfig = CONFIG, settings: Settings = D4) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.process = FakeProcess(config)
        self.telemetry = Telemetry(folder / "rank-0000.jsonl")
        self.policy = make_policy([4, 4], settings, 100_000)
        times = [StepTime(0.0, 0.25)] * 2
        meter = Meter(self.policy, times, 8.0)
        self.control = LiveControl(self.process, meter, lambda: self.now, self.telemetry, self.said.append)  # type: ignore[arg-type]
        self.letters: list[Any] = []
        self.coordinator = Coordinator(
            self.policy,
            Speeds(dict(enumerate(times))),
            lambda *letter: self.letters.append(letter),
            False,
            self.control,
        )
        self.coordinator.begin()
        self.file = folder / "rank-0000.jsonl"

    def work(self, seconds: float = 1.0) -> None:
        """Each rank does its next piece, and whatever rounds result are complete at once."""
        ready = [rank for rank, member in self.policy.members.items() if member.held]
        for rank in ready:
            self.coordinator.on([Began(rank, self.policy.members[rank].held[0].piece.number, self.policy.version)])
        self.now += seconds
        for rank in ready:
            work = self.policy.members[rank].current
            assert work is not None
            if work.piece.synchronous_round is not None and rank == ready[0]:
                self.coordinator.on([Completed(work.piece.synchronous_round)])
            sent = len(self.letters)
            self.coordinator.on([Finished(rank, work.piece.number, work.piece.samples, seconds, 1.0)])
            self._complete(sent)

    def _complete(self, sent: int) -> None:
        for start in [i for to, letter in self.letters[sent:] if to == 0 for i in letter]:
            if isinstance(start, StartRound) and (not start.synchronous or start.drain):
                again = len(self.letters)
                for rank in start.contributors if not start.synchronous else ():
                    last = self.policy.members[rank].ready[-1].piece.number
                    self.coordinator.on([Took(rank, start.number, last)])
                self.coordinator.on([Completed(start.number)])
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
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_window_closes_once_an_interval_and_not_before_a_round_is_over(job: Job) -> None:
    for second in range(1, 21):
        job.work()
        assert len(job.process.offered) == second // 5
    assert [seen.seconds for seen in job.process.offered] == [5.0] * 4
    assert all(seen.settings == D4 and seen.rounds for seen in job.process.offered)
    job.now += 60.0  # nothing moves
    job.coordinator.on([Tuned(D4)])
    assert len(job.process.offered) == 5
    job.now += 60.0  # and no round has completed since
    job.coordinator.on([Tuned(D4)])
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
    assert job.policy.settings == wanted == job.coordinator.settings
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
    assert first["settings"] == {"delay_bound": 4, "quorum": 0.25, "accumulation": 1}
    assert first["decision"] == second["decision"] == {"delay_bound": 8, "quorum": 0.25, "accumulation": 2}
    assert (first["seconds"], first["samples"], first["loss"]) == (5.0, 32, 0.25)


def test_a_change_of_mode_drains_first_and_counts_as_asked_for(job: Job) -> None:
    job.work_until_asked(1)
    job.process.inbox.append(Decided(Decision(D0, "so"), 2.6))
    job.now += LOOK_SECONDS
    job.coordinator.on([Began(0, job.policy.members[0].held[0].piece.number, job.policy.version)])
    assert job.policy.settings == D4  # until it has drained
    assert job.coordinator.settings == D0


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
    assert job.policy.settings == taken


def test_a_decision_about_settings_of_the_past_is_void(job: Job) -> None:
    job.work_until_asked(1)
    other = replace(D4, accumulation=2)
    job.coordinator.on([Tuned(other)])  # somebody else's
    job.decide(replace(D4, delay_bound=8))
    assert job.policy.settings == other
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


def test_queues_are_looked_at_seldom(job: Job) -> None:
    for _ in range(100):
        job.work(LOOK_SECONDS / 10)
    assert 8 <= job.process.looks <= 12


# Ends.


def test_a_death_is_said_once_and_the_last_settings_stay(job: Job) -> None:
    job.work_until_asked(1)
    job.process.exit_code = -signal.SIGKILL
    wanted = replace(D4, delay_bound=2)
    job.decide(wanted)  # its last words, which it said before
    assert job.policy.settings == wanted
    applied = job.policy.ledger.applied
    for _ in range(20):
        job.work()
    assert job.said == [
        "the controller was ended by SIGKILL: training goes on without it, with accumulation 1 and delay bound 2"
    ]
    assert job.policy.settings == wanted
    assert job.policy.ledger.applied > applied + 100
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


# Recipes.


@pytest.mark.parametrize(
    ("sync", "control", "said"),
    [
        ({"delay_bound": None}, {}, r"sync\.delay_bound is null, where control\.name goodput may set 1 to 16"),
        ({"delay_bound": 0}, {}, r"sync\.delay_bound is 0, .* change control\.least_delay_bound"),
        ({"accumulation": 9}, {}, r"sync\.accumulation is 9, where control\.name goodput may set 1 to 8"),
        ({}, {"interval_seconds": 0}, r"control\.interval_seconds is 0: it must be greater than 0"),
        ({}, {"least_accumulation": 0}, r"control\.least_accumulation is 0"),
        ({}, {"least_accumulation": 9}, r"control\.greatest_accumulation is 8: it must be at least 9"),
        ({}, {"least_delay_bound": -1}, r"control\.least_delay_bound is -1"),
        ({}, {"greatest_delay_bound": 0}, r"control\.greatest_delay_bound is 0: it must be at least 1"),
        ({}, {"policy": "x.safetensors"}, r"control\.policy is x\.safetensors, but control\.name is goodput"),
        ({}, {"fine_tune": True}, r"control\.fine_tune is True, but control\.name is goodput"),
    ],
)
def test_what_cannot_be_controlled_is_refused(sync: dict[str, Any], control: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Config(sync=SyncConfig(**sync), control=ControlConfig("goodput", **control))


def test_a_job_without_a_controller_may_have_any_settings() -> None:
    Config(sync=SyncConfig(delay_bound=None, accumulation=99))


def test_synchronous_training_is_controlled_where_the_bounds_say_so() -> None:
    Config(sync=SyncConfig(delay_bound=0), control=ControlConfig("ppo", least_delay_bound=0, greatest_delay_bound=0))


def test_a_resumed_run_goes_on_with_what_its_controller_had_set() -> None:
    progress = Progress(100, 7, 2, (4, 4), 9, 0.5, 4, 1.0)
    controlled = Config(control=ControlConfig("goodput", greatest_delay_bound=8))
    assert first_settings(controlled, None) == Settings(4, 0.25, 1)
    assert first_settings(controlled, progress) == Settings(8, 0.25, 4)  # within the bounds of today
    assert first_settings(Config(), progress) == Settings(4, 0.25, 1)
