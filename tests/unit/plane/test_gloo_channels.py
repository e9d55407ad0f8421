"""A connection that has broken is told in a sentence, wherever Gloo notices it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetsync.plane.base import LostError
from hetsync.plane.gloo_channels import GlooChannels


class Broken:
    """A group one of whose ranks has died, and whose connection Gloo knows to be broken."""

    def refuse(self, *words: Any) -> None:
        raise RuntimeError("[pair.cc:537] Read error [127.0.0.1]:53913: Connection reset by peer. GLHF!")

    send = recv = refuse


def test_sending_over_a_broken_connection_names_the_rank() -> None:
    with pytest.raises(LostError, match=r"lost rank 2, which has most likely ended \(.*Connection reset by peer"):
        GlooChannels(Broken()).send("note", [torch.zeros(2)], 2)


def test_receiving_over_a_broken_connection_names_the_rank() -> None:
    with pytest.raises(LostError, match="lost rank 1, which"):
        GlooChannels(Broken()).receive(1)
