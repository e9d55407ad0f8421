"""A gradient that is not a number, on one rank: the job ends before any other rank has it, and names the rank.

python -m pytest tests/fault/test_not_finite.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, started

# One sample's gradient is nan, while all losses are finite. Whose it is depends on the speeds.
PROGRAM = """
import sys, torch
from training import *
from hetsync.errors import UserError, complain
from hetsync.plane.mpi import MpiPlane

bound, position = int(sys.argv[1]), int(sys.argv[2])
plane, data = MpiPlane(), Blobs()
bad = data.points[EpochOrder(len(data), SEED).indices([(position, position + 1)])[0]]

def loss_of(model, points, labels):
    if torch.is_grad_enabled() and (points == bad).all(1).any():
        print(f"a nan on rank {plane.rank}", flush=True)
        weight = model.body[0].weight
        handle = weight.register_hook(lambda grad: grad * torch.nan)
    return cross_entropy(model, points, labels)

def check(outcome):
    assert all(weight.isfinite().all() for weight in outcome.weights)

try:
    train(plane, delayed(plane, delay_bound=bound), loss_of=loss_of, data=data, rests=[SAMPLES // 2], at_rest=check)
except UserError as mistake:
    complain(str(mistake))
    plane.abort(2)
print("ended", flush=True)
plane.close()
"""


def job(folder: Path, *words: int) -> Done:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "mpi")))
    command = [*mpirun(2), sys.executable, "-c", PROGRAM, *map(str, words)]
    with started(command, folder, {"PYTHONPATH": paths}) as process:
        return finished(process)


# In the midst of it (synchronous: test_scripts.py), and the last sample of all.
@pytest.mark.each_value(2)
@pytest.mark.parametrize(("bound", "position"), [(4, 30), (0, 191), (4, 191)])
def test_the_rank_with_the_nan_is_named(tmp_path: Path, bound: int, position: int) -> None:
    done = job(tmp_path, bound, position)
    ranks = [line.split()[-1] for line in done.out.splitlines() if line.startswith("a nan on rank")]
    assert len(ranks) == 1, done.story
    assert done.status == 2, done.story
    assert "ended" not in done.out
    (sentence,) = done.sentences
    assert f"the gradient became nan on rank {ranks[0]} after" in sentence, done.story
    assert "lower optimizer.learning_rate or look at the data" in sentence
    assert ("sync.delay_bound 0" in sentence) == (bound > 0)
