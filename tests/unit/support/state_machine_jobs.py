"""Jobs for the state machine's tests: clusters of any speeds, and what happens to them on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from virtual import make_machine

from hetsync.balance.shares import apportion
from hetsync.sync.messages import (
    NO_BOUND,
    AssignTask,
    DrainRequested,
    Settings,
    SettingsChanged,
    SharesChanged,
    StartRound,
)

relaxed = hypothesis_settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def arguments(draw_seconds):
    """The times of a cluster, all from one source."""
    return {
        "compute": lambda rank, samples: draw_seconds(),
        "delay": draw_seconds,
        "communicate": draw_seconds,
        "land": draw_seconds,
        "evaluate": lambda rank: draw_seconds(),
    }


bounds = st.integers(1, 32) | st.sampled_from([1, 1, 2, 3, NO_BOUND])
quorums = st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.75, 1.0])
delayed = st.builds(Settings, bounds, quorums, st.integers(1, 4), grace=st.sampled_from([0, 0, 1, 2]))
synchronous = st.builds(Settings, st.just(0), st.just(1.0), st.integers(1, 4))
any_settings = delayed | synchronous


def share_lists(most_ranks: int, most: int = 8):
    """Shares of some ranks, zeros among them; rank 0's is not zero."""
    first = st.integers(1, most)
    return st.tuples(first, st.lists(st.integers(0, most), max_size=most_ranks - 1)).map(lambda t: [t[0], *t[1]])


# Larger ones, where a seed does: speeds, jitter, message delays and collectives differ by orders of magnitude.


@dataclass(frozen=True)
class Times:
    """Seconds a sample by rank (`spread`: fastest to slowest), and means of all else in units of one slice."""

    seed: int
    spread: float
    jitter: float
    delay: float
    communicate: float
    land: float

    def arguments(self, ranks: int):
        draw = random.Random(self.seed)
        speeds = [self.spread ** draw.random() for _ in range(10 * ranks)]
        return {
            "compute": lambda rank, n: speeds[rank] * n / 4 * draw.lognormvariate(0, self.jitter),
            "delay": lambda: draw.expovariate(1) ** 2 * self.delay,
            "communicate": lambda: draw.random() * self.communicate,
            "land": lambda: draw.expovariate(1) * self.land,
            "evaluate": lambda rank: draw.expovariate(1) * self.land,
        }


times = st.builds(
    Times,
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([1, 4, 50]),
    jitter=st.sampled_from([0, 0.5, 1.5]),
    delay=st.sampled_from([0, 0.01, 1, 10]),
    communicate=st.sampled_from([0, 0.3, 5, 50]),
    land=st.sampled_from([0, 0.01, 3]),
)
everyday = Times(1, 4, 0.5, 0.01, 0.5, 0.01)


@st.composite
def jobs(draw, settings=any_settings, most_ranks=64):
    """(state machine, times): up to `most_ranks` ranks and a few hundred tasks."""
    ranks = draw(st.sampled_from([n for n in (1, 2, 3, 5, 8, 16, 64) if n <= most_ranks]))
    shares = [draw(st.integers(1, 12)), *draw(st.lists(st.integers(0, 12), min_size=ranks - 1, max_size=ranks - 1))]
    chosen = draw(settings)
    contributions = draw(st.integers(1, 6 if ranks > 8 else 25))
    total = sum(shares) * chosen.accumulation * contributions + draw(st.integers(0, 20))
    every = draw(st.none() | st.integers(total // 5 + 1, total + 1))
    evaluate = draw(st.none() | st.integers(total // 8 + 1, total + 1))
    machine = make_machine(shares, chosen, total, every, evaluate)
    machine.tasks_held = draw(st.sampled_from([2, 2, 3, 8]))
    return machine, draw(times)


# The controller's hands: new settings, shares and drains at any moment.


@st.composite
def interventions(draw, ranks, batch):
    """[(step, event)]: in order."""
    tuned = st.builds(SettingsChanged, any_settings)
    reshared = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).map(
        lambda weights: SharesChanged(apportion(batch, {r: w + (r == 0) for r, w in enumerate(weights)}))
    )
    drain = st.builds(DrainRequested, st.sampled_from(["stop", "save"]))
    steps = st.integers(0, 60) | st.integers(0, 600)
    events = st.lists(st.tuples(steps, tuned | tuned | reshared | drain), max_size=12)
    return sorted(draw(events), key=lambda pair: pair[0])


def script(planned):
    planned = list(planned)

    def before(cluster, step):
        due = []
        while planned and planned[0][0] <= step and not cluster.machine.ended:
            due.append(planned.pop(0)[1])
        return due

    return before


def numbers(instructions, rank):
    return [i.task.number for i in instructions if isinstance(i, AssignTask) and i.rank == rank]


def rounds(instructions):
    return [i.number for i in instructions if isinstance(i, StartRound)]
