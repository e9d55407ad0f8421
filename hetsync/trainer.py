"""The training job of one rank, from recipe to summary."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hetsync import checkpoint, data, models
from hetsync.config import Config
from hetsync.control.actions import Actions, Limits
from hetsync.control.process import ControlProcess
from hetsync.data import Data
from hetsync.data.loader import Source, to_device
from hetsync.data.workers import fetch
from hetsync.disk import write_atomically
from hetsync.emulate import Device, RealDevice, emulated_device
from hetsync.optimizers import build_optimizer
from hetsync.plane.base import Plane
from hetsync.plane.emulated_link import EmulatedLink
from hetsync.profiling.cluster import Cluster, load_cluster
from hetsync.profiling.measure import Subject, choose_device, find_place, limit_threads, measure_ranks
from hetsync.session import Evaluator, Plan, RankProfile, Session, choose_shares, settings_of
from hetsync.slicing import apportion
from hetsync.stop import StopSignal
from hetsync.summary import summarise
from hetsync.sync.messages import Settings
from hetsync.sync.milestones import Evaluation, marks_every, rests_at
from hetsync.telemetry import Telemetry
from hetsync.terminal import Display, Silence, Terminal

STOPPED = 85  # exit status: saved, to be resumed (launch/slurm.sbatch requeues on it)
EVALUATION_BATCH = 256


class Trainer(Evaluator):
    def __init__(self, config: Config, plane: Plane, run: Path, loaded: checkpoint.Loaded | None) -> None:
        """Collective. `loaded` is where to go on from, the same on all ranks."""
        self.config = config
        self.plane = plane
        self.run_folder = run
        self.metrics: dict[str, float] = {}
        self.began = time.monotonic()
        self._loaded = loaded
        self._train_seconds_before = loaded.progress.train_seconds if loaded else 0.0
        self.cluster = load_cluster(config.emulate) if config.emulate is not None else None
        if self.cluster is not None:
            self.cluster.device_of(plane.size - 1)  # is there one for every rank?
        place = find_place(plane)
        limit_threads(place, self.cluster is not None)
        torch.manual_seed(config.run.seed)
        self.data = data.build(config.data.name, config.data.options)
        self.model = models.build_for(self.data, config.model.name, config.model.options)
        self.model.to(choose_device(config.run.device, place))
        self.optimizer = build_optimizer(config.optimizer, self.model)
        if loaded is not None:
            checkpoint.restore(loaded, self.model, self.optimizer)
        self.total = config.run.samples or round(config.run.epochs * len(self.data.train))  # type: ignore[arg-type]
        subject = Subject(plane, config, self.model, self.data, place)
        self.profiles = measure_ranks(subject, self.cluster)
        self.device = make_device(self.cluster, self.profiles, plane.rank, config.run.seed, self.model)
        self.session = self._make_session()

    def _make_session(self) -> Session:
        config, loaded = self.config, self._loaded
        progress = loaded.progress if loaded else None
        same_ranks = progress is not None and progress.ranks == self.plane.size
        shares = progress.shares if progress and same_ranks else None
        shares = shares or choose_shares(config.sync, config.data.batch_size, self.profiles)
        plan = Plan(
            config.data.batch_size,
            self.total,
            self.profiles,
            rests_at(marks_every(config.run.checkpoint_every, self.total), "checkpoint", self.total),
            config.run.seed,
            progress.samples_applied if progress else 0,
            progress.version if progress else 0,
            shares,
            first_settings(config, progress),
            marks_every(config.run.evaluate_every, self.total),
        )
        session = Session(
            slowed(self.plane, self.cluster, self.model, self.profiles, shares),
            self.model,
            self.optimizer,
            Source(self.data.train, self.data.collate, self.data.costs, config.data.workers),
            config.sync,
            plan,
            self.device,
            config.schedule,
            config.optimizer.max_grad_norm,
            Telemetry(self.run_folder / "telemetry" / f"rank-{self.plane.rank:04d}.jsonl"),
            config.run.timeout_seconds,
            self._start_controller(),
            self,
        )
        if loaded is not None and session.outer is not None and loaded.outer is not None:
            session.outer.velocity = loaded.outer.to(next(self.model.parameters()).device)
        return session

    def _start_controller(self) -> ControlProcess | None:
        config = self.config
        if self.plane.rank != 0 or config.control.name == "fixed":
            return None
        log = self.run_folder / "control.log"
        return ControlProcess(config.control, config.run.seed, config.data.batch_size, log)

    def train(self, stop: StopSignal) -> int:
        """Train to the end or to a requested stop; returns the exit status."""
        session, display = self.session, self._display()
        if self.plane.rank == 0:  # mpirun hands the signal to every rank; rank 0 speaks for all
            stop.listen(session.request_stop)
        display.ranks(self.profiles, session.shares)
        try:
            for batch in session.slices(self._at_rest):
                loss = self.data.loss(self.model, batch)
                loss.backward()
                session.step(loss)
                if display.due():
                    self._show(display)
            summary = summarise(self)
        except BaseException:
            display.close(None)
            raise
        session.close()
        if self.plane.rank == 0:
            write_atomically(self.run_folder / "summary.json", json.dumps(summary, indent=1))
        display.close(summary)
        return STOPPED if session.stopping else 0

    def _display(self) -> Display:
        if self.plane.rank != 0:
            return Silence()
        return Terminal(self.total, self.session.plan.applied)

    def _show(self, display: Display) -> None:
        coordinator = self.session.coordinator
        assert coordinator is not None
        policy = coordinator.policy
        pieces = max(1, policy.staleness.total())
        mean = sum(staleness * count for staleness, count in policy.staleness.items()) / pieces
        display.progress(policy.ledger.applied, self.session.seconds_training(), coordinator.take_loss(), mean)

    # Evaluation: while training goes on, or at rest.

    @torch.no_grad()
    def score(self) -> dict[str, float]:
        """Each test sample is of one rank's part; the parts follow the shares. Emulated devices evaluate at the speed
        of the machine, so there they are equal: else fast ranks would be out of training for longer than slow ones."""
        count = len(self.data.test)  # type: ignore[arg-type]
        shares = self.session.shares if self.cluster is None else [1] * self.plane.size
        parts = apportion(count, dict(enumerate(shares)))
        first = sum(parts[rank] for rank in range(self.plane.rank))
        return evaluate_range(self.model, self.data, first, first + parts[self.plane.rank])

    def report(self, evaluation: Evaluation, train_seconds: float) -> None:
        self.metrics = self._metrics(evaluation.parts)
        self._record(evaluation.samples_applied, train_seconds)

    def _metrics(self, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = sorted({name for part in parts for name in part})
        totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
        return self.data.report({**totals, "samples": len(self.data.test)})  # type: ignore[arg-type]

    def _record(self, applied: int, train_seconds: float) -> None:
        seconds = round(self._train_seconds_before + train_seconds, 6)
        self.session.record("evaluation", samples_applied=applied, train_seconds=seconds, **self.metrics)

    def _at_rest(self) -> None:
        session, run = self.session, self.config.run
        over = session.applied == self.total
        if session.evaluation_due:
            self.metrics = self._metrics(self.plane.gather_objects(self.score()))
            if self.plane.rank == 0:
                self._record(session.applied, session.totals.train_seconds)
        if over or session.stopping or (run.checkpoint_every and session.applied % run.checkpoint_every == 0):
            self._save()

    def _save(self) -> None:
        session = self.session
        if self.plane.rank == 0:
            settings = session.settings
            progress = checkpoint.Progress(
                session.applied,
                session.version,
                self.plane.size,
                session.shares,
                settings.delay_bound,
                settings.quorum,
                settings.accumulation,
                self._train_seconds_before + session.totals.train_seconds,
            )
            outer = session.outer.velocity if session.outer is not None else None
            folder = self.run_folder / "checkpoints"
            checkpoint.save(folder, progress, self.model, self.optimizer, outer, self.config.run.keep_checkpoints)
        self.plane.barrier()


def first_settings(config: Config, progress: checkpoint.Progress | None) -> Settings:
    """The recipe's K, D and q; in a resumed run that is controlled, the K and D that were in force."""
    settings = settings_of(config.sync)
    if progress is None or config.control.name == "fixed":
        return settings
    kept = Settings(progress.delay_bound, settings.quorum, progress.accumulation)
    return Actions(Limits.of(config.control)).clipped(kept)


