"""benchmarks/planes_efficiency.py: what its jobs are told, and its table."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.planes_efficiency import table, words

OPTIONS = Namespace(cluster="quickstart", rate=500.0, samples=1600, batch=160)


def test_torchrun_sums_by_torch():
    assert words("torchrun", 4, 0, OPTIONS)[-1] == "torch"
    assert words("mpi", 4, 0, OPTIONS)[-1] == "mpi"


def test_planes_are_told_beside_mpi():
    def summary(efficiency, plane):
        rank = {"runtime_cpu_fraction": 0.02, "bytes_sent": 2_000_000}
        return {"solo_fraction": efficiency, "plane": plane, "per_rank": [rank, rank]}

    found = {("mpi", 4): [summary(0.98, "MPI"), summary(1.0, "MPI")], ("torch", 4): [summary(0.97, "Gloo")]}
    mpi, torch = table(found).splitlines()[2:]
    assert mpi == "| mpi | 4 | 0.990 [0.980, 1.000] | +0.000 | 2.0 | 2.0 | MPI |"
    assert torch == "| torch | 4 | 0.970 | -0.020 | 2.0 | 2.0 | Gloo |"
