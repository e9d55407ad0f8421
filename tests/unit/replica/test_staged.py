"""Replicas in stages, on threads that stand for ranks: they end where one process does."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from graphlib import CycleError
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from replicas import (
    MICRO_BATCHES,
    OPTIMIZERS,
    ThreadedChannels,
    Trained,
    assert_equal_to_one_process,
    blocks_of,
    on_threads,
    one_piece,
    train,
    trained_alone,
    unchanging,
    unequal,
)
from torch import nn
from torch.utils.data import TensorDataset
from workloads import WORKLOADS, Workload

from hetsync.balance.profile import StepTime
from hetsync.data import Data
from hetsync.data.evaluation import evaluate_range
from hetsync.data.random_state import set_aside
from hetsync.errors import UserError
from hetsync.plan.blocks import Cut, cut
from hetsync.plan.calls import Scored, observed_call
from hetsync.plan.division import Division
from hetsync.plane.base import Channels
from hetsync.profiling.measure import batch_of
from hetsync.replica import staged
from hetsync.replica.base import MicroBatch, MicroBatches, Piece
from hetsync.replica.scores import forward_outside_of_training
from hetsync.replica.staged import StagedReplica, Stages
from hetsync.replica.whole import WholeReplica

# Larger ones of the same cells show nothing new.
MODELS = [workload for workload in WORKLOADS if not workload.name.endswith(("_mobile", "_large"))]


# Ranks of the stages, and most micro-batches in flight.
CHAINS: dict[int, tuple[list[list[int]], list[int | None]]] = {
    2: ([[1], [0]], [None, None]),
    3: ([[1], [2], [0]], [None, 4, 1]),
    4: ([[2], [0], [3], [1]], [MICRO_BATCHES] * 4),
}
CLIP = 0.05


class Prepared(NamedTuple):
    model: nn.Module
    found: Cut
    data: Data
    alone: dict[str, Trained]  # by optimizer


@pytest.fixture(scope="module", params=MODELS, ids=lambda workload: workload.name)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    data = request.param.data(tmp_path_factory.mktemp(request.param.name))
    model, found = blocks_of(request.param, data)
    alone = {optimizer: trained_alone(model, data, optimizer, CLIP) for optimizer in OPTIMIZERS}
    assert all(min(told[1::2]) > CLIP for told, _ in alone.values())  # every other one is a norm
    return Prepared(model, found, data, alone)


@pytest.mark.each_value
@pytest.mark.parametrize(("count", "optimizer"), [(2, "sgd"), (3, "adamw"), (4, "sgd")])
def test_stages_equal_one_process(prepared: Prepared, count: int, optimizer: str) -> None:
    """Unequal ones of every model, with uneven micro-batches and clipped gradients."""
    model, found, data, alone = prepared
    stages = Stages(unequal(len(found.graph.blocks), count), *CHAINS[count])

    def work(rank: int, channels: Channels) -> None:
        assert_equal_to_one_process(model, found, data, stages, rank, channels, optimizer, CLIP, alone[optimizer])

    on_threads(count, work)


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
    stages = Stages(stage_of, [[rank] for rank in range(5)], [MICRO_BATCHES] * 5)

    alone = trained_alone(model, data, "sgd", None)

    def work(rank: int, channels: Channels) -> None:
        assert_equal_to_one_process(model, found, data, stages, rank, channels, alone=alone)

    on_threads(5, work)


class Heads(nn.Module):
    """Two, of which neither needs the other."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.trunk(x)
        return self.left(values), self.right(values)


def heads_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    left, right = model(batch)
    loss: torch.Tensor = (left * right).square().mean()
    return loss


