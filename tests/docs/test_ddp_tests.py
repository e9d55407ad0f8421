"""The page on DDP's tests has a row for each of those that the installed torch carries, and names tests of ours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import torch
from pages import ROOT

PAGE = (ROOT / "docs" / "results" / "ddp-tests.md").read_text(encoding="utf-8")
SECTIONS = ["The same property", "Refused here, too, or instead", "DDP's own machinery"]
MARKS = re.compile(r"`(test_\w+\*?)`")
OURS = re.compile(r"`(tests/\S+)::(test_\w+)`(?: \(([^)]+)\))?")


@cache
def of_wheel() -> list[str]:
    """Tests that make a DistributedDataParallel, themselves or by a helper; read, and not run."""
    path = Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
    source = path.read_text(encoding="utf-8")
    bases = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    body = next(base.body for base in bases if base.name == "_DistTestBase")
    lines, methods = source.splitlines(), [each for each in body if isinstance(each, ast.FunctionDef)]
    text = {each.name: "\n".join(lines[each.lineno - 1 : each.end_lineno]) for each in methods}

    def reached(name: str, seen: set[str]) -> bool:
        seen.add(name)
        called = (each for each in re.findall(r"self\.(\w+)\(", text[name]) if each in text and each not in seen)
        return "DistributedDataParallel" in text[name] or any(reached(each, seen) for each in called)

    return [name for name in text if name.startswith("test_") and reached(name, set())]


def rows() -> Iterator[tuple[str, list[str], str]]:
    """Of each its section, the names or patterns of DDP's tests, and the whole line."""
    for section in SECTIONS:
        text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
        for line in text.splitlines():
            if line.startswith("| `"):
                yield section, MARKS.findall(line.split("|")[1]), line


def found_by(pattern: str) -> list[str]:
    return [name for name in of_wheel() if fnmatch(name, pattern)]


def test_each_test_of_the_wheel_has_one_row() -> None:
    listed = [name for _, patterns, _ in rows() for pattern in patterns for name in found_by(pattern)]
    assert sorted(listed) == sorted(of_wheel())
    assert all(found_by(pattern) for _, patterns, _ in rows() for pattern in patterns)


def test_the_counts_are_those_of_the_rows() -> None:
    counts = dict.fromkeys(SECTIONS, 0)
    for section, patterns, _ in rows():
        counts[section] += sum(len(found_by(pattern)) for pattern in patterns)
    text = " ".join(PAGE.split())
    same, refused, machinery = counts.values()
    assert f"Of the {sum(counts.values())} tests the property is checked here for {same}," in text
    assert f"What {refused} do is refused with one sentence. {machinery} are of DDP's own machinery" in text


def test_ours_are_there() -> None:
    for section, _, line in rows():
        named = OURS.findall(line)
        assert bool(named) == (section != SECTIONS[2]), line
        for path, test, cases in named:
            source = (ROOT / path).read_text(encoding="utf-8")
            assert f"def {test}(" in source, test
            for case in filter(None, cases.split("; ")):
                assert f'"{case}": ' in source or all(f'"{each}": ' in source for each in case.split(", ")), case
