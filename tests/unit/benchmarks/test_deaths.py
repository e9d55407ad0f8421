"""What a death costs: the arithmetic."""

from __future__ import annotations

from benchmarks.deaths import BATCH, counted, covered


def line(step: int, samples: int = BATCH) -> dict[str, int]:
    return {"step": step, "samples": samples}


def test_all_that_went_back_trained_the_same_samples_again() -> None:
    """DDP: each rank tells of the whole batch, and one that died before it told of a step says nothing of it."""
    whole = [line(step) for step in (0, 1, 2, 1, 2, 3)]
    assert counted([whole, whole[:2] + whole[3:]], 4) == {"again": 2 * BATCH, "unseen": 0}


def test_what_the_dead_should_have_trained_is_unseen() -> None:
    """torchft: steps go on with the parts of those that are left."""
    left = [line(0), line(1, 48), line(2, 48), line(3)]
    assert counted([left, [line(0), line(3)]], 4) == {"again": 0, "unseen": 32}


def test_what_went_back_to_a_commit_trained_some_samples_again() -> None:
    """Horovod: steps are told by their first sample, and have other sizes afterwards."""
    left = [line(0), line(BATCH), line(BATCH, 48), line(BATCH + 48, 48)]
    dead = left[:2]
    assert covered([dead, left, left], 3) == {"again": BATCH, "unseen": 3 * BATCH - 160}