def test_blocks_do_not_wait_for_what_only_the_loss_needs() -> None:
    """The left head's forward pass waits for the right one's, on the stage that computes the loss of both."""
    model, alone, batches = Heads(), Heads(), [one_piece(torch.randn(3, 4)), one_piece(torch.randn(2, 4))]
    alone.load_state_dict(model.state_dict())
    loss = WholeReplica(alone, heads_loss).run(batches)
    found = cut(model, observed_call(model, heads_loss, torch.ones(3, 4)))
    gone, in_time = threading.Semaphore(0), list[bool]()

    def work(rank: int, channels: Channels) -> None:
        own = deepcopy(model)
        own.right.register_forward_hook(lambda *_: gone.release())
        own.left.register_forward_pre_hook(lambda *_: in_time.append(gone.acquire(timeout=20)))
        stages = Stages([0, 1, 2], [[0], [1], [2]], [None, None, None])
        replica = StagedReplica(own, found, heads_loss, stages, rank, channels)
        assert replica.run(batches) == pytest.approx(loss)
        for name, weight in own.named_parameters():
            if name in replica.held:
                torch.testing.assert_close(weight.grad, alone.get_parameter(name).grad)

    on_threads(3, work)
    assert in_time == [True, True]


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
    batches = [one_piece(torch.randn(samples, 4)) for samples in (3, 2)]
    model = Skipping()
    alone = deepcopy(model)
    loss = WholeReplica(alone, skipping_loss).run(batches)
    found = cut_of(model)

    def work(rank: int, channels: Channels) -> None:
        own = deepcopy(model)
        stages = Stages([0, 1, 2], [[0], [1], [2]], [None, None, None])
        replica = StagedReplica(own, found, skipping_loss, stages, rank, channels)
        assert replica.run(batches) == pytest.approx(loss)
        for name in replica.held:
            own_gradient, wanted = own.get_parameter(name).grad, alone.get_parameter(name).grad
            assert (own_gradient is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(own_gradient, wanted)

    on_threads(3, work)


# Two on the first stage, of which one is three times as fast, and three on the last.
SHARED = Stages([0, 1, 2], [[3, 0], [1], [5, 2, 4]], [None, 3, 1], [StepTime(0.0, t) for t in (1, 1, 3, 3, 1, 1)])


@pytest.mark.parametrize(("name", "least"), [("digits_cnn", 1), ("deeptte", 1), ("deeptte", 2)])
def test_ranks_share_stages(name: str, least: int, tmp_path: Path) -> None:
    """Their micro-batches come in pieces, which one process accumulates, too: batch norm sees as many samples at once.
    Its buffers then are a mean of what the ranks' have become."""
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    data = workload.data(tmp_path)
    model, found = blocks_of(workload, data)
    stages = replace(SHARED, stage_of=unequal(len(found.graph.blocks), 3), least=least)
    alone = deepcopy(model)
    expected = train(WholeReplica(alone, data.loss), data, "sgd", 0.5, stages.division)
    wanted = dict(alone.named_parameters())

    def work(rank: int, channels: Channels) -> None:
        replica = StagedReplica(deepcopy(model), found, data.loss, stages, rank, channels)
        replica.release()
        assert train(replica, data, "sgd", 0.5, stages.division) == pytest.approx(expected, rel=1e-5)
        whole = replica.whole({4})
        assert (whole is None) == (rank != 4)
        for name, weight in whole.named_parameters() if whole is not None else ():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-5, atol=1e-6)  # sums are in single precision
        assert set(replica.merged({rank: rank})) == ({0, 1, 5} if rank == 0 else {rank})

    on_threads(6, work)


def test_ranks_that_share_all_of_a_model_need_not_cut_it() -> None:
    model, alone = Branching(), Branching()
    alone.load_state_dict(model.state_dict())
    division = Division([[1, 0]], [StepTime(0.0, 1.0), StepTime(0.0, 2.0)])
    data = Data(TensorDataset(torch.arange(28.0).reshape(7, 4)), TensorDataset(torch.ones(5, 4)))
    batches = MicroBatches(data.train, lambda rows: torch.stack([row for (row,) in rows]), 3, division)(range(7))
    loss = WholeReplica(alone, skipping_loss).run(batches)
    assert [[piece.samples for piece in each.pieces] for each in batches] == [[1, 2], [1, 1], [1, 1]]

    def work(rank: int, channels: Channels) -> None:
        own = deepcopy(model)
        replica = WholeReplica(own, skipping_loss, None, division, rank, channels)
        assert replica.run(batches) == pytest.approx(loss)
        torch.testing.assert_close(own.a.weight.grad, alone.a.weight.grad)
        assert replica.passes.samples == (4 if rank == 0 else 3)

    on_threads(2, work)


