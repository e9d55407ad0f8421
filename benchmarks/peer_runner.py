"""One rank of one peer's job: python benchmarks/peer_runner.py PEER RECIPE.yaml FOLDER, under mpirun or torchrun.

Writes FOLDER/result.json (HetSync: its own summary and telemetry, and FOLDER/usage-RANK.json).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

# Where each peer's adapter is. "hetsync-sync" and the like are settings in the recipe.
PEERS = {
    "alone": "peer_ddp:alone",
    "unsynchronised": "peer_ddp:unsynchronised",
    "ddp-equal": "peer_ddp:ddp_equal",
    "ddp-by-speed": "peer_ddp:ddp_by_speed",
    "ddp-join": "peer_ddp:ddp_join",
    "post-local-sgd": "peer_ddp:post_local_sgd",
    "horovod": "peer_horovod:by_speed",
    "torchft-local-sgd": "peer_torchft:local_sgd",
    "torchft-diloco": "peer_torchft:diloco",
}


def launched() -> tuple[int, int]:
    """Rank and world size as Open MPI or torchrun tell them."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))
    size = os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    return int(rank), int(size)


def join_group(rank: int) -> None:
    """Enter the CPU quota that the harness has made for this rank, before any thread is there."""
    if (groups := os.environ.get("PEERS_CPU_GROUPS")) is not None:
        Path(groups, f"rank-{rank}", "tasks").write_text(str(os.getpid()))
        os.environ["XDG_CACHE_HOME"] = str(Path(os.environ["PEERS_CACHE"], f"rank-{rank}"))


def run_hetsync(recipe: str, folder: Path, rank: int) -> None:
    from peer_job import peak_bytes

    from hetsync.cli import train_main

    try:
        train_main([recipe])
    finally:
        Path(folder, f"usage-{rank}.json").write_text(json.dumps({"peak_bytes": peak_bytes()}))


def run_peer(name: str, recipe: str, folder: Path, rank: int, size: int) -> None:
    import torch.distributed as dist
    from peer_job import Job

    from hetsync.cli import parse

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo")
    module, function = PEERS[name].split(":")
    adapter = getattr(importlib.import_module(module), function)
    job = Job(parse([recipe])[0], rank, size)
    adapter(job)
    job.report(folder)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    name, recipe, folder = sys.argv[1:]
    rank, size = launched()
    join_group(rank)
    if name.startswith("hetsync"):
        run_hetsync(recipe, Path(folder), rank)
    else:
        run_peer(name, recipe, Path(folder), rank, size)


if __name__ == "__main__":
    main()
