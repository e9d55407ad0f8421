"""What the state machine remembers between two rounds about who would be late equals a look at everybody."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from virtual import VirtualCluster, make_machine

from hetsync.sync.members import in_bound
from hetsync.sync.messages import Event, Settings, SettingsChanged


@examples(deadline=None, max_examples=60)
@given(
    speeds=st.lists(st.floats(0.05, 2.0), min_size=2, max_size=6),
    first=st.builds(Settings, st.integers(1, 6), st.sampled_from([0.1, 0.5, 1.0]), st.integers(1, 2)),
    later=st.lists(st.builds(Settings, st.integers(0, 6), st.sampled_from([0.1, 0.5, 1.0]), st.integers(1, 2))),
    seed=st.integers(0, 2**16),
)
def test_nobody_late_is_overlooked(speeds: list[float], first: Settings, later: list[Settings], seed: int) -> None:
    dice, tuned, looks = random.Random(seed), list(later), 0

    def look(cluster: VirtualCluster, step: int) -> list[Event]:
        nonlocal looks
        machine = cluster.machine
        if not machine._rounds and not machine.settings.synchronous:
            looks += 1
            assert machine._membership.all_in_bound(machine._next_round) == all(
                in_bound(member, machine._next_round) for member in machine.members.values()
            )
        return [SettingsChanged(tuned.pop())] if tuned and dice.random() < 0.05 else []

    machine = make_machine([8] * len(speeds), first, 1500, every=600)
    cluster = VirtualCluster(
        machine,
        lambda rank, samples: samples * speeds[rank] * dice.uniform(0.5, 2.0),
        delay=lambda: dice.expovariate(2.0),
        communicate=lambda: dice.random(),
        land=dice.random,
        before=look,
    )
    cluster.run()
    assert looks > 0
