"""One rank of one peer's job: python -m benchmarks.peers.runner PEER RECIPE.yaml FOLDER.

Under mpirun or torchrun, at the clone's root. Writes FOLDER/result.json (HetSync:
its own summary and telemetry, and FOLDER/usage-RANK.json).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.common.processes import end_groups, launched_as
from benchmarks.common.quotas import join_group

CPU_GROUPS = "PEERS_CPU_GROUPS"  # environment: the folder of the ranks' cgroups, where devices are throttled

# Where each peer's adapter is. "hetsync-sync" and the like are settings in the recipe.
PEERS = {
    "alone": "ddp:alone",
    "unsynchronised": "ddp:unsynchronised",
    "ddp-equal": "ddp:ddp_equal",
    "ddp-by-speed": "ddp:ddp_by_speed",
    "ddp-join": "ddp:ddp_join",
    "post-local-sgd": "ddp:post_local_sgd",
    "horovod": "horovod:by_speed",
    "torchft-local-sgd": "torchft:local_sgd",
    "torchft-diloco": "torchft:diloco",
}


def run_hetsync(recipe: str, folder: Path, rank: int) -> None:
    from benchmarks.peers.job import peak_bytes
    from hetsync.cli import train

    try:
        train.main([recipe])
    finally:
        Path(folder, f"usage-{rank}.json").write_text(json.dumps({"peak_bytes": peak_bytes()}))


def run_peer(name: str, recipe: str, folder: Path, rank: int, size: int) -> None:
    import torch.distributed as dist

    from benchmarks.peers.job import Job
    from hetsync.config.parser import read_recipe

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo")
    module, function = PEERS[name].split(":")
    adapter = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
    job = Job(read_recipe(Path(recipe)), rank, size)
    adapter(job)
    job.report(folder)
    dist.barrier()
    end_groups()


def main() -> None:
    name, recipe, folder = sys.argv[1:]
    rank, size = launched_as()
    if (groups := os.environ.get(CPU_GROUPS)) is not None:
        join_group(Path(groups), rank)
    if name.startswith("hetsync"):
        run_hetsync(recipe, Path(folder), rank)
    else:
        run_peer(name, recipe, Path(folder), rank, size)


if __name__ == "__main__":
    main()
