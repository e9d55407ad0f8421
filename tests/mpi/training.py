"""Small jobs through `Session`, and what must hold of every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hetsync.balance.device import Device, RealDevice
from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import ScheduleConfig, SyncConfig
from hetsync.control.process import ControlProcess
from hetsync.data.loader import EpochOrder, Source
from hetsync.emulation.device import EmulatedDevice
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256
from hetsync.sync.messages import Contributed, Task, TaskStarted
from hetsync.sync.milestones import Milestone, marks_every
from hetsync.sync.rates import ScheduleRates
from hetsync.telemetry import Telemetry
from hetsync.train.checkpoint import Loaded
from hetsync.train.control_factory import control_factory
from hetsync.train.session import AtRest, Session
from hetsync.train.tasks import Trained
from hetsync.train.terms import Scorer, Terms

SAMPLES = 192
BATCH = 24
SEED = 3
NET_SEED = 5
FEATURES, CLASSES = 6, 3

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Hook = Callable[[Session, int], None]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Blobs(Dataset[Any]):
    """Three noisy clusters; each item tells its own index."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(11)
        centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        self.points = centres[self.labels] + torch.randn(samples, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.points[index], self.labels[index], index


class Net(nn.Module):
    """With `unused`, a weight that no loss depends on. Its `batch_norm` copes with batches of one sample."""

    def __init__(self, batch_norm: bool = False, unused: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(NET_SEED)
        norm = [nn.Unflatten(1, (8, 2)), nn.BatchNorm1d(8), nn.Flatten()] if batch_norm else []
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 16), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, CLASSES)
        )
        if unused:
            self.unused = nn.Parameter(torch.ones(7))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(points)
        return scores


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def cross_entropy(model: nn.Module, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(points), labels)


@torch.no_grad()
def loss_on_all(model: nn.Module, data: Blobs, loss_of: Loss = cross_entropy) -> float:
    training = model.training
    model.eval()
    loss = loss_of(model, data.points, data.labels).item()
    model.train(training)
    return loss


