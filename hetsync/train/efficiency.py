"""A job's report card: its samples/s against what its ranks' devices can do with nobody to wait for.

Devices are measured twice: alone, at the start, and slice by slice while they train. Pure: real and simulated runs
share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def report_card(samples_per_second: float, per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keys of a summary, from the ranks' own figures; docs/reference.md explains them.

    A rank that got no samples has no rate while training: that of the start stands for it. Where the start's were not
    measured, there is no `efficiency`.
    """
    trained = sum(rank["device_samples_per_second"] or rank["solo_samples_per_second"] or 0.0 for rank in per_rank)
    card: dict[str, Any] = {
        "solo_samples_per_second_sum": None,
        "device_samples_per_second_sum": trained,
        "efficiency": None,
        "efficiency_interval": None,
        "efficiency_while_training": samples_per_second / trained if trained else None,
    }
    if any(rank["solo_samples_per_second"] is None for rank in per_rank):
        return card
    solo = sum(rank["solo_samples_per_second"] for rank in per_rank)
    efficiency = samples_per_second / solo
    return {
        **card,
        "solo_samples_per_second_sum": solo,
        "efficiency": efficiency,
        "efficiency_interval": _interval(efficiency, solo, per_rank),
    }


def _interval(efficiency: float, solo: float, per_rank: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """From the scatter of the profiled steps; errors are added up, not squared: ranks of one machine err together."""
    if any(rank["solo_uncertainty"] is None for rank in per_rank):
        return None
    error = sum(rank["solo_uncertainty"] * rank["solo_samples_per_second"] for rank in per_rank) / solo
    return [efficiency / (1 + error), efficiency * (1 + error)]


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """The card in words, with the reason where it is above 1."""
    rate, emulated, interval = summary["samples_per_second"], summary["emulated"], summary["efficiency_interval"]
    solo, trained = summary["solo_samples_per_second_sum"], summary["device_samples_per_second_sum"]
    while_training = f"{summary['efficiency_while_training'] or 0.0:.3f}"
    if solo is None:
        return [
            f"{rate:,.1f} samples/s, of {trained:,.1f} that the devices were capable of while training:"
            f" {while_training} (their speeds were not measured before)"
        ]
    if interval is None:
        certainty = " (the devices were timed too few times to say how certain that is)"
    else:
        low, high = interval
        certainty = "" if low == high else f" ({low:.3f} to {high:.3f} by the scatter of the profiled steps)"
    lines = [
        f"{rate:,.1f} samples/s{' of emulated devices' if emulated else ''}, of {solo:,.1f} that the ranks reach alone:"
        f" efficiency {summary['efficiency']:.3f}{certainty}",
        f"of the {trained:,.1f} that the devices were capable of while training,"
        f" {'at the speeds drawn' if emulated else 'as measured there'}: {while_training}",
    ]
    if summary["efficiency"] > 1:
        then = "as the profile has them" if emulated else "as measured at the start"
        lines.append(
            f"above 1: within their slices the devices were {trained / solo - 1:.1%} faster than {then}"
            if trained > solo
            else "above 1, though the devices were no faster while training: they were measured too slow at the start"
        )
    return lines
