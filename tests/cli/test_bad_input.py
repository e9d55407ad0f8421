"""A mistake ends the job within seconds: one sentence with key, value and remedy, no traceback, exit status not 0."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Done, finished, mpirun, run, started

from hetsync.cli import train as cli
from hetsync.plane.local import LocalPlane

SMALL = ("--run.samples", "256", "--run.dir", "run")


def assert_one_sentence(done: Done, *parts: str, status: int = 2) -> None:
    assert done.status == status, done.story
    assert len(done.sentences) == 1, done.story
    assert "Traceback" not in done.err, done.story
    for part in parts:
        assert re.search(part, done.sentences[0]), f"{part!r} is not in {done.sentences[0]!r}"


# Seen before any rank speaks to another: tried within this process.


def complaint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_sentence(Done(int(ended.value.code or 0), captured.out, captured.err))
    return captured.err.strip()


ARGUMENTS = {
    "speed of nothing": (
        ["--emulation.samples_per_second", "100"],
        "emulation.samples_per_second is 100.0, but no cluster is emulated: name its profile by --emulate, or leave it"
        " out",
    ),
    "section for a value": (
        ["--sync.outer", "nesterov"],
        "sync.outer holds keys of its own: give these, such as sync.outer.name",
    ),
    "older name": (
        ["--control.least_accumulation", "2"],
        "there is no option --control.least_accumulation: it is called --control.min_accumulation",
    ),
    "huge number": (["--run.samples", "1e400"], "run.samples is inf: it must be a whole number or null"),
    "unknown key": (
        ["--sync.quorun", "0"],
        "there is no option --sync.quorun (did you mean --sync.quorum?); see --help",
    ),
    "unknown section": (
        ["--sink.quorum=0"],
        "there is no option --sink.quorum (did you mean --sync.quorum?); see --help",
    ),
    "text for a number": (
        ["--sync.delay_bound", "soon"],
        "sync.delay_bound is soon: it must be a whole number or auto or null",
    ),
    "fraction": (["--sync.accumulation", "1.5"], "sync.accumulation is 1.5: it must be a whole number or auto"),
    "no such choice": (["--sync.wire", "float16"], "sync.wire is float16: it must be auto, float32, bfloat16, int8, "),
    "nested choice": (["--sync.outer.name", "sgd"], "sync.outer.name is sgd: it must be identity or nesterov"),
    "no truth value": (["--sync.rebalance", "3"], "sync.rebalance is 3: it must be true or false"),
    "no mapping": (["--data.options", "5"], "data.options is 5: it must be a mapping of text to values"),
    "text in pins": (["--sync.pins", "{a: 1}"], "sync.pins must be a mapping of a whole number to a whole number"),
    "no value": (["--run.samples"], "--run.samples needs a value: a whole number or null"),
    "two recipes": (["{digits}", "more.yaml"], "more.yaml is one word too many: give one recipe, and settings as"),
    "quorum 0": (["--sync.quorum", "0"], "sync.quorum is 0.0: it is a fraction of the samples, above 0 and at most 1"),
    "quorum 2": (["--sync.quorum", "2"], "sync.quorum is 2.0"),
    "grace -1": (["--sync.grace", "-1"], "sync.grace is -1: it must be at least 0"),
    "grace without room": (["--sync.grace", "2"], "sync.grace is 2, but sync.delay_bound 4 has room for 1 at most"),
    "negative bound": (["--sync.delay_bound=-1"], "sync.delay_bound is -1: it must be at least 0"),
    "K 0": (["--sync.accumulation", "0"], "sync.accumulation is 0: it must be at least 1"),
    "no batch": (["--data.batch_size", "0"], "data.batch_size is 0: it must be at least 1"),
    "no samples": (["--run.samples", "0"], "run.samples is 0: it must be at least 1"),
    "endless": (["--run.epochs", "inf"], "run.epochs is inf: it must be a number"),
    "negative pin": (["--sync.pins", "{0: -3}"], "sync.pins is {0: -3}: it maps ranks to samples, both 0 or more"),
    "first without pin": (["--sync.shares", "first"], "sync.shares is first, so sync.pins must name rank 0's samples"),
    "digits without end": (["--run.samples", "7" * 5000], "(5,000 characters): it must be a whole number or null, of"),
    "large number": (["--optimizer.learning_rate", "7" * 400], "(400 characters): it must be a number, of at most 40"),
    "samples of centuries": (
        ["--run.samples", "7" * 20],
        "run.samples is 77777777777777777777: it must be at most 9,223",
    ),
    "seed": (["--run.seed", "7" * 30], "it must be at most 9,223,372,036,854,775,807"),
    "processes": (["--data.workers", "1e6"], "data.workers is 1000000: it must be at most 1,000"),
    "slow cluster": (["--emulation.samples_per_second", "1e-300"], "samples_per_second is 1e-300: it must be at least"),
    "name with a path": (["--run.name", "../x"], "run.name is ../x: give 1 to 100 characters without a slash"),
    "long name": (["--run.name", "x" * 5000], "(5,000 characters): give 1 to 100 characters"),
    "missing recipe": (["nowhere.yaml"], "recipe nowhere.yaml does not exist: give a path to a YAML file"),
    "resume nothing": (
        ["--resume", "nowhere"],
        "--resume nowhere: there is no recipe.yaml in it; give the folder of a run",
    ),
    "resume no run": (["--resume", "{folder}"], "there is no recipe.yaml in it; give the folder of a run"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_mistakes_on_the_command_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = ARGUMENTS[name]
    (tmp_path / "digits.yaml").write_text("run:\n  name: x\n")
    places = {"{digits}": str(tmp_path / "digits.yaml"), "{folder}": str(tmp_path)}
    assert sentence in complaint([places.get(word, word) for word in words], capsys)


RECIPES = {
    "unknown key": ("sync:\n  quorun: 1\n", "there is no key sync.quorun (did you mean quorum?); remove it"),
    "unknown section": ("sink:\n  quorum: 1\n", "there is no key sink"),
    "wrong type": (
        "sync:\n  delay_bound: soon\n",
        "sync.delay_bound is soon: it must be a whole number or auto or null",
    ),
    "bad value": ("sync:\n  quorum: 0\n", "sync.quorum is 0.0"),
    "null": (
        "sync:\n  accumulation: null\n",
        "sync.accumulation is null: it must be a whole number or auto; leave it out",
    ),
    "null for pins": ("sync:\n  pins: null\n", "sync.pins is null: it must be a mapping"),
    "value for a section": ("sync: 3\n", "sync holds 3 instead of keys with values"),
    "broken YAML": ("sync: [1\nrun: }\n", "my.yaml: line 2: expected"),
    "tab": ("sync:\n\tquorum: 1\n", "my.yaml: line 2: found character"),
    "text": ("just words\n", "it holds 'just words' instead of keys with values"),
    "list": ("- 1\n", "it holds [1] instead of keys with values"),
    "empty": ("", "it holds None instead of keys with values"),
    "not text": (bytes(range(128, 200)), "cannot read recipe"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_mistakes_in_a_recipe(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, sentence = RECIPES[name]
    recipe = tmp_path / "my.yaml"
    recipe.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = complaint([str(recipe)], capsys)
    assert sentence in said
    assert "my.yaml" in said or "sync." in said


def test_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-3 for text."""
    recipe = tmp_path / "my.yaml"
    recipe.write_text("optimizer:\n  learning_rate: 1e-3\ndata: {batch_size: 1e2}\nrun: {checkpoint_every: 1.5e3}\n")
    words = ["--optimizer.weight_decay", "1e-4", "--run.samples", "1e4", "--run.evaluate_every=2e3"]
    config, *_ = cli.parse([str(recipe), *words])
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-3, 1e-4)
    assert (config.data.batch_size, config.run.checkpoint_every) == (100, 1500)
    assert (config.run.samples, config.run.evaluate_every) == (10_000, 2000)


