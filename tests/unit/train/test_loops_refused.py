"""What a loop of a script's own may not do, each refused in one sentence with status 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.errors import USER_ERROR
from hetsync.plane.local import LocalPlane

BOUNDS = [0, 4]
InSlice = Callable[["Script", int, torch.Tensor], Any]


class Script:
    """Two layers with an optimizer each, and a scheduler that is not prepared."""

    def __init__(self, job: Any, loads: bool = True) -> None:
        torch.manual_seed(0)
        self.job = job
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.model[0].bias.requires_grad_(False)
        self.first, self.second = (SGD(layer.parameters(), lr=0.1) for layer in self.model)
        self.unprepared = ExponentialLR(self.first, 0.9)
        plateau, each = ReduceLROnPlateau(self.second), ExponentialLR(self.second, 0.9)
        self.data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        *_, self.plateau, self.each = job.prepare(self.model, self.first, self.second, plateau, each)
        if loads:
            self.loader = job.prepare(DataLoader(self.data, 8, shuffle=True))

    def run(self, in_slice: InSlice) -> None:
        for _ in self.job.epochs(2):
            self.train(in_slice)

    def train(self, in_slice: InSlice | None = None) -> None:
        for number, (inputs, labels) in enumerate(self.loader):
            (in_slice or ordinary)(self, number, (self.model(inputs) - labels).square().mean())


def ordinary(script: Script, number: int, loss: torch.Tensor) -> None:
    script.job.backward(loss)
    script.job.step()


def refused(
    capsys: pytest.CaptureFixture[str], bound: int, in_slice: Callable[[Script, int, torch.Tensor], Any]
) -> str:
    with pytest.raises(SystemExit) as ended, hetsync.join(plane=LocalPlane(), delay_bound=bound, progress=False) as job:
        Script(job).run(in_slice)
    assert ended.value.code == USER_ERROR
    said = capsys.readouterr().err.strip()
    assert said.startswith("hetsync: ")
    assert said.count("\n") == 0
    return said


def with_closure(script: Script, number: int, loss: torch.Tensor) -> None:
    script.job.backward(loss)
    script.first.step(lambda: 0.0)


def by_hand(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.first.param_groups[0]["lr"] = 0.01


def unprepared(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.unprepared.step()


def unprepared_given(script: Script, number: int, loss: torch.Tensor) -> None:
    script.job.backward(loss)
    script.job.step(script.first, script.unprepared)


def plateau(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.plateau.step(loss.item())


def irregular(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    if number % 3 == 0:
        script.each.step()


def other_momentum(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.second.param_groups[0]["momentum"] = 0.1 * number


def with_epoch(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.each.step(number / 8)


def set_back(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.each.last_epoch = 0


def other_batches(script: Script, number: int, loss: torch.Tensor) -> None:
    script.loader.batch_size = 4


def collated_otherwise(script: Script, number: int, loss: torch.Tensor) -> None:
    script.loader.collate_fn = list


def thawed(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.model[0].bias.requires_grad_(number == 2)


def grown(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.second.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def summed(script: Script, number: int, loss: torch.Tensor) -> None:
    script.job.backward(script.model(torch.ones(8, 4)).square().sum())


def of_each_sample(script: Script, number: int, loss: torch.Tensor) -> None:
    script.job.backward(script.model(torch.ones(8, 4)).square())


def reduced(script: Script, number: int, loss: torch.Tensor) -> None:
    script.job.backward(loss, reduction="max")


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    ("in_slice", "sentence"),
    [
        (with_closure, "the optimizer's step was given a closure"),
        (by_hand, "the optimizer's learning rate was changed in the loop, from [0.1] to [0.01]"),
        (other_momentum, "the optimizer's momentum was changed in the loop, from 0.0 to 0.1, which each rank would do"),
        (unprepared, "step the scheduler that job.prepare returned"),
        (
            unprepared_given,
            "job.step got a ExponentialLR: give optimizers, and schedulers as job.prepare returned them",
        ),
        (plateau, "a ReduceLROnPlateau was stepped within a slice"),
        (with_epoch, "a scheduler was stepped in the loop with an argument"),
        (irregular, "a scheduler was stepped first after 1 batches of the loop, and for the 2. time after 4"),
        (set_back, "a scheduler's last_epoch was set in the loop"),
        (other_batches, "a prepared loader's batch_size was set"),
        (collated_otherwise, "a prepared loader's collate_fn was set"),
        (thawed, "weight 0.bias was unfrozen in the loop"),
        (grown, "the optimizer has"),
        (summed, "the loss is a sum over the batch's samples"),
        (of_each_sample, "a loss of shape (8, 1)"),
        (reduced, "job.backward got reduction 'max': give 'mean' or 'sum'"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_refused_in_the_loop(capsys: pytest.CaptureFixture[str], bound: int, in_slice: InSlice, sentence: str) -> None:
    assert sentence in refused(capsys, bound, in_slice)


def run_by_next(job: Any, batches_an_epoch: int) -> None:
    script = Script(job)
    for _ in job.epochs(2):
        batches = iter(script.loader)
        for number in range(batches_an_epoch):
            inputs, labels = next(batches)
            ordinary(script, number, (script.model(inputs) - labels).square().mean())


def test_a_batch_after_the_last_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, hetsync.join(plane=LocalPlane(), delay_bound=0, progress=False) as job:
        run_by_next(job, 9)
    assert ended.value.code == USER_ERROR
    assert "the loop asked by next for another batch after an epoch's last" in capsys.readouterr().err


def test_a_job_that_all_have_left_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with hetsync.join(plane=LocalPlane(), delay_bound=0) as job:
        run_by_next(job, 3)
    assert "training ended after 24 of 128 samples, as all ranks left their loops" in capsys.readouterr().out


def turned(script: Script, number: int, loss: torch.Tensor) -> None:
    script.job.backward(loss)
    script.job.step(script.second, script.first)


def twice(script: Script, number: int, loss: torch.Tensor) -> None:
    for _ in range(2):
        script.job.backward(script.model(torch.ones(1, 4)).square().sum())
        script.job.step()


@pytest.mark.parametrize(
    ("in_slice", "sentence"),
    [(turned, "give them in the order of their steps"), (twice, "an optimizer was stepped twice in one slice")],
)
def test_refused_where_ranks_sum_gradients_batch_by_batch(
    capsys: pytest.CaptureFixture[str], in_slice: InSlice, sentence: str
) -> None:
    assert sentence in refused(capsys, 0, in_slice)
    with hetsync.join(plane=LocalPlane(), delay_bound=4, progress=False) as job:
        script = Script(job)
        before = [weight.detach().clone() for weight in script.model.parameters() if weight.requires_grad]
        script.run(in_slice)
    after = [weight for weight in script.model.parameters() if weight.requires_grad]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_optimizer_that_needs_a_closure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, hetsync.join(plane=LocalPlane(), progress=False) as job:
        job.prepare(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    assert ended.value.code == USER_ERROR
    assert "LBFGS" in capsys.readouterr().err


def test_other_groups_than_the_checkpoint_has_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The optimizer's state would go to other weights."""

    def train(turned_round: bool) -> None:
        with hetsync.join(plane=LocalPlane(), run=tmp_path / "run", resume="auto", progress=False) as job:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            layers = reversed(model) if turned_round else model
            optimizer = SGD([{"params": layer.parameters()} for layer in layers], lr=0.1, momentum=0.9)
            data = DataLoader(TensorDataset(torch.randn(64, 4)), 8, shuffle=True)
            *_, loader = job.prepare(model, optimizer, data)
            for _ in job.epochs(2 if turned_round else 1):
                for (inputs,) in loader:
                    job.backward(model(inputs).square().mean())
                    job.step()

    train(turned_round=False)
    with pytest.raises(SystemExit) as ended:
        train(turned_round=True)
    assert ended.value.code == USER_ERROR
    assert "an optimizer has other groups of weights" in capsys.readouterr().err


