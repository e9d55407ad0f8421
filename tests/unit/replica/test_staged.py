"""Replicas in stages, on threads that stand for ranks: they end where one process does."""

from __future__ import annotations

from copy import deepcopy
from graphlib import CycleError
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import MICRO_BATCHES, ThreadedChannels, assert_equal_to_one_process, blocks_of, on_threads, unequal
from torch import nn
from workloads import WORKLOADS, Workload

from hetsync.errors import UserError
from hetsync.plan.blocks import Cut, cut
from hetsync.plan.calls import observed_call
from hetsync.plane.base import Channels
from hetsync.replica.base import MicroBatch
from hetsync.replica.staged import StagedReplica, Stages
from hetsync.replica.whole import WholeReplica

# Larger ones of the same cells show nothing new.
MODELS = [workload for workload in WORKLOADS if not workload.name.endswith(("_mobile", "_large"))]


@pytest.mark.parametrize("workload", MODELS, ids=lambda workload: workload.name)
def test_three_stages_equal_one_process(workload: Workload, tmp_path: Path) -> None:
    data = workload.data(tmp_path)
    model, found = blocks_of(workload, data)
    stages = Stages(unequal(len(found.graph.blocks), 3), [1, 2, 0], [None, 4, 1])

    on_threads(
        3,
        lambda rank, channels: assert_equal_to_one_process(model, found, data, stages, rank, channels, "adamw", 0.5),
    )


# Pooling, which needs the LSTM, is in the block of its query.
COMPONENTS = {
    **{"attributes": 0, "path": 1, "geo_conv": 1, "lstm": 2, "upper_lstm": 2},
    **{"local": 3, "query": 4, "entire": 4},
}


def test_components_run_side_by_side(tmp_path: Path) -> None:
    """Attributes, geo-convolution, LSTM, and both heads; all micro-batches in flight."""
    workload = next(workload for workload in WORKLOADS if workload.name == "deeptte")
    data = workload.data(tmp_path)
    model, found = blocks_of(workload, data)
    stage_of = [COMPONENTS[block.name.split(".")[0]] for block in found.graph.blocks]
    stages = Stages(stage_of, range(5), [MICRO_BATCHES] * 5)

    on_threads(5, lambda rank, channels: assert_equal_to_one_process(model, found, data, stages, rank, channels))


class Skipping(nn.Module):
    """What it returns comes from its first layer, too; the second is not of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        first = self.a(x)
        last = self.c(self.b(first).detach())
        return {"first": first, "last": (last, len_of(first)), "batch": x}


def len_of(x: torch.Tensor) -> Any:
    return x.shape[0]


def skipping_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    returned = model(batch)
    last, samples = returned["last"]
    assert samples == len(batch)
    return (returned["first"] * returned["batch"] + last).square().mean()


def cut_of(model: nn.Module) -> Cut:
    return cut(model, observed_call(model, skipping_loss, torch.ones(3, 4)))


def test_what_the_model_returns_may_come_from_any_stage_and_may_be_more_than_tensors() -> None:
    batches = [MicroBatch(torch.randn(samples, 4), samples) for samples in (3, 2)]
    model = Skipping()
    alone = deepcopy(model)
    loss = WholeReplica(alone, skipping_loss).run(batches)
    found = cut_of(model)

    def work(rank: int, channels: Channels) -> None:
        own = deepcopy(model)
        stages = Stages([0, 1, 2], [0, 1, 2], [None, None, None])
        replica = StagedReplica(own, found, skipping_loss, stages, rank, channels)
        assert replica.run(batches) == pytest.approx(loss)
        for name in replica.held:
            own_gradient, wanted = own.get_parameter(name).grad, alone.get_parameter(name).grad
            assert (own_gradient is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(own_gradient, wanted)

    on_threads(3, work)


def test_evaluation_is_on_gathered_weights() -> None:
    model = Skipping()
    found = cut_of(model)
    changed = {name: tensor + 1 for name, tensor in model.state_dict().items()}

    def work(rank: int, channels: Channels) -> None:
        replica = StagedReplica(
            deepcopy(model), found, skipping_loss, Stages([0, 0, 1], [0, 1], [1, 1]), rank, channels
        )
        for name, tensor in replica.held.items():
            tensor.data.copy_(changed[name])

        def metrics(model: nn.Module, batch: float) -> dict[str, float]:
            assert all(torch.equal(tensor, changed[name]) for name, tensor in model.state_dict().items())
            return {"samples": batch, "training": float(model.training)}

        assert replica.evaluate(metrics, [2.0, 3.0]) == {"samples": 5.0, "training": 0.0}
        assert replica.model.training

    on_threads(2, work)


def test_a_loss_that_takes_weights_itself_is_refused() -> None:
    model = Skipping()
    found = cut_of(model)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return skipping_loss(model, batch) + model.a.weight.square().sum()

    def work(rank: int, channels: Channels) -> None:
        stages = Stages([0, 0, 1], [0, 1], [1, 1])
        replica = StagedReplica(deepcopy(model), found, loss, stages, rank, channels)
        batches = [MicroBatch(torch.ones(3, 4), 3)]
        if rank == 0:
            replica.run(batches)
            return
        with pytest.raises(UserError, match=r"computes with a\.weight itself, which rank 0 holds"):
            replica.run(batches)
        channels.send(0.0, [], 0)  # the loss that rank 0 waits for

    on_threads(2, work)


def test_stages_that_wait_for_each_other_are_refused() -> None:
    model = Skipping()
    with pytest.raises(CycleError):
        StagedReplica(
            model, cut_of(model), skipping_loss, Stages([0, 1, 0], [0, 1], [1, 1]), 0, ThreadedChannels(0, {})
        )


class Branching(Skipping):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return super().forward(x) if x.sum() > 0 else {}


def test_a_model_that_cannot_be_cut_is_refused_with_the_line() -> None:
    model = Branching()
    with pytest.raises(UserError, match=r"Branching cannot be cut into stages: test_staged.py:\d+ .* one rank"):
        StagedReplica(model, cut_of(model), skipping_loss, Stages([0], [0], [1]), 0, ThreadedChannels(0, {}))


@pytest.mark.parametrize("ranks", [[0, 0], [0], [0, 1, 2]])
def test_stages_and_ranks_must_match(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="stages"):
        Stages([0, 1], ranks, [1] * len(ranks))
