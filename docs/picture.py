"""Draws docs/picture.svg: who computes and who waits. Arithmetic on four speeds, not a measurement.

python docs/picture.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

SPEEDS = (4, 2, 1, 1)  # samples a unit of time
BATCH = 16
UNITS = 16  # of time, from left to right
LEFT, TOP, UNIT, ROW, BAR = 92, 30, 40, 22, 16  # pixels
COLOURS = ("#4878a8", "#5a9bc8")  # slices in turn

Bars = Sequence[Sequence[tuple[float, float]]]  # a rank: where each of its slices begins and ends


def lock_step() -> Bars:
    """Equal shares; each step lasts as long as the slowest rank's slice."""
    share = BATCH / len(SPEEDS)
    step = share / min(SPEEDS)
    starts = [step * index for index in range(int(UNITS / step))]
    return [[(start, start + share / speed) for start in starts] for speed in SPEEDS]


def by_speed() -> Bars:
    """Shares by speed; slices follow each other, and a slow stretch of one rank stops nobody."""
    seconds = BATCH / sum(SPEEDS)
    bars = []
    for rank in range(len(SPEEDS)):
        ends = [0.0]
        while ends[-1] < UNITS:
            late = 1.5 if (rank, len(ends)) in ((2, 2), (0, 4)) else 1.0
            ends.append(min(float(UNITS), ends[-1] + late * seconds))
        bars.append(list(pairwise(ends)))
    return bars


def panel(title: str, bars: Bars, top: int) -> list[str]:
    lines = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for rank, slices in enumerate(bars):
        y = top + ROW * rank
        lines.append(f'<text x="4" y="{y + 13}">rank {rank}, ×{SPEEDS[rank]}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{UNITS * UNIT}" height="{BAR}" fill="#e8e4da"/>')
        for index, (start, end) in enumerate(slices):
            x, width = LEFT + start * UNIT, (end - start) * UNIT - 1
            colour = COLOURS[index % len(COLOURS)]
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
    return lines


def picture() -> str:
    second = TOP + ROW * len(SPEEDS) + 36
    width, height = LEFT + UNITS * UNIT + 8, second + ROW * len(SPEEDS) + 22
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *panel("Lock-step, equal shares: all wait for the slowest", lock_step(), TOP),
        *panel("HetSync: shares by speed, ranks up to D rounds apart", by_speed(), second),
        f'<text x="{LEFT}" y="{height - 6}" fill="#666666">time → (blue: computing a slice; grey: waiting)</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "picture.svg").write_text(picture(), encoding="utf-8")
