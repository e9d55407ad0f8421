"""While other weights are shown, a rank's own are kept, and rounds go on."""

from __future__ import annotations

import pytest
import torch

from hetsync.sync.deltas import Deltas

BATCH = 8


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def made() -> tuple[list[torch.Tensor], Deltas]:
    generator = torch.Generator().manual_seed(1)
    local = [torch.randn(shape, generator=generator) for shape in ((2, 3), (4,), ())]
    return local, Deltas(local)


def test_the_shown_weights_come_and_go_bit_for_bit() -> None:
    local, deltas = made()
    snapshot = deltas.anchor.clone()
    for tensor in local:
        tensor += 1.37
    own = flat(local)
    with deltas.showing(snapshot):
        assert torch.equal(flat(local), snapshot)
    assert torch.equal(flat(local), own)


def test_they_go_when_an_evaluation_fails() -> None:
    local, deltas = made()
    snapshot, own = torch.zeros(11), flat(local)
    with pytest.raises(ZeroDivisionError), deltas.showing(snapshot):
        raise ZeroDivisionError
    assert torch.equal(flat(local), own)


def test_a_round_that_lands_meanwhile_loses_nothing() -> None:
    shown, plain = made(), made()
    for local, deltas in (shown, plain):
        for tensor in local:
            tensor += 2.0
        deltas.finish(BATCH, 1)
    for (_, deltas), showing in ((shown, True), (plain, False)):
        snapshot = deltas.anchor.clone()
        if showing:
            with deltas.showing(snapshot):
                deltas.pack(True, BATCH, "float32")
                deltas.apply_sum()
        else:
            deltas.pack(True, BATCH, "float32")
            deltas.apply_sum()
    for local, deltas in (shown, plain):
        assert deltas.apply()
        deltas.reset_to_anchor()
        assert torch.equal(flat(local), deltas.anchor)
    assert torch.equal(flat(shown[0]), flat(plain[0]))
    assert torch.allclose(flat(shown[0]), flat(made()[0]) + 2.0)
