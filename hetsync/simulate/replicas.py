"""Real gradients: every virtual rank has its own model, optimizer and deltas, and all sums are in rank order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hetsync.config.schema import Config, WireFormat
from hetsync.data import Data
from hetsync.data.evaluation import evaluate_range
from hetsync.data.ledger import length
from hetsync.data.loader import EpochOrder
from hetsync.data.workers import fetch
from hetsync.errors import UserError
from hetsync.models import going_by_steps
from hetsync.plane.base import Residual
from hetsync.plane.wire import decode, deliver, encode_sum, of_gradients, round_trip
from hetsync.simulate.learner import Learner
from hetsync.sync.buffers import Unruled
from hetsync.sync.collectives import squared_norm
from hetsync.sync.deltas import make_outer
from hetsync.sync.digests import weights_sha256
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.gradients import Gradients
from hetsync.sync.group_state import GroupState, averaged
from hetsync.sync.messages import StartRound, Task
from hetsync.sync.noise_scale import Addend, NoiseScale
from hetsync.sync.optimizer_state import average_optimizer_state
from hetsync.sync.optimizers import build_optimizer, momentum_of
from hetsync.sync.rates import ScheduleRates
from hetsync.sync.sparse import known_copies
from hetsync.sync.steps import LocalSteps, Steps, require_finite
from hetsync.sync.tail import Tail, added_buffers, shared_buffers, trained_values

MOST_RANKS = 64


class Replica:
    """One rank's tensors."""

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module,
        random_state: torch.Tensor,
        total_samples: int,
        rank: int,
        ranks: int,
    ) -> None:
        """This is `rank`, of as many `ranks` as the job has begun with."""
        self.model = model
        self.optimizer = build_optimizer(config.optimizer, model)
        self.local = LocalSteps.of([self.optimizer], config.data.batch_size, ranks)
        rates = ScheduleRates(self.optimizer, partial(config.schedule.factor, total=total_samples))
        self.steps = Steps(self.optimizer, rates, self.local, max_grad_norm=config.optimizer.max_grad_norm)
        self.outer = make_outer(config.sync, config.data.batch_size)
        self.gradients = Gradients(
            model, config.sync.bucket_bytes, lambda fraction: None, lambda: None, False, rank=rank, ranks=ranks
        )
        self.unruled = Unruled(model)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.buffers, self.added = shared_buffers(model), len(added_buffers(model))
        self.fragments = config.sync.for_model(trained_values(model)).most_fragments
        self.deltas: FragmentedDeltas | None = None
        self.addends: Sequence[torch.Tensor] = ()  # of a round, then its sums; none, where it has packed none
        self.arriving = False  # they are the sums
        self.random_state = random_state

    def delayed(self) -> FragmentedDeltas:
        """Made when delayed mode begins, as in the engine."""
        if self.deltas is None:
            self.deltas = FragmentedDeltas(
                self.weights, self.outer, self.buffers, fragments=self.fragments, added=self.added
            )
        return self.deltas

    def apply_sum(self) -> None:
        if self.arriving:
            self.delayed().apply_sum()
            self.addends, self.arriving = (), False


