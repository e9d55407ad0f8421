"""What a graph of blocks refuses."""

from __future__ import annotations

import pytest

from hetsync.plan.graph import BATCH, Block, BlockGraph, Edge


def block(name: str, *parameters: str) -> Block:
    return Block(name, "Linear", parameters, 4 * len(parameters))


A, B = block("a", "a.weight"), block("b", "b.weight")


def test_blocks_in_topological_order_are_a_graph() -> None:
    graph = BlockGraph((A, B), (Edge(BATCH, 0), Edge(0, 1), Edge(BATCH, 1)))

    assert graph.blocks[graph.edges[1].target] is B


@pytest.mark.parametrize(
    ("blocks", "edges", "says"),
    [
        ((A, B), (Edge(1, 0),), "1 → 0 of 2 blocks does not lead onwards"),
        ((A, B), (Edge(0, 0),), "0 → 0 of 2 blocks does not lead onwards"),
        ((A, B), (Edge(1, 2),), "1 → 2 of 2 blocks does not lead onwards"),
        ((A, B), (Edge(-2, 1),), "-2 → 1 of 2 blocks does not lead onwards"),
        ((A, B), (Edge(0, 1), Edge(0, 1)), "edge 0 → 1 is there 2 times"),
        ((A, block("a")), (), "block a is there 2 times"),
        ((A, block("b", "a.weight")), (), "parameter a.weight is there 2 times"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(blocks: tuple[Block, ...], edges: tuple[Edge, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BlockGraph(blocks, edges)
