"""Nothing runs ahead of what it needs: bits are the same whatever the device is late with, and no streams race."""

from __future__ import annotations

import pytest
import torch
from rank_jobs import job
from ranks import SAMPLES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stream", ["default", "own", "batch"])
def test_a_device_that_is_late_changes_no_bit(stream: str, device: str) -> None:
    late = job("bits", device, 0, stream)
    assert late == job("bits", device, 0, stream, CUDA_LAUNCH_BLOCKING="1")


@pytest.mark.parametrize("stream", ["default", "batch"])
@pytest.mark.parametrize("bound", [0, 4])
def test_torchs_sanitizer_finds_no_race(bound: int, stream: str, cuda: torch.device) -> None:
    assert job("sanitized", "cuda", bound, stream) == {"applied": 2 * SAMPLES}
