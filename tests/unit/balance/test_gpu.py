"""A part of a GPU is a device of its own, and is refused where CUDA would not heed it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetsync.balance.gpu import PERCENTAGE, PIPES, check_percentage, gpu_name, has_kernels
from hetsync.errors import UserError


def test_parts_of_one_gpu_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.delenv(PERCENTAGE, raising=False)
    assert gpu_name(torch.device("cuda", 0)) == "H100"
    monkeypatch.setenv(PERCENTAGE, "25")
    assert gpu_name(torch.device("cuda", 0)) == "H100, 25 % of it"


def test_a_percentage_that_nobody_heeds_is_refused(tmp_path: Path) -> None:
    check_percentage({})
    told = {PERCENTAGE: "25", PIPES: str(tmp_path)}
    with pytest.raises(UserError, match=f"no MPS daemon listens in {tmp_path}: start the job by launch/mps"):
        check_percentage(told)
    (tmp_path / "control").touch()
    check_percentage(told)


@pytest.mark.parametrize("percentage", ["0", "101", "half", ""])
def test_a_percentage_is_one(percentage: str) -> None:
    with pytest.raises(UserError, match="give more than 0, up to 100"):
        check_percentage({PERCENTAGE: percentage})


@pytest.mark.parametrize(
    ("capability", "built_for", "has"),
    [
        ((8, 0), ["sm_75", "sm_80", "sm_90"], True),
        ((8, 6), ["sm_75", "sm_80"], True),  # of the same major version
        ((8, 0), ["sm_75", "sm_86"], False),
        ((7, 0), ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"], False),  # a V100, and CUDA 13
        ((6, 0), ["sm_75"], False),
        ((9, 0), ["sm_80", "compute_80"], True),  # compiled when it is loaded
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120"], True),
        ((9, 4), ["gfx90a"], True),  # ROCm tells it otherwise
        ((9, 0), [], True),  # and a torch for CPUs not at all
    ],
)
def test_kernels_are_there_or_not(capability: tuple[int, int], built_for: list[str], has: bool) -> None:
    assert has_kernels(capability, built_for) == has
