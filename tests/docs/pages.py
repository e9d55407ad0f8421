"""The documents as tests see them: fenced blocks with their language, title, and the comment above."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md", *sorted(set((ROOT / "docs").rglob("*.md")) - set(GUIDE))]

BLOCK = re.compile(
    r'(?:<!-- (?P<note>(?:not run|run with): [^\n]*) -->\n\n)?^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """`title` is the name of the file that the reader makes of it. A `bash` block is run as it stands, with the words
    of `run with` at the end of each command, which make it small; or, where `not_run` says why, only checked."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    run_with: str = ""
    not_run: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """One a line, however many lines it takes in the text."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]

    @property
    def script(self) -> str:
        return "\n".join(f"{command} {self.run_with}" for command in self.commands)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, found) for found in BLOCK.finditer(text)]


def _block(page: Path, text: str, found: re.Match[str]) -> Block:
    kind, _, words = (found["note"] or "").partition(": ")
    line = text.count("\n", 0, found.start("language")) + 1
    notes = {kind.replace(" ", "_"): words} if kind else {}
    return Block(page, line, found["language"], found["title"], found["text"], **notes)


def is_run(block: Block) -> bool:
    return block.language == "bash" and block.page in GUIDE and not block.not_run


def furnish(folder: Path, made: list[Block]) -> None:
    """What a reader's folder holds: a clone's folders, and the files of the titled blocks."""
    for name in ("models", "docs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "launch").mkdir()
    for script in ("local", "quickstart"):  # no links: they install the repository that they find themselves in
        stub = folder / "launch" / script
        stub.write_text(f'#!/bin/sh\nexec "{ROOT / "launch" / script}" "$@"\n')
        stub.chmod(0o755)
    for block in made:
        if block.title is not None:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def words_of(command: str) -> list[str]:
    """The command's words, without what sets the environment, and without comments."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def links(page: Path) -> Iterator[str]:
    """Relative targets of the page's links and pictures."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"https?:|#", target):
            yield target.partition("#")[0]