class ReplicaLearner(Learner):
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
        models = [model, *(copy.deepcopy(model, known_copies(model)) for _ in range(ranks - 1))]
        self._replicas = {
            rank: Replica(config, mine, self._seeded(rank, 0), total_samples, rank, ranks)
            for rank, mine in enumerate(models)
        }
        self._guarded = config.sync.delay_bound == "auto" and ranks > 1
        self._kept: tuple[Any, ...] = ()  # state of the first replica, as all have it at rest
        momentum = momentum_of(self._replicas[0].optimizer)
        self._noise_of = {synchronous: NoiseScale(momentum) for synchronous in (False, True)}
        self._noise = self._noise_of[config.sync.first_delay_bound == 0]

    def _seeded(self, rank: int, applied: int) -> torch.Tensor:
        """The random state that a session gives its rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((self._config.run.seed, rank, applied)) & (2**63 - 1))
            return torch.get_rng_state()

    # Both modes.

    def begin_task(self, rank: int, task: Task) -> None:
        replica = self._replicas[rank]
        if task.synchronous_round is None:
            replica.delayed()
        else:
            replica.deltas = None
            replica.gradients.adopt_buffers()
            replica.gradients.open_task()
        replica.steps.begin_task(task)

    def compute_slice(self, rank: int, task: Task, index: int) -> float:
        replica, spans = self._replicas[rank], task.slices[index]
        delayed = task.synchronous_round is None
        torch.set_rng_state(replica.random_state)
        if not delayed:
            replica.gradients.open_slice(length(spans), last=index == len(task.slices) - 1)
        batch = fetch(self._data.train, self._order.indices(spans), self._data.collate)
        for part in going_by_steps(replica.model):
            part.step_count = task.position // self._config.data.batch_size
        loss = self._data.loss(replica.model, batch)
        replica.unruled.check()
        loss.backward()
        if delayed:
            replica.steps.step()
            replica.steps.clear()
        else:
            replica.gradients.close_slice()
        replica.random_state = torch.get_rng_state()
        return float(loss.detach())

    def finish_task(self, rank: int, task: Task) -> None:
        replica = self._replicas[rank]
        if task.synchronous_round is None:
            total = replica.delayed().finish(task.samples, len(task.slices), replica.local.lift(task))
        else:
            total = replica.gradients.flush(task.samples)
        # In a guarded job the losses that follow are not finite, and this is in no round.
        if not (self._guarded and task.synchronous_round is None):
            require_finite(total, rank, task)

    # Delayed rounds.

    def apply(self, rank: int) -> None:
        self._replicas[rank].delayed().apply()

    def pack(self, rank: int, start: StartRound) -> None:
        self._pack(self._replicas[rank], start, contributes=True)

    def _pack(self, replica: Replica, start: StartRound, contributes: bool) -> None:
        replica.addends = replica.delayed().pack(start, contributes, self._config.data.batch_size, start.wire)

    def sum_deltas(self, start: StartRound) -> None:
        for replica in self._replicas.values():
            replica.apply_sum()
            if not replica.addends:
                self._pack(replica, start, contributes=False)
        replicas = list(self._replicas.values())
        norms, norm = [0.0] * len(replicas), 0.0
        for place, parts in enumerate(zip(*(replica.delayed().summed for replica in replicas), strict=True)):
            own, summed = sum_in_place([replica.addends[place] for replica in replicas], start.wire, parts[0].residual)
            norms = [before + more for before, more in zip(norms, own, strict=True)]
            norm += summed
            sum_tails([part.tail for part in parts])
        given = [Addend(*replica.delayed().packed, own) for replica, own in zip(replicas, norms, strict=True)]
        self._measure_noise(given, norm, synchronous=False)
        for replica in replicas:
            replica.arriving = True
        self._newest = start.number

    def apply_sum(self, rank: int, number: int) -> None:
        if number == self._newest:
            self._replicas[rank].apply_sum()

    def reset_to_anchor(self) -> None:
        for replica in self._replicas.values():
            replica.apply_sum()
            replica.delayed().reset_to_anchor()

    # Synchronous rounds.

    def reduce_gradients(self, number: int, round_samples: int) -> None:
        wire = of_gradients(self._config.sync.first_wire)
        gradients_by_rank = [replica.gradients for replica in self._replicas.values()]
        norms, norm = [0.0] * len(gradients_by_rank), 0.0
        for index, bucket in enumerate(gradients_by_rank[0].buckets):
            assert all([gradients.released() for gradients in gradients_by_rank])
            packed = [gradients.pack(index, wire) for gradients in gradients_by_rank]
            own, summed = sum_in_place(packed, wire, bucket.residual)
            norms = [before + more for before, more in zip(norms, own, strict=True)]
            norm += summed
        assert all([gradients.released() for gradients in gradients_by_rank])
        sum_tails([gradients.tail for gradients in gradients_by_rank])
        addends = [Addend(each.samples, 0, n) for each, n in zip(gradients_by_rank, norms, strict=True)]
        self._measure_noise(addends, norm, synchronous=True)

    def step(self, rank: int) -> None:
        replica = self._replicas[rank]
        replica.gradients.collect()
        replica.steps.step()
        replica.steps.clear()

    # What controllers see.

    def _measure_noise(self, addends: Sequence[Addend], norm: float, synchronous: bool) -> None:
        self._noise = self._noise_of[synchronous]
        self._noise.add(addends, norm)

    def learning_rate(self, applied: int) -> float:
        return self._config.schedule.factor(applied, self._total_samples)

    @property
    def noise_scale(self) -> float | None:
        """As a live job measures it, in the mode of the last round."""
        return self._noise.samples

    # At rest.

    def at_rest(self, samples: Mapping[int, int], applied: int, synchronous: bool) -> None:
        for replica in self._replicas.values():
            replica.steps.show_owner(applied)
        if not synchronous:
            optimizers = [replica.optimizer for replica in self._replicas.values()]
            used = [samples[rank] for rank in self._replicas]
            average_states(optimizers, used)
            average_groups([replica.steps.groups for replica in self._replicas.values()], used)
        for rank, replica in self._replicas.items():
            replica.random_state = self._seeded(rank, applied)

    def keep(self) -> None:
        first = self._replicas[0]
        self._kept = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.outer))

    def go_back(self, applied: int) -> None:
        for rank, replica in self._replicas.items():
            weights, state, outer = copy.deepcopy(self._kept)
            replica.steps.show_owner(applied)
            replica.model.load_state_dict(weights)
            replica.optimizer.load_state_dict(state)
            replica.outer, replica.deltas = outer, None
            replica.addends, replica.arriving = (), False
            replica.random_state = self._seeded(rank, applied)

    def remove_rank(self, rank: int) -> None:
        del self._replicas[rank]

    def add_rank(self, rank: int) -> None:
        like = self._replicas[0]
        model, ranks = copy.deepcopy(like.model, known_copies(like.model)), like.local.ranks
        replica = Replica(self._config, model, like.random_state, self._total_samples, rank, ranks)
        replica.optimizer.load_state_dict(copy.deepcopy(like.optimizer.state_dict()))
        replica.outer = copy.deepcopy(like.outer)
        replica.gradients.tail.travel = list(like.gradients.tail.travel)
        if like.deltas is not None:
            replica.delayed().tail.travel = list(like.deltas.tail.travel)
        self._replicas[rank] = replica
        self._replicas = dict(sorted(self._replicas.items()))

    def evaluate(self) -> dict[str, float]:
        """Over the whole test set, with the weights that all ranks hold."""
        count, first = len(self._data.evaluated), self._replicas[0]  # type: ignore[arg-type]
        with nullcontext() if first.deltas is None else first.deltas.showing(first.deltas.anchor):
            sums = evaluate_range(first.model, self._data, 0, count)
        return self._data.report({**sums, "samples": count})

    @property
    def anchor_sha256(self) -> str:
        first = self._replicas[0]
        local = [*first.weights, *first.buffers]
        return weights_sha256(local if first.deltas is None else [first.deltas.anchor])


def sum_in_order(
    addends: Sequence[torch.Tensor], wire: WireFormat, residual: Residual | None = None
) -> torch.Tensor | None:
    """As a plane sums: each addend rounded to what travels, then the sum; `residual` is that of all shards. None for no
    addends."""
    if not addends:
        return None
    first, *others = [addend if wire == "float32" else round_trip(addend, wire) for addend in addends]
    total = first.clone()
    for addend in others:
        total += addend
    if wire == "float32":
        deliver(residual, total)
        return total
    return decode(encode_sum(total, wire, residual), total.numel(), wire)


def sum_in_place(addends: Sequence[torch.Tensor], wire: WireFormat, residual: Residual) -> tuple[list[float], float]:
    """All become their sum. The squared norms that they had, and the sum's."""
    total = sum_in_order(addends, wire, residual)
    assert total is not None
    norms = [float(squared_norm(addend)) for addend in addends]
    for addend in addends:
        addend.copy_(total)
    return norms, float(squared_norm(total))


