"""A job's efficiency: its samples/s over what its devices were capable of while they trained, slice by slice.

Never above 1: what is lacking was lost to waiting, loading, and the runtime between slices. Beside it stands the part
of what the ranks reach alone, by the profile of the start: devices that have become faster since may lift that above 1.
Pure: real and simulated runs share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def report_card(samples_per_second: float, per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keys of a summary, from the ranks' own figures; docs/reference.md explains them.

    A rank that got no samples has no rate while training: that of the start stands for it. Where the start's were not
    measured, there is no `solo_fraction`.
    """
    trained = sum(rank["device_samples_per_second"] or rank["solo_samples_per_second"] or 0.0 for rank in per_rank)
    card: dict[str, Any] = {
        "device_samples_per_second_sum": trained,
        "efficiency": samples_per_second / trained if trained else None,
        "solo_samples_per_second_sum": None,
        "solo_fraction": None,
        "solo_fraction_interval": None,
    }
    if any(rank["solo_samples_per_second"] is None for rank in per_rank):
        return card
    solo = sum(rank["solo_samples_per_second"] for rank in per_rank)
    fraction = samples_per_second / solo
    return {
        **card,
        "solo_samples_per_second_sum": solo,
        "solo_fraction": fraction,
        "solo_fraction_interval": _interval(fraction, solo, per_rank),
    }


def _interval(fraction: float, solo: float, per_rank: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """From the scatter of the profiled steps; errors are added up, not squared: ranks of one machine err together."""
    if any(rank["solo_uncertainty"] is None for rank in per_rank):
        return None
    error = sum(rank["solo_uncertainty"] * rank["solo_samples_per_second"] for rank in per_rank) / solo
    return [fraction / (1 + error), fraction * (1 + error)]


def sentence(summary: Mapping[str, Any]) -> str:
    """The efficiency in words."""
    return (
        f"{summary['samples_per_second']:,.1f} samples/s, of {summary['device_samples_per_second_sum']:,.1f} that the"
        f" {'emulated ' if summary['emulated'] else ''}devices were capable of while training: efficiency"
        f" {summary['efficiency'] or 0.0:.3f}"
    )
