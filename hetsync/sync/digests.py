"""Digests of tensors, by name. Those that seldom change are hashed again only where they have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from hetsync.sync.sparse import dense_parts

PIECE_WORDS = 1 << 16  # that stay in the cache beside their places
MULTIPLIER = 6364136223846793005  # of a piece's sum by each that follows: odd, as in Knuth's generator


class Mark(NamedTuple):
    """What tells cheaply whether a tensor has changed. Changes through `.data`, as loops make them to what no
    optimizer trains (a target network), count no versions: so there is a sum of its memory, too."""

    version: int | None
    places: tuple[int, ...]
    bits: int


class Digests:
    """One rank's. `of` looks at all tensors that it is given, and hashes those that may have changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Mark, str]] = {}

    @torch.no_grad()
    def of(self, tensors: Mapping[str, torch.Tensor], seldom: Iterable[str]) -> dict[str, str]:
        """SHA-256 of each tensor's bytes, by name. `seldom`: the names of those that most often are as they were when
        they were last asked for; of the others nothing is remembered."""
        names = list(seldom)
        marked = dict(zip(names, marks([tensors[name] for name in names]), strict=True))
        found: dict[str, str] = {}
        for name, tensor in tensors.items():
            mark, (known, digest) = marked.get(name), self._known.get(name, (None, ""))
            found[name] = digest if mark is not None and mark == known else weights_sha256([tensor])
        self._known |= {name: (mark, found[name]) for name, mark in marked.items()}
        return found


def marks(tensors: Sequence[torch.Tensor]) -> list[Mark]:
    """Of each tensor. On a GPU it is waited for once."""
    parts = [dense_parts(tensor) for tensor in tensors]
    sums = [bit_sum(part) for each in parts for part in each]
    told = iter(torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else [])
    return [
        Mark(
            None if tensor.is_inference() else tensor._version,
            tuple(part.data_ptr() for part in each),
            sum(next(told) for _ in each),
        )
        for tensor, each in zip(tensors, parts, strict=True)
    ]


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Of a dense tensor's memory as whole numbers, each by its place, so that values that have changed places are seen;
    on its device, in little more than a pass over memory."""
    memory = _bytes(tensor)
    if memory.storage_offset() % 8:  # whole numbers lie at multiples of eight
        memory = memory.clone()
    whole = len(memory) - len(memory) % 8
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for words in (memory[:whole].view(torch.int64), memory[whole:].to(torch.int64)):
        most = min(len(words), PIECE_WORDS) if memory.device.type == "cpu" else len(words)  # a GPU has no such cache
        places = 2 * torch.arange(most, device=memory.device) + 1  # odd: no change is lost
        for piece in words.split(max(1, most)):
            total = total * MULTIPLIER + (piece * places[: len(piece)]).sum()
    return total


def weights_sha256(tensors: Iterable[torch.Tensor]) -> str:
    """Digest of the tensors' bytes, in order."""
    digest = hashlib.sha256()
    for part in (part for tensor in tensors for part in dense_parts(tensor)):
        digest.update(_bytes(part.cpu()).numpy().data)
    return digest.hexdigest()


def digest_of(digests: Mapping[str, str]) -> str:
    """One of all, whatever their order."""
    told = "".join(f"{name}\0{digest}\0" for name, digest in sorted(digests.items()))
    return hashlib.sha256(told.encode()).hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not every dtype has one of numpy's; a view as bytes needs at least one dimension."""
    return tensor.contiguous().flatten().view(torch.uint8)
