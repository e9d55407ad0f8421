"""Models as graphs of blocks, without a model."""

from __future__ import annotations

from collections.abc import Iterable

from hetsync.plan.graph import BATCH, Block, BlockCost, BlockGraph, Edge


def graph(names: Iterable[str], edges: Iterable[tuple[int, int]] | None = None) -> BlockGraph:
    """A chain, unless edges are given. Each block holds its name's `weight`."""
    blocks = tuple(Block(name, "Linear", (f"{name}.weight",), 400) for name in names)
    pairs = [(i - 1, i) for i in range(len(blocks))] if edges is None else [(BATCH, 0), *edges]
    return BlockGraph(blocks, tuple(Edge(a, b) for a, b in pairs))


def cost(
    forward: float = 0.01,
    backward: float = 0.02,
    fixed: float = 0.0,
    output: int = 100,
    saved: int = 200,
    weight: int = 400,
    update: float = 0.0,
    received: int = 0,
) -> BlockCost:
    return BlockCost(forward, backward, fixed, 2 * fixed, output, saved, weight, received, update_seconds=update)
