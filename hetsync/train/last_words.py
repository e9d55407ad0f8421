"""What a rank says while mpirun ends it because another has died. That one says nothing, and mpirun only that a process
was killed; launch/local, which outlives all, speaks for itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hetsync.launchers import RUN_FILE, launched_by_mpi, told_of_deaths
from hetsync.processes import Process
from hetsync.shortage import killed_for_memory
from hetsync.train.run_folder import has_checkpoint


def of_a_death(processes: Mapping[int, Process], rank: int, folder: Path | None, resume_by: str) -> str | None:
    """None where no rank of this host is known to have died, or another of its ranks is the one to speak. The launcher
    that ends ranks (TERM) leaves them some 0.5 s; `processes` of all ranks; `resume_by`: {} is the folder."""
    if not launched_by_mpi() or told_of_deaths() or RUN_FILE in os.environ or rank not in processes:
        return None
    here = {other: process for other, process in processes.items() if process.host == processes[rank].host}
    gone = [other for other, process in here.items() if process.has_gone]
    if not gone or rank != min(here.keys() - set(gone)):
        return None
    if folder is None:
        how = "no run folder was given, so start anew"
    elif has_checkpoint(folder):
        run = "" if "{}" in resume_by else f" (the run: {folder})"
        how = f"go on with: {resume_by.format(folder)}{run}"
    else:
        how = "nothing has been saved yet, so start anew"
    memory = killed_for_memory()
    return (
        f"rank {gone[0]} was killed or crashed{f' ({memory})' if memory else ''}: {how}; by mpirun --with-ft ulfm (Open"
        " MPI 5) the others go on after a death"
    )
