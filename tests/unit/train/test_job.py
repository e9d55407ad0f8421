"""Wrong uses of a job on one rank: one sentence that says what to do, and status 2."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import environment, summary_of
from torch import nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hetsync
from hetsync.plane.local import LocalPlane
from hetsync.train import workplace
from hetsync.train.evaluation import EvaluationLoader, RankParts
from hetsync.train.job import Job

SAMPLES, BATCH = 48, 16
ROOT = Path(__file__).parents[3]


def data() -> Dataset[Any]:
    points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points[:, 0] > 0).long())


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(data(), **{"batch_size": BATCH, "shuffle": True, **options})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class OwnBatches(BatchSampler):
    pass


class Shuffled(RandomSampler):
    def __init__(self) -> None:
        super().__init__(range(SAMPLES))


class Plain(DataLoader[Any]):
    """Is only made in another way."""

    def __init__(self, training: bool) -> None:
        super().__init__(data(), BATCH, sampler=Shuffled() if training else None)


class Changing(DataLoader[Any]):
    def __iter__(self) -> Any:
        for points, labels in super().__iter__():
            yield points - points.mean(), labels


class Filtering(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return filter(None, super()._get_iterator())


class Balanced(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([0] * SAMPLES)


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(SAMPLES))


def bucketed() -> DataLoader[Any]:
    """Its class has the name of torch's, as that of wrappers may have."""
    kind = type("BatchSampler", (BatchSampler,), {"__iter__": lambda self: iter([[0], [1]])})
    made = loader()
    object.__setattr__(made, "batch_sampler", kind(made.sampler, BATCH, False))
    return made


class Script:
    """A script's things, and its loop; what a case puts in place of its lines is called with it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = nn.Linear(4, 2)
        self.optimizer = SGD(self.model.parameters(), 0.1)
        self.loader: Any = None

    def prepare(self) -> None:
        *_, self.loader = self.job.prepare(self.model, self.optimizer, loader())

    def step(self) -> None:
        self.job.backward(self.loss())
        self.job.step(self.optimizer)

    def loss(self, model: nn.Module | None = None) -> torch.Tensor:
        points, labels = self.batch
        return nn.functional.cross_entropy((model or self.model)(points), labels)

    def run(self, prepare: Act | None, batch: Act | None, rest: Act | None, epochs: Any = 2) -> None:
        self.prepare() if prepare is None else prepare(self)
        for _ in self.job.epochs(epochs):
            for found in self.loader:
                self.batch = found
                self.step() if batch is None else batch(self)
            if rest is not None:
                rest(self)


Act = Callable[[Script], Any]


def sentence_of(capsys: pytest.CaptureFixture[str], act: Callable[[], Any]) -> str:
    """What a job that ends with status 2 says."""
    with pytest.raises(SystemExit) as end:
        act()
    assert end.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hetsync:")]
    assert len(said) == 1, said
    return said[0]


def train(
    prepare: Act | None = None, batch: Act | None = None, rest: Act | None = None, epochs: Any = 2, **settings: Any
) -> None:
    with hetsync.join(progress=False, **settings) as job:
        Script(job).run(prepare, batch, rest, epochs)


def after(act: Act) -> Act:
    """Prepares as usual, and then that."""

    def prepare(script: Script) -> None:
        script.prepare()
        act(script)

    return prepare


def given(*things: str, **others: Any) -> Act:
    """Prepares these of the script's things, and others."""
    return lambda script: script.job.prepare(*(getattr(script, name) for name in things), *others.values())


def stepped(act: Act) -> Act:
    """A step, and then that, while the batch is out."""

    def batch(script: Script) -> None:
        script.step()
        act(script)

    return batch


def loads(*arguments: Any, **options: Any) -> Act:
    def prepare(script: Script) -> None:
        script.job.prepare(script.model, script.optimizer)
        script.loader = script.job.loader(*arguments, **options)

    return prepare


def test_the_script_works_as_it_is() -> None:
    train(rest=lambda script: script.job.evaluate(lambda: (1.0, 1)))


def test_classes_that_only_make_loaders_in_another_way_are_taken() -> None:
    def prepare(script: Script) -> None:
        things = (script.model, script.optimizer, Plain(training=True), Plain(training=False))
        *_, script.loader, test_loader = script.job.prepare(*things)
        assert [len(labels) for _, labels in test_loader] == [BATCH] * 3

    train(prepare)


