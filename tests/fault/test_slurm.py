"""Jobs on a real SLURM of three unlike nodes on this machine, by `hetsync launch slurm` and launch/slurm.sbatch: what
they start, and how they go on when they are pre-empted or crash. What needs no daemon is in tests/cli/test_slurm.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import environment, program, summary_of

pytestmark = pytest.mark.xdist_group("slurm")  # of one worker: they share a fixture that is dear
ROOT = Path(__file__).resolve().parents[2]
LAB = Path(__file__).with_name("slurm_lab.sh")
SECONDS = 100.0  # this machine may be busy with other tests
TRAIN = ["hetsync-train", "--emulate", "quickstart", "--run.profile_seconds", "0.3"]
# Now and then a message comes before MPI_Init of Open MPI 5.0 can take one: issue 12495 of open-mpi/ompi.
OF_OPEN_MPI = "mca_pml_ob1_recv_frag_callback_match"
EVENLY = ["--emulation.samples_per_second", "400"]  # 1600 samples take four seconds


def _missing() -> str | None:
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name, path=path)]
    if absent:
        return f"SLURM is not installed here: there is no {', '.join(absent)}"
    return "SLURM's daemons need root" if os.geteuid() != 0 else None


@dataclass(frozen=True)
class Slurm:
    """Commands of SLURM, and of ours, against a cluster of these tests' own; `folder` is where jobs run."""

    settings: dict[str, str]
    folder: Path

    def call(self, *words: str | Path, status: int = 0) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            env=self.settings,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def launch(self, *words: str | Path) -> str:
        """By `hetsync launch slurm`: the job's number."""
        return self.call(program("hetsync"), "launch", "slurm", *words).rpartition(" ")[2]

    def groups(self, job: str) -> list[dict[str, str]]:
        """What SLURM knows of each group of nodes, its first one's first."""
        lines = self.call("scontrol", "--oneliner", "show", "job", job).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def state(self, job: str) -> dict[str, str]:
        return self.groups(job)[0]

    def said(self, job: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"hetsync-{job}*.out")))

    def wait(self, job: str, what: str, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not reached():
            state = self.state(job)["JobState"]
            assert time.monotonic() < end, f"{state}, no {what} after {SECONDS:.0f} s; it said:\n{self.said(job)}"
            time.sleep(0.3)

    def finish(self, job: str, state: str = "COMPLETED") -> None:
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.wait(job, state, lambda: self._go_on(job) in over)
        assert self.state(job)["JobState"] == state, self.said(job)

    def _go_on(self, job: str) -> str:
        """Its state. What Open MPI's own crash at its start has requeued starts at once."""
        state = self.state(job)["JobState"]
        if state == "PENDING" and OF_OPEN_MPI in self.said(job):
            self._start_now(job)
        return state

    def _start_now(self, job: str) -> None:
        for group in self.groups(job):
            self.call("scontrol", "update", f"jobid={group['JobId']}", "StartTime=now")

    def start_requeued(self, job: str) -> None:
        """SLURM holds a requeued job back for two minutes; this does not."""
        self.wait(job, "requeue", lambda: "and requeued" in self.said(job) and self.state(job)["JobState"] == "PENDING")
        self._start_now(job)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of those who use it."""
    reason = _missing()
    if reason:
        pytest.skip(reason)
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: there are sockets in it
    mpi = Path(program("mpirun")).resolve().parents[1]  # tests may run in an environment that borrows its MPI
    path = f"{Path(sys.executable).parent}:{mpi / 'bin'}:{os.environ['PATH']}:/usr/sbin"
    settings = environment(
        SLURM_CONF=str(base / "slurm.conf"),
        PATH=path,
        OPAL_PREFIX=str(mpi),
        LD_LIBRARY_PATH=str(mpi / "lib"),
        PYTHONPATH=str(ROOT),
        RES_OPTIONS="timeout:1 attempts:1",
    )
    subprocess.run([LAB, "up", base], env=settings, check=True, timeout=60)
    try:
        yield settings
    finally:
        subprocess.run([LAB, "down", base], env=settings, check=True, timeout=120)
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def slurm(cluster: dict[str, str], tmp_path: Path) -> Slurm:
    return Slurm(cluster, tmp_path)


def test_a_recipe_by_the_clones_script(slurm: Slurm) -> None:
    setting = f"ALL,HETSYNC_ROOT={ROOT},VIRTUAL_ENV={sys.prefix},RUN_DIR={slurm.folder / 'run'}"
    options = ["--parsable", f"--export={setting}", "--ntasks=2"]
    job = slurm.call("sbatch", *options, ROOT / "launch" / "slurm.sbatch", *TRAIN[1:], "--run.samples", "640")
    slurm.finish(job)
    assert summary_of(slurm.folder / "run")["ranks"] == 2


def test_a_pre_empted_job_saves_is_requeued_and_resumes(slurm: Slurm) -> None:
    words = [*TRAIN, *EVENLY, "--run.samples", "1600", "--run.checkpoint_every", "400"]
    job = slurm.launch("--nodes", "1,ranks=2,constraint=fast", "--", *words)
    run = slurm.folder / "runs" / f"hetsync-{job}"
    slurm.wait(job, "checkpoint", lambda: any(run.glob("checkpoints/samples-*")))
    urgent = slurm.call(
        "sbatch", "--parsable", "--partition=high", "--exclusive", "--constraint=fast", "--wrap", "sleep 1"
    )
    slurm.wait(job, "pre-emption", lambda: slurm.state(job)["JobState"] == "PENDING")
    stopped_at = max(int(path.name.removeprefix("samples-")) for path in run.glob("checkpoints/samples-*"))
    assert 0 < stopped_at < 1600
    assert "stopped on request, and requeued" in slurm.said(job)
    slurm.finish(urgent)
    slurm.start_requeued(job)
    slurm.finish(job)
    assert slurm.state(job)["Restarts"] == "1"
    assert summary_of(run)["samples_applied"] == 1600


MEET = """
import os, sys
from mpi4py import MPI
told = MPI.COMM_WORLD.gather((os.environ["SLURMD_NODENAME"], os.environ.get("CUDA_VISIBLE_DEVICES")))
if told: print("told", sorted(told))
"""


def test_unlike_nodes_are_one_job_with_gpus_of_their_own(slurm: Slurm) -> None:
    (slurm.folder / "meet.py").write_text(MEET)
    groups = ["--nodes", "1,gpus=fast:2,constraint=fast", "--nodes", "2,gpus=slow:1,cpus=2,constraint=slow"]
    job = slurm.launch(*groups, "--", "python", "meet.py")
    slurm.finish(job)
    assert "told [('n1', '0,1'), ('n1', '0,1'), ('n2', '0'), ('n3', '0')]" in slurm.said(job)


def test_gpus_of_tasks_are_bound_by_srun_and_refused_with_mpirun(slurm: Slurm) -> None:
    (slurm.folder / "meet.py").write_text(MEET)

    def submit(launcher: str) -> str:
        setting = f"ALL,HETSYNC_ROOT={ROOT},VIRTUAL_ENV={sys.prefix},LAUNCHER={launcher}"
        options = ["--parsable", f"--export={setting}", "--ntasks=3", "--nodes=2", "--gpus-per-task=1"]
        return slurm.call("sbatch", *options, ROOT / "launch" / "slurm.sbatch", "--", "python", "meet.py")

    job = submit("srun")
    slurm.finish(job)
    assert "told [('n1', '0'), ('n1', '1'), ('n2', '0')]" in slurm.said(job)
    job = submit("mpirun")
    slurm.finish(job, "FAILED")
    assert "--gpus-per-task would give all ranks of a node one GPU under mpirun" in slurm.said(job)


def test_a_job_that_was_given_gpus_does_not_train_on_the_cpu(slurm: Slurm) -> None:
    job = slurm.launch("--nodes", "1,gpus=1", "--", *TRAIN)
    slurm.finish(job, "FAILED")
    assert "SLURM has given this job 1 GPUs" in slurm.said(job)
    assert slurm.state(job)["ExitCode"] == "2:0"
    assert "requeued" not in slurm.said(job)


CRASH = """
import os, pathlib, sys
starts = pathlib.Path("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= int(sys.argv[1]): os.abort()
print("came through")
"""


def test_a_crashed_job_is_tried_again_within_a_limit(slurm: Slurm) -> None:
    (slurm.folder / "crash.py").write_text(CRASH)
    job = slurm.launch("--nodes", "1", "--", "python", "crash.py", "1")
    slurm.start_requeued(job)
    slurm.finish(job)
    assert "crashed with status" in slurm.said(job)
    assert "came through" in slurm.said(job)
    (slurm.folder / "starts").unlink()
    job = slurm.launch("--nodes", "1", "--max-crashes", "2", "--", "python", "crash.py", "9")
    slurm.start_requeued(job)
    slurm.finish(job, "FAILED")
    assert "crashed with status 134, 2 times in a row" in slurm.said(job)
    assert not list(slurm.folder.glob("*.crashes"))


CRASH_OF_ONE = """
import os, pathlib, time
starts = pathlib.Path("starts")
if starts.exists():
    print("came through", flush=True)
elif os.environ["SLURMD_NODENAME"] == "n2":
    time.sleep(2)
    starts.write_text("x")
    os.abort()
else:
    time.sleep(60)
"""


def test_a_crash_of_one_rank_under_srun_is_tried_again(slurm: Slurm) -> None:
    """The others are ended by TERM, which is what srun returns."""
    (slurm.folder / "crash.py").write_text(CRASH_OF_ONE)
    job = slurm.launch("--nodes", "1,constraint=fast", "--nodes", "2,constraint=slow", "--", "python", "crash.py")
    slurm.start_requeued(job)
    slurm.finish(job)
    assert "crashed with status" in slurm.said(job)
    assert slurm.said(job).count("came through") == 3


def test_a_sweep_is_an_array(slurm: Slurm) -> None:
    """Each of its jobs has its words, and a number of its own; a recipe's folders are in tests/cli/test_slurm.py."""
    (slurm.folder / "words.py").write_text("import sys; print('words', sys.argv[1:])")
    sweep = ["--sweep", "rate=0.1,0.01", "--sweep", "kind=[a, 1]"]
    job = slurm.launch("--nodes", "1", *sweep, "--", "python", "words.py", "first")
    slurm.finish(f"{job}_0")
    slurm.finish(f"{job}_1")
    told = sorted(line for line in slurm.said(job).splitlines() if line.startswith("words"))
    assert told == [f"words ['first', '--rate', '{rate}', '--kind', '[\"a\", 1]']" for rate in ("0.01", "0.1")]


SCRIPT = """
import sys, torch, hetsync
from torch.utils.data import TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 4), torch.randint(3, (240,)))
with hetsync.join(run=sys.argv[1], resume="auto") as job:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.prepare(model, optimizer)
    loader = job.loader(data, 24)
    for epoch in job.epochs(2):
        for inputs, labels in loader:
            job.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            job.step()
"""


def test_a_script_of_ones_own(slurm: Slurm) -> None:
    (slurm.folder / "mine.py").write_text(SCRIPT)
    job = slurm.launch("--nodes", "2,constraint=slow", "--run", "mine", "--", "python", "mine.py", "mine")
    slurm.finish(job)
    summary = json.loads((slurm.folder / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["ranks"], summary["samples_applied"]) == ("finished", 2, 480)
    assert re.search("start 0, 2 ranks on n.*the run is in .*/mine", slurm.said(job))
