"""`hetsync doctor` as a user starts it, where things are sound and where MPI is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Done, finished, mpirun, needs_loadable_mpi, program, started

from hetsync.cli import doctor
from hetsync.cli.doctor import report
from hetsync.doctor.checks import Finding, Verdict
from hetsync.doctor.facts import Facts, Limits, Mpi, Storage, Torch
from hetsync.doctor.nodes import Comparison
from hetsync.plane.choice import DeviceOf
from hetsync.plane.local import LocalPlane


def examined(folder: Path, launcher: list[str], *words: str, **env: str) -> Done:
    with started([*launcher, program("hetsync"), "doctor", *words], folder, env) as process:
        return finished(process)


def test_two_ranks_of_a_host_are_one_node_and_leave_nothing(tmp_path: Path) -> None:
    done = examined(tmp_path, mpirun(2), "--json")
    assert done.status == 0, done.story
    told = json.loads(done.out)
    (node,) = told["nodes"]
    assert node["ranks"] == 2
    assert node["mpi"]["thread_multiple"]
    assert node["packages"]["torch"]
    verdicts = {finding["subject"]: finding["verdict"] for finding in told["findings"]}
    assert (
        verdicts["MPI"]
        == verdicts["run folder"]
        == verdicts["ranks"]
        == verdicts["time of day"]
        == verdicts["shared folder"]
        == "ok"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_mpi_that_does_not_load_is_a_problem_told_once(tmp_path: Path) -> None:
    needs_loadable_mpi()
    (tmp_path / "runs").touch()
    done = examined(tmp_path, mpirun(2), MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert done.status == 1, done.story
    assert "Traceback" not in done.out + done.err
    assert done.out.count("problem, MPI: ") == 1
    assert done.out.count("problem, run folder: free space, or choose another folder by --run.dir") == 1
    assert "nothing stops training here" not in done.out


@pytest.mark.thorough
def test_ranks_that_mpi_does_not_know_of(tmp_path: Path) -> None:
    """Under mpirun -np 1 as a launcher of two ranks that this MPI does not understand."""
    done = examined(tmp_path, [*mpirun(1), "env", "OMPI_COMM_WORLD_SIZE=2"])
    assert done.status == 1, done.story
    assert "problem, ranks: the launcher started 2 ranks, but MPI sees 1: use the mpirun of the MPI" in done.out


def test_the_table_of_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    place, limits = Storage("runs"), Limits(None, None)
    nodes = [Facts(host, "3.11", "0.1", {}, Mpi(), Torch(), place, place, limits) for host in ("n1", "n2")]
    odd = Comparison(Finding("open files", Verdict.NOTE, "20,000", "ulimit -n 4096"), {"n2": "256"})
    assert report(nodes, [odd], False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("most of 2 nodes" in line and "differs" in line for line in lines)
    assert any("open files" in line and "20,000" in line and "n2: 256" in line for line in lines)
    assert lines[-2:] == ["note, open files: ulimit -n 4096", "nothing stops training here"]
    wrong = Comparison(Finding("MPI", Verdict.PROBLEM, "none", "install one"))
    assert report(nodes, [odd, wrong], True) == 1
    assert json.loads(capsys.readouterr().out)["findings"][1]["remedy"] == "install one"


class Ranks(LocalPlane):
    """Others with devices of their own."""

    def __init__(self, *devices: DeviceOf) -> None:
        super().__init__()
        self.devices = devices

    def gather_objects(self, value: Any) -> list[Any]:
        return list(self.devices) if isinstance(value, DeviceOf) else [value]


CUDA = [DeviceOf("a", f"cuda:{number}", f"a {number}") for number in range(2)]
CPU = DeviceOf("a", "cpu", None)


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ([CPU, CPU], None),
        (CUDA, "by NCCL"),
        ([CUDA[0], CUDA[0]], "all through host memory: rank 0, 1 share cuda:0 of a"),
        ([*CUDA, CPU], "by NCCL among rank 0, 1, and between them through host memory: rank 2 has no CUDA device"),
    ],
)
def test_it_says_which_ranks_nccl_will_join(
    monkeypatch: pytest.MonkeyPatch, devices: list[DeviceOf], says: str | None
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert [each.finding.found for each in doctor._sums(Ranks(*devices))] == ([] if says is None else [says])
