"""Every command of README and guide is run as the reader types it. What cannot run here, or takes too long, has its
options, keys, extras and files checked."""

from __future__ import annotations

import configparser
import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest
from jobs import environment, finished, program, started
from pages import GUIDE, PAGES, ROOT, Block, blocks, furnish, is_run, words_of

from hetsync.cli import main as cli_main
from hetsync.cli import train as cli_train

SECONDS = 150.0  # of a block
# Not ours to check.
OTHERS = {".", ".ci/run", "docker", "git", "launch/test", "mkdocs", "mlflow", "pytest", "tensorboard", "wandb"}
UNKNOWN = "--no-such-option"

RUN = [page for page in GUIDE if any(map(is_run, blocks(page)))]
CHECKED = [b for page in PAGES for b in blocks(page) if b.language == "bash" and not is_run(b)]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    made = blocks(page)
    furnish(tmp_path, made)
    path = f"{Path(program('hetsync-train')).parent}:{environment()['PATH']}"
    for block in filter(is_run, made):
        with started(["bash", "-euo", "pipefail", "-c", block.script], tmp_path, {"PATH": path}) as process:
            done = finished(process, SECONDS)
        assert done.status == 0, f"{block.name}\n{done.story}"


def test_the_answer_whether_a_card_pays_is_the_one_of_the_page(tmp_path: Path) -> None:
    made = blocks(ROOT / "docs" / "guide" / "cluster.md")
    furnish(tmp_path, made)
    (asked,) = [block for block in made if "old-card.yaml" in block.text and block.language == "bash"]
    (shown,) = [block for block in made if block.language == "text"]
    with started(words_of(asked.text), tmp_path, {"COLUMNS": "100"}) as process:
        done = finished(process, SECONDS)
    assert done.out.endswith(shown.text), done.story


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    furnish(made, [block for page in PAGES for block in blocks(page)])
    return made


