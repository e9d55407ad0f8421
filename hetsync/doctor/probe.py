"""`python -m hetsync.doctor.probe SUBJECT`: one line of JSON about a library, from a process that it may bring down."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

from hetsync.errors import one_sentence


def mpi() -> dict[str, Any]:
    from mpi4py import MPI

    return {
        "library": one_sentence(MPI.Get_library_version().partition("\n")[0].partition(",")[0]),
        "thread_multiple": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        **_extensions(),
    }


def _extensions() -> dict[str, Any]:
    """Of Open MPI and MPICH, by the functions that their headers mpi-ext.h and mpi.h declare."""
    path = mpi_among(Path("/proc/self/maps").read_text())
    if path is None:
        return {}
    library = ctypes.CDLL(path)
    cuda = getattr(library, "MPIX_Query_cuda_support", None)
    return {"cuda_aware": None if cuda is None else bool(cuda()), "ulfm": hasattr(library, "MPIX_Comm_shrink")}


def mpi_among(maps: str) -> str | None:
    """Of the files that a process has mapped, whose paths may have blanks."""
    found = re.search(r"/.*/libmpi(?:ch)?\.so\S*$", maps, re.MULTILINE)
    return found and found[0]


def torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hetsync.balance.gpu import has_kernels

    built_for = torch.cuda.get_arch_list()
    there = dist.is_available()
    nccl = there and dist.is_nccl_available()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "without_kernels": [
            torch.cuda.get_device_name(index)
            for index in range(gpus)
            if not has_kernels(torch.cuda.get_device_capability(index), built_for)
        ],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "gloo": there and dist.is_gloo_available(),
    }


def horovod() -> dict[str, Any]:
    import horovod.torch as hvd

    built = {"MPI": hvd.mpi_built, "Gloo": hvd.gloo_built, "NCCL": hvd.nccl_built}
    return {"carriers": [name for name, is_built in built.items() if is_built()]}


SUBJECTS = {"mpi": mpi, "torch": torch, "horovod": horovod}


def main(subject: str) -> None:
    try:
        found = SUBJECTS[subject]()
    except Exception as error:  # whatever a broken library raises is what is asked for
        found = {"failure": one_sentence(str(error) or type(error).__name__)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
