"""A rank's part in a job, as a training loop sees it: slices come, steps go.

    for batch in session.slices():
        loss = ...
        loss.backward()
        session.step(loss)

`trainer.py` is such a loop; `api.join` makes a session for a user's own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hetsync.config import ScheduleConfig, SyncConfig
from hetsync.control.live import LiveControl
from hetsync.control.meter import Meter
from hetsync.control.process import ControlProcess
from hetsync.data.ledger import Ledger, length
from hetsync.data.loader import Loader, Source
from hetsync.emulate import Device
from hetsync.optimizers import Steps, momentum_of
from hetsync.plane.base import Plane
from hetsync.slicing import StepTime, equal_shares, first_pinned_shares, speed_shares
from hetsync.sync.coordinator import Coordinator, Send
from hetsync.sync.deltas import Nesterov, Snapshot
from hetsync.sync.engine import Engine, EngineOptions
from hetsync.sync.messages import NO_BOUND, DrainRequested, Piece, Scored, Settings, StartRound, Tuned
from hetsync.sync.milestones import Evaluation, Marks, Milestones, no_marks
from hetsync.sync.optimizer_state import average_optimizer_state
from hetsync.sync.policy import Policy
from hetsync.sync.speeds import Speeds
from hetsync.telemetry import Telemetry

STOP = "stop requested"


class AnchorMismatchError(RuntimeError):
    """Ranks that must hold the same weights do not: an internal error."""


@dataclass(frozen=True)
class RankProfile:
    """What a rank is, measured or emulated. `cap` is the largest slice that its memory holds."""

    device: str
    host: str
    time: StepTime
    emulated: bool = False
    cap: int | None = None


@dataclass(frozen=True)
class Plan:
    """What all ranks agree on before they start.

    Args:
        batch_size: B, samples of one slice of all ranks.
        total_samples: Samples to train on, over all ranks.
        ranks: One profile a rank.
        milestones: Where all ranks come to rest.
        seed: Of sample order and of each rank's random numbers.
        applied: Samples applied before (a resumed run).
        version: Rounds completed before.
        shares: Shares to start with; None computes them from the profiles.
        settings: Settings to start with; None takes those of the recipe.
        evaluations: Where the shared weights are evaluated while training goes on.
    """

    batch_size: int
    total_samples: int
    ranks: Sequence[RankProfile]
    milestones: Milestones
    seed: int = 0
    applied: int = 0
    version: int = 0
    shares: tuple[int, ...] | None = None
    settings: Settings | None = None
    evaluations: Marks = no_marks


class Evaluator:
    """What a session does where the plan wants an evaluation. This one does nothing."""

    def score(self) -> dict[str, float]:
        """On every rank, between two pieces: sums of metrics over its part of the test data, of the model as it is."""
        return {}

    def report(self, evaluation: Evaluation, train_seconds: float) -> None:
        """On rank 0, from its communication thread, once all ranks have scored the weights of that moment."""


@dataclass
class Totals:
    """What a rank has done so far, in seconds of its main thread, and samples."""

    compute_seconds: float = 0.0
    data_seconds: float = 0.0
    train_seconds: float = 0.0
    pieces: int = 0
    samples: int = 0
    since_rest: int = 0
    anchor_sha256: str = field(default="")


def choose_shares(sync: SyncConfig, batch_size: int, ranks: Sequence[RankProfile]) -> tuple[int, ...]:
    """Samples of each rank in a slice of all."""
    caps = [profile.cap for profile in ranks]
    if sync.shares == "equal":
        return equal_shares(len(ranks), batch_size, caps, sync.pins)
    if sync.shares == "first":
        return first_pinned_shares(len(ranks), batch_size, sync.pins[0])
    return speed_shares([profile.time for profile in ranks], batch_size, caps, sync.pins)


def settings_of(sync: SyncConfig) -> Settings:
    bound = NO_BOUND if sync.delay_bound is None else sync.delay_bound
    return Settings(bound, sync.quorum, sync.accumulation)


class Session:
    def __init__(
        self,
        plane: Plane,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        source: Source,
        sync: SyncConfig,
        plan: Plan,
        device: Device,
        schedule: ScheduleConfig | None = None,
        max_grad_norm: float | None = None,
        telemetry: Telemetry | None = None,
        timeout_seconds: float = 600.0,
        controller: ControlProcess | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        """Collective. The model's weights may differ between ranks: all start from rank 0's.

        Rank 0's `controller` may change the settings while the job runs; the session closes it.
        """
        self.plane = plane
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.totals = Totals()
        self.settings = plan.settings or settings_of(sync)
        self.shares = plan.shares or choose_shares(sync, plan.batch_size, plan.ranks)
        self.applied = plan.applied
        self.version = plan.version
        self.stopping = False
        self.evaluation_due = False  # at this rest
        self.outer = Nesterov(sync.outer.learning_rate, sync.outer.momentum) if sync.outer.name == "nesterov" else None
        self._device = device
        self._schedule = schedule or ScheduleConfig()
        self._steps = Steps(optimizer, self._schedule, max_grad_norm, plan.total_samples, plan.batch_size)
        self._telemetry = telemetry or Telemetry(None)
        self._torch_device = next(model.parameters()).device
        self._loader = Loader(source, plan.seed, self._torch_device)
        self._sync = sync
        self.control: LiveControl | None = None  # on rank 0, where there is a controller
        self._controller = controller
        self._evaluator = evaluator or Evaluator()
        self._snapshot_seconds = 0.0  # of training, when the newest snapshot was made
        self._segment: tuple[float, float | None] = (0.0, None)  # seconds before, began; the latter None at rest
        controlled = bool(plane.broadcast_object(controller is not None))  # rank 0 knows
        self.engine = Engine(
            plane,
            model,
            EngineOptions(plan.batch_size, sync.wire, sync.bucket_bytes, timeout_seconds, controlled),
            self._make_coordinator if plane.rank == 0 else None,
            self.outer,
            device.pace,
            self._loader.prefetch,
            self._telemetry,
            plan.version,
        )
        self._slice_samples = 0
        self._waited_before = 0.0
        self._data_before = 0.0
        self._piece: Piece | None = None
        self._stepped = True
        self._piece_seconds = 0.0
        self._piece_loss: torch.Tensor | None = None

    def _make_coordinator(self, send: Send) -> Coordinator:
        plan, sync = self.plan, self._sync
        ledger = Ledger(plan.total_samples, plan.applied)
        shares = dict(enumerate(self.shares))
        policy = Policy(shares, self.settings, ledger, plan.milestones, plan.version, plan.evaluations)
        caps = [profile.cap for profile in plan.ranks]
        speeds = Speeds({rank: profile.time for rank, profile in enumerate(plan.ranks)}, caps, sync.pins)
        if self._controller is not None:
            times = [profile.time for profile in plan.ranks]
            solo = sum(time.rate(share) for time, share in zip(times, self.shares, strict=True))
            learning_rate = partial(self._schedule.factor, total=plan.total_samples)
            meter = Meter(policy, times, solo, momentum=momentum_of(self.optimizer), learning_rate=learning_rate)
            self.control = LiveControl(self._controller, meter, self.seconds_training, self._telemetry)
        rebalance = sync.rebalance and sync.shares == "speed"
        return Coordinator(policy, speeds, send, rebalance, self.control, self._report)

    @property
    def coordinator(self) -> Coordinator | None:
        """On rank 0."""
        return self.engine.coordinator

    def slices(self, at_rest: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """This rank's batches, until the samples are used up or a stop was requested.

        After each, call `step` once. `at_rest` runs on every rank when all have come to rest with the same
        weights: to evaluate, to save.
        """
        self._seed_ranks()
        self._share_first_weights()
        self.plane.barrier()
        self.engine.start()
        self._segment = (0.0, time.monotonic())
        while True:
            work = self.engine.next_work()
            if isinstance(work, Piece):
                yield from self._piece_slices(work)
            elif isinstance(work, Snapshot):
                self._score(work)
            else:
                began = self._stop_clock()
                self._come_to_rest(work)
                at_rest()
                self.record("rest", reason=work.drain, seconds=round(time.monotonic() - began, 6))
                if work.final or self.stopping:
                    return
                self._seed_ranks()
                self._segment = (self.totals.train_seconds, time.monotonic())

    def _stop_clock(self) -> float:
        """What follows is not training; returns the moment."""
        self.totals.train_seconds = self.seconds_training()
        self._segment = (self.totals.train_seconds, None)
        return time.monotonic()

    def _score(self, snapshot: Snapshot) -> None:
        """This rank's part of an evaluation, between two pieces."""
        began = self._stop_clock()
        self._snapshot_seconds = self.totals.train_seconds - (began - snapshot.made_at)
        with self.engine.showing(snapshot), torch.random.fork_rng(devices=[]):
            sums = self._evaluator.score()
        ended = time.monotonic()
        self._segment = (self.totals.train_seconds, ended)
        self.record("score", round=snapshot.round, seconds=round(ended - began, 6))
        self.engine.tell(Scored(self.plane.rank, snapshot.round, sums))

    def _report(self, evaluation: Evaluation) -> None:
        self._evaluator.report(evaluation, self._snapshot_seconds)

    def _piece_slices(self, piece: Piece) -> Iterator[Any]:
        self._piece, self._piece_seconds, self._piece_loss = piece, 0.0, None
        self._steps.begin(piece)
        batches = iter(self._loader.slices(piece))
        for index, spans in enumerate(piece.slices):
            began = time.monotonic()
            batch = next(batches)
            self.totals.data_seconds += time.monotonic() - began
            samples = length(spans)
            self.engine.open_slice(piece, samples, last=index == len(piece.slices) - 1)
            self._slice_samples = samples
            self._stepped = False
            self._device.begin(samples)
            yield batch
            if not self._stepped:
                raise RuntimeError("call session.step(loss) once after each slice's backward")
        self._finish(piece)

    def step(self, loss: torch.Tensor | None = None) -> None:
        """After backward: the optimizer's step, where one is due. `loss` is the slice's mean, for the records."""
        assert self._piece is not None
        if self._stepped:
            raise RuntimeError("session.step was called twice for one slice")
        self._stepped = True
        delayed = self._piece.synchronous_round is None
        if delayed:
            self._steps.take()
        self._piece_seconds += self._device.end()
        if loss is not None:
            weighted = loss.detach() * self._slice_samples
            self._piece_loss = weighted if self._piece_loss is None else self._piece_loss + weighted
        if delayed:
            self.engine.close_slice()

    def _finish(self, piece: Piece) -> None:
        if piece.synchronous_round is not None:
            self.engine.reduce(piece)
            self._steps.take()
        loss_sum = 0.0 if self._piece_loss is None else float(self._piece_loss)
        self.engine.finish(piece, self._piece_seconds, loss_sum)
        totals = self.totals
        totals.compute_seconds += self._piece_seconds
        totals.pieces += 1
        totals.samples += piece.samples
        totals.since_rest += piece.samples
        self.record(
            "piece",
            piece=piece.number,
            samples=piece.samples,
            slices=len(piece.slices),
            version=self.engine.worker.version,
            compute_seconds=round(self._piece_seconds, 6),
            data_seconds=round(totals.data_seconds - self._data_before, 6),
            wait_seconds=round(self.engine.spent.wait_seconds - self._waited_before, 6),
            loss=loss_sum / piece.samples if piece.samples else None,
        )
        self._waited_before = self.engine.spent.wait_seconds
        self._data_before = totals.data_seconds

    def record(self, kind: str, **fields: Any) -> None:
        """One line of this rank's telemetry."""
        self._telemetry.record(kind, **fields)

    def seconds_training(self) -> float:
        """Seconds from the first slice on, less those at rest."""
        before, began = self._segment  # in one step: rank 0's communication thread asks, too
        return before if began is None else before + time.monotonic() - began

    def tune(self, settings: Settings) -> None:
        """On any rank: new K, D and q for the work handed out from now on (the controller's handle)."""
        self.engine.tell(Tuned(settings))

    # At rest.

    def request_stop(self) -> None:
        """Come to rest as soon as possible and end `slices` there; a resume goes on from that point."""
        self.engine.tell(DrainRequested(STOP))

    def _come_to_rest(self, drained: StartRound) -> None:
        self.version = drained.number + 1
        self.stopping = drained.drain == STOP
        self.evaluation_due = drained.evaluate or drained.final
        told = self.plane.broadcast_object(self._state_of_policy())
        self.applied, self.settings, self.shares = told
        if not drained.synchronous:
            average_optimizer_state(
                self.optimizer, self.totals.since_rest, self.plane.gather_objects, self.engine.allreduce
            )
        self.totals.since_rest = 0
        self._compare_anchors(drained.synchronous)

    def _state_of_policy(self) -> tuple[int, Settings, tuple[int, ...]] | None:
        if self.coordinator is None:
            return None
        policy = self.coordinator.policy
        return policy.ledger.applied, policy.settings, tuple(m.share for m in policy.members.values())

    def _compare_anchors(self, synchronous: bool) -> None:
        mine = weights_sha256(self.engine.anchor)
        kinds = self.plane.gather_objects((mine, self._torch_device.type))
        self.totals.anchor_sha256 = kinds[0][0]
        if all(theirs == mine for theirs, _ in kinds):
            return
        if synchronous and len({kind for _, kind in kinds}) > 1:
            # CPUs and GPUs round an optimizer's step differently; nothing else may differ.
            self._share_first_weights()
            return
        odd = [rank for rank, (theirs, _) in enumerate(kinds) if theirs != kinds[0][0]]
        raise AnchorMismatchError(f"ranks {odd} hold other weights than rank 0 at version {self.version}")

    @torch.no_grad()
    def _share_first_weights(self) -> None:
        """All ranks take over rank 0's weights and buffers."""
        state = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.plane.broadcast_object(state if self.plane.rank == 0 else None))

    def _seed_ranks(self) -> None:
        """Dropout and augmentation draw alike after a resume and in the uninterrupted run."""
        torch.manual_seed(hash((self.plan.seed, self.plane.rank, self.applied)) & (2**63 - 1))

    def close(self) -> None:
        """Collective at a regular end."""
        self.engine.stop()
        if self.control is not None:
            self.control.close()
        self._loader.close()
        self._telemetry.close()


def weights_sha256(tensors: Sequence[torch.Tensor]) -> str:
    """Digest of the tensors' bytes, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