# One with a part that only training has, one with packed sequences, and one with translations.
SCORED = [workload for workload in WORKLOADS if workload.name in ("inception_v3", "deeptte", "ptb_lstm", "nmt")]


@pytest.mark.parametrize("workload", SCORED, ids=lambda workload: workload.name)
def test_metrics_are_those_of_the_whole_model(workload: Workload, tmp_path: Path) -> None:
    """Through the stages, but for translations, which ask for more than forward."""
    data = workload.data(tmp_path)
    model = workload.model(data).train()
    found = cut(model, observed_call(model, data.loss, batch_of(data, 3, torch.device("cpu"))))
    stages = Stages(unequal(len(found.graph.blocks), 3), [[1], [2, 3], [0]], [1, 1, 1], [StepTime(0.0, 1.0)] * 4)
    scoring = forward_outside_of_training(model, data, torch.device("cpu"))
    assert (scoring is None) == (workload.name == "nmt")
    wanted = evaluate_range(model, data, 2, 19)
    parts: dict[int, dict[str, float]] = {}

    def work(rank: int, channels: Channels) -> None:
        own = deepcopy(model)
        replica = StagedReplica(own, found, data.loss, stages, rank, channels, scoring=scoring)
        replica.release()
        parts[rank] = replica.evaluate(data, 2, 19)
        assert own.training

    on_threads(4, work)
    assert [rank for rank in range(4) if parts[rank]] == ([0, 1, 2, 3] if workload.name == "nmt" else [0])
    found_sums = {name: sum(part.get(name, 0.0) for part in parts.values()) for name in wanted}
    assert found_sums == pytest.approx(wanted, rel=1e-4)


def in_pieces(model: nn.Module, batch: Any) -> dict[str, float]:
    """Metrics that call the model once for few samples, so that the scores of many take no memory at once."""
    return {"loss": sum(len(piece) * skipping_loss(model, piece).item() for piece in batch[0].split(32))}


def test_metrics_of_more_samples_than_the_model_is_called_with_at_once() -> None:
    """As the Penn Treebank's, of 256 windows in pieces of 32."""
    model, samples = Skipping(), TensorDataset(torch.randn(100, 4))
    data = Data(samples, samples, skipping_loss, in_pieces)
    found, scoring = cut_of(model), forward_outside_of_training(model, data, torch.device("cpu"))
    assert scoring is not None
    parts: dict[int, dict[str, float]] = {}

    def work(rank: int, channels: Channels) -> None:
        stages = Stages([0, 0, 1], [[0], [1]], [1, 1])
        replica = StagedReplica(deepcopy(model), found, skipping_loss, stages, rank, channels, scoring=scoring)
        parts[rank] = replica.evaluate(data, 0, 100)

    on_threads(2, work)
    found_loss = sum(part.get("loss", 0.0) for part in parts.values())
    assert found_loss == pytest.approx(evaluate_range(model, data, 0, 100)["loss"], rel=1e-5)


def test_a_rank_keeps_no_weights_of_other_stages() -> None:
    model = Skipping()
    found = cut_of(model)

    def work(rank: int, channels: Channels) -> None:
        own = deepcopy(model)
        replica = StagedReplica(own, found, skipping_loss, Stages([0, 0, 1], [[0], [1]], [1, 1]), rank, channels)
        replica.release()
        kept = {name for name, weight in own.named_parameters() if weight.untyped_storage().nbytes() == weight.nbytes}
        assert kept == set(replica.held)
        replica.run([one_piece(torch.ones(3, 4)), one_piece(torch.ones(2, 4))])
        optimizer = torch.optim.SGD(replica.parameters, 0.1, momentum=0.9)
        optimizer.step()
        weights = sum(weight.nbytes for weight in replica.parameters)
        least = sum(3 * weight.nbytes if weight.grad is not None else weight.nbytes for weight in replica.parameters)
        assert least < replica.memory.bytes(optimizer) < 3 * weights + 2000

    on_threads(2, work)