def evaluate_range(model: torch.nn.Module, data: Data, first: int, stop: int) -> dict[str, float]:
    """Sums of the metrics over test samples [first, stop)."""
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    training = model.training
    model.eval()
    for start in range(first, stop, EVALUATION_BATCH):
        indices = list(range(start, min(stop, start + EVALUATION_BATCH)))
        batch = to_device(fetch(data.test, indices, data.collate), device)
        for name, value in data.metrics(model, batch).items():
            sums[name] = sums.get(name, 0.0) + value
    model.train(training)
    return sums


def make_device(
    cluster: Cluster | None, profiles: list[RankProfile], rank: int, seed: int, model: torch.nn.Module
) -> Device:
    """What times this rank's slices."""
    if cluster is not None:
        return emulated_device(cluster, rank, profiles[rank].time.rate(1), seed)
    if next(model.parameters()).device.type == "cuda":
        return RealDevice(torch.cuda.synchronize)
    return RealDevice()


def slowed(
    plane: Plane,
    cluster: Cluster | None,
    model: torch.nn.Module,
    profiles: list[RankProfile],
    shares: tuple[int, ...],
) -> Plane:
    """The plane behind an emulated cluster's link."""
    if cluster is None or cluster.link is None or plane.size == 1:
        return plane
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    round_bytes = 4 * sum(tensor.numel() for tensor in tensors)
    slice_seconds = max(p.time.seconds(n) for p, n in zip(profiles, shares, strict=True))
    # One figure for the whole round, whatever the number of buckets that it travels in.
    transfer = cluster.link.seconds(round_bytes, plane.size, slice_seconds) - cluster.link.latency_seconds
    carried = 2 * (plane.size - 1) / plane.size
    rate = carried * round_bytes / transfer if transfer > 0 else float("inf")
    return EmulatedLink(plane, cluster.link.latency_seconds, rate)
