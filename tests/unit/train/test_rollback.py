"""fault.not_finite rollback, on a rank alone: all that was trained since the newest checkpoint is trained again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from normed_net import NormedNet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.config.faults import FaultConfig
from hetsync.config.schema import Config, ControlConfig, RunConfig
from hetsync.errors import UserError
from hetsync.plane.base import LostError
from hetsync.sync.delay_guard import Lost
from hetsync.sync.messages import TaskLeftOut
from hetsync.train import checkpoint
from hetsync.train.rollback import agreed, destination
from hetsync.train.summary import Rollback

SAMPLES, BATCH = 96, 16


class Counted:
    """What a script registers."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def train_nowhere() -> None:
    """Without a run folder."""
    with hetsync.join(progress=False, fault={"not_finite": "rollback"}) as job:
        model = NormedNet()
        data = TensorDataset(torch.zeros(8, 4), torch.zeros(8).long())
        job.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, 4, shuffle=True))
        for _ in job.epochs(1):
            job.ready()


class Outcome:
    def __init__(self, model: nn.Module, counted: Counted, seen: list[int], folder: Path) -> None:
        self.weights = model.state_dict()
        self.batches = counted.batches
        self.seen = seen
        summary = folder / "run" / "summary.json"
        self.summary: dict[str, Any] = json.loads(summary.read_text())


def train(
    folder: Path, bound: int | None, spoiled: tuple[int, ...], *, epochs: int = 1, every: int = 1, **settings: Any
) -> Outcome:
    """The batches of these numbers, in the order in which they come, are nan. The scheduler is stepped after each
    `every` of an epoch's, which the loop counts itself."""
    points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(points, (points[:, 0] > 0).long(), torch.arange(SAMPLES))
    model, counted, seen, batches = NormedNet(), Counted(), list[int](), 0
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    told = {"checkpoint_every": 2 * BATCH, "fault": {"not_finite": "rollback"}, "delay_bound": bound, **settings}
    with hetsync.join(run=folder / "run", progress=False, **told) as job:
        loader = DataLoader(data, BATCH, shuffle=True)
        model, optimizer, scheduler, loader = job.prepare(model, optimizer, scheduler, loader)
        job.register("counted", counted)
        for _ in job.epochs(epochs):
            for number, (points, labels, indices) in enumerate(loader, start=1):
                seen += indices.tolist()
                batches += 1
                counted.batches += 1
                points = points * torch.nan if batches in spoiled else points
                job.backward(nn.functional.cross_entropy(model(points), labels))
                job.step(optimizer)
                if number % every == 0:
                    scheduler.step()
    return Outcome(model, counted, seen, folder)


@pytest.mark.parametrize("bound", [0, 4, None])
def test_all_is_trained_again_from_the_newest_checkpoint(tmp_path: Path, bound: int | None) -> None:
    """Weights, optimizer, scheduler and what is registered are as if nothing had been."""
    plain = train(tmp_path / "plain", bound, ())
    outcome = train(tmp_path / "spoiled", bound, (4,))
    summary = outcome.summary
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    (rollback,) = summary["rollbacks"]
    assert rollback["rank"] == 0
    assert rollback["checkpoint_samples"] == 2 * BATCH
    assert rollback["samples"] >= BATCH
    (failure,) = summary["failures"]
    assert (failure["kind"], failure["action"]) == ("not_finite", "went back")
    again = Counter(outcome.seen)
    assert set(again) == set(range(SAMPLES))
    assert set(again.values()) == {1, 2}
    assert outcome.batches == plain.batches == SAMPLES // BATCH
    assert plain.summary["rollbacks"] == []
    for name, value in plain.weights.items():
        assert torch.equal(outcome.weights[name], value), name


@pytest.mark.parametrize("bound", [0, 4])
def test_the_third_failure_after_the_same_checkpoint_ends_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], bound: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, bound, tuple(range(4, 40)))
    assert ended.value.code == 2
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hetsync:")]
    assert "gradients were not finite on rank 0 in round" in said
    assert "for the third time since the checkpoint of 32 samples" in said
    named = said.partition("of the data set: ")[2].partition(", for the third")[0].split(", ")
    assert len(named) == BATCH


def test_a_newer_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    summary = train(tmp_path, 0, (4, 6, 10)).summary  # nan in the second batch after a checkpoint, each time
    assert [rollback["checkpoint_samples"] for rollback in summary["rollbacks"]] == [32, 32, 64]
    assert summary["samples_applied"] == SAMPLES


