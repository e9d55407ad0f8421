"""A model as a graph of blocks, and what each block costs: plain figures, without tensors or devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

BATCH = -1  # the source of edges that come from the batch


@dataclass(frozen=True)
class Block:
    """Smallest unit of placement.

    Attributes:
        name: Path of its module, or a name made from it where the module is called several times.
        kind: Type of its module; `function` for operations outside of modules.
        parameters: Names of the parameters and float buffers that it holds, as the model's state names them.
        weight_bytes: Of these.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    weight_bytes: int


@dataclass(frozen=True)
class Edge:
    """Tensors that go from one block to another: indices into the blocks; `BATCH` as source."""

    source: int
    target: int


@dataclass(frozen=True)
class BlockGraph:
    """Blocks in topological order: no edge leads backwards, hence there is no circle.

    Raises ValueError where two blocks have one name or hold the same parameter, or where an edge leads backwards, out
    of the blocks, or stands there twice.
    """

    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        _require_once("block", [block.name for block in self.blocks])
        _require_once("parameter", [name for block in self.blocks for name in block.parameters])
        _require_once("edge", [f"{edge.source} → {edge.target}" for edge in self.edges])
        for edge in self.edges:
            if not BATCH <= edge.source < edge.target < len(self.blocks):
                raise ValueError(
                    f"edge {edge.source} → {edge.target} of {len(self.blocks)} blocks does not lead onwards"
                )


@dataclass(frozen=True)
class BlockCost:
    """What a block costs; a micro-batch of n samples costs fixed + n · per sample.

    Attributes:
        forward_seconds: A sample's, on the profiled device.
        backward_seconds: A sample's, on the profiled device.
        fixed_forward_seconds: A micro-batch's, whatever its size.
        fixed_backward_seconds: A micro-batch's, whatever its size.
        output_bytes: A sample's, of what the edges out of the block carry: once to each rank that needs it.
        saved_bytes: A sample's, of what backward needs from forward.
        weight_bytes: Of its parameters and float buffers.
        received_bytes: A sample's, of what backward needs that blocks before have saved: there once more where these
            are on another rank.
        loss_bytes: A sample's, of `saved_bytes`: what the loss saves, of one micro-batch at a time.
        update_seconds: Of its weights' part in the optimizer's update, once a step, on the profiled device.
        padding: Where samples are padded to the longest, the power of a batch's samples with which a sample's
            `saved_bytes` grow, up to those of a batch of `padded_samples`, for which they are.
    """

    forward_seconds: float
    backward_seconds: float
    fixed_forward_seconds: float
    fixed_backward_seconds: float
    output_bytes: int
    saved_bytes: int
    weight_bytes: int
    received_bytes: int = 0
    loss_bytes: int = 0
    update_seconds: float = 0.0
    padding: float = 0.0
    padded_samples: int = 1


def _require_once(what: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name} is there {count} times")
