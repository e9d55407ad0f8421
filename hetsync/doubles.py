"""Double precision, which not every device has."""

from __future__ import annotations

import torch


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """In float64: on its device, or in the host's memory where the device has none such (Apple's)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