# Seen later: processes of their own, alone and under mpirun.

USER_CODE = """
import os, torch
from torch.utils.data import Dataset, TensorDataset
from hetsync.data import Data

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))

class Breaks(torch.nn.Linear):
    def __init__(self, rank):
        super().__init__(64, 10)
        self.rank = rank

    def forward(self, images):
        if RANK == self.rank and self.training:
            raise ZeroDivisionError("a mistake of the user's")
        return super().forward(images.flatten(1))

def no_module():
    return 3

def anything(**options):
    return 3

def unreadable(path):
    open(path)

class Torn(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index > 50:
            raise OSError(5, "Input/output error", "images/51.png")
        return torch.zeros(1, 8, 8), 0

def torn():
    return Data(Torn(), Torn())

def empty():
    nothing = TensorDataset(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))
    return Data(nothing, nothing)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USER_CODE)
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if the program had been started in the folder, in this process."""
    handler = signal.getsignal(signal.SIGUSR1)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(LocalPlane, "abort", lambda plane, code: sys.exit(code))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield folder
    sys.modules.pop("mine", None)
    signal.signal(signal.SIGUSR1, handler)


ALONE = {
    "model": (["--model.name", "vgg"], "model.name is vgg: use one of .*digits_cnn.*, or package.module:name"),
    "data": (["--data.name", "mnis"], "data.name is mnis: use one of .*digits.*, or package.module:name"),
    "optimizer": (["--optimizer.name", "sgdd"], "optimizer.name is sgdd: use one of sgd, adam, adamw, or package"),
    "no such class": (
        ["--model.name", "mine:Nothing"],
        "model.name is mine:Nothing.*no attribute 'Nothing'.*: give pa",
    ),
    "no such module": (["--data.name", "nowhere:data"], "data.name is nowhere:data.*No module named 'nowhere'.*: give"),
    "no module of torch": (["--model.name", "mine:no_module"], "mine:no_module, which returned int: return a torch.nn"),
    "no data": (["--data.name", "mine:no_module"], "mine:no_module, which returned int: return a hetsync.data.Data"),
    "no optimizer": (["--optimizer.name", "mine:anything"], "optimizer.name is mine:anything, which returned int"),
    "empty data": (["--data.name", "mine:empty"], "data.name is mine:empty, whose training set is empty"),
    "model option": (["--model.options.channel", "3"], r"model.options is \{'channel': 3\}: got an unexpected keyword"),
    "data option": (["--data.options.seed", "3"], r"data.options is \{'seed': 3\}: got an unexpected keyword"),
    "optimizer option": (["--optimizer.options.beta", "3"], "optimizer.options is .*'beta': 3.*: got an unexpected"),
    "closure": (
        ["--optimizer.name", "torch.optim:LBFGS"],
        "torch.optim:LBFGS, whose step needs a closure.*: take one without, such as SGD",
    ),
    "no such decay": (
        ["--optimizer.name", "torch.optim:LBFGS", "--optimizer.weight_decay", "0.1"],
        r"optimizer.options is \{\}: got an unexpected keyword argument 'weight_decay'; see the arguments of torch",
    ),
    "option's type": (
        ["--model.options.channels", "many"],
        "model.options.channels is many: .*DigitsCNN takes a whole number",
    ),
    "fraction of an option": (
        ["--data.options.split_seed", "1.5"],
        "data.options.split_seed is 1.5: .*takes a whole number",
    ),
    "torch's option": (
        ["--optimizer.options", "{nesterov: 3}"],
        "optimizer.options.nesterov is 3: .*SGD takes true or false",
    ),
    "torch's own check": (
        ["--optimizer.momentum", "0", "--optimizer.options", "{nesterov: true}"],
        "optimizer.options is {'nesterov': True}, which .*SGD does not take: Nesterov momentum requires",
    ),
    "negative option": (["--model.options.channels", "-3"], r"options is \{'channels': -3\}, which .* does not take"),
    "no function": (["--model.name", "mine:RANK"], "model.name is mine:RANK, which is a int: name a function or class"),
    "a shell": (
        ["--model.name", "os:system", "--model.options.command", "touch acted"],
        "model.name is os:system, which is of Python's standard library .*: name a function or class of your own",
    ),
    "endless batch": (["--data.batch_size", "1e9"], "batch_size is 1000000000, but the training set has 1438 samples"),
    "pin of no rank": (["--sync.pins", "{5: 3}"], "sync.pins names rank 5, but the last is 0: remove it"),
    "pin over the batch": (["--sync.pins", "{0: 100}"], "sync.pins gives rank 0 100 samples: give it 0 to 64"),
    "profile": (
        ["--emulate", "nope"],
        "there is no cluster profile nope: give the path of a .yaml file, or .*quickstart",
    ),
    "broken profile": (
        ["--emulate", "bad.yaml"],
        "cluster profile bad.yaml: devices.*count is 0: it must be at least 1",
    ),
    "device": (["--run.device", "tpu"], "run.device is tpu: use auto, cpu, cuda, cuda:INDEX or mps"),
    "NaN": (
        ["--optimizer.learning_rate", "1e9"],
        "(loss|gradient) became (nan|-?inf) on rank 0.*: lower optimizer.learning_rate",
    ),
    "unreadable data": (
        ["--data.name", "mine:unreadable", "--data.options.path", "gone.csv"],
        "unreadable.*gone.csv.*op",
    ),
    "unreadable sample": (["--data.name", "mine:torn"], "the data cannot be read: .*images/51.png.*data.options"),
    "read-only folder": (
        ["--run.dir", "/proc"],
        "cannot write /proc/job.lock: .*; free space or choose another run folder",
    ),
    "folder of nobody": (["--run.dir", "/proc/nowhere"], "run folder /proc/nowhere cannot be made: .*; choose another"),
    "folder is a file": (["--run.dir", "mine.py"], "run folder mine.py cannot be made: .*; choose another"),
    "folder with a run": (
        ["--run.dir", "old"],
        "run folder old holds a run already: choose another, or .* --resume old",
    ),
    "no checkpoint": (["--resume", "begun"], "begun: there is no complete checkpoint in .*; start afresh"),
    "no policy": (
        ["--control.name", "ppo", "--control.policy", "gone"],
        "control.policy gone does not exist: make one",
    ),
}


