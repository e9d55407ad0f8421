"""Plan files: what is written reads back, and every mistake is one sentence that names its key and its remedy."""

from __future__ import annotations

import pytest
import yaml
from block_graphs import graph
from hypothesis import given
from hypothesis import strategies as st

from hetsync.config.records import record
from hetsync.errors import UserError
from hetsync.plan.graph import Block, BlockGraph, Edge
from hetsync.plan.placement import Placement, Replica, Stage, as_plan_file, place, shortest_names
from hetsync.plan.plan_file import (
    ModelIdentity,
    PlanFile,
    Predicted,
    mistakes_in,
    read_plan,
    weights_digest,
    write_plan,
)

MODEL = graph(["stem", "cells.0.conv", "cells.0.norm", "cells.1.conv", "classifier"])
DIGEST = weights_digest([("stem.weight", (3, 4)), ("classifier.weight", (4,))])
PLAN = {
    "format": 1,
    "model": {"name": "nasnet", "weights_sha256": DIGEST},
    "batch_size": 160,
    "replicas": [
        {
            "share": 120,
            "micro_batches": 8,
            "stages": [
                {"ranks": [0], "blocks": ["stem", "cells.0"], "in_flight": 3},
                {"ranks": [2, 3], "blocks": ["cells.1", "classifier"]},
            ],
        },
        {"share": 40, "stages": [{"ranks": [1], "blocks": ["*"]}]},
    ],
}


def changed(keys, value=None):
    """The plan with one value replaced; None removes the key."""
    plan = yaml.safe_load(yaml.safe_dump(PLAN))
    *path, last = keys.split(".")
    inner = plan
    for key in path:
        inner = inner[int(key) if key.isdecimal() else key]
    last = int(last) if last.isdecimal() else last
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return plan


def load(tmp_path, content, ranks=4):
    """As a job does."""
    path = tmp_path / "plan.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    plan = read_plan(path)
    with mistakes_in(path):
        plan.check_job(ranks, 160, "nasnet", DIGEST)
        return place(plan, MODEL)


def test_names_become_blocks(tmp_path):
    assert load(tmp_path, PLAN) == Placement(
        (
            Replica((Stage((0,), (0, 1, 2), 3), Stage((2, 3), (3, 4))), 120, 8),
            Replica((Stage((1,), (0, 1, 2, 3, 4)),), 40),
        )
    )


def test_what_is_written_reads_back(tmp_path):
    plan = as_plan_file(
        load(tmp_path, PLAN), MODEL, 160, ModelIdentity("nasnet"), Predicted(1.5, 106.7, 2e6, {0: 10, 1: 20})
    )
    write_plan(plan, tmp_path / "written.yaml")
    assert read_plan(tmp_path / "written.yaml") == plan
    assert plan.replicas[0].stages[0].blocks == ("stem", "cells.0")


MANY = ["a", "b.0.x", "b.0.y", "b.1.x", "b.1.y", "bb", "c.d.e", "c.d.f", "c.g"]

