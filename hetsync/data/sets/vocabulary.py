"""What data sets of sentences share: words and their numbers, text files line by line, perplexity."""

from __future__ import annotations

import codecs
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from hetsync.errors import UserError

UNKNOWN = "<unk>"
END = "<eos>"
PAD_ID, UNKNOWN_ID, BEGIN_ID, END_ID = range(4)
SPECIAL = ("<pad>", UNKNOWN, "<bos>", END)


class Vocabulary:
    """Words and their numbers, 0 to len - 1.

    Args:
        words: All words, each once; a word's place is its number.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(self._words)}

    @classmethod
    def most_frequent(
        cls, sentences: Iterable[Sequence[str]], size: int | None = None, special: Sequence[str] = ()
    ) -> Vocabulary:
        """`special` words, then those of the sentences, frequent ones first (ties by alphabet), `size` in all."""
        counts = Counter(word for sentence in sentences for word in sentence)
        found = sorted(counts.keys() - set(special), key=lambda word: (-counts[word], word))
        return cls([*special, *found][:size])

    def __len__(self) -> int:
        return len(self._words)

    def __contains__(self, word: str) -> bool:
        return word in self._numbers

    def encode(self, words: Iterable[str]) -> list[int]:
        """Numbers of the words, that of <unk> for those unknown; KeyError where there is no <unk> either."""
        numbers = self._numbers
        return [numbers[word] if word in numbers else numbers[UNKNOWN] for word in words]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Words of the numbers."""
        return [self._words[number] for number in numbers]


def read_lines(path: Path, wrong: Callable[[str, str], None]) -> Iterator[str | None]:
    """Lines of a UTF-8 file, unzipped where its name ends in .gz; None in the place of a bad line.

    Args:
        path: The file.
        wrong: Called with where and what for each line that is empty or not UTF-8, and for a file that cannot be
            read (which then has no lines).
    """
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        wrong(str(path), f"cannot be read ({error})")
        return
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n"), 1):
        try:
            text = line.decode().strip()
            fault = "is empty"
        except UnicodeDecodeError:
            text, fault = "", "is not UTF-8"
        if not text:
            wrong(f"{path}:{number}", fault)
        yield text or None


def refuse(name: str, folder: Path) -> Callable[[str, str], NoReturn]:
    """What a loader does about a bad record: the first one ends it."""

    def raise_error(where: str, what: str) -> NoReturn:
        raise UserError(f"data.name is {name}, but {where} {what}: see `hetsync data check {name} {folder}`")

    return raise_error


def perplexity(nll: float, tokens: float) -> float:
    """exp(nll / tokens); infinite for a model that has diverged."""
    mean = nll / max(1.0, tokens)
    return math.exp(mean) if mean < 700 else math.inf
