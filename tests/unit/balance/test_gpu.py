"""A part of a GPU is a device of its own, and is refused where CUDA would not heed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetsync.balance.gpu import PERCENTAGE, PIPES, VISIBLE, check_percentage, gpu_identity, gpu_name, has_kernels
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


Identity = Callable[..., str]


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> Identity:
    """Of the device with this index, for a process that sees some."""

    def told(index: int, visible: dict[str, str], **properties: Any) -> str:
        for name in VISIBLE:
            monkeypatch.delenv(name, raising=False)
        for name, value in visible.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
        return gpu_identity(torch.device("cuda", index))

    return told


def test_ranks_know_a_gpu_by_its_uuid_whatever_each_of_them_sees(identity: Identity) -> None:
    assert identity(1, {}, uuid="a") == identity(0, {"CUDA_VISIBLE_DEVICES": "1"}, uuid="a")
    assert identity(0, {"CUDA_VISIBLE_DEVICES": "0"}, uuid="a") != identity(0, {"CUDA_VISIBLE_DEVICES": "1"}, uuid="b")


def test_where_torch_tells_no_uuid_by_its_place_or_by_what_its_rank_was_shown(identity: Identity) -> None:
    """Each rank sees one device, which has the number 0 for all."""
    place = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
    assert identity(0, {"HIP_VISIBLE_DEVICES": "3"}, **place) == identity(3, {}, **place) == "00:1b:00"
    first, second = (identity(0, {"HIP_VISIBLE_DEVICES": shown}) for shown in ("0", "1"))
    assert (first, second) == ("0", "1")
    assert identity(1, {"HIP_VISIBLE_DEVICES": "1,0", "ROCR_VISIBLE_DEVICES": "5,4"}) == "5"
    assert identity(2, {}) == "2"


@pytest.mark.parametrize("same", [True, False])
def test_parts_that_mig_has_cut_out_are_not_shared(identity: Identity, same: bool) -> None:
    """Whether a part's uuid is the whole GPU's or its own."""
    parts = [{"CUDA_VISIBLE_DEVICES": f"MIG-{number}"} for number in "12"]
    uuids = ["whole", "whole"] if same else ["one", "two"]
    first, second = (identity(0, part, uuid=uuid) for part, uuid in zip(parts, uuids, strict=True))
    assert first != second
    assert identity(0, parts[0], uuid=uuids[0]) == first