PREPARES: dict[str, tuple[Act, str]] = {
    "part of the draws": (
        given(loader=loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 48, 24))),
        "WeightedRandomSampler draws 24 of 48 samples with replacement, but .*, with weights= where",
    ),
    "draws without replacement": (
        loads(loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 48, 48, replacement=False))),
        "WeightedRandomSampler draws 48 of 48 samples without replacement, but",
    ),
    "part of the samples": (
        given(loader=loader(shuffle=False, sampler=RandomSampler(data(), num_samples=24))),
        "RandomSampler draws 24 of 48 samples without replacement, but",
    ),
    "weights of a sampler": (
        given(loader=loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 47, 48))),
        r"weights has the shape \(47,\), but there are 48 training samples",
    ),
    "generator of draws": (
        given(loader=loader(shuffle=False, sampler=WeightedRandomSampler([1.0], 48, generator=torch.Generator()))),
        "has a generator",
    ),
    "test data that are drawn": (
        lambda script: script.job.test_loader(loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 48, 48))),
        "test data has a WeightedRandomSampler that draws with replacement, but .*: leave it out",
    ),
    "no weights": (loads(data(), BATCH, weights=[0.0] * 48), "weights add up to 0: give one that is above 0"),
    "large weights": (loads(data(), BATCH, weights=[1e308] * 48), "weights add up to inf: .* a sum that is finite"),
    "weights of classes": (loads(data(), BATCH, weights=[1, 2]), r"shape \(2,\), .* weights_of_classes\[labels\]"),
    "weights in a column": (loads(data(), BATCH, weights=torch.ones(48, 1)), r"weights has the shape \(48, 1\)"),
    "weight below 0": (loads(data(), BATCH, weights=[1.0, -0.5] * 24), "weights has -0.5 for sample 1: give finite"),
    "weight nan": (loads(data(), BATCH, weights=[1.0] * 47 + [float("nan")]), "weights has nan for sample 47"),
    "weights that are words": (
        loads(data(), BATCH, weights=["high"] * 48),
        "weights is a list that does not hold plain",
    ),
    "distributed": (
        given(loader=loader(shuffle=False, sampler=DistributedSampler(data(), 2, 0))),
        "has a DistributedSampler, .* leave it out",
    ),
    "batches": (
        given(loader=DataLoader(data(), batch_sampler=OwnBatches(RandomSampler(data()), 4, False))),  # type: ignore[arg-type]
        "batches by a OwnBatches",
    ),
    "batches put in": (given(loader=bucketed()), "batches by a BatchSampler"),
    "own loop": (given(loader=Changing(data(), BATCH, shuffle=True)), "with an __iter__ .* in the data set"),
    "own iterator": (given(loader=Filtering(data(), BATCH, shuffle=True)), "is a Filtering with an _get_iterator"),
    "own loop over test data": (given(loader=Changing(data(), BATCH)), "is a Changing"),
    "own loop to evaluate": (lambda script: script.job.test_loader(Changing(data(), BATCH)), "is a Changing"),
    "own loop over a stream": (loads(Changing(Stream(), BATCH), samples=48), "is a Changing"),
    "own shuffle": (
        given(loader=loader(shuffle=False, sampler=Balanced(range(SAMPLES)))),
        "has a Balanced, but .* job.loader weights=",
    ),
    "own order": (given(loader=loader(shuffle=False, sampler=Backwards(range(SAMPLES)))), "has a Backwards, but"),
    "iterable": (loads(Stream(), BATCH), "give job.loader samples=N"),
    "costs of others": (loads(data(), BATCH, costs=[1.0] * 49), "there are 49 costs, but 48 training samples"),
    "iterable loader": (given(loader=DataLoader(Stream(), batch_size=4)), "data set is a Stream, which has no end"),
    "forked workers": (given(loader=loader(num_workers=1, multiprocessing_context="fork")), "are to be forked"),
    "generator": (given(loader=loader(generator=torch.Generator())), "has a generator, .* seed of hetsync.join"),
    "sampler's generator": (
        given(loader=loader(shuffle=False, sampler=RandomSampler(data(), generator=torch.Generator()))),
        "has a generator",
    ),
    "timeout": (given(loader=loader(num_workers=1, timeout=5)), "has a timeout, .* timeout_seconds of"),
    "last test samples": (
        after(given(loader=DataLoader(data(), batch_size=25, drop_last=True))),
        "of test data has drop_last=True",
    ),
    "data parallel": (given(model=nn.DataParallel(nn.Linear(4, 2))), "give the module inside"),
    "batch norm over ranks": (
        given(model=nn.Sequential(nn.Linear(4, 2), nn.SyncBatchNorm(2))),
        "1 is a SyncBatchNorm, .* leave convert_sync_batchnorm out",
    ),
    "lazy": (given(model=nn.Sequential(nn.LazyLinear(2))), "0.weight has no shape yet, .* call the model on one batch"),
    "no model": (lambda script: script.job.prepare(script.optimizer, loader()), "has no model"),
    "no optimizer": (lambda script: script.job.prepare(script.model, loader()), "has no optimizer"),
    "no data": (given("model", "optimizer"), "the job has no training data"),
    "two loaders": (after(given(loader=loader())), "training data twice"),
    "model twice": (after(given("model")), "got the same Linear twice"),
    "optimizer twice": (after(given("optimizer")), "got the same SGD twice"),
    "closure": (
        lambda script: script.job.prepare(script.model, LBFGS(script.model.parameters()), loader()),
        "optimizer is a LBFGS, whose step needs a closure",
    ),
    "another optimizer's scheduler": (
        given("optimizer", scheduler=StepLR(SGD(nn.Linear(4, 2).parameters(), 0.1), 3)),
        "scheduler belongs to another optimizer",
    ),
    "something": (given(three=3), "job.prepare got a int"),
    "batch 0": (loads(data(), 0), "batch_size is 0"),
    "batch of a fraction": (loads(data(), 1.5), "batch_size is 1.5"),
    "batch of all": (loads(data(), 49), "but the data set has 48 samples: lower it"),
    "one graph": (loads(TensorDataset(torch.zeros(1, 4)), 2), "has 1 samples: split it, a graph into subgraphs"),
    "no samples": (loads(TensorDataset(torch.zeros(0, 4)), BATCH), "the data set is empty"),
    "no data set": (loads(3, BATCH), "dataset is a int: give a map-style data set, which has a length"),
    "nothing to train": (given("optimizer", loader=loader(), model=nn.Tanh()), "has no weights to train"),
    "no batch": (loads(data()), "needs a batch_size"),
    "workers": (loads(data(), BATCH, workers=-1), "got -1 workers"),
    "samples 0": (loads(data(), BATCH, samples=0), "got samples 0"),
    "epochs 0": (loads(data(), BATCH, epochs=0), "got epochs 0"),
    "epochs nan": (loads(data(), BATCH, epochs=float("nan")), "got epochs nan"),
    "epochs and samples": (loads(data(), BATCH, epochs=1, samples=4), "got epochs and samples"),
    "epochs twice": (loads(data(), BATCH, epochs=1), "told twice how long to train"),
    "evaluate every 0": (after(lambda script: script.job.evaluate_every(0, print)), "job.evaluate_every got 0 samples"),
    "evaluate what": (after(lambda script: script.job.evaluate_every(3, 4)), "job.evaluate_every got a int"),  # type: ignore[arg-type]
    "event": (after(lambda script: script.job.on("start", print)), "job.on got 'start'"),  # type: ignore[arg-type]
    "call what": (after(lambda script: script.job.on("end", 3)), "job.on got a int"),  # type: ignore[arg-type]
    "no state": (after(lambda script: script.job.register("it", 3)), "job.register got a int as it"),
    "constrain what": (after(lambda script: script.job.constrain([], print)), "job.constrain got a list"),  # type: ignore[arg-type]
    "constrain how": (
        after(lambda script: script.job.constrain(script.model, lambda: None)),
        "which is called with .Linear. here",
    ),
    "constrain a stranger": (
        after(lambda script: script.job.constrain(nn.Linear(4, 2), print)),
        "a Linear whose weight is a weight of no prepared model",
    ),
    "constrain by name": (
        after(lambda script: script.job.constrain(script.model, lambda _: script.model.weight.data.clamp_(-9, 9))),
        "job.constrain has changed weights or buffers of the script's model",
    ),
    "constrain at random": (
        after(lambda script: script.job.constrain(script.model, lambda it: it.weight.add_(torch.randn(1)))),
        "job.constrain has made other weights of the same ones",
    ),
    "a batch": (after(lambda script: script.job.step()), "no batch is out"),
}


