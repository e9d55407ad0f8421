"""Replicas that train under delayed synchronisation, each on one rank or several.

Policy, coordinator and rounds know the leaders only (`sync/engine.py`); the other ranks of a replica follow theirs
(`sync/follower.py`). All come to rest where something is saved or evaluated, and hold the same then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from hetsync.balance.profile import StepTime
from hetsync.balance.speed_tracker import Speeds
from hetsync.data.ledger import Ledger, length
from hetsync.emulation.link import EmulatedSums, Way
from hetsync.plane.base import Sums
from hetsync.plane.some_ranks import SomeRanks
from hetsync.replica.holders import Counters, average_over_holders
from hetsync.replica.segments import segments_of
from hetsync.stop_signal import StopSignal
from hetsync.sync.buffers import Unruled, merged_at_rest
from hetsync.sync.coordinator import Coordinator, Send, as_messages
from hetsync.sync.engine import Engine
from hetsync.sync.follower import Follower
from hetsync.sync.log import Followers
from hetsync.sync.messages import DrainRequested, StartRound, Task
from hetsync.sync.milestones import CHECKPOINT, STOP
from hetsync.sync.segmented import Segment
from hetsync.sync.shared_state import EngineOptions
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.sync.steps import LocalSteps, Steps
from hetsync.sync.tail import added_buffers, shared_buffers
from hetsync.train.planned_terms import STAGE, PlannedTerms, Replicas, Rest, memory_of_plans


class DelayedReplicas(Replicas):
    def __init__(self, terms: PlannedTerms) -> None:
        """Collective. All ranks hold the same weights. Nobody else uses the channels but the replica, and at rests."""
        assert terms.channels is not None
        at = terms.at
        self._at, self._assignment, self._replica, self._loader = at, terms.assignment, terms.replica, terms.loader
        self._channels, self._books = terms.channels, terms.books
        self._milestones, self._total, self._save_due = terms.milestones, terms.total, terms.save_due
        self._save_asked = False
        self._rank = at.plane.rank
        self._leaders = [each.leader for each in self._assignment.placement.replicas]
        self._speaks = self._assignment.speaks(self._rank)
        self._segments = segments_of(self._assignment.placement, self._assignment.cut.graph)
        model = self._replica.model
        rules = {name: rule for name, (_, rule) in merged_at_rest(model).items()}
        self._counters, self._unruled = Counters(self._replica.held, rules), Unruled(model)
        config = at.config
        norm, batch = config.optimizer.max_grad_norm, config.data.batch_size
        self._local = LocalSteps.of([terms.optimizer], batch, len(self._leaders))
        self._steps = Steps(terms.optimizer, terms.rates, self._local, max_grad_norm=norm)
        self._samples = 0  # of this replica, since the last rest
        self._rested_at = self._books.applied
        self._opened: list[Sums] = []
        self._part = self._make_part()

    # Making it.

    def _make_part(self) -> Engine | Follower:
        at, held = self._at, self._open_segments()
        options = EngineOptions(
            batch=at.config.data.batch_size,
            timeout_seconds=at.config.run.timeout_seconds,
            on_host=at.device.type == "cpu",
        )
        prefetch, telemetry, version = self._loader.prefetch, self._books.telemetry, self._books.steps
        planned = self._assignment.replica_of(self._rank)
        if self._rank != planned.leader:
            return Follower(
                at.plane,
                planned.leader,
                at.device,
                held,
                options,
                on_task=prefetch,
                telemetry=telemetry,
                version=version,
            )
        plane = SomeRanks(at.plane, self._leaders)
        ranks = [rank for stage in planned.stages for rank in stage.ranks if rank != planned.leader]
        return Engine(
            plane,
            self._replica.model,
            options,
            coordinator=self._make_coordinator if self._rank == 0 else None,
            on_task=prefetch,
            telemetry=telemetry,
            version=version,
            segments=held,
            followers=Followers(plane, ranks),
        )

    def _open_segments(self) -> list[Segment]:
        """Those that this rank holds, and that have something to sum."""
        held, shared = self._replica.held, {id(buffer) for buffer in shared_buffers(self._replica.model)}
        added = {id(buffer) for buffer in added_buffers(self._replica.model)}
        way, found = Way(), []
        for holders, names in sorted(self._segments.items()):
            own = [held[name] for name in names] if self._rank in holders else []
            weights = [tensor for tensor in own if tensor.requires_grad]
            buffers = sorted((each for each in own if id(each) in shared), key=lambda each: id(each) in added)
            last = sum(id(tensor) in added for tensor in buffers)
            if weights or buffers:
                sums = self._at.plane.open_sums(holders)
                self._opened.append(sums)
                found.append(Segment(weights, buffers, self._behind_link(sums, holders, way), self._speaks, last))
        return found

    def _behind_link(self, sums: Sums, holders: tuple[int, ...], way: Way) -> Sums:
        cluster = self._at.cluster
        if cluster is None or (cluster.link is None and not cluster.links):
            return sums
        link, slowest = cluster.ring_link(sorted(holders)), max(self._assignment.costs.replica_seconds)
        return EmulatedSums(sums, partial(link.seconds, ranks=len(holders), slice_seconds=slowest), way)

    def _make_coordinator(self, send: Send) -> Coordinator:
        books, seconds = self._books, self._assignment.costs.replica_seconds
        shares = dict(zip(self._leaders, books.shares, strict=True))
        ledger = Ledger(self._total, books.applied)
        machine = RoundStateMachine(shares, books.settings, ledger, self._milestones, books.steps)
        times = zip(self._leaders, seconds, books.shares, strict=True)
        speeds = Speeds({leader: StepTime(0.0, spent / share) for leader, spent, share in times})
        return Coordinator(machine, speeds, as_messages(machine, send), rebalance=False)

    # Training.

    def rests(self, stop: StopSignal | None) -> Iterator[Rest]:
        self._steps.start()
        self._part.start()
        if stop is not None:
            stop.listen(lambda: self._part.report_from_signal(DrainRequested(STOP)))
        while True:
            work = self._part.next_work()
            if isinstance(work, Task):
                self._compute(work)
                continue
            assert isinstance(work, StartRound)
            yield self._come_to_rest(work, stop)
            if work.final or work.drain == STOP:
                return
            self._unruled.begin()
            self._steps.start()

    def _compute(self, task: Task) -> None:
        part, passes, steps = self._part, self._replica.passes, self._steps
        waited, computed, through = part.timer.wait_seconds, passes.seconds, passes.samples
        steps.begin_task(task)
        batches = self._loader.slices(task)
        loading = spent = loss_sum = 0.0
        for spans in task.slices:
            began = time.monotonic()
            micro_batches = next(batches)
            loaded = time.monotonic()
            passes.begin_slice(length(spans))
            with memory_of_plans(STAGE):
                loss_sum += self._replica.run(micro_batches) * length(spans)
                self._unruled.check()
                self._replica.update(steps.optimizer, steps.greatest_norm)
            loading, spent = loading + loaded - began, spent + time.monotonic() - loaded
            part.close_slice(task)
        part.finish(task, spent, loss_sum, self._local.lift(task))
        self._samples += task.samples
        computed = passes.seconds - computed
        wait = part.timer.wait_seconds - waited + max(0.0, spent - computed)
        seconds = {"compute": computed, "data": loading, "wait": wait}
        own = passes.samples - through
        self._books.task_done(task, own, part.worker.version, loss_sum / task.samples, seconds)
        self._between_tasks()

    def _between_tasks(self) -> None:
        if not self._save_asked and self._save_due():
            self._save_asked = True
            self._part.report(DrainRequested(CHECKPOINT))
        if (coordinator := self._coordinator) is not None:
            machine = coordinator.machine
            applied, staleness = machine.ledger.applied, dict(machine.staleness)
            self._books.progress(applied, coordinator.take_loss(), self._steps.scheduled[0], staleness)

    @property
    def _coordinator(self) -> Coordinator | None:
        """On rank 0."""
        return self._part.coordinator if isinstance(self._part, Engine) else None

    # At rest.

    def _come_to_rest(self, drained: StartRound, stop: StopSignal | None) -> Rest:
        books, plane, before = self._books, self._at.plane, self._rested_at
        books.clock.stop()
        coordinator = self._coordinator
        told = None
        if coordinator is not None:
            machine = coordinator.machine
            told = machine.ledger.applied, dict(machine.staleness)
        applied, staleness = plane.broadcast_object(told)
        books.come_to_rest(applied, drained.number + 1, staleness)
        self._steps.show_owner(applied)
        self._come_together()
        self._samples, self._save_asked, self._rested_at = 0, False, applied
        signals = plane.gather_objects(None if stop is None else stop.caught)
        caught = next((signal for signal in signals if signal is not None), None)
        return Rest(before, applied, drained.drain or "", caught, save=drained.drain == CHECKPOINT)

    def _come_together(self) -> None:
        gather, weights = self._at.plane.gather_objects, dict(self._replica.model.named_parameters())
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        samples = self._samples if self._speaks else 0  # ranks that share a stage have used the same ones
        average_over_holders(
            self._steps.optimizer, trained, self._segments, samples, self._rank, gather, self._channels
        )
        self._counters.share(gather, self._samples)

    def close(self) -> None:
        books, part = self._books, self._part
        books.round_bytes_sent, books.runtime_cpu_seconds = part.bytes_sent, part.cpu_seconds()
        self._replica.memory.beside = part.buffer_bytes
        part.stop()
        self._steps.close(books.applied)
        for sums in self._opened:
            sums.close()