def checkpoint(run_folder: Path) -> None:
    """What tells of a complete one."""
    state = run_folder / "checkpoints" / "samples-000000000128" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")


@pytest.mark.parametrize("name", ALONE)
def test_mistakes_that_show_later(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = ALONE[name]
    (here / "bad.yaml").write_text("name: bad\nsource: none\ndevices: [{name: a, count: 0}]\n")
    checkpoint(here / "old")
    for run_folder in ("old", "begun"):
        (here / run_folder).mkdir(exist_ok=True)
        (here / run_folder / "recipe.yaml").write_text("run:\n  samples: 256\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--run.samples", "2000", "--run.dir", "run", "--run.profile_seconds", "0.05", *words])
    captured = capsys.readouterr()
    assert_one_sentence(Done(int(ended.value.code or 0), captured.out, captured.err), sentence)


def test_a_folder_with_a_run_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(here / "old")
    with pytest.raises(SystemExit):
        cli.main(["--run.dir", "old"])
    assert [path.name for path in (here / "old").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("words", [["--model.name", "vgg"], ["--data.options.seed", "3"], ["--emulate", "nope"]])
def test_a_start_that_fails_leaves_no_folder(words: list[str], here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("the user's")
    for folder, left in (("run", None), ("mine", "notes.txt")):
        with pytest.raises(SystemExit):
            cli.main(["--run.dir", folder, *words])
        assert (here / folder).exists() == bool(left)
    assert (here / "mine" / "notes.txt").read_text() == "the user's"


# As a user starts it: the same sentences, once for all ranks, and nobody left behind.

TOGETHER = {
    "unknown key": (["--sync.quorun", "0"], 2, "there is no option --sync.quorun"),
    "no checkpoint": (["--resume", "old"], 2, "old: there is no complete checkpoint"),
    "model": (["--model.name", "vgg"], 2, "model.name is vgg"),
    "batch": (
        ["--data.batch_size", "1"],
        2,
        "batch_size 1 is smaller than the 2 ranks: raise it to at least 2, or",
    ),
    "profile": (["--emulate", "one.yaml"], 2, "profile one has 1 devices, none for rank 1: start at most 1 ranks"),
    "unreadable sample": (["--data.name", "mine:torn"], 2, "the data cannot be read: .*images/51.png"),
    "unknown key, alone": (["--sync.quorun", "0"], None, "there is no option --sync.quorun"),
}


ALIKE = "model", "batch", "unreadable sample"  # to others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in ALIKE)) for name in TOGETHER]
)
def test_a_mistake_is_said_once(name: str, folder: Path) -> None:
    words, ranks, sentence = TOGETHER[name]
    (folder / "one.yaml").write_text("name: one\nsource: none\ndevices: [{name: a}]\n")
    (folder / "old").mkdir()
    (folder / "old" / "recipe.yaml").write_text("run:\n  samples: 256\n")
    assert_one_sentence(run(*SMALL, *words, folder=folder, ranks=ranks), sentence)
    assert name != "model" or not (folder / "run").exists()


@pytest.mark.thorough
def test_mpi_that_a_script_has_started_without_threads(folder: Path) -> None:
    """Where HetSync starts MPI it asks for them itself."""
    program = [sys.executable, "-c", "from mpi4py import MPI\nimport hetsync\nhetsync.join()"]
    with started([*mpirun(2), *program], folder, {"MPI4PY_RC_THREAD_LEVEL": "single"}) as process:
        assert_one_sentence(finished(process), "MPI_THREAD_MULTIPLE")


def test_an_error_in_the_users_code_on_one_rank_ends_the_job_and_names_it(folder: Path) -> None:
    (folder / "two.yaml").write_text("name: two\nsource: none\ndevices: [{name: a}, {name: b}]\n")
    words = ["--model.name", "mine:Breaks", "--model.options.rank", 1, "--sync.delay_bound", 0]
    speed = ["--emulate", "two.yaml", "--emulation.samples_per_second", 1000]
    done = run(*SMALL, *words, *speed, folder=folder, ranks=2)
    assert done.status not in (0, 85), done.story
    assert done.err.count("Traceback (most recent call last)") == 1, done.story
    assert "ZeroDivisionError: a mistake of the user's" in done.err
    assert done.sentences == ["hetsync: rank 1: failed, so the job ends"], done.story