def warms_up(script: Script, number: int, loss: torch.Tensor) -> None:
    ordinary(script, number, loss)
    script.each.step()


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("warm_epochs", "factor", "refused"), [(1, 0.9, True), (1, 1.0, False), (3, 0.9, False)])
def test_a_scheduler_whose_steps_cease_is_refused(
    capsys: pytest.CaptureFixture[str], bound: int, warm_epochs: int, factor: float, refused: bool
) -> None:
    """But where they change nothing: at the end, and after a warm-up that has come to its end."""

    def run() -> None:
        with hetsync.join(plane=LocalPlane(), delay_bound=bound, progress=False) as job:
            script = Script(job)
            script.each.scheduler.gamma = factor
            for epoch in job.epochs(4):
                script.train(warms_up if epoch < warm_epochs else ordinary)

    if not refused:
        run()
        return
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == USER_ERROR
    assert "was stepped no more in a whole loop over batches" in capsys.readouterr().err


def again(script: Script) -> None:
    """Another loop over batches, as for accuracy on the training data."""
    for _ in script.loader:
        pass


def in_each_epoch(script: Script) -> None:
    for _ in script.job.epochs(2):
        script.train()
        again(script)


def after_the_last(script: Script) -> None:
    for _ in script.job.epochs(2):
        script.train()
    again(script)


def without_epochs(script: Script) -> None:
    script.loader = script.job.loader(script.data, batch_size=8, epochs=2)
    for _ in range(2):
        script.train()


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("loops", [in_each_epoch, after_the_last, without_epochs])
def test_batches_come_once(capsys: pytest.CaptureFixture[str], bound: int, loops: Callable[[Script], None]) -> None:
    with pytest.raises(SystemExit) as ended, hetsync.join(plane=LocalPlane(), delay_bound=bound, progress=False) as job:
        loops(Script(job, loops is not without_epochs))
    assert ended.value.code == USER_ERROR
    assert "a second loop over the job's batches" in capsys.readouterr().err


def test_batches_of_a_run_that_is_over_are_none_to_look_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(afterwards: Callable[[Script], None]) -> None:
        with hetsync.join(plane=LocalPlane(), run=tmp_path / "run", resume="auto", progress=False) as job:
            script = Script(job)
            for _ in job.epochs(2):
                script.train()
            afterwards(script)

    run(lambda script: None)
    with pytest.raises(SystemExit) as ended:
        run(again)
    assert ended.value.code == USER_ERROR
    assert "a second loop over the job's batches" in capsys.readouterr().err
