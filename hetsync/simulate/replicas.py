"""Real gradients: every virtual rank has its own model, optimizer and deltas, and all sums are in rank order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hetsync.config import Config
from hetsync.control.noise import Addend, NoiseScale
from hetsync.data import Data
from hetsync.data.ledger import length
from hetsync.data.loader import EpochOrder
from hetsync.data.workers import fetch
from hetsync.errors import UserError
from hetsync.optimizers import Steps, build_optimizer, momentum_of
from hetsync.plane.base import WireFormat
from hetsync.plane.wire import round_trip
from hetsync.session import weights_sha256
from hetsync.simulate.learner import Learner
from hetsync.sync.deltas import Deltas, Nesterov
from hetsync.sync.gradients import Gradients
from hetsync.sync.messages import Piece
from hetsync.sync.optimizer_state import average_optimizer_state
from hetsync.sync.sums import squared_norm
from hetsync.trainer import evaluate_range

MOST_RANKS = 64


class Replica:
    """One rank's tensors."""

    def __init__(self, config: Config, model: torch.nn.Module, random_state: torch.Tensor, total_samples: int) -> None:
        self.model = model
        self.optimizer = build_optimizer(config.optimizer, model)
        longest, batch_size = config.optimizer.max_grad_norm, config.data.batch_size
        self.steps = Steps(self.optimizer, config.schedule, longest, total_samples, batch_size)
        outer = config.sync.outer
        self.outer = Nesterov(outer.learning_rate, outer.momentum) if outer.name == "nesterov" else None
        self.gradients = Gradients(model, config.sync.bucket_bytes, lambda fraction: None, lambda: None)
        weights = [p for p in model.parameters() if p.requires_grad]
        self.local = weights + [b for b in model.buffers() if b.is_floating_point()]
        self.deltas: Deltas | None = None
        self.flight: torch.Tensor | None = None  # the addend of a round, then its sum
        self.arriving = False  # it is the sum
        self.random_state = random_state

    def delayed(self) -> Deltas:
        """Made when delayed mode begins, as in the engine."""
        if self.deltas is None:
            self.deltas = Deltas(self.local, self.outer)
        return self.deltas

    def land(self) -> None:
        if self.arriving:
            self.delayed().land()
            self.flight, self.arriving = None, False


