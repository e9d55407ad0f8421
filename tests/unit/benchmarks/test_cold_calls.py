"""What the calls of a communication thread cost, after others."""

from __future__ import annotations

import torch

from benchmarks.cold_calls import calls_of, cpu_microseconds, slice_of
from hetsync.models.digits_cnn import DigitsCNN


def test_each_call_comes_after_another_and_costs_something() -> None:
    torch.manual_seed(0)
    model = DigitsCNN(channels=4)
    computed = []

    def compute() -> None:
        computed.append(1)
        slice_of(model)()

    for call in calls_of(model).values():
        assert cpu_microseconds(call, compute, repetitions=3) > 0
    assert len(computed) == 3 * len(calls_of(model))