@pytest.mark.parametrize("block", CHECKED, ids=lambda block: block.name)
def test_the_options_of_what_is_not_run(block: Block, folder: Path) -> None:
    for command in block.commands:
        if (mistake := mistake_in(words_of(command), folder)) is not None:
            pytest.fail(f"{block.name}: {command}\n{mistake}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_options_of_benchmarks_in_sentences(page: Path, folder: Path) -> None:
    for command in re.findall(r"`(python\s+(?:-m )?benchmarks[^`]*)`", page.read_text(encoding="utf-8")):
        assert mistake_in(words_of(" ".join(command.split())), folder) is None, command


@pytest.mark.parametrize(
    "command",
    [
        "hetsync-train --sync.delay_bounds 3",
        "hetsync-train missing.yaml",
        "launch/local 2 --sync.quorum many",
        "launch/local --tolerate 2 --sync.quorum many",
        "launch/local --replace 2 --fault.replace perhaps",
        "launch/local 2 -- hetsync simulate --emulat quickstart",
        "launch/mps 100,half --sync.quorum 1",
        "launch/horovod 0.28.1",
        "launch/mps 100,50 --sync.quorum many",
        "mpirun -n 12 hetsync-train --no.such.key 3",
        "sbatch --ntasks=12 launch/slurm.sbatch --run.checkpoint 3",
        "hetsync launch slurm --nodes 2,gpu=3 -- hetsync-train digits",
        "hetsync launch slurm --nodes 2 -- hetsync-train digits --run.checkpoint 3",
        "hetsync data check cifar10 somewhere --fast",
        "hetsync data chekc cifar10 somewhere",
        "python benchmarks/efficiency.py",
        "python -m benchmarks.efficiency --no-such-thing",
        "python -m benchmarks.slices --repetitions 3",
        "python -m benchmarks.missing",
        "pip install -e '.[mpi,missing]'",
        "some-program",
    ],
)
def test_a_mistake_is_found(command: str, folder: Path) -> None:
    assert mistake_in(words_of(command), folder) is not None


def mistake_in(words: list[str], folder: Path) -> str | None:
    """What is wrong with a command, if anything is."""
    match words:
        case [name, *_] if name in OTHERS:
            return None
        case ["launch/local", "--tolerate" | "--replace", *rest]:
            return mistake_in(["launch/local", *rest], folder)
        case ["launch/local", _, "--", *program_words]:
            return mistake_in(program_words, folder)
        case ["launch/mps", parts, *rest] if all(part.isdigit() for part in parts.split(",")):
            return mistake_in(["launch/local", str(parts.count(",") + 1), *rest], folder)
        case ["launch/local", _, *arguments] | ["launch/quickstart", *arguments]:
            return _parsed(["hetsync-train", *arguments], folder)
        case ["launch/horovod"]:
            return None
        case ["sbatch", *rest] if "launch/slurm.sbatch" in rest:
            told = rest[rest.index("launch/slurm.sbatch") + 1 :]
            return None if told[:1] == ["--"] else _parsed(["hetsync-train", *told], folder)
        case ["hetsync", "launch", "slurm", *rest]:
            status, said = _said(["hetsync", "launch", "slurm", "--dry-run", *rest], folder)
            return said if status else None
        case ["mpirun", *rest]:
            starts = [index for index, word in enumerate(rest) if word in ("hetsync-train", "hetsync", "python")]
            return mistake_in(rest[starts[0] :], folder) if starts else f"{words} starts no program of ours"
        case ["hetsync-train", *_] | ["hetsync", "train" | "simulate" | "profile", *_]:
            return _parsed(words, folder)
        case ["hetsync", "--version"]:
            return None
        case ["hetsync", *_]:
            return _known(words, folder)
        case ["python", "-m", "pytest", *_]:
            return None
        case ["python", *rest]:
            return _script(rest, folder)
        case ["pip", "install", *rest]:
            return _extras(rest)
    return f"{words[0]} is no program that these pages are known to use"


def _said(words: list[str], folder: Path) -> tuple[int, str]:
    """In this process: to read options takes a tenth of what a process takes to start."""
    main = {"hetsync": cli_main.main, "hetsync-train": cli_train.main}[words[0]]
    told, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            main(words[1:])
    except SystemExit as ended:
        return int(ended.code or 0), told.getvalue().strip()
    finally:
        os.chdir(before)
    return 0, told.getvalue().strip()


def _parsed(words: list[str], folder: Path) -> str | None:
    """Keys, values and files of a command that takes a recipe: it prints the effective one."""
    status, said = _said([*words, "--print_config"], folder)
    return said if status else None


def _known(words: list[str], folder: Path) -> str | None:
    """Verbs without a recipe do at once what they are asked for, unless there is one option that they do not know."""
    _, said = _said([*words, UNKNOWN], folder)
    return None if re.search(rf"(unrecognized arguments:|there is no option) {UNKNOWN}(;|$)", said) else said


def _with_what_it_imports(script: Path, folder: Path) -> str:
    """The source of a benchmark, and of the benchmarks whose functions it takes: one's parser may be another's."""
    source = script.read_text(encoding="utf-8")
    names = re.findall(r"^from (benchmarks[\w.]*) import", source, re.MULTILINE)
    modules = [folder / (name.replace(".", "/") + ".py") for name in names]
    return "\n".join([source, *(module.read_text(encoding="utf-8") for module in modules if module.is_file())])


def _script(words: list[str], folder: Path) -> str | None:
    """A script is there, and its options are named in its source: starting it would load torch."""
    is_module = words[0] == "-m"
    name = words[1] if is_module else words[0]
    script = folder / (name.replace(".", "/") + ".py" if is_module else name)
    if is_module and not script.is_file():
        script = script.with_suffix("") / "__main__.py"
    if not script.is_file():
        return f"{name} is not there"
    if "benchmarks" not in script.relative_to(folder).parts:
        return None
    if not is_module:
        return f"{name} finds its package by python -m only"
    options = re.findall(r'add_argument\(\s*f?"(--[^" ]+)"', _with_what_it_imports(script, folder))
    known = [re.sub(r"\\{.*?\\}", ".+", re.escape(option)) for option in options]
    unknown = [word for word in words if word.startswith("--") and not any(re.fullmatch(k, word) for k in known)]
    return f"{unknown} are no options of {name}" if unknown else None


def _extras(words: list[str]) -> str | None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = [extra for word in words for extra in ",".join(re.findall(r"\[(.+)\]", word)).split(",") if extra]
    missing = set(named) - set(setup["options.extras_require"])
    return f"there are no extras {missing}" if missing else None


def test_python_is_the_one_that_has_hetsync() -> None:
    assert Path(program("hetsync-train")).parent == Path(sys.executable).parent
