"""Loops of a user's own that ranks cannot share, under mpirun: one sentence, status 2, no hang.

A case for each way in which ranks find a mistake: one of them, some, all at once. The other sentences:
tests/mpi/test_loops_numbers.py and tests/unit/train/test_loops_refused.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, started

SCRIPT = """
import torch, hetsync
from torch.utils.data import TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 4), torch.randint(3, (240,)))
with hetsync.join(delay_bound={bound}, rebalance=False, progress=False, timeout_seconds=30.0) as job:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.prepare(model, optimizer)
    {before}
    loader = job.loader(data, 24)
    for epoch in job.epochs(2):
        for number, (inputs, labels) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
{body}
"""

SKIPS_ONE = """
loss.backward()
if number == 3 and job.rank == 1:
    continue
optimizer.step()
optimizer.zero_grad()
"""
EACH_SKIPS_ANOTHER = SKIPS_ONE.replace("number == 3 and job.rank == 1", "number == 3 + job.rank")
CLIPS = """
if number == 3 and job.rank == 1:
    continue
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
optimizer.step()
optimizer.zero_grad()
"""
CLIPS_WHAT_ONE_LACKS = """
if job.rank == 1:
    loss = torch.nn.functional.cross_entropy(inputs @ model.weight.T, labels)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
optimizer.step()
optimizer.zero_grad()
"""
PENALTY_ON_GRADIENTS = """
job.backward(loss, create_graph=True)
job.backward(sum(weight.grad.square().sum() for weight in model.parameters()))
optimizer.step()
optimizer.zero_grad()
"""
WRITES_BY_ANOTHER_NAME = """
optimizer.zero_grad(set_to_none=False)
name = model.weight.grad
loss.backward()
if name is not None:
    name.zero_()
optimizer.step()
"""
SHARPNESS_AWARE = """
loss.backward()
with torch.no_grad():
    moves = [0.01 * weight.grad / weight.grad.norm() for weight in model.parameters()]
    torch._foreach_add_(list(model.parameters()), moves)
torch.nn.functional.cross_entropy(model(inputs), labels).backward()
optimizer.step()
"""
SURGERY = """
gradients = []
for each in (loss, model(inputs).square().mean()):
    each.backward(retain_graph=True)
    gradients.append(model.weight.grad.clone())
    optimizer.zero_grad()
model.weight.grad = sum(gradients)
optimizer.step()
"""
NOISE = """
loss.backward()
for weight in model.parameters():
    weight.grad += 0.01 * torch.randn_like(weight)
optimizer.step()
optimizer.zero_grad()
"""
CLIPS_UNSCALED = """
if number == 3 and job.rank == 1:
    continue
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()
"""
CLIPS_COLLECTED = """
if number == 3 and job.rank == 1:
    continue
loss.backward()
job.collect(optimizer)
torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
optimizer.step()
optimizer.zero_grad()
"""
CLAMPS = """
if number == 3 and job.rank == 1:
    continue
job.backward(loss)
job.step(optimizer)
for weight in model.parameters():
    weight.data.clamp_(-0.1, 0.1)
"""
AVERAGES = """
if number == 3 and job.rank == 1:
    continue
job.backward(loss)
job.step(optimizer)
average.update_parameters(model)
"""
AVERAGES_BY_HAND = AVERAGES.replace(
    "average.update_parameters(model)", "average[0] = 0.9 * average[0] + 0.1 * model.weight"
)
COUNTS_BY_ITSELF = """
done = globals().get("done", 0) + 1
(loss / 4).backward()
if done % 4 == 0:
    optimizer.step()
    optimizer.zero_grad()
"""
COUNTS_TURNS = """
done = globals().get("done", 0) + 1
if done % 3:
    job.backward(loss)
    job.step(optimizer)
else:
    job.backward(torch.nn.functional.cross_entropy(second(inputs), labels))
    job.step(other)
"""
LEAVES_A_STEP_OUT = """
job.backward(loss)
norm = job.clip_grad_norm_(model.parameters(), 1.0)
if number < 10:
    optimizer.step()
