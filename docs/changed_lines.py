"""Writes into docs/guide/own-loop.md how many lines of docs/examples/before.py each framework changes.

python docs/changed_lines.py
"""

from __future__ import annotations

import tokenize
from difflib import SequenceMatcher
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "guide" / "own-loop.md"
BEGIN, END = "<!-- made by docs/changed_lines.py -->", "<!-- end -->"

# What each script does as it stands: checkpoint and resume, signals, telemetry, uneven devices.
SCRIPTS = {
    "HetSync": ("after.py", "yes, on any number of ranks", "save and stop", "JSON lines, summary", "shares by speed"),
    "Accelerate": ("with_accelerate.py", "no", "no", "no", "equal shares"),
    "DDP": ("ddp.py", "no", "no", "no", "equal shares"),
    "Lightning": ("with_lightning.py", "checkpoint; to resume, name it to `fit`", "no", "CSV", "equal shares"),
}
UNSEEN = (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
HEAD = ("", "written", "gone", "checkpoint, resume", "signals", "telemetry", "uneven devices")


def lines(script: Path) -> list[str]:
    """As Python reads them: a statement that brackets spread over several is one, and indentation does not count. A
    docstring at the head is left out: it says what the script is."""
    found = [""]
    with script.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.NEWLINE:
                found.append("")
            elif token.type not in UNSEEN:
                found[-1] += f" {token.string}"
    return found[found[0].startswith(' """') : -1]


def changed(before: Path, after: Path) -> tuple[int, int]:
    """Lines that are new or different in a script, and those that are gone without one in their place."""
    written = gone = 0
    matcher = SequenceMatcher(None, lines(before), lines(after), autojunk=False)
    for kind, begin, end, new_begin, new_end in matcher.get_opcodes():
        if kind != "equal":
            written += new_end - new_begin
            gone += max(0, end - begin - (new_end - new_begin))
    return written, gone


def table() -> str:
    rows: list[tuple[str, ...]] = [HEAD, ("---",) * len(HEAD)]
    for name, (script, *features) in SCRIPTS.items():
        counts = changed(HERE / "examples" / "before.py", HERE / "examples" / script)
        rows.append((f"{name}, [{script}](../examples/{script})", *map(str, counts), *features))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str) -> str:
    """The page, with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())
