"""What has not changed is not hashed again, and whatever has changed is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from hetsync.sync import digests
from hetsync.sync.digests import Digests, bit_sum, weights_sha256

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(10.0),
    "bfloat16": lambda: torch.arange(11.0).bfloat16(),
    "long": lambda: torch.arange(5),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).to(torch.complex128),
    "scalar": lambda: torch.tensor(2.0),
    "none": lambda: torch.zeros(0),
    "channels_last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "not aligned": lambda: torch.arange(10.0)[1:],
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of what is hashed, from now on."""
    found: list[int] = []

    def watched(tensors: Iterable[torch.Tensor]) -> str:
        given = list(tensors)
        found.extend(tensor.nbytes for tensor in given if tensor.layout is torch.strided)
        return weights_sha256(given)

    monkeypatch.setattr(digests, "weights_sha256", watched)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_digests_are_those_of_the_bytes(kind: str) -> None:
    known, tensor = Digests(), KINDS[kind]()
    for _ in range(2):
        assert known.of({"x": tensor}, ["x"]) == {"x": weights_sha256([tensor])}


def test_what_seldom_changes_is_hashed_once(hashed: list[int]) -> None:
    known, base, trained = Digests(), torch.ones(100), torch.ones(7)
    for _ in range(3):
        known.of({"base": base, "trained": trained}, ["base"])
    assert sorted(hashed) == [28, 28, 28, 400]


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda weight: weight.detach().mul_(2),
    "through data": lambda weight: weight.data.mul_(2),
    "one bit": lambda weight: weight.data.view(torch.int32)[1].bitwise_xor_(1),
    "other memory": lambda weight: setattr(weight, "data", weight.data + 1),
    "rows swapped": lambda weight: weight.data.copy_(weight.data.flip(0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    known, weight = Digests(), torch.nn.Parameter(torch.arange(18.0).view(9, 2), requires_grad=False)
    before = known.of({"base": weight}, ["base"])
    CHANGES[change](weight)
    after = known.of({"base": weight}, ["base"])
    assert after == {"base": weights_sha256([weight])} != before


@pytest.mark.parametrize("piece", [1, 2, 1 << 16])
def test_values_that_have_changed_places_are_seen(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Words in one piece, pieces, and the bytes behind the last word."""
    monkeypatch.setattr(digests, "PIECE_WORDS", piece)
    memory = torch.arange(1, 46, dtype=torch.uint8)
    before = int(bit_sum(memory))
    for one, other in [(0, 8), (8, 32), (3, 5), (40, 44), (0, 44)]:
        swapped = memory.clone()
        swapped[one], swapped[other] = memory[other], memory[one]
        assert int(bit_sum(swapped)) != before
    for one, other in [(0, 8), (8, 32)]:  # whole words
        swapped = memory.clone()
        swapped[one : one + 8], swapped[other : other + 8] = memory[other : other + 8], memory[one : one + 8]
        assert int(bit_sum(swapped)) != before


def test_sums_of_memory_are_of_all_of_it() -> None:
    memory = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], dtype=torch.uint8)
    for start in range(3):
        for place in range(start, 11):
            tensor = memory.clone()[start:]
            before = int(bit_sum(tensor))
            tensor[place - start] += 1
            assert int(bit_sum(tensor)) != before
