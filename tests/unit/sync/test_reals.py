"""Complex weights travel as real values, in delayed mode too."""

from __future__ import annotations

import torch

from hetsync.sync.deltas import Deltas
from hetsync.sync.optimizer_state import average_optimizer_state
from hetsync.sync.reals import as_of, count_reals, reals


def test_reals_share_memory_and_come_back() -> None:
    weight = torch.randn(3, 2, dtype=torch.cfloat)
    values = reals(weight)
    assert values.shape == (3, 2, 2)
    assert count_reals(weight) == values.numel()
    assert torch.equal(as_of(values.clone(), weight), weight)
    values.zero_()
    assert not weight.any()


def test_what_is_conjugate_only_by_name_keeps_its_values() -> None:
    weight = torch.randn(3, dtype=torch.cfloat).conj()
    assert torch.equal(reals(weight)[:, 1], weight.imag)


def test_progress_of_complex_weights_has_both_parts() -> None:
    weight = torch.zeros(2, dtype=torch.cfloat, requires_grad=True)
    deltas = Deltas([weight])
    with torch.no_grad():
        weight += 1 + 2j
    deltas.finish(4, 1)
    assert deltas.pack(True, 4, "float32").tolist() == [1, 2, 1, 2]


def test_moments_of_complex_weights_are_averaged() -> None:
    weight = torch.ones(2, dtype=torch.cfloat, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.full((2,), 1 + 2j)
    optimizer.step()
    before = optimizer.state[weight]["exp_avg"].clone()

    def with_another(value: object) -> list[object]:  # which has used as many samples, and whose moments are zero
        return [value, value]

    average_optimizer_state(optimizer, 8, with_another, lambda flat: None)
    assert torch.allclose(optimizer.state[weight]["exp_avg"], before / 2)
