"""The figures of a simulated run, in the schema of a real one's summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from hetsync.balance.shares import solo_rates
from hetsync.config.schema import Config
from hetsync.simulate.quadratic import NoisyQuadratic
from hetsync.simulate.simulation import Simulation
from hetsync.simulate.virtual_rank import VirtualRank
from hetsync.train.run_folder import Status
from hetsync.train.summary import JobFigures, RankFigures, RunFigures, summarise


def simulated_summary(
    simulation: Simulation, config: Config, metrics: Mapping[str, float], wall_seconds: float
) -> dict[str, Any]:
    """All seconds but `wall_seconds` are virtual. What only real hosts have (CPU time, overruns, bytes) is 0."""
    machine, scenario, learner = simulation.machine, simulation.scenario, simulation.learner
    ranks = {**simulation.ranks, **simulation.away}
    solo = solo_rates(scenario.batch_size, scenario.ranks, scenario.sync.least_slice)
    per_rank = [_rank_figures(simulation, ranks[rank], solo[rank]) for rank in sorted(ranks)]
    job = JobFigures(
        status=Status.STOPPED if simulation.stopped else Status.FINISHED,
        ranks=len(scenario.ranks),
        ranks_at_start=len(scenario.ranks),
        plane=None,
        emulated=True,
        emulate=config.emulation.profile,
        samples_applied=machine.ledger.applied,
        samples_expected=scenario.total_samples,
        shares=[figures.share for figures in per_rank],
        seed=config.run.seed,
    )
    return summarise(
        RunFigures(
            job=job,
            per_rank=per_rank,
            rounds=machine.version,
            staleness=machine.staleness,
            settings=machine.settings.in_force,
            rounds_changes=simulation.rounds_changes,
            metrics=metrics,
            anchor_sha256=learner.anchor_sha256,
            wall_seconds=wall_seconds,
            landscape=asdict(learner.landscape) if isinstance(learner, NoisyQuadratic) else None,
            simulated=True,
        )
    )


def _rank_figures(simulation: Simulation, virtual: VirtualRank, solo: float) -> RankFigures:
    profile = simulation.scenario.ranks[virtual.number]
    member = simulation.machine.members.get(virtual.number)
    return RankFigures(
        rank=virtual.number,
        profile=replace(profile, emulated=True, uncertainty=0.0, load_seconds_per_sample=0.0),
        share=member.share if member is not None else 0,
        samples=virtual.samples,
        solo_samples_per_second=solo,
        train_seconds=simulation.now,
        compute_seconds=virtual.compute_seconds,
        wait_seconds=virtual.wait_seconds + virtual.waiting_seconds(simulation.now),
        slices=virtual.device.slices,
    )