def sum_tails(tails: Sequence[Tail]) -> None:
    """As the engine does, for all ranks."""
    more = True
    while more:
        total = sum_in_order([tail.flat for tail in tails], "float32")
        assert total is not None
        for tail in tails:
            tail.flat.copy_(total)
        more = all([tail.unpack() for tail in tails])


def average_groups(groups: Sequence[GroupState], samples: Sequence[int]) -> None:
    """`average_group_state` of all ranks in one process."""
    names = set().union(*(each.own for each in groups))
    for each in groups:
        each.own = set(names)
    mean = averaged([(each.told(), used) for each, used in zip(groups, samples, strict=True)])
    for each in groups:
        each.take(mean)


def average_states(optimizers: Sequence[torch.optim.Optimizer], samples: Sequence[int]) -> None:
    """`average_optimizer_state` of all ranks in one process, by asking each rank thrice.

    A collective cannot answer the first rank before it has heard the last. So all are heard once for what they gather,
    once for what they add, and get their answers the third time; each call replaces the states of the one before.
    """
    gathered: list[Any] = []
    addends: list[list[torch.Tensor]] = [[] for _ in optimizers]  # of each rank, chunk by chunk

    def ask(gather: Callable[[Any], list[Any]], allreduce: Callable[[int, torch.Tensor], None]) -> None:
        for place, (optimizer, count) in enumerate(zip(optimizers, samples, strict=True)):
            average_optimizer_state(optimizer, count, gather, partial(allreduce, place))

    def collect(value: Any) -> list[Any]:
        gathered.append(value)
        return [value._replace(keys=[], samples=0, others={})]  # nothing to average yet

    ask(collect, lambda place, flat: None)
    of_all = list(gathered)
    ask(lambda value: of_all, lambda place, flat: addends[place].append(flat.clone()))
    totals = [sum_in_order(chunk, "float32") for chunk in zip(*addends, strict=True)]
    answers = [iter(totals) for _ in optimizers]

    def answer(place: int, flat: torch.Tensor) -> None:
        total = next(answers[place])
        assert total is not None
        flat.copy_(total)

    ask(lambda value: of_all, answer)
