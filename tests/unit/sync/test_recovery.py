"""Laws of a recovery, with any deaths at any step and messages in any order.

`mortal.py` plays the ranks and checks that no sample is lost or counted twice, that anchors and weights are one, that
no task is applied too late, that each rest and each evaluation takes place, and that every job ends.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mortal import Job, World

from hetsync.sync.messages import NO_BOUND, Settings

EXAMPLES = int(os.environ.get("HETSYNC_RECOVERY_EXAMPLES", "150"))
many = hypothesis_settings(max_examples=EXAMPLES, deadline=None)

bounds = st.sampled_from([1, 1, 2, 4, NO_BOUND])
delayed = st.builds(Settings, bounds, st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.0]), st.integers(1, 2))
synchronous = st.builds(Settings, st.just(0), st.just(1.0), st.integers(1, 2))


def jobs(settings, **others):
    shares = st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=7))
    return st.builds(
        Job,
        shares=shares.map(lambda drawn: (drawn[0], *drawn[1])),
        settings=settings,
        total=st.integers(1, 200),
        rest_every=st.none() | st.integers(5, 80),
        evaluate_every=st.none() | st.integers(5, 80),
        deaths=st.integers(1, 7),
        death_chance=st.sampled_from([0.003, 0.01, 0.05]),
        death_in_recovery=st.sampled_from([0.0, 0.02, 0.1]),
        seed=st.integers(0, 2**32),
        **others,
    )


@many
@given(jobs(delayed))
def test_whoever_dies_delayed_jobs_end_with_each_sample_once(job):
    World(job).run()


@many
@given(jobs(synchronous))
def test_synchronous_rounds_hold_the_same_batches_whoever_dies(job):
    world, undisturbed = World(job), World(replace(job, deaths=0))
    world.run()
    undisturbed.run()
    expected = undisturbed.batches()
    assert world.batches() == (expected[: len(world.batches())] if world.lost else expected)


@many
@given(
    jobs(
        delayed | synchronous,
        withdrawals=st.sampled_from([0.0, 0.3]),
        changes=st.sampled_from([0.02, 0.1]),
        least_ranks=st.sampled_from([None, 1, 3]),
    )
)
def test_loops_left_early_other_settings_and_an_end_for_too_few(job):
    World(job).run()
