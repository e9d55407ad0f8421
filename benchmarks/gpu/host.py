"""What a machine is: versions, its GPU, whether it has MPS, and what `hetsync doctor` says of it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.common.processes import environment
from benchmarks.gpu.kept import keep, table

DOCTOR_SECONDS = 12.0
FIELDS = "name,driver_version,memory.total,compute_mode,mig.mode.current,pstate"


def said_by(*words: str) -> str:
    """What a program says, or why it says nothing."""
    if shutil.which(words[0]) is None:
        return f"no {words[0]}"
    done = subprocess.run(words, capture_output=True, text=True, timeout=DOCTOR_SECONDS, env=environment(), check=False)
    text = (done.stdout + done.stderr).strip()
    return text if done.returncode == 0 else f"status {done.returncode}: {text}"


def facts() -> Iterator[tuple[str, str]]:
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}"
    yield "kernels for", " ".join(torch.cuda.get_arch_list()) or "processors only"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        yield "device", f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        yield "capability", ".".join(map(str, torch.cuda.get_device_capability()))
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
        yield "nvidia-smi", said_by("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader")
    yield "MPS", shutil.which("nvidia-cuda-mps-control") or "not installed"
    yield "mpirun", said_by("mpirun", "--version").splitlines()[0]
    yield "/dev/shm", f"{shutil.disk_usage('/dev/shm').free / 1e9:.1f} GB free" if Path("/dev/shm").exists() else "none"
    yield "cores", str(len(os.sched_getaffinity(0)))


def doctor() -> str:
    beside = Path(sys.executable).parent / "hetsync"
    return said_by(str(beside) if beside.exists() else "hetsync", "doctor")


def markdown(known: Sequence[tuple[str, str]], diagnosis: str) -> str:
    return f"{table(['what', 'found'], [list(pair) for pair in known], words=2)}\n\n```text\n{diagnosis}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder for host.json and host.md")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    known = list(facts())
    keep(options.output, "host", markdown(known, "not asked yet"), facts=dict(known))
    diagnosis = doctor()
    keep(options.output, "host", markdown(known, diagnosis), facts=dict(known), doctor=diagnosis)
    print(f"{dict(known).get('device', 'no CUDA device')}; torch {torch.__version__}")


if __name__ == "__main__":
    main()