@pytest.mark.parametrize("case", PREPARES)
def test_what_cannot_be_prepared(capsys: pytest.CaptureFixture[str], case: str) -> None:
    prepare, sentence = PREPARES[case]
    said = sentence_of(capsys, lambda: train(prepare))
    assert re.search(sentence, said), said


LOOPS: dict[str, tuple[Act, str]] = {
    "another model": (lambda script: script.job.backward(script.loss(nn.Linear(4, 2))), "no optimizer has made a step"),
    "a step of another model": (
        lambda script: (script.job.backward(script.loss(nn.Linear(4, 2))), script.job.step()),
        "found no gradient: call loss.backward.. on a loss of this model",
    ),
    "no backward": (lambda script: script.job.step(), "found no gradient"),
    "no step": (lambda script: script.job.backward(script.loss()), "no optimizer has made a step on 48 samples"),
    "another optimizer": (
        lambda script: (script.job.backward(script.loss()), script.job.step(SGD(script.model.parameters(), 0.1))),
        "an optimizer that was not prepared",
    ),
    "a scheduler": (
        lambda script: (script.job.backward(script.loss()), script.job.step(StepLR(script.optimizer, 3))),
        "job.step got a StepLR",
    ),
    "a second loop": (stepped(lambda script: next(iter(script.loader))), "two loops over the job's batches"),
    "an evaluation": (stepped(lambda script: script.job.evaluate(lambda: 1.0)), "job.evaluate_every evaluates"),
    "a stop": (stepped(lambda script: script.job.stop()), "a batch is out"),
    "preparing": (stepped(lambda script: script.job.prepare(nn.Linear(4, 2))), "after the loop had begun"),
}


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("case", LOOPS)
def test_what_a_loop_cannot_do(capsys: pytest.CaptureFixture[str], case: str, bound: int) -> None:
    batch, sentence = LOOPS[case]
    said = sentence_of(capsys, lambda: train(batch=batch, delay_bound=bound))
    assert re.search(sentence, said), said