def test_a_loss_that_takes_weights_itself_is_refused() -> None:
    model = Skipping()
    found = cut_of(model)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return skipping_loss(model, batch) + model.a.weight.square().sum()

    def work(rank: int, channels: Channels) -> None:
        stages = Stages([0, 0, 1], [[0], [1]], [1, 1])
        replica = StagedReplica(deepcopy(model), found, loss, stages, rank, channels)
        batches = [one_piece(torch.ones(3, 4))]
        if rank == 0:
            replica.run(batches)
            return
        with pytest.raises(UserError, match=r"computes with a\.weight itself, which rank 0 holds"):
            replica.run(batches)
        channels.send(0.0, [], 0)  # the loss that rank 0 waits for

    on_threads(2, work)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have one random state between them; ranks that are processes have one each."""
    lock = threading.Lock()

    @contextmanager
    def alone(*devices: torch.device, seed: int | None = None) -> Iterator[None]:
        with lock, set_aside(*devices, seed=seed):
            yield

    monkeypatch.setattr(staged, "set_aside", alone)


def losses_of_two_stages(loss: Scored, batches: Sequence[MicroBatch], seeds: Sequence[int] = (0,)) -> list[float]:
    """Of layers that return what they are given; after each of the seeds."""
    model = unchanging(2)
    found, told = cut(model, observed_call(model, loss, batches[0].pieces[0].batch)), list[float]()

    def work(rank: int, channels: Channels) -> None:
        stages = Stages([0, 1], [[0], [1]], [None, None])
        replica = StagedReplica(deepcopy(model), found, loss, stages, rank, channels)
        for seed in seeds:
            replica.seed_losses(seed)
            value = replica.run(batches)
            if rank == 1:
                told.append(value)

    on_threads(2, work)
    return told


@pytest.mark.usefixtures("in_turn")
def test_what_the_loss_draws_is_the_same_on_all_stages() -> None:
    """The call of the model is the first one's, what comes after it the last one's."""
    drawn: list[float] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noisy = x + torch.rand_like(x) + np.random.rand() + random.random()
        difference: torch.Tensor = (model(noisy) - noisy).square().mean()
        drawn.append(noisy[0, 0].item())
        return difference

    assert losses_of_two_stages(loss, [one_piece(torch.zeros(2, 4))] * 3, seeds=(1, 2, 1)) == [0.0, 0.0, 0.0]
    assert len(set(drawn)) == 6  # of each micro-batch others, and after another seed
    assert drawn[:3] == drawn[6:]


@pytest.mark.usefixtures("in_turn")
def test_a_loss_may_change_its_batch_in_place() -> None:
    """It runs on it twice: once for its call of the model, and once after that."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        target, x = batch.pop("target"), batch["x"].add_(1)
        difference: torch.Tensor = (model(x) - target).square().mean()
        return difference

    batches = [MicroBatch([Piece({"x": torch.zeros(2, 4), "target": torch.ones(2, 4)}, 2)])]
    assert losses_of_two_stages(loss, batches) == [0.0]


def test_stages_that_wait_for_each_other_are_refused() -> None:
    model = Skipping()
    with pytest.raises(CycleError):
        StagedReplica(
            model, cut_of(model), skipping_loss, Stages([0, 1, 0], [[0], [1]], [1, 1]), 0, ThreadedChannels(0, {})
        )


class Branching(Skipping):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return super().forward(x) if x.sum() > 0 else {}


def test_a_model_that_cannot_be_cut_is_refused_with_the_line() -> None:
    model = Branching()
    with pytest.raises(UserError, match=r"Branching cannot be cut into stages: test_staged.py:\d+ .* one rank"):
        StagedReplica(model, cut_of(model), skipping_loss, Stages([0], [[0]], [1]), 0, ThreadedChannels(0, {}))


@pytest.mark.parametrize("ranks", [[[0], [0]], [[0]], [[0], [1], [2]], [[0, 1], [1]]])
def test_stages_and_ranks_must_match(ranks: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="stages"):
        Stages([0, 1], ranks, [1] * len(ranks))
