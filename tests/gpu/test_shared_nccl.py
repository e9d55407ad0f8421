"""NCCL among ranks that share a GPU, as NCCL 2.30 and newer have it: the lane of jobs on several GPUs, on one."""

from __future__ import annotations

import pytest
import torch
from rank_jobs import job

pytestmark = pytest.mark.gpu

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}


def test_its_lane_sums_in_every_wire_format(device: str) -> None:
    if device == "cuda" and torch.cuda.nccl.version() < (2, 30):
        pytest.skip("needs NCCL 2.30")
    worst = job("through_lane", device, **SHARED)
    assert worst["float32"] == 0
    assert max(worst["bfloat16"], worst["int8"]) < 0.02