optimizer.zero_grad()
"""
BEFORE = {
    AVERAGES_BY_HAND: "job.keep_average(average := [model.weight.detach().clone()])",
    CLIPS_UNSCALED: "scaler = job.prepare(torch.amp.GradScaler('cpu', init_scale=1024.0))",
    COUNTS_TURNS: "second = torch.nn.Linear(4, 3); other = torch.optim.SGD(second.parameters(), 0.1);"
    " job.prepare(second, other)",
    AVERAGES: "average = job.prepare(torch.optim.swa_utils.AveragedModel(model))",
}
NO_STEP = """
loss.backward()
"""


def run(folder: Path, ranks: int, body: str, bound: int, samples: int = 240) -> Done:
    indented = "\n".join(f"            {line}" for line in body.strip().splitlines())
    before = next((lines for each, lines in BEFORE.items() if each.splitlines()[2:] == body.splitlines()[2:]), "")
    script = SCRIPT.format(body=indented, bound=bound, before=before).replace("240", str(samples))
    (folder / "script.py").write_text(script)
    with started([*mpirun(ranks), sys.executable, "script.py"], folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process)


@pytest.mark.each_value(4)
@pytest.mark.parametrize(
    ("ranks", "body", "bound", "sentence"),
    [
        (3, SKIPS_ONE, 0, "the loops of 2 ranks step an optimizer (or look at its gradients) and those of 1"),
        (3, EACH_SKIPS_ANOTHER, 0, "the loops of 2 ranks step an optimizer (or look at its gradients) and those of 1"),
        (2, CLIPS, 0, "gradients were changed between backward (or unscale_, job.collect) and step in a batch that"),
        (2, CLIPS_WHAT_ONE_LACKS, 0, "call job.backward(loss) in place of loss.backward()"),
        (2, SHARPNESS_AWARE, 0, "a weight got another gradient after gradients of this batch had been looked at"),
        (2, SURGERY, 0, "a weight got another gradient after gradients of this batch had been looked at"),
        (2, PENALTY_ON_GRADIENTS, 0, "take torch.autograd.grad(loss, weights, create_graph=True)"),
        (2, WRITES_BY_ANOTHER_NAME, 0, "gradients were written by hand"),
        (2, NOISE, 0, "let random numbers come from a torch.Generator of one seed"),
        (2, CLIPS_UNSCALED, 0, "gradients were changed between backward (or unscale_, job.collect) and step in a"),
        (4, CLIPS_UNSCALED, 0, "call job.backward(loss, weight=0), and go on as with any; what job.clip_grad_norm_"),
        (2, CLIPS_COLLECTED, 0, "gradients were changed between backward (or unscale_"),
        (2, CLAMPS, 0, "weights, or averages of them, were changed after their step in a batch that another rank has"),
        (2, AVERAGES_BY_HAND, 0, "weights, or averages of them, were changed after their step"),
        (2, AVERAGES, 0, "weights, or averages of them, were changed after their step"),
        (2, NO_STEP, 4, "no optimizer has made a step"),
    ],
)
def test_a_loop_that_cannot_work_ends_with_a_sentence(
    tmp_path: Path, ranks: int, body: str, bound: int, sentence: str
) -> None:
    done = run(tmp_path, ranks, body, bound)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert sentence in done.sentences[0]
    assert "Traceback" not in done.err, done.story


@pytest.mark.each_value(1)
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (COUNTS_BY_ITSELF, "go by job.step_count"),
        (COUNTS_TURNS, "go by job.step_count"),
        (LEAVES_A_STEP_OUT, "made no step on them, in a batch in which another rank had no part"),
    ],
)
def test_a_count_of_the_loops_own_is_behind_where_a_rank_had_no_part_of_a_batch(
    tmp_path: Path, body: str, sentence: str
) -> None:
    """The last batch of an epoch has one sample."""
    done = run(tmp_path, 3, body, 0, samples=241)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert sentence in done.sentences[0]


@pytest.mark.each_value(1)
@pytest.mark.parametrize("body", [COUNTS_BY_ITSELF, COUNTS_TURNS])
def test_the_job_s_count_of_steps_is_not(tmp_path: Path, body: str) -> None:
    done = run(tmp_path, 3, body.replace('globals().get("done", 0) + 1', "job.step_count"), 0, samples=241)
    assert done.status == 0, done.story


@pytest.mark.each_value(2)
@pytest.mark.parametrize(("ranks", "bound", "status"), [(2, 0, 0), (2, 4, 2), (1, 4, 0)])
def test_state_is_carried_from_batch_to_batch_only_where_ranks_keep_their_places(
    tmp_path: Path, ranks: int, bound: int, status: int
) -> None:
    body = "            job.backward(loss)\n            job.step(optimizer)"
    script = SCRIPT.format(bound=bound, before="", body=body)
    carries = "(state := model(inputs, state.detach() if number else None))"
    script = script.replace("Linear(4, 3)", "RNNCell(4, 3)").replace("model(inputs)", carries)
    (tmp_path / "script.py").write_text(script)
    with started([*mpirun(ranks), sys.executable, "script.py"], tmp_path, {"PYTHONPATH": str(ROOT)}) as process:
        done = finished(process)
    assert done.status == status, done.story
    assert [" ranks the next batch holds other sequences" in told for told in done.sentences] == [True] * (status > 0)
    assert "Traceback" not in done.err, done.story
