"""`hetsync launch slurm`: what it writes and refuses, and what a job does, with stubs in the place of SLURM and MPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetsync.cli.main import main
from hetsync.slurm.script import seconds_of

ROOT = Path(__file__).resolve().parents[2]


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["launch", "slurm", "--dry-run", *words])
    return capsys.readouterr().out


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def tool(name: str) -> str | None:
    """A checker of the extra `test`."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


# What it writes.


def test_one_kind_of_node_is_a_plain_job(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2,gpus=a100:4,cpus=8,memory=64G,partition=a,b,constraint=[x*1&y*1]", "--time", "1-0"]
    asked = options(written(capsys, *words, "--sbatch=--account=mine"))
    groups = ["--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--gpus-per-node=a100:4", "--cpus-per-task=8"]
    assert asked[5:] == [
        "--time=1-0",
        *groups,
        "--mem=64G",
        "--partition=a,b",
        '--constraint="[x*1&y*1]"',
        "--account=mine",
    ]
    assert "--signal=B:USR1@60" in asked


def test_several_kinds_are_components_of_one_job(capsys: pytest.CaptureFixture[str]) -> None:
    script = written(capsys, "--nodes", "1,gpus=4", "--nodes", "2,ranks=3", "--time", "10")
    first, second = " ".join(options(script)).split(" hetjob ")
    assert "--nodes=1 --ntasks=4" in first
    assert second == "--time=10 --nodes=2 --ntasks=6 --ntasks-per-node=3"
    assert "launcher=srun" in script


def test_a_sweep_has_a_job_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sweep", "sync.delay_bound=0,2", "--sweep", "sync.pins={0: 3},{0: 5}"]
    script = written(capsys, "--nodes", "1", *words)
    assert "--array=0-3" in options(script)
    assert 'run_dir="$PWD"/runs/hetsync-"$SLURM_ARRAY_JOB_ID"/"$SLURM_ARRAY_TASK_ID"\n' in script
    assert """    1) program+=(--sync.delay_bound 0 --sync.pins '{"0": 5}') ;;""" in script
    assert """    2) program+=(--sync.delay_bound 2 --sync.pins '{"0": 3}') ;;""" in script


def test_words_of_a_program_reach_it_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = written(
        capsys, "--nodes", "1", "--run", str(tmp_path / "a $b"), "--", "python", "x.py", "it's", "--y=$HOME"
    )
    settings = script.partition("set -euo pipefail")[2].partition("launcher=")[0]
    shown = subprocess.run(
        ["bash", "-c", f'{settings}\nprintf "%s\\n" "${{program[@]}}" "$run_dir"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines() == ["python", "x.py", "it's", "--y=$HOME", str(tmp_path / "a $b")]


@pytest.mark.parametrize(
    ("saving", "lead"), [([0.5], 30), ([2.0, 40.25, 3.0], 121), ([1e6], 65535)], ids=["short", "longest", "bounded"]
)
def test_the_lead_is_what_saving_took(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, saving: list[float], lead: int
) -> None:
    lines = [{"kind": "rest", "at": float(at), "reason": "checkpoint", "seconds": s} for at, s in enumerate(saving)]
    lines.append({"kind": "rest", "at": 99.0, "reason": "evaluation", "seconds": 5000.0})
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "rank-0000.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "summary.json").write_text('{"ranks": 1, "delay_bound": 4}')
    assert f"--signal=B:USR1@{lead}" in options(written(capsys, "--nodes", "1", "--lead-of", str(tmp_path)))


@pytest.mark.parametrize(
    ("time", "seconds"), [("90", 5400), ("1:30", 90), ("2:00:01", 7201), ("1-2", 93600), ("1-2:3:4", 93784)]
)
def test_times(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


SCRIPTS = {
    "plain": ["--nodes", "1"],
    "unlike": ["--nodes", "1,gpus=2", "--nodes", "2", "--time", "5"],
    "sweep": ["--nodes", "1", "--sweep", "sync.delay_bound=0,2"],
    "apptainer": ["--nodes", "1", "--apptainer", "hetsync.sif", "--", "python", "a b.py"],
    "pyxis": ["--nodes", "1", "--pyxis", "registry/hetsync", "--setup", "module load cuda"],
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_scripts_are_clean(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(written(capsys, *SCRIPTS[case]))
    subprocess.run(["bash", "-n", script], check=True)
    if (shellcheck := tool("shellcheck")) is not None:
        assert subprocess.run([shellcheck, script], capture_output=True, text=True, check=False).stdout == ""


def test_the_clones_script_is_clean() -> None:
    if (shellcheck := tool("shellcheck")) is None:
        pytest.skip("shellcheck is not installed here")
    words = [shellcheck, "-x", "launch/slurm.sbatch"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout == ""


# What it refuses.

MISTAKES: dict[str, tuple[Sequence[str], str]] = {
    "no nodes": ([], "the following arguments are required: --nodes"),
    "nodes": (["--nodes", "two"], "the number of nodes is 'two': give a number"),
    "none": (["--nodes", "0"], "the number of nodes is '0'"),
    "a key": (["--nodes", "2,gpu=1"], "there is no gpu (did you mean gpus?)"),
    "gpus": (["--nodes", "2,gpus=many"], "gpus is 'many': give a number or KIND:NUMBER"),
    "memory": (["--nodes", "2,memory=lots"], "memory is 'lots'"),
    "constraint": (["--nodes", '2,constraint="; rm'], "constraint is "),
    "time": (["--nodes", "1", "--time", "soon"], "--time is soon: give minutes"),
    "too little time": (["--nodes", "1", "--time", "1"], "--time is 1, of which saving takes 60 s"),
    "lead": (["--nodes", "1", "--lead", "0"], "--lead is 0: give 1 to 65535"),
    "two leads": (["--nodes", "1", "--lead", "9", "--lead-of", "x"], "exclude each other"),
    "lead of nothing": (["--nodes", "1", "--lead-of", "nowhere"], "there is no run folder nowhere"),
    "name": (["--nodes", "1", "--name", "a b"], "--name is 'a b'"),
    "crashes": (["--nodes", "1", "--max-crashes", "0"], "--max-crashes is 0: give 1 or more"),
    "venv": (["--nodes", "1", "--venv", "nowhere"], "which has no bin/python"),
    "two places": (["--nodes", "1", "--pyxis", "x", "--apptainer", "y"], "--apptainer and --pyxis exclude each other"),
    "mpirun in images": (["--nodes", "1", "--launcher", "mpirun", "--pyxis", "x"], "--pyxis cannot have"),
    "mpirun on two": (["--nodes", "1", "--nodes", "1", "--launcher", "mpirun"], "several --nodes cannot have"),
    "sbatch": (["--nodes", "1", "--sbatch", "x"], "--sbatch is 'x': give an option"),
    "lines": (["--nodes", "1", "--sbatch=--a\nrm -r"], "--sbatch is "),
    "recipe": (["--nodes", "1", "--", "hetsync-train", "digitz"], "there is no recipe digitz (did you mean digits?)"),
    "key": (["--nodes", "1", "--", "hetsync-train", "--sync.d", "3"], "there is no option --sync.d"),
    "resume": (["--nodes", "1", "--", "hetsync-train", "--run.dir", "x", "--resume", "x"], "--resume x: there is no"),
    "run": (["--nodes", "1", "--run", "x"], "give hetsync-train --run.dir x"),
    "sweep": (["--nodes", "1", "--sweep", "sync.delay_bound"], "give KEY=VALUE,VALUE"),
    "sweep's yaml": (["--nodes", "1", "--sweep", "sync.delay_bound=[1"], "give KEY=VALUE,VALUE"),
    "sweep's key": (["--nodes", "1", "--sweep", "sync.delay=1,2"], "there is no option --sync.delay"),
    "sweep's value": (["--nodes", "1", "--sweep", "sync.quorum=0.5,7"], "sync.quorum is 7"),
    "sweep twice": (["--nodes", "1", "--sweep", "a=1", "--sweep", "a=2"], "is there twice"),
    "large sweep": (["--nodes", "1", "--sweep", f"run.seed={','.join(map(str, range(1001)))}"], "makes 1001 jobs"),
    "sweep of unlike nodes": (["--nodes", "1", "--nodes", "1", "--sweep", "run.seed=1,2"], "for one --nodes only"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], case: str) -> None:
    words, sentence = MISTAKES[case]
    with pytest.raises(SystemExit) as ended:
        main(["launch", "slurm", "--dry-run", *words])
    out, said = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert sentence in said
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize(("there", "sentence"), [(False, "there is no sbatch here"), (True, "Invalid partition")])
def test_what_sbatch_says_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool, sentence: str
) -> None:
    if there:
        program(tmp_path / "sbatch", "echo 'sbatch: error: Invalid partition name' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if there else str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["launch", "slurm", "--nodes", "1"])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


# What a job does.


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


class Job:
    """A job's script in an environment whose programs are stubs."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> None:
        self.folder = folder
        self.programs = folder / "env" / "bin"  # first in the job's PATH
        self.programs.mkdir(parents=True)
        for name in ("sleep", "python"):
            program(self.programs / name, ":")
        self.scontrol(preempted="None")
        self.script = folder / "job"
        self.script.write_text(written(capsys, "--nodes", "1", "--venv", str(folder / "env"), *words))

    def start(self, ranks: str, restart: int = 0, *words: str, **more: str) -> tuple[int, str]:
        """Its status, and what it says, where `ranks` is what mpirun or srun does; `more`: of its environment."""
        for name in ("mpirun", "srun"):
            asked = f'[[ $1 == --version ]] && exit\necho "{name} $*" >> {self.folder}/calls'
            program(self.programs / name, f"{asked}\n{ranks}")
        told = {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_RESTART_COUNT": str(restart),
            **more,
        }
        # Jobs in this process may have left it ignoring requests, and so what it starts.
        command = ["env", "--default-signal=USR1", "bash", str(self.script), *words]
        env = {name: value for name, value in {**os.environ, **told}.items() if value}
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=30, check=False
        )
        return done.returncode, done.stderr

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def scontrol(self, preempted: str, failures: int = 0) -> None:
        """It fails so often at first, as while SLURM's controller fails over."""
        fail = f"echo x >> {self.folder}/failed; echo 'Unable to contact slurm controller'; exit 1"
        times = f"PreemptEligibleTime=2026-11-02T14:00:00 PreemptTime={preempted}"
        lines = [
            f"touch {self.folder}/failed; if (($(wc -l < {self.folder}/failed) < {failures})); then {fail}; fi",
            f"""if [[ $1 == requeue ]]; then echo "$@" >> {self.folder}/requeued; exit; fi""",
            f"""if [[ $* == "show job 7" ]]; then echo '   {times}'; fi""",
        ]
        program(self.programs / "scontrol", "\n".join(lines))

    @property
    def requeued(self) -> int:
        path = self.folder / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def checkpoint(self, samples: int) -> str:
        """What makes one."""
        made = f"{self.folder}/runs/hetsync-7/checkpoints/samples-{samples:012d}"
        return f"mkdir -p {made}; touch {made}/state.json"


@pytest.mark.parametrize("status", [85, 86])
def test_a_stopped_job_is_requeued_and_resumes(capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int) -> None:
    job = Job(capsys, tmp_path)
    assert job.start(f"{job.checkpoint(5)}; exit {status}")[0] == status
    assert job.requeued == 1
    finish = f"""echo '{{"status": "finished"}}' > {tmp_path}/runs/hetsync-7/summary.json"""
    assert job.start(finish, restart=1)[0] == 0
    run = tmp_path / "runs" / "hetsync-7"
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith(f"mpirun -n 2 hetsync-train --run.dir {run}")
    assert second.endswith(f"hetsync-train --run.dir {run} --resume {run}")
    assert job.requeued == 1


def test_a_sweeps_jobs_have_folders_of_their_own_in_one_that_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--sweep", "sync.delay_bound=0,2", "--", "hetsync-train", "--run.dir", str(tmp_path / "s")]
    job = Job(capsys, tmp_path, *words)
    finish = f"""echo '{{"status": "finished"}}' > {tmp_path}/s/1/summary.json"""
    assert job.start(finish, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1")[0] == 0
    (call,) = job.calls
    assert call.endswith(f"--sync.delay_bound 2 --run.dir {tmp_path}/s/1")


class ClonesJob(Job):
    """By the clone's own script."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        super().__init__(capsys, folder)
        self.script = ROOT / "launch" / "slurm.sbatch"
        self.told = {"HETSYNC_ROOT": str(ROOT), "VIRTUAL_ENV": str(folder / "env"), "RUN_DIR": str(folder / "run")}


@pytest.mark.parametrize(
    ("told", "ranks"),
    [
        ({"SLURM_NTASKS": "5", "SLURM_NTASKS_PER_NODE": "4"}, 5),
        ({"SLURM_NTASKS": "", "SLURM_NTASKS_PER_NODE": "4(x3)", "SLURM_JOB_NUM_NODES": "3"}, 12),
    ],
)
def test_the_clones_script_starts_the_ranks_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, told: dict[str, str], ranks: int
) -> None:
    job = ClonesJob(capsys, tmp_path)
    finish = f"""echo '{{"status": "finished"}}' > {tmp_path}/run/summary.json"""
    assert job.start(finish, 0, "digits", **job.told, **told)[0] == 0
    assert job.calls == [f"mpirun -n {ranks} hetsync-train digits --run.dir {tmp_path}/run"]


@pytest.mark.parametrize(
    ("words", "told", "sentence"),
    [
        (["digits"], {"SLURM_NTASKS": ""}, "say how many ranks"),
        (["--resume", "old"], {}, "give RUN_DIR=FOLDER in place of --resume"),
        (["digits", "--run.dir=old"], {}, "give the run folder by RUN_DIR=FOLDER"),
    ],
)
def test_the_clones_script_refuses_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], told: dict[str, str], sentence: str
) -> None:
    job = ClonesJob(capsys, tmp_path)
    status, said = job.start("exit 0", 0, *words, **job.told, **told)
    assert (status, job.calls, job.requeued) == (2, [], 0)
    assert sentence in said


def test_what_is_left_of_a_removed_checkpoint_is_none_to_resume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = Job(capsys, tmp_path)
    (tmp_path / "runs" / "hetsync-7" / "checkpoints" / "samples-000000000005").mkdir(parents=True)
    job.start("exit 0")
    assert "--resume" not in (tmp_path / "calls").read_text()


def test_restarts_have_a_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path, "--max-restarts", "2")
    assert job.start("exit 85", restart=1)[0] == 85
    status, said = job.start("exit 85", restart=2)
    assert (status, job.requeued) == (1, 1)
    assert "was requeued 2 times already" in said


@pytest.mark.parametrize("status", [2, 130, 143])
def test_a_mistake_and_a_cancelled_job_are_not_requeued(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int
) -> None:
    job = Job(capsys, tmp_path)
    assert job.start(f"exit {status}")[0] == status
    assert job.requeued == 0


def test_a_mistake_after_a_new_checkpoint_is_a_crash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The recipe works: a file could not be read for a moment, say. What is wrong in it fails the next start."""
    job = Job(capsys, tmp_path)
    status, said = job.start(f"{job.checkpoint(5)}; exit 2")
    assert (status, job.requeued) == (2, 1)
    assert "crashed with status 2, and requeued" in said
    assert job.start("exit 2", restart=1)[0] == 2
    assert job.requeued == 1
    assert not list(tmp_path.glob("*.crashes"))


def test_such_crashes_have_their_limit_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path, "--max-crashes", "1")
    status, said = job.start(f"{job.checkpoint(5)}; exit 2")
    assert (status, job.requeued) == (1, 0)
    assert "crashed with status 2, 1 times in a row" in said


def test_a_mistake_that_comes_again_after_each_checkpoint_has_its_limit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = Job(capsys, tmp_path, "--max-crashes", "2")
    assert job.start(f"{job.checkpoint(5)}; exit 2")[0] == 2
    status, said = job.start(f"{job.checkpoint(9)}; exit 2", restart=1)
    assert (status, job.requeued) == (1, 1)
    assert said.splitlines()[-1].endswith("crashed with status 2, 2 times in a row")


def test_crashes_in_a_row_have_a_limit_and_a_checkpoint_between_counts_anew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = Job(capsys, tmp_path, "--max-crashes", "2")
    assert job.start("exit 1")[0] == 1
    assert job.start(f"{job.checkpoint(5)}; exit 139", restart=1)[0] == 139
    assert job.start(f"{job.checkpoint(9)}; exit 1", restart=2)[0] == 1
    assert job.requeued == 3
    status, said = job.start("exit 1", restart=3)
    assert (status, job.requeued) == (1, 3)
    assert "2 times in a row without a new checkpoint" in said
    assert not list(tmp_path.glob("*.crashes"))


@pytest.mark.parametrize(
    ("state", "summary", "requeued"),
    [("RUNNING", "running", 1), ("COMPLETING", "running", 0), ("RUNNING", "stopped", 0), ("RUNNING", None, 1)],
)
@pytest.mark.parametrize("before", [None, "stopped"])
def test_a_crash_under_srun_is_one_whatever_the_others_end_with(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    state: str,
    summary: str | None,
    requeued: int,
    before: str | None,
) -> None:
    """srun ends the others by TERM, and may return their status, the greater one."""
    job = Job(capsys, tmp_path, "--launcher", "srun")
    program(job.programs / "squeue", f"echo {state}; echo {state}")
    path = tmp_path / "runs" / "hetsync-7" / "summary.json"
    path.parent.mkdir(parents=True)
    if before:  # of an earlier start
        path.write_text(json.dumps({"status": before, "samples_applied": 1}))
    write = f"echo '{json.dumps({'status': summary, 'samples_applied': 2})}' > {path}; " if summary else ""
    status, said = job.start(f"{write}exit 143")
    assert (status, job.requeued) == (1 if requeued else 143, requeued)
    assert ("crashed with status" in said) == bool(requeued)


@pytest.mark.parametrize("failures", [0, 20])
@pytest.mark.parametrize("summary", ["stopped", "running"])
def test_ranks_that_end_at_the_term_of_a_pre_emption_are_requeued(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, summary: str, failures: int
) -> None:
    """SLURM sends it in place of USR1, unless the site sets send_user_signal. It is no crash."""
    job = Job(capsys, tmp_path, "--launcher", "srun", "--max-crashes", "1")
    job.scontrol(preempted="2999-11-02T15:00:00", failures=failures)
    program(job.programs / "squeue", "echo RUNNING")
    write = f"mkdir -p runs/hetsync-7; echo '{json.dumps({'status': summary})}' > runs/hetsync-7/summary.json; "
    status, said = job.start(f"{write}exit 143")
    assert (status, job.requeued) == (143, 1)
    assert "stopped at a pre-emption, and requeued" in said


def test_a_pre_emption_before_this_start_is_none_of_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ranks were told to stop by somebody else."""
    job = Job(capsys, tmp_path, "--launcher", "srun")
    job.scontrol(preempted="2001-11-02T15:00:00")
    program(job.programs / "squeue", "echo RUNNING")
    assert (
        job.start("""mkdir -p runs/hetsync-7; echo '{"status": "stopped"}' > runs/hetsync-7/summary.json; exit 143""")[
            0
        ]
        == 143
    )
    assert job.requeued == 0


def test_a_crash_under_srun_is_one_where_squeue_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path, "--launcher", "srun")
    program(job.programs / "squeue", "exit 1")
    status, said = job.start("exit 143")
    assert (status, job.requeued) == (1, 1)
    assert "crashed with status 1, and requeued" in said


def test_the_last_task_of_an_array_is_asked_for_by_its_own_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SLURM_JOB_ID is the whole array's too."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    job = Job(capsys, tmp_path, "--launcher", "srun")
    program(job.programs / "squeue", "echo RUNNING; [[ $* == *--jobs=7_3* ]] || echo COMPLETED")
    assert job.start("exit 143")[0] == 1
    assert (tmp_path / "requeued").read_text() == "requeue 7_3\n"


def test_requeueing_outlasts_a_controller_that_fails_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path)
    job.scontrol(preempted="None", failures=20)
    status, said = job.start("exit 85")
    assert (status, job.requeued) == (85, 1)
    assert said.count("stopped on request, and requeued") == 1


def test_a_job_that_cannot_be_requeued_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path)
    job.scontrol(preempted="None", failures=1000)
    status, said = job.start("exit 85")
    assert (status, job.requeued) == (1, 0)
    assert "and requeued" not in said
    assert "could not be requeued in a minute: Unable to contact slurm controller" in said
    assert len((tmp_path / "failed").read_text().splitlines()) == 30


def test_a_lost_node_is_no_success(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """mpirun returns 0."""
    job = Job(capsys, tmp_path)
    status, said = job.start("exit 0")
    assert (status, job.requeued) == (1, 1)
    assert "crashed with status 1" in said


def test_a_request_before_the_ranks_listen_loses_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path)
    assert job.start("kill -USR1 $$")[0] == 138
    assert job.requeued == 1


def test_a_request_goes_on_to_the_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path)
    ranks = "trap 'exit 85' USR1; kill -USR1 $PPID; for _ in {1..100}; do /bin/sleep 0.1; done"
    assert job.start(ranks)[0] == 85
    assert job.requeued == 1


def test_an_environment_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(capsys, tmp_path)
    job.script.write_text(job.script.read_text().replace(f"venv={tmp_path}/env", f"venv={tmp_path}/gone"))
    status, said = job.start("exit 0")
    assert (status, job.requeued) == (1, 0)
    assert f"{tmp_path}/gone has no Python that runs on" in said