RESTS: dict[str, tuple[Act, str]] = {
    "a step": (lambda script: script.job.step(), "no batch is out"),
    "the optimizer's step": (lambda script: script.optimizer.step(), "no batch is out"),
    "nothing": (lambda script: script.job.evaluate(lambda: None), "found nothing on any rank"),
    "no function": (lambda script: script.job.evaluate(3), "job.evaluate got a int"),  # type: ignore[arg-type]
    "wants more": (
        lambda script: script.job.evaluate(lambda model: 1.0),
        r"\(model\), .* with \(\) here .*missing.*'model'",
    ),
    "wants less": (lambda script: script.job.evaluate(lambda: 1.0, 3), r"with \(int\) here .*too many"),
    "nan": (lambda script: script.job.keep_best(float("nan")), "job.keep_best got nan"),
    "text": (lambda script: script.job.keep_best("good"), "job.keep_best got good"),  # type: ignore[arg-type]
    "two numbers": (lambda script: script.job.keep_best(torch.zeros(2)), "job.keep_best got tensor"),  # type: ignore[arg-type]
    "mode": (lambda script: script.job.keep_best(1.0, "up"), "job.keep_best got mode 'up'"),  # type: ignore[arg-type]
    "epochs": (lambda script: next(script.job.epochs(3)), "told twice how long to train"),
    "preparing": (lambda script: script.job.prepare(nn.Linear(4, 2)), "after the loop had begun"),
}


@pytest.mark.parametrize("method", ["evaluate", "gather"])
def test_where_ranks_may_join_nothing_is_done_together_before_the_first_batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """Whoever joins would do it alone."""
    monkeypatch.setattr(workplace, "check_replacing", lambda *words: None)
    act = after(lambda script: getattr(script.job, method)(lambda: 1.0))
    said = sentence_of(capsys, lambda: train(act, run=tmp_path / "run", fault={"replace": True}))
    assert f"job.{method} was called before the first batch, and fault.replace is true" in said


@pytest.mark.parametrize("case", RESTS)
def test_what_cannot_be_done_at_rest(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    rest, sentence = RESTS[case]
    said = sentence_of(capsys, lambda: train(rest=rest, run=tmp_path / "run"))
    assert re.search(sentence, said), said


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": 0}, "job.epochs got 0"),
        ({"epochs": -1}, "job.epochs got -1"),
        ({"epochs": 1.5}, "job.epochs got 1.5"),
        ({"epochs": "3"}, "job.epochs got 3"),
        ({"resume": True}, "resume needs the folder of the run"),
        ({"resume": "auto"}, "resume needs the folder of the run"),
        ({"run": 3}, "hetsync: run is 3"),
        ({"precision": "fp8"}, "hetsync: precision is fp8"),
        ({"delay_bound": -1}, "hetsync: delay_bound is -1"),
        ({"rest": lambda script: script.job.keep_best(1.0)}, "job.keep_best needs a run folder"),
    ],
)
def test_settings_that_cannot_be(capsys: pytest.CaptureFixture[str], settings: dict[str, Any], sentence: str) -> None:
    assert sentence in sentence_of(capsys, lambda: train(**settings))


