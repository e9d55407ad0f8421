"""What a checker says about the files of a data set, record by record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Findings:
    """Counts of what is there, and what is wrong with it.

    Args:
        tell: Called with each problem as it is found: where (file and line or record), and what.
    """

    def __init__(self, tell: Callable[[str, str], None] = lambda where, what: None) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self._tell = tell

    def count(self, what: str, number: int = 1) -> None:
        """`number` more good ones, e.g. count("trips")."""
        self.counts[what] += number

    def problem(self, where: str, what: str, kind: str | None = None) -> None:
        """One bad record; `kind` groups those alike in the summary (default: `what`)."""
        self.problems[kind or what] += 1
        self._tell(where, what)
