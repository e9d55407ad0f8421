"""These tests run on a GPU; `--device cpu` runs what is not of GPUs alone on processors, to see that it runs."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cuda", "cpu"], default="cuda", help="what ranks compute on")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    chosen: str = request.config.getoption("--device", default="cuda")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return chosen


@pytest.fixture
def cuda(device: str) -> torch.device:
    if device != "cuda":
        pytest.skip("of GPUs alone")
    return torch.device("cuda", 0)
