"""The figures of a run, gathered from all ranks into `summary.json`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hetsync.sync.messages import NO_BOUND

if TYPE_CHECKING:
    from hetsync.trainer import Trainer


def summarise(trainer: Trainer) -> dict[str, Any]:
    """Collective, at rest; complete on rank 0, the ranks' own figures elsewhere.

    `samples_per_second` counts the samples of this process over the time from the first slice to the last
    round, waits and drains included, evaluation and checkpoints not. A rank's solo rate is that of its profile
    at its share: what it reaches with nobody to wait for.
    """
    session, plane = trainer.session, trainer.plane
    per_rank = plane.gather_objects(_rank_figures(trainer))
    coordinator = session.coordinator
    if coordinator is None:
        return {"per_rank": per_rank}
    policy, totals = coordinator.policy, session.totals
    solo = sum(rank["solo_samples_per_second"] for rank in per_rank)
    rate = (session.applied - session.plan.applied) / totals.train_seconds if totals.train_seconds else 0.0
    pieces = policy.staleness.total()
    bound = session.settings.delay_bound
    control = {"control": session.control.summary()} if session.control is not None else {}
    return {
        "status": "stopped" if session.stopping else "finished",
        "ranks": plane.size,
        "emulated": trainer.config.emulate is not None,
        "emulate": trainer.config.emulate,
        "samples_applied": session.applied,
        "samples_expected": trainer.total,
        "samples_per_second": rate,
        "solo_samples_per_second_sum": solo,
        "efficiency": rate / solo,
        "rounds": session.version,
        "staleness": {
            "mean": sum(s * count for s, count in policy.staleness.items()) / max(1, pieces),
            "max": max(policy.staleness, default=0),
            "histogram": {str(s): policy.staleness[s] for s in sorted(policy.staleness)},
        },
        "delay_bound": None if bound == NO_BOUND else bound,
        "quorum": session.settings.quorum,
        "accumulation": session.settings.accumulation,
        **control,
        "shares": list(session.shares),
        "metrics": trainer.metrics,
        "anchor_sha256": totals.anchor_sha256,
        "train_seconds": totals.train_seconds,
        "wall_seconds": time.monotonic() - trainer.began,
        "overrun_fraction": sum(r["overruns"] for r in per_rank) / max(1, sum(r["slices"] for r in per_rank)),
        "real_compute_cores": sum(r["real_seconds"] for r in per_rank) / max(1e-9, totals.train_seconds),
        "seed": trainer.config.run.seed,
        "per_rank": per_rank,
    }


def _rank_figures(trainer: Trainer) -> dict[str, Any]:
    session, rank = trainer.session, trainer.plane.rank
    totals, profile, device = session.totals, trainer.profiles[rank], trainer.device
    seconds = max(1e-9, totals.train_seconds)
    return {
        "rank": rank,
        "host": profile.host,
        "device": profile.device,
        "emulated": profile.emulated,
        "share": session.shares[rank],
        "samples": totals.samples,
        "solo_samples_per_second": profile.time.rate(session.shares[rank]),
        "device_samples_per_second": totals.samples / max(1e-9, totals.compute_seconds),
        "compute_fraction": totals.compute_seconds / seconds,
        "wait_fraction": session.engine.spent.wait_seconds / seconds,
        "data_fraction": totals.data_seconds / seconds,
        "runtime_cpu_fraction": session.engine.cpu_seconds() / seconds,
        "bytes_sent": session.engine.bytes_sent,
        "slices": device.slices,
        "real_seconds": device.real_seconds,
        "overruns": device.overruns,
    }