def test_epochs_are_checked_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def ask() -> None:
        with hetsync.join(progress=False) as job:
            Script(job).prepare()
            job.epochs(0)

    assert "job.epochs got 0" in sentence_of(capsys, ask)


def test_an_epoch_without_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    def idle() -> None:
        with hetsync.join(progress=False) as job:
            Script(job).prepare()
            for _ in job.epochs(2):
                pass

    assert "epoch 0 used none of the job's batches" in sentence_of(capsys, idle)


def test_run_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "there is no complete checkpoint" in sentence_of(capsys, lambda: train(run=run, resume=True))
    train(run=run)
    assert "holds a run already" in sentence_of(capsys, lambda: train(run=run))
    assert "raise its epochs" in sentence_of(capsys, lambda: train(run=run, resume=True, epochs=1))
    assert "is in use by process" in sentence_of(
        capsys, lambda: train(run=run, resume=True, epochs=3, rest=lambda script: train(run=run, resume=True))
    )

    def another(script: Script) -> None:
        script.model = nn.Linear(4, 3)
        script.optimizer = SGD(script.model.parameters(), 0.1)
        script.prepare()

    assert "the checkpoint does not fit the model" in sentence_of(
        capsys, lambda: train(another, run=run, resume=True, epochs=4)
    )


NO_GUARD = """
import torch, hetsync
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(SAMPLES, 4), torch.zeros(SAMPLES).long())
with hetsync.join() as job:
    model, optimizer, loader = job.prepare(
        model, optimizer, DataLoader(data, batch_size=16, shuffle=True, num_workers=1)
    )
    for epoch in job.epochs(1):
        for points, labels in loader:
            job.backward(torch.nn.functional.cross_entropy(model(points), labels))
            job.step()
"""


@pytest.mark.each_value(1)
@pytest.mark.parametrize("samples", ["48", "20_000"])  # more than a pipe holds
def test_workers_of_a_script_without_a_guard(tmp_path: Path, samples: str) -> None:
    (tmp_path / "script.py").write_text(NO_GUARD.replace("SAMPLES", samples))
    words = [sys.executable, "script.py"]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 2, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("hetsync:")]
    assert "under if __name__ == '__main__'" in said
    assert "Traceback" not in done.stderr


BLOCKED = """
import os, torch, hetsync
from torch.utils.data import DataLoader, Dataset

class Blocked(Dataset):
    pipe, _ = os.pipe()

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.tensor(list(os.read(self.pipe, 1)))  # nobody writes

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with hetsync.join(timeout_seconds=0.5) as job:
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Blocked(), batch_size=16, shuffle=True))
    for epoch in job.epochs(1):
        for points in loader:
            pass
"""


def test_a_process_whose_data_never_come_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BLOCKED)
    words = [sys.executable, "script.py"]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2, done.stderr
    assert "a batch has not been loaded within" in done.stderr


# What the reviews of the first version found.

BOUNDS = pytest.mark.parametrize("bound", [0, 4])


@BOUNDS
def test_a_loop_that_all_ranks_leave_can_be_evaluated_and_gone_on_from(bound: int, tmp_path: Path) -> None:
    found: list[float] = []

    def script(epochs: int) -> None:
        with hetsync.join(run=tmp_path / "run", resume="auto", progress=False, delay_bound=bound) as job:
            model = nn.Linear(4, 2)
            optimizer = SGD(model.parameters(), 0.1)
            *_, batches, tests = job.prepare(model, optimizer, loader(), DataLoader(data(), batch_size=BATCH))
            for _ in job.epochs(epochs):
                for number, (points, labels) in enumerate(batches):
                    job.backward(nn.functional.cross_entropy(model(points), labels))
                    job.step()
                    if number == 1:
                        break
                found.append(job.evaluate(lambda: (sum(len(labels) for _, labels in tests), len(tests.dataset))))

    script(2)
    assert found == [1.0]
    script(2)  # finished: it goes through
    assert found == [1.0]


def by_zip(batches: Any) -> Iterator[Any]:
    return (batch for _, batch in zip(range(len(batches)), batches))  # noqa: B905


