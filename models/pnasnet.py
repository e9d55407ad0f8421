"""PNASNet-5 (Liu et al. 2018, "Progressive Neural Architecture Search").

Weights, without the auxiliary head as the paper counts:

    size                      published         here
    mobile, N = 3, F = 54         5.1 M    5,063,347
    large, N = 4, F = 216        86.1 M   86,051,704
    CIFAR, N = 3, F = 48          3.2 M    3,176,602

One cell serves throughout, with stride 2 in place of a reduction cell. The paper's figure could be read as two such
cells beside 3 N others; only 3 N in all gives the published counts, also for CIFAR (which the authors' code lacks:
its stem and drop path are NASNet's). The auxiliary head adds 2.4 M, 4.6 M and 1.6 M while training.
"""

from __future__ import annotations

from hetsync.models.limits import require_count
from hetsync.models.nas_cells import CURRENT, EARLIER, CellNetwork, CellPlan, Genotype, NetworkPlan, imagenet_stem

CELL = Genotype(
    (
        (("separable5", EARLIER), ("maximum", EARLIER)),
        (("separable7", CURRENT), ("maximum", CURRENT)),
        (("separable5", CURRENT), ("separable3", CURRENT)),
        (("separable3", 4), ("maximum", CURRENT)),
        (("separable3", EARLIER), ("identity", CURRENT)),
    ),
    outputs=(2, 3, 4, 5, 6),
)


def pnasnet5_cifar(
    classes: int = 10,
    cells: int = 3,
    filters: int = 48,
    auxiliary: bool = True,
    drop_path: float = 0.4,
    dropout: float = 0.0,
) -> CellNetwork:
    """PNASNet-5 for images of about 32 pixels.

    Args:
        classes: Classes to score.
        cells: Cells of each of the three stages (the paper's N).
        filters: Filters of the first stage's cells (F); the last features are 20 times as many.
        auxiliary: Whether there is an auxiliary head, below the second reduction.
        drop_path: See `CellNetwork`.
        dropout: See `CellNetwork`.
    """
    plan = NetworkPlan((3 * filters, 1), _stages(cells, filters), 2 * cells, auxiliary_map=4)
    return CellNetwork(plan, classes, auxiliary, drop_path, dropout)


def pnasnet5_mobile(
    classes: int = 1000,
    cells: int = 3,
    filters: int = 54,
    auxiliary: bool = True,
    drop_path: float = 0.0,
    dropout: float = 0.5,
) -> CellNetwork:
    """PNASNet-5 for images of 224 pixels; arguments as in `pnasnet5_cifar`."""
    stages = (*imagenet_stem(CELL, filters), *_stages(cells, filters))
    return CellNetwork(NetworkPlan((32, 2), stages, 2 * cells + 2, 4), classes, auxiliary, drop_path, dropout)


def pnasnet5_large(
    classes: int = 1000,
    cells: int = 4,
    filters: int = 216,
    auxiliary: bool = True,
    drop_path: float = 0.4,
    dropout: float = 0.5,
) -> CellNetwork:
    """PNASNet-5 for images of 331 pixels; arguments as in `pnasnet5_cifar`."""
    stages = (*imagenet_stem(CELL, filters), *_stages(cells, filters))
    return CellNetwork(NetworkPlan((96, 2), stages, 2 * cells + 2, 6), classes, auxiliary, drop_path, dropout)


def _stages(cells: int, filters: int) -> tuple[CellPlan, ...]:
    """Three stages; the first cell of the second and the third halves the size."""
    require_count("cells", cells)
    require_count("filters", filters, 2)
    return tuple(
        CellPlan(CELL, filters * 2**stage, stride=2 if stage and index == 0 else 1)
        for stage in range(3)
        for index in range(cells)
    )
