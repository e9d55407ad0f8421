"""What is summed lies where the plane's sums are fastest."""

from __future__ import annotations

import pytest
import torch

from hetsync.plane.local import LocalPlane
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.gradients import Gradients
from hetsync.sync.segmented import Segment, SegmentedDeltas

BATCH = 8


class Allocator(LocalPlane):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        self.given.append(torch.full((count,), float("nan"), device=device))  # it is not cleared
        return self.given[-1]

    def gave(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(given.untyped_storage().data_ptr() == storage for given in self.given)


@pytest.mark.parametrize("skips", [False, True])
def test_buckets(skips: bool) -> None:
    plane = Allocator()
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    gradients = Gradients(model, 64, lambda fraction: None, lambda: None, skips=skips, allocate=plane.allocate)
    assert len(plane.given) == len(gradients.buckets) > 1
    for index, bucket in enumerate(gradients.buckets):
        assert plane.gave(gradients.pack(index, "float32"))
        assert not bucket.flat.any()


@pytest.mark.parametrize("fragments", [1, 2])
def test_deltas_in_every_round(fragments: int) -> None:
    """Two buffers take turns."""
    plane = Allocator()
    weights = [torch.zeros(6), torch.zeros(6)]
    deltas = FragmentedDeltas(weights, ranks_counted=2, fragments=fragments, allocate=plane.allocate)
    for number in range(3):
        for part in deltas.parts:
            for weight in weights:
                weight += 1
            part.finish(BATCH, 1)
            addend = part.pack(True, BATCH, "float32")
            assert plane.gave(addend), number
            assert addend.isfinite().all()
            part.apply_sum()
            part.apply()
    assert len(plane.given) == 2 * fragments


def test_segments_each_by_its_own_sums() -> None:
    planes = [Allocator(), Allocator()]
    deltas = SegmentedDeltas([Segment([torch.zeros(6)], [], plane) for plane in planes])
    for plane, part in zip(planes, deltas.parts, strict=True):
        assert plane.gave(part.pack(True, BATCH, "float32"))