def unequal_shares(ranks: int, batch: int = BATCH) -> dict[int, int]:
    """Each rank gets about twice the next one's samples, and no slice is of one."""
    weights = [2 ** (ranks - rank) for rank in range(ranks)]
    shares = [max(2, batch * weight // sum(weights)) for weight in weights]
    shares[0] += batch - sum(shares)
    return dict(enumerate(shares))


@dataclass
class Rest:
    """What one rank saw when all had come to rest."""

    applied: int
    version: int
    anchor: str
    local: str
    loss: float


@dataclass
class Outcome:
    """What one rank knows of a job that is over."""

    session: Session
    model: nn.Module
    optimizer: torch.optim.Optimizer
    first_loss: float
    rests: list[Rest] = field(default_factory=list)
    slices: list[tuple[list[int], float]] = field(default_factory=list)  # (indices, mean loss)
    staleness: list[int] = field(default_factory=list)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in local_tensors(self.model)]


def local_tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


def batches(session: Session, at_rest: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """This rank's, to the job's end; `at_rest` runs where all ranks have come to rest."""

    def rest() -> None:
        session.require_finite()
        at_rest()

    for item in session.course():
        if isinstance(item, AtRest):
            session.at_rest(rest)
        else:
            yield item


def step(session: Session, loss: torch.Tensor, clip: float | None = None) -> None:
    """After backward: the optimizers' steps, where they are due."""
    due = [steps for number, steps in enumerate(session.tasks.steps) if session.tasks.collect(number)]
    for steps in due:
        if clip is not None:
            steps.clip(steps.weights, clip)
        steps.step()
    for steps in due:
        steps.clear()
    session.tasks.add_loss(loss)


def train(
    plane: Plane,
    sync: SyncConfig,
    *,
    model: nn.Module | None = None,
    optimizer: str = "momentum",
    data: Blobs | None = None,
    samples: int = SAMPLES,
    rests: Iterable[int] = (),
    loss_of: Loss = cross_entropy,
    device: Device | None = None,
    schedule: ScheduleConfig | None = None,
    clip: float | None = None,
    on_slice: Hook = lambda session, number: None,
    at_rest: Callable[[Outcome], None] = lambda outcome: None,
    loaded: Loaded | None = None,
    timeout_seconds: float = 30.0,
    telemetry: Telemetry | None = None,
    controller: Callable[[], ControlProcess] | None = None,
    evaluate_every: int | None = None,
    scorer: Scorer | None = None,
) -> Outcome:
    """Collective: one job, from its weights to its end; `rests` are the stream positions to rest at."""
    model, data = model or Net(), data or Blobs()
    made = OPTIMIZERS[optimizer](model)
    if loaded is not None:
        from hetsync.train.checkpoint import restore

        restore(loaded, model, [made])
    progress = loaded.progress if loaded else None
    stops = sorted(position for position in rests if position < samples)

    def next_milestone(position: int) -> Milestone:
        due = next((stop for stop in stops if stop > position), samples)
        return Milestone(due, "rest", due == samples)

    profile = RankProfile("test", "here", StepTime(0.0, 1.0))
    terms = Terms(
        batch_size=BATCH,
        total_samples=samples,
        ranks=[profile] * plane.size,
        milestones=next_milestone,
        seed=SEED,
        applied=progress.samples_applied if progress else 0,
        version=progress.version if progress else 0,
        evaluations=marks_every(evaluate_every, samples),
    )
    schedule = schedule or ScheduleConfig()
    learning_rate = partial(schedule.factor, total=samples)
    session = Session(
        plane=plane,
        trained=Trained(model=model, optimizers=[made], rates=[ScheduleRates(made, learning_rate)]),
        source=Source(data),
        sync=sync,
        terms=terms,
        device=device or RealDevice(),
        telemetry=telemetry,
        timeout_seconds=timeout_seconds,
        make_control=control_factory(controller, terms.ranks, made, learning_rate) if controller is not None else None,
        scorer=scorer,
    )
    if loaded is not None and session.outer is not None:
        session.outer.velocity = loaded.outer
    outcome = Outcome(session, model, made, loss_on_all(model, data, loss_of))
    _watch_staleness(session, outcome.staleness)

    def rest() -> None:
        assert data is not None
        outcome.rests.append(
            Rest(
                session.applied,
                session.version,
                weights_sha256(session.engine.anchor),
                weights_sha256(local_tensors(model)),
                loss_on_all(model, data, loss_of),
            )
        )
        at_rest(outcome)

    try:
        for number, (points, labels, indices) in enumerate(batches(session, rest)):
            on_slice(session, number)
            loss = loss_of(model, points, labels)
            loss.backward()
            step(session, loss, clip)
            outcome.slices.append((indices.tolist(), loss.item()))
    except BaseException:
        session.release()
        raise
    session.close()
    return outcome


def _watch_staleness(session: Session, seen: list[int]) -> None:
    """Books of our own, beside the state machine's: from which version each task began, and which round took it."""
    worker = session.engine.worker
    start_task, contribute = worker.start_task, worker.contribute
    began_at: dict[int, int] = {}

    def watched_start() -> tuple[Task, TaskStarted]:
        task, began = start_task()
        if task.synchronous_round is None:
            began_at[task.number] = worker.version
        return task, began

    def watched_contribute(round_number: int) -> tuple[Contributed, int]:
        took, oldest = contribute(round_number)
        for number in [number for number in began_at if number <= took.task]:
            seen.append(round_number - began_at.pop(number))
        return took, oldest

    worker.start_task, worker.contribute = watched_start, watched_contribute  # type: ignore[method-assign]


def of_unequal_speed(rank: int, fastest: float = 1e-5) -> EmulatedDevice:
    """Rank 0 takes `fastest` seconds a sample, the next twice as long, and so on."""
    return EmulatedDevice(StepTime(0.0, fastest * 2**rank))


def plain_batches(samples: int, size: int, first: int, last: int) -> Iterator[list[int]]:
    """Indices of the batches of one process, over positions of the stream of so many samples an epoch."""
    order = EpochOrder(samples, SEED)
    for start in range(first, last, size):
        yield order.indices([(start, min(last, start + size))])


def plain_training(
    *,
    accumulation: int,
    optimizer: str,
    model: nn.Module | None = None,
    clip: float | None = None,
    samples: int = SAMPLES,
) -> tuple[list[torch.Tensor], list[float], list[list[int]]]:
    """One process and nothing but PyTorch, on batches of K·B: weights, loss and indices of each step."""
    data, model = Blobs(), model or Net()
    step = OPTIMIZERS[optimizer](model)
    losses, batches = [], []
    for indices in plain_batches(len(data), accumulation * BATCH, 0, samples):
        loss = cross_entropy(model, data.points[indices], data.labels[indices])
        step.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        step.step()
        losses.append(loss.item())
        batches.append(indices)
    return [tensor.detach() for tensor in local_tensors(model)], losses, batches


# What must hold of every job.


def assert_invariants(
    plane: Plane, outcomes: Sequence[Outcome], samples: int, bound: int | None, data_samples: int = SAMPLES
) -> None:
    """Collective; `outcomes` are of the parts of one job, in order (more than one where it was resumed)."""
    last = outcomes[-1]
    everyones = plane.gather_objects([(o.rests, [i for i, _ in o.slices], o.staleness) for o in outcomes])
    for theirs in everyones:
        assert [rests for rests, _, _ in theirs] == [rests for rests, _, _ in everyones[0]], "ranks differ at rest"
    for outcome in outcomes:
        for rest in outcome.rests:
            assert rest.local == rest.anchor, f"u is not w at rest after {rest.applied} samples"
    used = Counter(i for theirs in everyones for _, slices, _ in theirs for indices in slices for i in indices)
    epochs, rest_of_epoch = divmod(samples, data_samples)
    more = set(EpochOrder(data_samples, SEED).indices([(epochs * data_samples, samples)]))
    assert len(more) == rest_of_epoch
    assert used == Counter({i: epochs + (i in more) for i in range(data_samples) if epochs or i in more})
    staleness = [s for theirs in everyones for _, _, seen in theirs for s in seen]
    assert min(staleness, default=0) >= 0
    assert bound is None or max(staleness, default=0) <= bound
    assert last.session.applied == samples
    if last.session.coordinator is not None:
        booked = last.session.coordinator.machine
        assert booked.ended == (not last.session.stopping)
        assert booked.ledger.outstanding() == 0 or last.session.stopping


def synchronous(plane: Plane, **changes: Any) -> SyncConfig:
    return replace(SyncConfig(0, rebalance=False, pins=unequal_shares(plane.size)), **changes)


def delayed(plane: Plane, **changes: Any) -> SyncConfig:
    """Where nothing is by rule."""
    pins = unequal_shares(plane.size)
    return replace(SyncConfig(4, 0.25, grace=0, rebalance=False, wire="float32", pins=pins), **changes)
