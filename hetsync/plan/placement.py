"""Where each block of a model is: replicas of stages, by indices into a `BlockGraph`; from plan files and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError
from itertools import pairwise

from hetsync.errors import UserError, did_you_mean
from hetsync.plan.graph import BATCH, Block, BlockGraph
from hetsync.plan.plan_file import (
    ALL,
    FORMAT,
    ModelIdentity,
    PlanFile,
    PlannedReplica,
    PlannedStage,
    Predicted,
    SearchRecord,
    runs_at_once,
)
from hetsync.plan.schedule import stage_order


@dataclass(frozen=True)
class Stage:
    """Blocks that run as one unit; several ranks each compute a part of every micro-batch's samples."""

    ranks: tuple[int, ...]
    blocks: tuple[int, ...]  # ascending
    in_flight: int | None = None  # None is 1F1B's


@dataclass(frozen=True)
class Replica:
    """A whole model on one rank or several. `share` None is by predicted speed."""

    stages: tuple[Stage, ...]
    share: int | None = None
    micro_batches: int = 1

    @property
    def at_once(self) -> bool:
        """Is it one rank that runs its share at once?"""
        return runs_at_once(self.stages, self.micro_batches)

    @property
    def leader(self) -> int:
        """Its lowest rank."""
        return min(rank for stage in self.stages for rank in stage.ranks)

    @property
    def stage_of(self) -> dict[int, int]:
        """By block."""
        return {block: index for index, stage in enumerate(self.stages) for block in stage.blocks}

    def edges(self, graph: BlockGraph) -> frozenset[tuple[int, int]]:
        """Between stages."""
        of = self.stage_of
        pairs = ((of[edge.source], of[edge.target]) for edge in graph.edges if edge.source != BATCH)
        return frozenset((source, target) for source, target in pairs if source != target)


@dataclass(frozen=True)
class Placement:
    """Every replica of a job."""

    replicas: tuple[Replica, ...]

    @property
    def ranks(self) -> list[int]:
        return [rank for replica in self.replicas for stage in replica.stages for rank in stage.ranks]


def place(plan: PlanFile, graph: BlockGraph) -> Placement:
    """The plan's names as blocks of the model.

    UserError where a block is unknown, missing or placed twice in a replica, where its parts share a weight, and where
    stages wait for each other.
    """
    replicas = []
    for number, planned in enumerate(plan.replicas):
        replica = _place_replica(planned, graph, f"replicas[{number}]")
        _check_order(replica, graph, f"replicas[{number}]")
        replicas.append(replica)
    return Placement(tuple(replicas))


def _place_replica(planned: PlannedReplica, graph: BlockGraph, where: str) -> Replica:
    placed: dict[int, int] = {}
    for index, stage in enumerate(planned.stages):
        for name in stage.blocks:
            for block in _blocks_below(name, graph.blocks, f"{where}.stages[{index}].blocks"):
                if block in placed:
                    other = "twice in" if placed[block] == index else f"in stages[{placed[block]}] and"
                    raise UserError(
                        f"{where} has block {graph.blocks[block].name} {other} stages[{index}]: leave it in one place"
                    )
                placed[block] = index
    if missing := [block.name for index, block in enumerate(graph.blocks) if index not in placed]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{where} lacks block {missing[0]}{more}: every block of the model needs a stage")
    stages = tuple(
        Stage(stage.ranks, tuple(sorted(block for block, of in placed.items() if of == index)), stage.in_flight)
        for index, stage in enumerate(planned.stages)
    )
    return Replica(stages, planned.share, planned.micro_batches)


def _blocks_below(name: str, blocks: Sequence[Block], where: str) -> list[int]:
    below = [index for index, block in enumerate(blocks) if name == ALL or _is_below(block.name, name)]
    if below:
        return below
    for block in blocks:  # one that holds more than its name says: a weight that is shared, or modules that run as one
        if any(_is_below(parameter, name) for parameter in block.parameters):
            raise UserError(
                f"{where} has {name}, whose weights are part of block {block.name} and cannot be apart from it: "
                f"leave {name} out, and place {block.name}"
            )
    names = {".".join(block.name.split(".")[:parts]) for block in blocks for parts in range(1, 9)}
    raise UserError(f"{where} has {name}, which is no block of the model{did_you_mean(name, sorted(names))}")


def _is_below(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}.")


def _check_order(replica: Replica, graph: BlockGraph, where: str) -> None:
    try:
        stage_order(len(replica.stages), replica.edges(graph))
    except CycleError as error:
        circle = error.args[1]
        told = ", and ".join(_told_edge(replica, graph, *pair) for pair in pairwise(circle))
        raise UserError(
            f"{where} has stages that wait for each other: {told}: move blocks so that a stage needs only what can be "
            "computed before all of it"
        ) from None


def _told_edge(replica: Replica, graph: BlockGraph, source: int, target: int) -> str:
    of = replica.stage_of
    edge = next(e for e in graph.edges if e.source != BATCH and (of[e.source], of[e.target]) == (source, target))
    names = [graph.blocks[block].name for block in (edge.target, edge.source)]
    return f"{names[0]} of stages[{target}] needs {names[1]} of stages[{source}]"


def as_plan_file(
    placement: Placement,
    graph: BlockGraph,
    batch_size: int,
    model: ModelIdentity | None = None,
    predicted: Predicted | None = None,
    search: SearchRecord | None = None,
) -> PlanFile:
    """The plan file of a placement, with the shortest names."""
    replicas = []
    for replica in placement.replicas:
        stages = tuple(
            PlannedStage(stage.ranks, shortest_names(stage.blocks, graph.blocks), stage.in_flight)
            for stage in replica.stages
        )
        replicas.append(PlannedReplica(share=replica.share, micro_batches=replica.micro_batches, stages=stages))
    return PlanFile(
        format=FORMAT,
        model=model,
        batch_size=batch_size,
        replicas=tuple(replicas),
        predicted=predicted,
        search=search,
    )


def shortest_names(chosen: Collection[int], blocks: Sequence[Block]) -> tuple[str, ...]:
    """Names that stand for these blocks and no others, in the order of the blocks.

    ValueError where the name of one of them also stands for another block, below it.
    """
    inside = set(chosen)
    if len(inside) == len(blocks):
        return (ALL,)
    others = [block.name for index, block in enumerate(blocks) if index not in inside]
    taken = {above for name in others for above in _names_above(name)}
    names = [next((name for name in _names_above(blocks[i].name) if name not in taken), None) for i in sorted(inside)]
    if None in names:
        raise ValueError(f"no name stands for block {blocks[sorted(inside)[names.index(None)]].name} alone")
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _names_above(name: str) -> Iterable[str]:
    """a, a.b and a.b.c of a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
