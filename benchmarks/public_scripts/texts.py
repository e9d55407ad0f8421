"""HetSync's own guide as a text to learn, in the files of scripts that know another one."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.local_job import ROOT
from hetsync.data.loader import EpochOrder

HELD_OUT = 0.1
LINES = 900


def guide() -> str:
    return "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "guide").glob("*.md")))


def as_nanogpt(folder: Path) -> None:
    """data/guide, by characters: train.bin, val.bin of uint16, and meta.pkl with how many characters there are."""
    text = guide()
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = np.array([known[character] for character in text], np.uint16)
    place = folder / "data" / "guide"
    place.mkdir(parents=True)
    cut = int(len(numbers) * (1 - HELD_OUT))
    numbers[:cut].tofile(place / "train.bin")
    numbers[cut:].tofile(place / "val.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(known)}))


def as_words(folder: Path) -> None:
    """text/train.txt, valid.txt and test.txt, in which each character is a word."""
    lines = [" ".join(line.replace(" ", "_")) for line in guide().splitlines()][:LINES]
    first, second = int(len(lines) * (1 - 2 * HELD_OUT)), int(len(lines) * (1 - HELD_OUT))
    place = folder / "text"
    place.mkdir()
    for name, part in (("train", lines[:first]), ("valid", lines[first:second]), ("test", lines[second:])):
        (place / f"{name}.txt").write_text("\n".join(part), encoding="utf-8")


def blocks_in_the_jobs_order() -> None:
    """The places in the text that nanoGPT's loop draws by randint, but not those that its estimate of the loss does."""
    randint, order = torch.randint, []

    def drawn(high: int, size: tuple[int], *others: Any, **named: Any) -> torch.Tensor:
        caller = sys._getframe(2).f_code.co_name
        if caller != "<module>":
            return randint(high, size, *others, **named)
        if not order:
            order.append(endless(high, torch.initial_seed()))
        return torch.tensor(list(itertools.islice(order[0], size[0])))

    torch.randint = drawn  # type: ignore[assignment]


def endless(samples: int, seed: int) -> Iterator[int]:
    """A job's order of samples, epoch after epoch."""
    order = EpochOrder(samples, seed)
    for epoch in itertools.count():
        yield from order.indices([(epoch * samples, (epoch + 1) * samples)])
