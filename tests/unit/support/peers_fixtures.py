"""A cell of the peers benchmark, and a job's record, for its tests."""

from dataclasses import replace

from benchmarks.peers import cells

SCENARIOS = cells.scenarios(None)
DIGITS = cells.WORKLOADS["digits"]


def cell(cluster="v100-p100-k80", peer="ddp-by-speed", workload=DIGITS, **changes):
    return replace(cells.Cell(workload, cluster, SCENARIOS[cluster], peer, 0, 1000, 400.0), **changes)


RANK_FIGURES = {
    "samples": 300,
    "compute_fraction": 0.75,
    "wait_fraction": 0.2,
    "communication_seconds": 1.0,
    "bytes_sent": 6e5,
    "runtime_cpu_seconds": 0.1,
    "peak_bytes": 1e8,
    "slices": 100,
    "overruns": 1,
    "device_samples_per_second": 40.0,
}


def job(peer, seconds=10.0, accuracies=(0.5, 0.9, 1.0), seed=0, **changes):
    """A record of 300 samples."""
    points = [
        {"samples": 100 * (i + 1), "seconds": seconds * (i + 1) / 3, "accuracy": a} for i, a in enumerate(accuracies)
    ]
    result = {"samples": 300, "train_seconds": seconds, "metrics": {"accuracy": accuracies[-1], "loss": 0.1}}
    result |= {"evaluations": points, "per_rank": [RANK_FIGURES]}
    head = {"workload": "digits", "cluster": "c", "title": "C", "peer": peer, "seed": seed, "falling": False}
    return {**head, "target": ["accuracy", 0.95], "ideal": 40.0, "equal": 20.0, "result": result, **changes}