class Replicas(Learner):
    """Trains on the CPU. The same seed gives the same weights, bit for bit."""

    learns = True

    def __init__(self, config: Config, data: Data, model: torch.nn.Module, ranks: int, total_samples: int) -> None:
        """`model` is rank 0's, with the first weights. UserError for more than 64 ranks."""
        if ranks > MOST_RANKS:
            raise UserError(f"--gradients computes for {MOST_RANKS} ranks at most, not {ranks}: leave it out")
        self._config = config
        self._data = data
        self._total_samples = total_samples
        self._order = EpochOrder(len(data.train), config.run.seed, data.costs)  # type: ignore[arg-type]
        self._newest = -1
        models = [model, *(copy.deepcopy(model) for _ in range(ranks - 1))]
        self._replicas = {
            rank: Replica(config, mine, self._seeded(rank, 0), total_samples) for rank, mine in enumerate(models)
        }
        momentum = momentum_of(self._replicas[0].optimizer)
        self._noise_of = {synchronous: NoiseScale(momentum) for synchronous in (False, True)}
        self._noise = self._noise_of[config.sync.delay_bound == 0]

    def _seeded(self, rank: int, applied: int) -> torch.Tensor:
        """The random state that a session gives its rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((self._config.run.seed, rank, applied)) & (2**63 - 1))
            return torch.get_rng_state()

    def _wire(self, drain: bool) -> WireFormat:
        return "float32" if drain else self._config.sync.wire

    # Both modes.

    def begin(self, rank: int, piece: Piece) -> None:
        replica = self._replicas[rank]
        if piece.synchronous_round is None:
            replica.delayed()
        else:
            replica.deltas = None
        replica.steps.begin(piece)

    def slice(self, rank: int, piece: Piece, index: int) -> float:
        replica, spans = self._replicas[rank], piece.slices[index]
        delayed = piece.synchronous_round is None
        torch.set_rng_state(replica.random_state)
        if not delayed:
            replica.gradients.open_slice(length(spans), last=index == len(piece.slices) - 1)
        batch = fetch(self._data.train, self._order.indices(spans), self._data.collate)
        loss = self._data.loss(replica.model, batch)
        loss.backward()
        if delayed:
            replica.steps.take()
        replica.random_state = torch.get_rng_state()
        return float(loss.detach())

    def finish(self, rank: int, piece: Piece) -> None:
        replica = self._replicas[rank]
        if piece.synchronous_round is None:
            replica.delayed().finish(piece.samples, len(piece.slices))
        else:
            replica.gradients.flush(piece.samples)

    # Delayed rounds.

    def apply(self, rank: int) -> None:
        self._replicas[rank].delayed().apply()

    def load(self, rank: int, drain: bool) -> None:
        replica = self._replicas[rank]
        replica.flight = replica.delayed().load(True, self._config.data.batch_size, self._wire(drain))

    def add(self, number: int, contributors: Sequence[int], drain: bool) -> None:
        wire = self._wire(drain)
        weighed: list[Addend] = []
        addends: list[torch.Tensor] = []
        for replica in (self._replicas[rank] for rank in contributors):
            if replica.flight is not None:
                addends.append(replica.flight)
                weighed.append(Addend(*replica.delayed().loaded, squared_norm(replica.flight)))
        total = sum_in_order(addends, wire)
        if total is not None:
            self._weigh(weighed, squared_norm(total), synchronous=False)
        for replica in self._replicas.values():
            replica.land()
            if replica.flight is None:
                replica.flight = replica.delayed().load(False, self._config.data.batch_size, wire)
            if total is not None:
                replica.flight.copy_(total)
            replica.arriving = True
        self._newest = number

    def land(self, rank: int, number: int) -> None:
        if number == self._newest:
            self._replicas[rank].land()

    def settle(self) -> None:
        for replica in self._replicas.values():
            replica.land()
            replica.delayed().settle()

    # Synchronous rounds.

    def reduce(self, number: int, round_samples: int) -> None:
        wire = self._config.sync.wire
        everyones = [replica.gradients for replica in self._replicas.values()]
        norms, norm = [0.0] * len(everyones), 0.0
        for index in range(len(everyones[0].buckets) + 1):
            assert all([gradients.released() for gradients in everyones])
            loaded = [gradients.load(index, wire) for gradients in everyones]
            total = sum_in_order([tensor for tensor, _ in loaded], loaded[0][1])
            assert total is not None
            if index < len(everyones[0].buckets):
                norms = [before + squared_norm(tensor) for before, (tensor, _) in zip(norms, loaded, strict=True)]
                norm += squared_norm(total)
            for tensor, _ in loaded:
                tensor.copy_(total)
        self._weigh([Addend(g.samples, 0, n) for g, n in zip(everyones, norms, strict=True)], norm, synchronous=True)

    def step(self, rank: int, piece: Piece) -> None:
        replica = self._replicas[rank]
        replica.gradients.collect(piece.round_samples)
        replica.steps.take()

    # What controllers see.

    def _weigh(self, addends: Sequence[Addend], norm: float, synchronous: bool) -> None:
        self._noise = self._noise_of[synchronous]
        self._noise.add(addends, norm)

    def learning_rate(self, applied: int) -> float:
        return self._config.schedule.factor(applied, self._total_samples)

    @property
    def noise_scale(self) -> float | None:
        """As a live job measures it, in the mode of the last round."""
        return self._noise.samples

    # At rest.

    def rest(self, samples: Mapping[int, int], applied: int, synchronous: bool) -> None:
        if not synchronous:
            optimizers = [replica.optimizer for replica in self._replicas.values()]
            average_states(optimizers, [samples[rank] for rank in self._replicas])
        for rank, replica in self._replicas.items():
            replica.random_state = self._seeded(rank, applied)

    def leave(self, rank: int) -> None:
        del self._replicas[rank]

    def join(self, rank: int) -> None:
        like = self._replicas[0]
        replica = Replica(self._config, copy.deepcopy(like.model), like.random_state, self._total_samples)
        replica.optimizer.load_state_dict(copy.deepcopy(like.optimizer.state_dict()))
        replica.outer = copy.deepcopy(like.outer)
        self._replicas[rank] = replica
        self._replicas = dict(sorted(self._replicas.items()))

    def evaluate(self) -> dict[str, float]:
        """Over the whole test set, with the weights that all ranks hold."""
        count, first = len(self._data.test), self._replicas[0]  # type: ignore[arg-type]
        with nullcontext() if first.deltas is None else first.deltas.showing(first.deltas.anchor):
            sums = evaluate_range(first.model, self._data, 0, count)
        return self._data.report({**sums, "samples": count})

    @property
    def anchor_sha256(self) -> str:
        first = self._replicas[0]
        return weights_sha256(first.local if first.deltas is None else [first.deltas.anchor])


def sum_in_order(addends: Sequence[torch.Tensor], wire: WireFormat) -> torch.Tensor | None:
    """As a plane sums: each addend rounded to what travels, then the sum. None for no addends."""
    if not addends:
        return None
    first, *others = [addend if wire == "float32" else round_trip(addend, wire) for addend in addends]
    total = first.clone()
    for addend in others:
        total += addend
    return total if wire == "float32" else round_trip(total, wire)


def average_states(optimizers: Sequence[torch.optim.Optimizer], samples: Sequence[int]) -> None:
    """`average_optimizer_state` of all ranks in one process, by asking each rank thrice.

    A collective cannot answer the first rank before it has heard the last. So all are heard once for what they gather,
    once for what they add, and get their answers the third time; each call replaces the states of the one before.
    """
    told: list[Any] = []
    addends: list[torch.Tensor] = []

    def ask(gather: Callable[[Any], list[Any]], allreduce: Callable[[torch.Tensor], None]) -> None:
        for optimizer, count in zip(optimizers, samples, strict=True):
            average_optimizer_state(optimizer, count, gather, allreduce)

    def hear(value: Any) -> list[Any]:
        told.append(value)
        return [([], 0)]  # nothing to average yet

    ask(hear, lambda flat: None)
    everyones = list(told)
    ask(lambda value: everyones, lambda flat: addends.append(flat.clone()))
    total = sum_in_order(addends, "float32")

    def answer(flat: torch.Tensor) -> None:
        assert total is not None
        flat.copy_(total)

    ask(lambda value: everyones, answer)
