"""What the documents say of the code is so: keys, messages, places; and they hold together."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from pages import PAGES, ROOT, blocks, links

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.sync.messages import Settings
from hetsync.train.summary import JobFigures, PlanFigures, PlannedRank, RankFigures, RunFigures, summarise

DOCS = ROOT / "docs"
LONGEST_README = 100
LANGUAGES = {"bash", "yaml", "python", "text"}


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_keys_of_recipes_are_up_to_date() -> None:
    reference = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert "`sync.delay_bound`" in reference
    assert tool("generate").with_keys(reference) == reference, "run python docs/generate.py"


def test_the_picture_is_up_to_date() -> None:
    assert (DOCS / "picture.svg").read_text(encoding="utf-8") == tool("picture").picture(), "run python docs/picture.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_and_links(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks(page)), "a block is not seen by the tests"
    for target in links(page):
        assert (page.parent / target).exists(), target


def test_the_table_of_changed_lines_is_up_to_date() -> None:
    page = (DOCS / "guide" / "own-loop.md").read_text(encoding="utf-8")
    assert "| HetSync, [after.py]" in page
    assert tool("changed_lines").with_table(page) == page, "run python docs/changed_lines.py"


def test_our_loop_changes_fewest_lines() -> None:
    """README and guide say nine."""
    changed, examples = tool("changed_lines").changed, DOCS / "examples"
    assert changed(examples / "before.py", examples / "after.py")[0] == 9
    others = ("ddp.py", "with_accelerate.py", "with_lightning.py")
    assert all(changed(examples / "before.py", examples / script)[0] > 9 for script in others)


def test_the_loop_of_the_guide_is_that_of_the_example() -> None:
    (shown,) = [block for block in blocks(DOCS / "guide" / "own-loop.md") if "test_loader = job.prepare" in block.text]
    assert shown.text.strip() in (DOCS / "examples" / "after.py").read_text(encoding="utf-8")


def test_the_architecture_names_all_who_write_telemetry() -> None:
    package = ROOT / "hetsync"
    writers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r'record\(\s*(?:\w+,\s*)?"', path.read_text(encoding="utf-8"))
    }
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    told = page.partition("**Who writes telemetry?**")[2].partition("**Who makes")[0]
    assert set(re.findall(r"`(\w+/\w+\.py)", told)) == writers


def test_packages_that_are_said_to_have_a_readme_have_one() -> None:
    package = ROOT / "hetsync"
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    told = page.rpartition("READMEs of their own")[0].rpartition("\n\n")[2]
    assert set(re.findall(r"`(\w+)/`", told)) == {path.parent.name for path in package.glob("*/README.md")}


def modules_with_a_readme() -> list[Path]:
    package = ROOT / "hetsync"
    return sorted(path for readme in package.rglob("README.md") for path in readme.parent.glob("[!_]*.py"))


@pytest.mark.parametrize("module", modules_with_a_readme(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_readme_tells_of_every_module_of_its_package(module: Path) -> None:
    assert f"`{module.name}`" in (module.parent / "README.md").read_text(encoding="utf-8")


@cache
def sentences() -> list[str]:
    """All strings of the package, with … for what is filled in."""
    found = []
    for path in (ROOT / "hetsync").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def messages() -> list[str]:
    page = (DOCS / "guide" / "troubleshooting.md").read_text(encoding="utf-8").partition("## No message")[0]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_of_the_code(message: str) -> None:
    """In the page's order, each part between two … in one sentence."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    assert any(re.search(".*".join(parts), sentence, re.DOTALL) for sentence in sentences()), message


