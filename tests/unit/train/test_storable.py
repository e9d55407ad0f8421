"""Tensors on their way into a file."""

from __future__ import annotations

import torch

from hetsync.train.tensor_files import storable


def test_memory_is_copied_only_where_it_is_shared() -> None:
    weight = torch.randn(6, 4)
    shared = {"tied": weight, "turned": weight.t(), "part": weight[2:]}
    made = storable({"weight": weight, **shared, "other": torch.ones(3)})
    assert made["weight"].data_ptr() == weight.data_ptr(), "a base of gigabytes is not to be held twice"
    places = {name: tensor.untyped_storage().data_ptr() for name, tensor in made.items()}
    assert len(set(places.values())) == len(made), "safetensors refuses what shares memory"
    for name, tensor in shared.items():
        assert torch.equal(made[name], tensor)
        assert made[name].is_contiguous()
