"""Jobs on two hosts with a slow link between them: network namespaces of this machine (namespaces_lab.sh)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import Done, environment, finished, program, started, summary_of

pytestmark = pytest.mark.xdist_group("two_hosts")  # of one worker: they share a fixture that is dear
LAB = Path(__file__).with_name("namespaces_lab.sh")
RATE = "1gbit"
BYTES_PER_SECOND = 1e9 / 8
SAMPLES = 1200
TRAIN = ["--run.samples", str(SAMPLES), "--run.profile_seconds", "0.3", "--run.dir", "run"]


def _refused(base: Path) -> str | None:
    """Why this machine has no such hosts; None where it made them."""
    missing = [name for name in ("ip", "tc", "nsenter", "unshare", "mpirun") if not shutil.which(name)]
    if missing:
        return f"not installed here: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    done = subprocess.run([LAB, "up", base, "2", RATE], capture_output=True, text=True, timeout=60)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("lab")
    reason = _refused(base)
    if reason:
        pytest.skip(reason)
    try:
        yield base
    finally:
        subprocess.run([LAB, "down", base], check=True, timeout=60)


def _crossed(lab: Path) -> int:
    """Bytes that h0's link has carried so far, both ways."""
    counters = "/sys/class/net/eth0/statistics"
    words = [lab / "on", "h0", f"mount -t sysfs sysfs /sys; cat {counters}/rx_bytes {counters}/tx_bytes"]
    return sum(map(int, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()))


def _ended(words: list[str], folder: Path) -> Done:
    with started(words, folder) as job:
        done = finished(job)
    assert done.status == 0, done.story
    return done


def _check(lab: Path, folder: Path, before: int, carrier: str) -> None:
    summary: dict[str, Any] = summary_of(folder / "run")
    assert summary["samples_applied"] == SAMPLES
    assert summary["plane"].startswith(f"sums by {carrier}")
    assert [rank["host"] for rank in summary["per_rank"]] == ["h0", "h1"]
    assert _crossed(lab) - before > summary["per_rank"][0]["bytes_sent"] > 0


@pytest.mark.parametrize(("plane", "carrier"), [("mpi", "MPI"), ("torch", "Gloo")])
def test_a_job_under_mpirun_spans_both(lab: Path, tmp_path: Path, plane: str, carrier: str) -> None:
    before = _crossed(lab)
    words = [str(lab / "mpirun"), "-np", "2", program("hetsync-train"), *TRAIN, "--run.plane", plane]
    _ended(words, tmp_path)
    _check(lab, tmp_path, before, carrier)


def test_a_job_under_torchrun_spans_both(lab: Path, tmp_path: Path) -> None:
    before = _crossed(lab)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--master-addr", "h0", "--master-port", "29500"]
    train = [program("hetsync-train"), *TRAIN]

    def on(rank: int) -> list[str]:
        return [str(lab / "on"), f"h{rank}", "exec", *torchrun, "--node-rank", str(rank), *meeting, *train]

    with started(on(1), tmp_path) as other:
        _ended(on(0), tmp_path)
        assert finished(other).status == 0
    _check(lab, tmp_path, before, "Gloo")


def test_profile_measures_the_link(lab: Path, tmp_path: Path) -> None:
    words = [str(lab / "mpirun"), "-np", "2", program("hetsync"), "profile", "--run.profile_seconds", "0.3"]
    _ended(words, tmp_path)
    profile = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    assert "2 ranks on h0, h1" in profile["source"]
    assert 0 < profile["link"]["bytes_per_second"] < BYTES_PER_SECOND, "no faster than the link is"
    (between,) = profile["links"]
    assert between["between"] == ["h0", "h1"]
    assert 0 < between["bytes_per_second"] < 1.1 * BYTES_PER_SECOND
    assert [group["host"] for group in profile["devices"]] == ["h0", "h1"]


def test_sums_between_hosts_are_not_in_place(lab: Path, tmp_path: Path) -> None:
    """Where MPI would send everything through one rank; tests/mpi/test_mpi_plane.py has those on one host."""
    script = tmp_path / "told.py"
    script.write_text(
        "from hetsync.plane.mpi import MpiSums\n"
        "from hetsync.plane.mpi_members import MpiMembers\n"
        "print([lane.copies for lane in MpiSums(MpiMembers.of_world(tolerant=False))._lanes])\n"
    )
    done = _ended([str(lab / "mpirun"), "-np", "2", sys.executable, str(script)], tmp_path)
    assert done.out.splitlines() == 2 * ["[True, True]"], done.story


def test_the_lab_leaves_nothing_behind(tmp_path: Path) -> None:
    reason = _refused(tmp_path)
    if reason:
        pytest.skip(reason)
    subprocess.run([LAB, "down", tmp_path], check=True, timeout=60)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, env=environment()).stdout
    tag = (tmp_path / "on").read_text().split("/run/netns/")[1].split("-")[0]
    assert tag not in left
