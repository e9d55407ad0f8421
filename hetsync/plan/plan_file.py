"""Plan files: which ranks form a replica of the model, and which blocks each of them holds, by names.

`placement.py` makes indices of the names, once the model's blocks are known.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import yaml

from hetsync.config.checks import at_least
from hetsync.config.records import plain, record
from hetsync.config.yaml_files import read_yaml
from hetsync.errors import UserError, brief
from hetsync.files import write_atomically

FORMAT = 1
ALL = "*"  # as a block's name


@dataclass(frozen=True)
class ModelIdentity:
    """The model that a plan was made for. Without `weights_sha256` (written by hand) another may have its name."""

    name: str
    weights_sha256: str | None = None


@dataclass(frozen=True)
class PlannedStage:
    """Blocks that run as one unit, by name; a name stands for all blocks below it, `*` for all of the model.

    Several ranks compute each micro-batch together, each a part of its samples. `in_flight`: micro-batches whose
    forward pass ran and whose backward pass has not, at most; None is 1F1B's, the stages left.
    """

    ranks: tuple[int, ...]
    blocks: tuple[str, ...]
    in_flight: int | None = None

    def __post_init__(self) -> None:
        _require_some("ranks", self.ranks)
        _require_some("blocks", self.blocks)
        for index, rank in enumerate(self.ranks):
            at_least(f"ranks[{index}]", rank, 0)
        at_least("in_flight", self.in_flight, 1)


@dataclass(frozen=True, kw_only=True)
class PlannedReplica:
    """A whole model. `share`: its samples of a slice of all replicas; None is by predicted speed."""

    share: int | None = None
    micro_batches: int = 1
    stages: tuple[PlannedStage, ...]

    def __post_init__(self) -> None:
        _require_some("stages", self.stages)
        at_least("share", self.share, 1)
        at_least("micro_batches", self.micro_batches, 1)
        if self.share is not None and self.least_share > self.share:
            raise UserError(f"micro_batches is {self.micro_batches}, for {self._told_share}")

    @property
    def at_once(self) -> bool:
        """Is it one rank that runs its share at once, as ranks do without a plan?"""
        return runs_at_once(self.stages, self.micro_batches)

    @property
    def least_share(self) -> int:
        """By which every rank has a sample of every micro-batch."""
        return self.micro_batches * max(len(stage.ranks) for stage in self.stages)

    @property
    def _told_share(self) -> str:
        ranks = self.least_share // self.micro_batches
        each = "each needs one" if ranks == 1 else f"each needs one for each of the {ranks} ranks of a stage"
        return f"a share of {self.share} samples, and {each}: give fewer micro-batches, or a larger share"


class OnRanks(Protocol):
    """A stage, by names or by indices."""

    @property
    def ranks(self) -> tuple[int, ...]: ...


def runs_at_once(stages: Sequence[OnRanks], micro_batches: int) -> bool:
    """Is a replica of these stages one rank that computes its share in one piece?"""
    return micro_batches == 1 and len(stages) == 1 and len(stages[0].ranks) == 1


@dataclass(frozen=True)
class Predicted:
    """What the evaluator said of the plan; not read by a job's decisions. `memory_bytes` by rank."""

    step_seconds: float
    samples_per_second: float
    bytes_per_sample: float
    memory_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TriedSearch:
    """One of the searches that were run; without `objective` none of its plans counts, or it could not search."""

    method: str
    evaluations: int
    seconds: float
    objective: float | None = None


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """How the plan was found; not read by a job's decisions.

    `method` found it. `weights` are of time, bytes and memory in `objective`, which is 1 for data parallelism by speed.
    `bound`: no plan whose stages are of one rank each has a lower objective; `gap`: how far above it this one is, as a
    fraction of it. `evaluations` and `seconds` (of a process) are of all searches in `tried`.
    """

    method: str
    evaluations: int
    seconds: float
    seed: int
    weights: tuple[float, ...]
    objective: float
    bound: float
    gap: float | None = None
    tried: tuple[TriedSearch, ...]


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan as it is written."""

    format: int
    model: ModelIdentity | None = None
    batch_size: int
    replicas: tuple[PlannedReplica, ...]
    predicted: Predicted | None = None
    search: SearchRecord | None = None

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 1)
        _require_some("replicas", self.replicas)
        for rank, count in Counter(self.ranks).items():
            if count > 1:
                raise UserError(f"rank {rank} is in {count} places: leave it in one, since a rank holds one stage")
        self._check_shares()

    def _check_shares(self) -> None:
        shares = [replica.share for replica in self.replicas]
        given = sum(share for share in shares if share is not None)
        open_ones = [replica.least_share for replica in self.replicas if replica.share is None]
        if not open_ones and given != self.batch_size:
            raise UserError(
                f"the shares {', '.join(map(str, shares))} add up to {given}, but batch_size is {self.batch_size}: "
                "make them equal, or leave a share out"
            )
        if not given and sum(open_ones) > self.batch_size:
            raise UserError(
                f"batch_size is {self.batch_size}, and the replicas need {sum(open_ones)} for their micro-batches, a "
                "sample of each for every rank of a stage: lower micro_batches, or raise batch_size"
            )
        if given + sum(open_ones) > self.batch_size:
            raise UserError(
                f"batch_size is {self.batch_size}, of which {given} are given as shares, and the other replicas need "
                f"{sum(open_ones)} for their micro-batches: lower shares or micro_batches, or raise batch_size"
            )

    @property
    def ranks(self) -> list[int]:
        """All that the plan names."""
        return [rank for replica in self.replicas for stage in replica.stages for rank in stage.ranks]

    @property
    def data_parallel(self) -> bool:
        """Does each replica run at once, on a rank of its own?"""
        return all(replica.at_once for replica in self.replicas)

    def check_job(self, ranks: int, batch_size: int, model_name: str, weights_sha256: str) -> None:
        """UserError unless the plan was made for this model and this batch, and has a place for every rank.

        `weights_sha256` is `weights_digest` of the model.
        """
        self.check_ranks(ranks)
        if self.batch_size != batch_size:
            raise UserError(
                f"batch_size is {self.batch_size}, but data.batch_size is {batch_size}, to which the shares must add "
                "up: make them equal"
            )
        if self.model is None:
            return
        if self.model.name != model_name:
            raise UserError(f"model.name is {self.model.name}, but the job's is {model_name}: plan for this model")
        if self.model.weights_sha256 not in (None, weights_sha256):
            raise UserError(
                f"model.weights_sha256 is {brief(self.model.weights_sha256)[:12]}…, but the job's {model_name} has "
                f"{weights_sha256[:12]}…, so its weights have other names or shapes: plan for this model"
            )

    def check_ranks(self, ranks: int) -> None:
        """UserError unless it has a place for each of so many ranks, and for no others."""
        for rank in self.ranks:
            if rank >= ranks:
                raise UserError(f"it places rank {rank}, but the job has {ranks}: start {max(self.ranks) + 1} ranks")
        if missing := sorted(set(range(ranks)) - set(self.ranks)):
            raise UserError(
                f"rank {missing[0]} is missing, of the job's {ranks}: add it to a replica, or start "
                f"{len(self.ranks)} ranks"
            )


def read_plan(path: Path) -> PlanFile:
    """A plan file. UserError, which names the file and the key, where it cannot be read or says what cannot be."""
    content = read_yaml(path, f"plan {path}")
    with mistakes_in(path):
        # Another format has other keys: that must not be told as a key that there is not.
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise UserError(f"format is {brief(content['format'])}, and {FORMAT} is what is read here: plan anew")
        return record(PlanFile, content)


def write_plan(plan: PlanFile, path: Path) -> None:
    """Write a plan file, all of it or nothing. UserError where the path cannot be written."""
    text = yaml.safe_dump(plain(plan), sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    write_atomically(path, text, "choose another path")


@contextlib.contextmanager
def mistakes_in(path: Path) -> Iterator[None]:
    """Inside, mistakes name the plan."""
    try:
        yield
    except UserError as mistake:
        raise UserError(f"plan {path}: {mistake}") from None


def weights_digest(shapes: Iterable[tuple[str, Sequence[int]]]) -> str:
    """SHA-256 of the names and shapes of a model's weights and buffers, in any order."""
    text = json.dumps(sorted((name, list(shape)) for name, shape in shapes))
    return hashlib.sha256(text.encode()).hexdigest()


def _require_some(key: str, values: Sequence[object]) -> None:
    if not values:
        raise UserError(f"{key} is an empty list: give at least one")