@pytest.mark.parametrize(
    ("spoiled", "every", "said"),
    [
        ((1,), 2 * BATCH, "there is no checkpoint yet to go back to"),
        ((7,), SAMPLES, "the newest checkpoint, of 96 samples, is of before this epoch"),
    ],
)
def test_where_nobody_can_go_back_the_job_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], spoiled: tuple[int, ...], every: int, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, 4, spoiled, epochs=2, checkpoint_every=every)
    assert ended.value.code == 2
    (sentence,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hetsync:")]
    assert said in sentence
    assert "gradients were not finite on rank 0 in round" in sentence


def test_it_goes_back_within_an_epoch(tmp_path: Path) -> None:
    """The second one, which a checkpoint is of, too."""
    summary = train(tmp_path, 4, (10,), epochs=2, checkpoint_every=2 * BATCH + 8).summary
    assert len(summary["rollbacks"]) == 1
    assert summary["samples_applied"] == 2 * SAMPLES


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("spoiled", [4, 5])  # back to before the scheduler's first step, and to after it
def test_a_loop_that_counts_its_batches_steps_its_scheduler_as_before(tmp_path: Path, bound: int, spoiled: int) -> None:
    """Its counter goes on where all go back, and its steps are after as many samples as without that."""
    plain = train(tmp_path / "plain", bound, (), epochs=2, every=3)
    outcome = train(tmp_path / "spoiled", bound, (spoiled,), epochs=2, every=3)
    assert len(outcome.summary["rollbacks"]) == 1
    for name, value in plain.weights.items():
        assert torch.equal(outcome.weights[name], value), name


def test_gradients_of_before_are_gone(tmp_path: Path) -> None:
    """Those of a task's second batch, after a first that was nan: a loop may add to what it finds in `.grad`."""
    points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    model, counted, held = NormedNet(), Counted(), list[tuple[int, bool]]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    told = {"checkpoint_every": 2 * BATCH, "fault": {"not_finite": "rollback"}, "delay_bound": 4, "accumulation": 2}
    with hetsync.join(run=tmp_path / "run", progress=False, **told) as job:
        loader = DataLoader(TensorDataset(points), BATCH, shuffle=True)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        job.register("counted", counted)
        for _ in job.epochs(1):
            for (batch,) in loader:
                held.append((counted.batches, any(weight.grad is not None for weight in model.parameters())))
                counted.batches += 1
                optimizer.zero_grad()
                spoiled = len(held) == 3
                model(batch * torch.nan if spoiled else batch).square().mean().backward()
                optimizer.step()
    at_checkpoint = [grad for batches, grad in held if batches == 2]
    assert at_checkpoint == [True, False], held


def test_what_only_some_have_been_told_of_counts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first rank has died on the way back, and the one that is the first now has not heard of what it decided."""
    loaded = SimpleNamespace(path=tmp_path, progress=SimpleNamespace(samples_applied=64))
    monkeypatch.setattr(checkpoint, "complete", lambda folder: [folder])
    monkeypatch.setattr(checkpoint, "load_newest", lambda folder: loaded)
    told = Rollback(cause="not_finite", rank=0, host="a", round=3, next_round=5, samples=16, checkpoint_samples=64)
    known = [told, replace(told, round=6, next_round=8)]
    session: Any = SimpleNamespace(
        left_out=[TaskLeftOut(0, 3, 16, ()), TaskLeftOut(0, 6, 16, ())],
        books_lost=[],
        lost=[],
        applied=64,
        version=8,
        named=lambda spans: "7",
    )
    messages: Any = SimpleNamespace(gather_objects=lambda mine: [mine, known])
    before = agreed(messages, known[:1])
    assert before == known
    assert destination(tmp_path, session, ["a", "b"], before, 0) == (tmp_path, None)
    session.left_out.append(TaskLeftOut(1, 9, 16, ()))
    with pytest.raises(UserError, match=r"on rank 1 in round 9, .* for the third time since the checkpoint of 64"):
        destination(tmp_path, session, ["a", "b"], before, 0)


def test_it_is_refused_where_there_will_be_no_checkpoint() -> None:
    back = FaultConfig(not_finite="rollback")
    with pytest.raises(UserError, match=r"run\.checkpoint_every and run\.checkpoint_seconds are null"):
        Config(fault=back, run=RunConfig(checkpoint_seconds=None))
    with pytest.raises(UserError, match=r"fault\.not_finite is rollback, but control\.name is goodput"):
        Config(fault=back, control=ControlConfig("goodput"))


def test_it_is_refused_without_a_run_folder(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_nowhere()
    assert "fault.not_finite is rollback, but there is no run folder" in capfd.readouterr().err


def test_where_delay_has_lost_training_all_go_to_a_copy_in_memory(tmp_path: Path) -> None:
    """Unless something worse has come since; who has died may have known alone."""
    session: Any = SimpleNamespace(left_out=[], books_lost=[], lost=[], applied=64, version=8, named=lambda spans: "7")
    with pytest.raises(LostError, match="has died"):
        destination(tmp_path, session, ["a", "b"], [], 0, [16, 32])
    session.lost.append(Lost(1, 7, float("nan"), 0.1, 20))
    place, told = destination(None, session, ["a", "b"], [], 0, [16, 32])
    assert (place, told.cause, told.host, told.samples, told.checkpoint_samples) == (16, "delay", "b", 48, 16)
    assert destination(None, session, ["a", "b"], [told], 0, [16, 32]) == (16, None)
    assert destination(None, session, ["a", "b"], [], 24, [16, 32])[0] == 32  # lines of 24 are not run again
    with pytest.raises(UserError, match="there is no copy of this epoch's beginning that is sound"):
        destination(None, session, ["a", "b"], [], 40, [16, 32])
    with pytest.raises(UserError, match="delay_bound 0 stands higher rates, and there is no copy in memory"):
        destination(None, session, ["a", "b"], [], 0)
    session.left_out.append(TaskLeftOut(0, 3, 16, ()))
    assert destination(None, session, ["a", "b"], [], 0, [16, 32])[0] == 16
