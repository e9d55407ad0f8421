"""NASNet-A (Zoph et al. 2018, "Learning Transferable Architectures for Scalable Image Recognition").

Weights, without the auxiliary head as the paper counts, which names sizes by N @ the last features:

    size                published         here
    mobile, 4 @ 1056        5.3 M    5,287,076
    large, 6 @ 4032        88.9 M   88,743,820
    CIFAR, 6 @ 768          3.3 M    3,328,234

The auxiliary head adds 2.4 M, 4.6 M and 1.6 M while training.
"""

from __future__ import annotations

from hetsync.models.limits import require_count
from hetsync.models.nas_cells import CURRENT, EARLIER, CellNetwork, CellPlan, Genotype, NetworkPlan, imagenet_stem

NORMAL = Genotype(
    (
        (("separable5", CURRENT), ("separable3", EARLIER)),
        (("separable5", EARLIER), ("separable3", EARLIER)),
        (("average", CURRENT), ("identity", EARLIER)),
        (("average", EARLIER), ("average", EARLIER)),
        (("separable3", CURRENT), ("identity", CURRENT)),
    ),
    outputs=(EARLIER, 2, 3, 4, 5, 6),
)

REDUCTION = Genotype(
    (
        (("separable5", CURRENT), ("separable7", EARLIER)),
        (("maximum", CURRENT), ("separable7", EARLIER)),
        (("average", CURRENT), ("separable5", EARLIER)),
        (("identity", 3), ("average", 2)),
        (("separable3", 2), ("maximum", CURRENT)),
    ),
    outputs=(3, 4, 5, 6),
)


def nasnet_a_cifar(
    classes: int = 10,
    cells: int = 6,
    filters: int = 32,
    auxiliary: bool = True,
    drop_path: float = 0.4,
    dropout: float = 0.0,
) -> CellNetwork:
    """NASNet-A for images of about 32 pixels.

    Args:
        classes: Classes to score.
        cells: Normal cells of each of the three stages (the paper's N).
        filters: Filters of the first stage's cells (F); the last features are 24 times as many.
        auxiliary: Whether there is an auxiliary head, below the second reduction.
        drop_path: See `CellNetwork`.
        dropout: See `CellNetwork`.
    """
    plan = NetworkPlan((3 * filters, 1), _stages(cells, filters), 2 * cells + 1, auxiliary_map=4)
    return CellNetwork(plan, classes, auxiliary, drop_path, dropout)


def nasnet_a_mobile(
    classes: int = 1000,
    cells: int = 4,
    filters: int = 44,
    auxiliary: bool = True,
    drop_path: float = 0.0,
    dropout: float = 0.5,
) -> CellNetwork:
    """NASNet-A for images of 224 pixels; arguments as in `nasnet_a_cifar`."""
    plan = NetworkPlan(
        (32, 2), (*imagenet_stem(REDUCTION, filters), *_stages(cells, filters)), 2 * cells + 3, auxiliary_map=4
    )
    return CellNetwork(plan, classes, auxiliary, drop_path, dropout)


def nasnet_a_large(
    classes: int = 1000,
    cells: int = 6,
    filters: int = 168,
    auxiliary: bool = True,
    drop_path: float = 0.3,
    dropout: float = 0.5,
) -> CellNetwork:
    """NASNet-A for images of 331 pixels; arguments as in `nasnet_a_cifar`."""
    stages = _stages(cells, filters, earlier_after_reduction=-3)
    plan = NetworkPlan((96, 2), (*imagenet_stem(REDUCTION, filters), *stages), 2 * cells + 3, auxiliary_map=6)
    return CellNetwork(plan, classes, auxiliary, drop_path, dropout)


def _stages(cells: int, filters: int, earlier_after_reduction: int = -2) -> tuple[CellPlan, ...]:
    """Three stages of normal cells, a reduction between them.

    A normal cell after a reduction has the reduction's current input as its earlier one; in the large network
    (-3) it is the reduction's earlier input.
    """
    require_count("cells", cells)
    require_count("filters", filters, 2)
    plans: list[CellPlan] = []
    for stage in range(3):
        width = filters * 2**stage
        if stage:
            plans.append(CellPlan(REDUCTION, width, stride=2))
        first = earlier_after_reduction if stage else -2
        plans += [CellPlan(NORMAL, width, earlier=first if index == 0 else -2) for index in range(cells)]
    return tuple(plans)
