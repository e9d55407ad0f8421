"""Models that go by how far their job has come."""

from __future__ import annotations

from torch import nn


class GoesBySteps(nn.Module):
    """A part of a model that goes by the job's steps, as scheduled sampling does.

    Attributes:
        step_count: Batches that a whole job would have trained on. It is set before each slice: a rank's own count
            would be another on each.
    """

    step_count: int = 0