@cache
def modules() -> dict[str, str]:
    """By dotted name: the text, as models and profiles are installed."""
    found = {}
    for folder in ("hetsync", "models", "cluster_profiles"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if folder == "hetsync" else ("hetsync", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize("folder", ["hetsync", "models", "benchmarks"])
def test_modules_that_code_names_are_there(folder: str) -> None:
    """`hetsync.package.module` and what it has, in comments and docstrings as well."""
    for path in (ROOT / folder).rglob("*.py"):
        for name in re.findall(r"(?<![\w./])hetsync(?:\.[A-Za-z]\w*)+", path.read_text(encoding="utf-8")):
            module, _, last = name.rpartition(".")
            assert name in modules() or re.search(rf"\b{last}\b", modules().get(module, "")), f"{path}: {name}"


def hops() -> list[str]:
    """`file.py:function`, `file.py:Class.method` and files of the package that the architecture names."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"`((?:[\w.]+/)*\w+\.py(?::[\w.]+)?)`", page)))


@pytest.mark.parametrize("hop", hops())
def test_places_of_the_architecture_are_there(hop: str) -> None:
    name, _, place = hop.partition(":")
    path = next((root / name for root in (ROOT / "hetsync", ROOT) if (root / name).is_file()), None)
    assert path is not None, f"{name} is not there"
    scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in filter(None, place.split(".")):
        named = [node for node in scope if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        assert named, f"{path.name} has no {place}"
        scope = named[0].body


def explained(heading: str) -> list[str]:
    """The names that open the rows of a part of the reference."""
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    part = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in part.splitlines() if re.match(r"\| `(?!kind`)", line)]
    listed = [line.partition(", and:")[0] for line in part.splitlines() if line.startswith("`rank`")]
    return [name for cell in cells + listed for name in re.findall(r"`(\w+)`", cell)]


def test_the_keys_of_summaries_are_explained() -> None:
    device = RankProfile("device", "host", StepTime(0.0, 0.1), True)
    row = RankFigures(
        rank=0,
        profile=device,
        share=8,
        samples=80,
        solo_samples_per_second=10.0,
        train_seconds=8.0,
        compute_seconds=8.0,
        wait_seconds=0.0,
        slices=10,
        planned=PlannedRank(
            replica=0,
            stage=0,
            step_fraction=1.0,
            idle_fraction=0.0,
            activation_bytes_sent=0,
            memory_bytes=0,
            predicted_memory_bytes=0,
        ),
    )
    plan = PlanFigures(
        path="plan.yaml",
        sha256="",
        replicas=[[[0]]],
        predicted_step_seconds=1.0,
        measured_step_seconds=1.0,
        predicted_samples_per_second=8.0,
        bytes_per_sample=0.0,
        communication_fraction=0.0,
    )
    job = JobFigures(
        status="finished",
        ranks=1,
        ranks_at_start=1,
        plane="sums by MPI, messages by MPI (given)",
        emulated=True,
        emulate=None,
        samples_applied=80,
        samples_expected=80,
        shares=[8],
        seed=0,
    )
    summary = summarise(
        RunFigures(
            job=job,
            per_rank=[row],
            rounds=10,
            staleness={0: 10},
            settings=Settings(),
            metrics={},
            anchor_sha256=None,
            wall_seconds=9.0,
            control={},
            landscape={},
            plan=plan,
            simulated=True,
        )
    )
    known = {*summary, *row.row(), *asdict(plan), "left_at_round"}  # the last of a rank that has died
    assert set(explained("summary.json")) == known


def test_the_kinds_of_telemetry_are_explained() -> None:
    kinds = {
        argument.value
        for path in (ROOT / "hetsync").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("record", "_line")
        for argument in node.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    assert kinds == set(explained("Telemetry"))


def commits_named(page: Path) -> list[str]:
    """What stands in a table's row of commits or under a key of that name, and elsewhere what looks like one."""
    text = page.read_text(encoding="utf-8")
    rows = "\n".join(re.findall(r'^\| commit \|.*|"commit": ?"\w+"', text, re.MULTILINE))
    alike = re.findall(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40}\b", text) if page.suffix == ".md" else []
    return [*re.findall(r"\b[0-9a-f]{7,40}\b", rows), *alike]


def history() -> str:
    """Its commits, a line each; none where this is a source archive or a shallow clone."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if not (ROOT / ".git").exists() or shallow.stdout.strip() != "false":
        return ""
    return subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True).stdout


def test_every_commit_that_is_named_is_in_the_history() -> None:
    pages = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "benchmarks" / "published").iterdir()]
    named = {(page.name, commit) for page in pages for commit in commits_named(page)}
    assert len(named) > 40
    if not (commits := history()):
        pytest.skip("no history here")
    assert not [(page, commit) for page, commit in sorted(named) if f"\n{commit}" not in f"\n{commits}"]