MISTAKES = {
    "unreadable": ("replicas: [", "cannot read plan .*plan.yaml: line 1"),
    "no mapping": ([1, 2], "it holds '?\\[1, 2\\]'? instead of keys with values"),
    "unknown key": (changed("replicas.0.shares", 3), "no key replicas.0..shares .did you mean share"),
    "format": (changed("format", 2), "format is 2, and 1 is what is read here: plan anew"),
    "no format": (changed("format"), "format is missing: add it"),
    "share as text": (
        changed("replicas.0.share", "many"),
        "replicas.0..share is many: it must be a whole number",
    ),
    "no share": (changed("replicas.0.share", 0), "replicas.0..share is 0: it must be at least 1"),
    "no micro-batches": (changed("replicas.0.micro_batches", 0), "micro_batches is 0: it must be at least 1"),
    "none in flight": (changed("replicas.0.stages.0.in_flight", 0), "stages.0..in_flight is 0: it must be at least 1"),
    "no ranks": (changed("replicas.0.stages.0.ranks", []), "stages.0..ranks is an empty list: give at least one"),
    "negative rank": (changed("replicas.0.stages.0.ranks", [-1]), "stages.0..ranks.0. is -1: it must be at least 0"),
    "no blocks": (changed("replicas.0.stages.0.blocks", []), "stages.0..blocks is an empty list"),
    "no stages": (changed("replicas.0.stages", []), "replicas.0..stages is an empty list"),
    "no replicas": (changed("replicas", []), "replicas is an empty list"),
    "unknown block": (
        changed("replicas.0.stages.0.blocks", ["stem", "cell.0"]),
        "replicas.0..stages.0..blocks has cell.0, which is no block of the model .did you mean cells.0",
    ),
    "missing block": (
        changed("replicas.0.stages.0.blocks", ["stem"]),
        "replicas.0. lacks block cells.0.conv and 1 more: every block of the model needs a stage",
    ),
    "block in two stages": (
        changed("replicas.0.stages.1.blocks", ["cells", "classifier"]),
        "replicas.0. has block cells.0.conv in stages.0. and stages.1.: leave it in one place",
    ),
    "block twice": (
        changed("replicas.1.stages.0.blocks", ["*", "stem"]),
        "replicas.1. has block stem twice in stages.0.: leave it in one place",
    ),
    "rank missing": (
        changed("replicas.0.stages.1.ranks", [3]),
        "rank 2 is missing, of the job's 4: .*or start 3 ranks",
    ),
    "rank twice": (changed("replicas.1.stages.0.ranks", [0]), "rank 0 is in 2 places: leave it in one"),
    "rank beyond": (changed("replicas.1.stages.0.ranks", [4]), "places rank 4, but the job has 4: start 5 ranks"),
    "other model": (changed("model.name", "vgg"), "model.name is vgg, but the job's is nasnet: plan for this model"),
    "other weights": (
        changed("model.weights_sha256", "3f" * 32),
        "model.weights_sha256 is 3f3f3f3f3f3f…, but the job's nasnet has .*: plan for this model",
    ),
    "shares": (
        changed("replicas.1.share", 41),
        "the shares 120, 41 add up to 161, but batch_size is 160: make them equal, or leave a share out",
    ),
    "open shares": (
        changed("replicas.1", {"micro_batches": 50, "stages": [{"ranks": [1], "blocks": ["*"]}]}),
        "batch_size is 160, of which 120 are given as shares, and the other replicas need 50",
    ),
    "batch": (
        {**PLAN, "batch_size": 100, "replicas": [{"stages": [{"ranks": [0, 1, 2, 3], "blocks": ["*"]}]}]},
        "batch_size is 100, but data.batch_size is 160, to which the shares must add up",
    ),
    "more micro-batches than samples": (
        changed("replicas.1.micro_batches", 41),
        "replicas.1..micro_batches is 41, for a share of 40 samples, and each needs one: give fewer micro-batches",
    ),
    "more lockstep ranks than samples": (
        changed("replicas.0.micro_batches", 61),
        "micro_batches is 61, for a share of 120 samples, and each needs one for each of the 2 ranks of a stage",
    ),
    "stages that wait for each other": (
        changed(
            "replicas.0.stages",
            [{"ranks": [0], "blocks": ["stem", "cells.1"]}, {"ranks": [2, 3], "blocks": ["cells.0", "classifier"]}],
        ),
        "replicas.0. has stages that wait for each other: .*cells.1.conv of stages.0. needs cells.0.norm of stages.1.",
    ),
    "predicted": (
        changed(
            "predicted", {"step_seconds": 1, "samples_per_second": 1, "bytes_per_sample": 1, "memory_bytes": {"a": 1}}
        ),
        "a key of predicted.memory_bytes is a: it must be a whole number",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path, mistake):
    content, sentence = MISTAKES[mistake]
    with pytest.raises(UserError, match=sentence) as told:
        load(tmp_path, content)
    assert f"plan {tmp_path / 'plan.yaml'}: " in str(told.value)
    assert "\n" not in str(told.value)


def test_there_is_no_file(tmp_path):
    with pytest.raises(UserError, match=r"cannot read plan .*none.yaml: .*No such file"):
        read_plan(tmp_path / "none.yaml")


def test_a_tied_weight_in_two_stages():
    tied = BlockGraph((Block("embedding", "Embedding", ("embedding.weight", "output.weight"), 400),), (Edge(-1, 0),))
    plan = as_plan_file(Placement((Replica((Stage((0,), (0,)),)),)), tied, 8)
    stages = [{"ranks": [0], "blocks": ["embedding"]}, {"ranks": [1], "blocks": ["output"]}]
    two = record(PlanFile, {"format": 1, "batch_size": 8, "replicas": [{"stages": stages}]})
    assert plan.replicas[0].stages[0].blocks == ("*",)
    with pytest.raises(UserError, match="has output, whose weights are part of block embedding and cannot be apart"):
        place(two, tied)


@given(st.sets(st.integers(0, 8), min_size=1))
def test_shortest_names_stand_for_their_blocks_alone(chosen):
    model = graph(MANY)
    names = shortest_names(chosen, model.blocks)
    stages = tuple(Stage((i,), (i,)) for i in range(9) if i not in chosen)
    two = as_plan_file(Placement((Replica((Stage((9,), tuple(sorted(chosen))), *stages)),)), model, 9)
    assert two.replicas[0].stages[0].blocks == names
    assert place(two, graph(MANY, ())).replicas[0].stages[0].blocks == tuple(sorted(chosen))
