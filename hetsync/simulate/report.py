"""The summary of a simulated run: the keys of a real one's, and `simulated`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hetsync.config import Config
from hetsync.control.observation import mean_staleness
from hetsync.simulate.node import Node
from hetsync.simulate.quadratic import NoisyQuadratic
from hetsync.simulate.simulation import Simulation
from hetsync.sync.messages import NO_BOUND


def summarise(
    simulation: Simulation, config: Config, metrics: Mapping[str, float], wall_seconds: float
) -> dict[str, Any]:
    """All seconds but `wall_seconds` are virtual. What only real hosts have (CPU time, overruns, bytes) is 0."""
    policy, scenario = simulation.policy, simulation.scenario
    applied, seconds = policy.ledger.applied, max(1e-12, simulation.now)
    rate, solo = applied / seconds, simulation.solo_samples_per_second
    nodes = {**simulation.nodes, **simulation.away}
    learner = simulation.learner
    landscape = {"landscape": asdict(learner.landscape)} if isinstance(learner, NoisyQuadratic) else {}
    bound = policy.settings.delay_bound
    return {
        "status": "stopped" if simulation.stopped else "finished",
        "simulated": True,
        **landscape,
        "ranks": len(scenario.ranks),
        "emulated": True,
        "emulate": config.emulate,
        "samples_applied": applied,
        "samples_expected": scenario.total_samples,
        "samples_per_second": rate,
        "solo_samples_per_second_sum": solo,
        "efficiency": rate / solo,
        "rounds": policy.version,
        "staleness": {
            "mean": mean_staleness(policy.staleness),
            "max": max(policy.staleness, default=0),
            "histogram": {str(s): policy.staleness[s] for s in sorted(policy.staleness)},
        },
        "delay_bound": None if bound == NO_BOUND else bound,
        "quorum": policy.settings.quorum,
        "accumulation": policy.settings.accumulation,
        "shares": [policy.members[rank].share if rank in policy.members else 0 for rank in sorted(nodes)],
        "metrics": dict(metrics),
        "anchor_sha256": learner.anchor_sha256,
        "train_seconds": simulation.now,
        "wall_seconds": wall_seconds,
        "overrun_fraction": 0.0,
        "real_compute_cores": 0.0,
        "seed": config.run.seed,
        "per_rank": [_rank_figures(simulation, nodes[rank], seconds) for rank in sorted(nodes)],
    }


def _rank_figures(simulation: Simulation, node: Node, seconds: float) -> dict[str, Any]:
    rank, profile = node.rank, simulation.scenario.ranks[node.rank]
    member = simulation.policy.members.get(rank)
    share = member.share if member is not None else 0
    return {
        "rank": rank,
        "host": profile.host,
        "device": profile.device,
        "emulated": True,
        "share": share,
        "samples": node.samples,
        "solo_samples_per_second": profile.time.rate(share),
        "device_samples_per_second": node.samples / max(1e-9, node.compute_seconds),
        "compute_fraction": node.compute_seconds / seconds,
        "wait_fraction": (node.wait_seconds + node.waiting_seconds(simulation.now)) / seconds,
        "data_fraction": 0.0,
        "runtime_cpu_fraction": 0.0,
        "bytes_sent": 0,
        "slices": node.device.slices,
        "real_seconds": 0.0,
        "overruns": 0,
    }