def by_islice(batches: Any) -> Iterator[Any]:
    return itertools.islice(batches, len(batches))


def by_next(batches: Any) -> Iterator[Any]:
    coming = iter(batches)
    return (next(coming) for _ in range(len(batches)))


@BOUNDS
@pytest.mark.parametrize("ways", [by_zip, by_islice, by_next])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_loop_that_has_taken_all_batches_is_not_a_left_one(
    bound: int, ways: Callable[[Any], Iterator[Any]], evaluates: bool
) -> None:
    """Though it has not asked for another."""
    epochs = []
    with hetsync.join(progress=False, delay_bound=bound) as job:
        model = nn.Linear(4, 2)
        _, _, batches = job.prepare(model, SGD(model.parameters(), 0.1), loader(batch_size=10))
        for epoch in job.epochs(3):
            taken = 0
            for points, labels in ways(batches):
                job.backward(nn.functional.cross_entropy(model(points), labels))
                job.step()
                taken += len(labels)
            epochs.append((epoch, taken))
            if evaluates:
                job.evaluate(lambda: (1.0, 1))
    assert epochs == [(epoch, SAMPLES) for epoch in range(3)]
    assert job.session.applied == 3 * SAMPLES


def test_training_data_may_drop_the_last_samples_whether_shuffled_or_not() -> None:
    for shuffle in (True, False):
        sizes: list[int] = []

        def look(script: Script, sizes: list[int] = sizes) -> None:
            sizes.append(len(script.batch[0]))
            script.step()

        train(loads(loader(batch_size=20, shuffle=shuffle, drop_last=True)), look, epochs=1, delay_bound=0)
        assert sizes == [20, 20]


class Shifted(TensorDataset):
    """With augmentation of its own."""

    def __getitem__(self, index: Any) -> Any:
        point, label = super().__getitem__(index)
        return point + 100.0, label


def test_a_tensor_data_set_may_have_a_getitem_of_its_own() -> None:
    points, labels = data().tensors  # type: ignore[attr-defined]
    smallest: list[float] = []

    def look(script: Script) -> None:
        smallest.append(float(script.batch[0].min()))
        script.step()

    def prepare(script: Script) -> None:
        shifted = DataLoader(Shifted(points, labels), batch_size=BATCH, shuffle=True)
        *_, script.loader = script.job.prepare(script.model, script.optimizer, shifted)

    train(prepare, look)
    assert min(smallest) > 50


def test_ranks_are_measured_on_samples_that_cost_as_all_do() -> None:
    """Every other sample is short; evenly spaced ones all are."""
    costs, seen = [1.0, 9.0] * 32, set()

    def measured(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.add(batch[0].mean().item())
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def prepare(script: Script) -> None:
        samples = TensorDataset(torch.tensor(costs)[:, None].expand(64, 4), torch.zeros(64, dtype=torch.long))
        loads(samples, BATCH, costs=costs)(script)
        script.job.measure(measured)

    train(prepare, profile_seconds=0.1)
    assert seen == {5.0}


EVALUATES = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import hetsync

data = TensorDataset(torch.ones(8, 2))
job = hetsync.join(run="run", resume="auto")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
*_, loader, tests = job.prepare(model, optimizer, DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
epochs = job.epochs(int(sys.argv[1]))
job.print("result", job.evaluate(lambda tests, *, factor: (factor * sum(len(x) for x, in tests), 8), tests, factor=3))
for _ in epochs if "train" in sys.argv else ():
    for (inputs,) in loader:
        job.backward(model(inputs).mean())
        job.step()
"""


def test_a_script_may_evaluate_only_and_its_run_goes_on_afterwards(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EVALUATES)

    def run(*words: str) -> str:
        env = environment(PYTHONPATH=str(ROOT))
        done = subprocess.run(
            [sys.executable, "script.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env
        )
        assert done.returncode == 0, done.stderr
        assert "result 3.0" in done.stdout
        return done.stdout

    assert "training ended" not in run("1")
    assert "8 of 8 samples" in run("1", "train")
    assert "8 of 16 samples" in run("2")
    assert "16 of 16 samples" in run("2", "train")


@pytest.mark.parametrize("shuffle", [True, False])
def test_prepared_loaders_answer_what_scripts_ask_of_theirs(shuffle: bool) -> None:
    collate = list
    given = DataLoader(data(), 7, shuffle=shuffle, collate_fn=collate, drop_last=shuffle, num_workers=1)
    with hetsync.join(progress=False) as job:
        prepared = job.prepare(given)
        for name in ("dataset", "batch_size", "collate_fn", "drop_last", "num_workers", "pin_memory"):
            assert getattr(prepared, name) == getattr(given, name), name
        for name in ("sampler", "batch_sampler"):
            assert type(getattr(prepared, name)) is type(getattr(given, name))
            assert len(getattr(prepared, name)) == len(getattr(given, name))
        assert len(prepared) == len(given)


@pytest.mark.parametrize("kind", ["sampler", "uniform sampler", "argument", "argument beside a loader"])
def test_weights_are_taken_from_samplers_and_arguments(kind: str) -> None:
    weights = [0.0, 3.0] * (SAMPLES // 2)
    with hetsync.join(progress=False) as job:
        if kind == "sampler":
            prepared = job.prepare(loader(shuffle=False, sampler=WeightedRandomSampler(weights, SAMPLES)))
        elif kind == "uniform sampler":
            prepared = job.prepare(loader(shuffle=False, sampler=RandomSampler(data(), replacement=True)))
            weights = [1.0] * SAMPLES
        elif kind == "argument":
            prepared = job.loader(data(), BATCH, weights=weights)
        else:
            prepared = job.loader(loader(shuffle=False), weights=weights)
        assert prepared.source.weights.tolist() == weights
        assert isinstance(prepared.sampler, WeightedRandomSampler)
        assert len(prepared.sampler) == SAMPLES
        assert prepared.shuffle


def test_test_data_are_a_ranks_part_where_all_evaluate_and_whole_elsewhere() -> None:
    parts = RankParts(1, 2)  # the second of two ranks
    parts.shares = [1, 2]
    tests = EvaluationLoader(DataLoader(data(), batch_size=BATCH), parts, torch.device("cpu"))

    def samples() -> list[int]:
        return [sum(len(labels) for _, labels in tests), len(tests.dataset), len(tests.part)]

    assert samples() == [SAMPLES] * 3
    with tests.cut():
        assert samples() == [SAMPLES * 2 // 3] * 3
    assert samples() == [SAMPLES] * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda job, optimizer: job.register("late", nn.Linear(1, 1)),
        lambda job, optimizer: job.schedule(optimizer, lambda samples: 0.0),
        lambda job, optimizer: job.measure(lambda model, batch: None),
        lambda job, optimizer: job.evaluate_every(16, lambda: 1.0),
        lambda job, optimizer: job.constrain(nn.Linear(1, 1), print),
    ],
)
def test_what_comes_too_late_is_refused(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = sentence_of(capsys, lambda: train(rest=lambda script: call(script.job, script.optimizer)))
    assert "was called after the loop had begun" in said


def test_a_loop_that_clips_and_never_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    def clip(script: Script) -> None:
        script.job.backward(script.loss())
        script.job.clip_grad_norm_(script.model.parameters(), 1.0)
        script.optimizer.zero_grad()

    assert "no optimizer has made a step" in sentence_of(capsys, lambda: train(batch=clip))


def test_a_model_elsewhere_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(script: Script) -> None:
        script.model = nn.Linear(4, 2, device="meta")
        script.optimizer = SGD(script.model.parameters(), 0.1)
        script.prepare()

    assert "put all there by .to(job.device)" in sentence_of(capsys, lambda: train(prepare))


@pytest.mark.parametrize("order", ["unshuffled", "subset"])
def test_loaders_that_are_mistaken_say_what_to_do(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(script: Script) -> None:
        if order == "unshuffled":
            script.job.prepare(script.model, script.optimizer, loader(shuffle=False))
        else:
            script.prepare()
            script.job.test_loader(DataLoader(data(), sampler=SubsetRandomSampler(range(16))))

    said = sentence_of(capsys, lambda: train(prepare))
    assert ("test data only" if order == "unshuffled" else "give a torch.utils.data.Subset") in said


def test_a_pair_of_figures_is_recorded() -> None:
    def rest(script: Script) -> None:
        assert script.job.evaluate(lambda: ((1.0, 2), (1, 4))) == (0.5, 0.25)
        assert script.job.metrics == {"metric_0": 0.5, "metric_1": 0.25}

    train(rest=rest)


def test_backward_takes_options_and_print_too(capsys: pytest.CaptureFixture[str]) -> None:
    def batch(script: Script) -> None:
        loss = script.loss()
        script.job.backward(loss, retain_graph=True)
        script.job.backward(loss)
        script.job.step()

    train(batch=batch, rest=lambda script: script.job.print("done", flush=True))
    assert "done" in capsys.readouterr().out


@BOUNDS
def test_the_lines_after_an_epoch_come_once_though_it_rests_twice(bound: int) -> None:
    """A checkpoint by time is asked for when the epoch's last samples are out already."""
    seen: list[int] = []
    batches: list[int] = []

    def batch(script: Script) -> None:
        batches.append(script.job.epoch)
        script.job.session.request_rest("checkpoint")
        script.step()

    train(batch=batch, rest=lambda script: seen.append(script.job.epoch), epochs=3, delay_bound=bound)
    assert seen == [0, 1, 2]
    assert [batches.count(epoch) for epoch in seen] == [SAMPLES // BATCH] * 3


def in_turns(script: Script) -> None:
    """A batch, with weights that are frozen as a critic's are while the generator steps."""
    script.model.requires_grad_(True)
    script.step()
    script.model.bias.requires_grad_(False)


@BOUNDS
def test_weights_that_are_frozen_in_turns_may_be_so_at_a_rest(bound: int, tmp_path: Path) -> None:
    for epochs in (1, 3):
        train(batch=in_turns, epochs=epochs, delay_bound=bound, run=tmp_path / "run", resume="auto")


@BOUNDS
def test_weights_that_are_frozen_in_turns_may_be_so_where_all_go_back(bound: int, tmp_path: Path) -> None:
    fault = {"not_finite": "rollback", "inject": [{"kind": "not_finite", "rank": 0, "round": 1}]}
    run = tmp_path / "run"
    train(batch=in_turns, delay_bound=bound, run=run, checkpoint_every=BATCH, fault=fault)
    assert summary_of(run)["rollbacks"]


def test_extra_state_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

    def prepare(script: Script) -> None:
        script.model = Extra(4, 2)
        script.optimizer = SGD(script.model.parameters(), 0.1)
        script.prepare()

    assert "a model's state holds a dict (get_extra_state)" in sentence_of(capsys, lambda: train(prepare))


@pytest.mark.parametrize("bound", [0, 4])
def test_a_step_with_none_for_a_closure_is_torch_s_default(bound: int) -> None:
    with hetsync.join(plane=LocalPlane(), delay_bound=bound, progress=False) as job:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.prepare(model, optimizer)
        before = model.weight.detach().clone()
        for number, (rows,) in enumerate(job.loader(TensorDataset(torch.ones(64, 4)), 8, epochs=1)):
            job.backward(model(rows).mean())
            if number % 2:
                optimizer.step(None)
            else:
                optimizer.step(closure=None)
            optimizer.zero_grad()
    assert torch.allclose(before - model.weight, torch.full((1, 4), 0.8))


def learns_nothing(job: Any, model: torch.nn.Module, rows: torch.Tensor) -> None:
    with torch.no_grad():
        loss = model(rows).mean()
    job.backward(loss)


WRONG_BACKWARDS: dict[str, tuple[Callable[..., None], str]] = {
    "no gradient ever": (learns_nothing, "no loss of 64 samples had anything to learn"),
    "weight of nan": (lambda job, model, rows: job.backward(model(rows).mean(), weight=float("nan")), "weight nan"),
    "weight below 0": (lambda job, model, rows: job.backward(model(rows).mean(), weight=-1), "weight -1"),
    "weights": (lambda job, model, rows: job.backward(model(rows).mean(), weight=torch.ones(2)), "a number of 0 or"),
    "weight of a sum": (
        lambda job, model, rows: job.backward(model(rows).sum(), weight=3, reduction="sum"),
        "got a weight, and reduction 'sum'",
    ),
    "a gradient that is not finite": (
        lambda job, model, rows: job.backward((model(rows) * 0).log().mean()),
        "became nan",
    ),
}


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("case", WRONG_BACKWARDS)
def test_backward_says_what_is_wrong(capsys: pytest.CaptureFixture[str], case: str, bound: int) -> None:
    body, sentence = WRONG_BACKWARDS[case]

    def script() -> None:
        with hetsync.join(plane=LocalPlane(), delay_bound=bound, progress=False) as job:
            model = torch.nn.Linear(4, 1)
            job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for (rows,) in job.loader(TensorDataset(torch.ones(64, 4)), 8, epochs=1):
                body(job, model, rows)
                job.step()

    with pytest.raises(SystemExit):
        script()
    assert sentence in capsys.readouterr().err
