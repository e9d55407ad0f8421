"""Jobs on two hosts with a slow link between them, which may be cut, as a host may die: network namespaces of this
machine (namespaces_lab.sh).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import SECONDS, Done, command, environment, finished, program, run, started, summary_of

from hetsync.sync.milestones import TOO_FEW
from hetsync.train.checkpoint import complete, load_newest

pytestmark = pytest.mark.xdist_group("two_hosts")  # of one worker: they share a fixture that is dear
LAB = Path(__file__).with_name("namespaces_lab.sh")
RATE = "1gbit"
FREE = 2 * 1e9 / 8  # bytes a second: more than any error of measuring that RATE
SAMPLES = 1200
SAVE_EVERY = 256  # samples, four batches
TRAIN = ["--run.samples", str(SAMPLES), "--run.profile_seconds", "0.3", "--run.dir", "run"]


def _refused(base: Path, rate: str = RATE) -> str | None:
    """Why this machine has no such hosts; None where it made them."""
    missing = [name for name in ("ip", "tc", "nsenter", "unshare", "mpirun") if not shutil.which(name)]
    if missing:
        return f"not installed here: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    done = subprocess.run([LAB, "up", base, "2", rate], capture_output=True, text=True, timeout=60)
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


def _carried(lab: Path) -> int:
    """Bytes of h0's link so far, both ways."""
    return int(subprocess.run([LAB, "carried", lab, "h0"], capture_output=True, text=True, check=True).stdout)


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
    assert _carried(lab) - before > summary["per_rank"][0]["bytes_sent"] > 0


@pytest.mark.parametrize(("plane", "carrier"), [("mpi", "MPI"), ("torch", "Gloo")])
def test_a_job_under_mpirun_spans_both(lab: Path, tmp_path: Path, plane: str, carrier: str) -> None:
    before = _carried(lab)
    words = [str(lab / "mpirun"), "-np", "2", program("hetsync-train"), *TRAIN, "--run.plane", plane]
    _ended(words, tmp_path)
    _check(lab, tmp_path, before, carrier)


def test_a_job_under_torchrun_spans_both(lab: Path, tmp_path: Path) -> None:
    before = _carried(lab)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--master-addr", "h0", "--master-port", "29500"]
    train = [program("hetsync-train"), *TRAIN]

    def on(rank: int) -> list[str]:
        return [str(lab / "on"), f"h{rank}", "exec", *torchrun, "--node-rank", str(rank), *meeting, *train]

    with started(on(1), tmp_path) as other:
        _ended(on(0), tmp_path)
        assert finished(other).status == 0
    _check(lab, tmp_path, before, "Gloo")


@pytest.mark.parametrize("plane", ["mpi", pytest.param("torch", marks=pytest.mark.thorough)], ids=["MPI", "Gloo"])
def test_behind_a_very_slow_link_a_job_begins_with_delay(tmp_path: Path, plane: str) -> None:
    """A sum of its weights takes 0.15 s, and a slice some milliseconds."""
    reason = _refused(tmp_path, "8mbit")
    if reason:
        pytest.skip(reason)
    try:
        words = [str(tmp_path / "mpirun"), "-np", "2", program("hetsync-train"), *TRAIN, "--run.plane", plane]
        done = _ended(words, tmp_path)
    finally:
        subprocess.run([LAB, "down", tmp_path], check=True, timeout=60)
    first = summary_of(tmp_path / "run")["rounds_changes"][0]
    assert (first["round"], first["delay_bound"], first["wire"]) == (0, 4, "top64")
    assert f"from round 0 on: {first['reason']}" in done.out


def test_profile_measures_the_link(lab: Path, tmp_path: Path) -> None:
    words = [str(lab / "mpirun"), "-np", "2", program("hetsync"), "profile", "--run.profile_seconds", "0.3"]
    done = _ended(words, tmp_path)
    assert "sums of fewer ranks are as much faster as the slowest link of their ring" in done.out
    assert "(rank 0)" in done.out or "(rank 1)" in done.out  # whichever was the slower
    profile = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    assert "2 ranks on h0, h1" in profile["source"]
    assert 0 < profile["link"]["bytes_per_second"] < FREE
    (between,) = profile["links"]
    assert between["between"] == ["h0", "h1"]
    assert 0 < between["bytes_per_second"] < FREE
    assert [group["host"] for group in profile["devices"]] == ["h0", "h1"]


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("hosts", "flags", "algorithm"),
    [
        ("h0:1,h1:1", [], "4 direct"),
        ("h0:1,h1:1", ["--with-ft", "ulfm"], "16 in place"),
        ("h0:3,h1:1", [], "16 out of place"),  # for h1's rank as well, which is alone there
        ("h0:2", [], "4 in place"),
    ],
)
def test_the_algorithm_of_sums_is_that_of_the_hosts(
    lab: Path, tmp_path: Path, hosts: str, flags: list[str], algorithm: str
) -> None:
    """Between hosts MPI would send everything through one rank; tests/mpi/test_mpi_plane.py has what comes of it."""
    script = tmp_path / "told.py"
    script.write_text(
        "from hetsync.plane.mpi import MpiSums\n"
        "from hetsync.plane.mpi_members import MpiMembers\n"
        "for lane in MpiSums(MpiMembers.of_world(tolerant=False))._lanes:\n"
        "    print(lane.algorithm.in_flight, lane.algorithm.kind)\n"
    )
    ranks = sum(int(each.split(":")[1]) for each in hosts.split(","))
    mpirun = ["env", f"HOSTS={hosts}", str(lab / "mpirun"), "-np", str(ranks), *flags]
    done = _ended([*mpirun, sys.executable, str(script)], tmp_path)
    assert done.out.splitlines() == 2 * ranks * [algorithm], done.story


# What hosts call themselves, and what else their interfaces are.

OPENS = """
import os, sys
from hetsync.plane import open_plane
from hetsync.plane.ending import opening
with opening():
    plane = open_plane(sys.argv[1], 8.0)
print(f"rank {plane.rank} has met {plane.gather_objects(os.uname().nodename)} over {plane.sums_by}", flush=True)
plane.close()
"""


@pytest.fixture
def opens(tmp_path: Path) -> str:
    script = tmp_path / "opens.py"
    script.write_text(OPENS)
    return str(script)


def test_hosts_of_one_name_meet(lab: Path, tmp_path: Path, opens: str) -> None:
    """Each would take the other's address for its own."""
    renamed = ["sh", "-c", f'"hostname same; exec {sys.executable} {opens} torch"']
    done = _ended([str(lab / "mpirun"), "-np", "2", *renamed], tmp_path)
    assert sorted(done.out.splitlines()) == [f"rank {n} has met ['same', 'same'] over Gloo" for n in range(2)]


def _meet_where_a_name_means(lab: Path, folder: Path, opens: str, own: str) -> None:
    """To its own host, and to no other, a name is this address."""

    def on(rank: int) -> list[str]:
        hosts = folder / f"hosts_{rank}"
        other = 1 - rank
        hosts.write_text(f"127.0.0.1 localhost\n{own} h{rank}\n10.77.0.{other + 1} h{other}\n")
        told = f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=h0 MASTER_PORT=29501"
        script = f"mount --bind {hosts} /etc/hosts; exec env {told} {sys.executable} {opens} torch"
        return [str(lab / "on"), f"h{rank}", script]

    with started(on(1), folder) as other:
        first = _ended(on(0), folder)
        second = finished(other)
    assert (first.out + second.out).splitlines() == [f"rank {n} has met ['h0', 'h1'] over Gloo" for n in range(2)]


def test_hosts_whose_own_names_are_their_loopback_meet(lab: Path, tmp_path: Path, opens: str) -> None:
    """As Debian's installer writes it: to its own host a name is 127.0.1.1."""
    _meet_where_a_name_means(lab, tmp_path, opens, "127.0.1.1")


@pytest.mark.each_value(1)
@pytest.mark.parametrize("own", ["172.17.0.1", "10.0.3.1"])
def test_hosts_whose_own_names_are_their_bridge_meet(lab: Path, tmp_path: Path, opens: str, own: str) -> None:
    """systemd answers with any interface of the host. Of two addresses Gloo connects to the lower."""
    with _bridges(lab, own):
        _meet_where_a_name_means(lab, tmp_path, opens, own)


@contextmanager
def _bridges(lab: Path, address: str) -> Iterator[None]:
    """Of a container engine, which have the same address on every host; a port keeps each up."""
    tag = (lab / "on").read_text().split("/run/netns/")[1].split("-")[0]
    hosts = [f"{tag}-h{n}" for n in range(2)]
    for host in hosts:
        for words in (
            "link add docker0 type bridge",
            f"addr add {address}/16 dev docker0",
            "link set docker0 up",
            "link add port type veth peer name inside",
            "link set port master docker0 up",
            "link set inside up",
        ):
            subprocess.run(["ip", "-n", host, *words.split()], check=True, timeout=20)
    try:
        yield
    finally:
        for host in hosts:
            for device in ("docker0", "port"):
                subprocess.run(["ip", "-n", host, "link", "del", device], check=True, timeout=20)


@pytest.fixture
def docker(lab: Path) -> Iterator[None]:
    with _bridges(lab, "172.17.0.1"):
        yield


@pytest.mark.each_value(1)
@pytest.mark.parametrize("flags", [[], ["--with-ft", "ulfm", "--mca", "mpi_preconnect_mpi", "1"]])
def test_an_mpi_that_connects_by_a_hosts_own_bridge_ends_with_a_sentence(
    lab: Path, tmp_path: Path, opens: str, docker: None, flags: list[str]
) -> None:
    words = [str(lab / "mpirun"), "-np", "2", *flags, sys.executable, opens, "mpi"]
    with started(["env", "INTERFACES=eth0,docker0", *words], tmp_path) as job:
        done = finished(job, 60)
    assert "has met" not in done.out
    if "MPI_ERRORS_ARE_FATAL" in done.err:  # Open MPI itself has found out, and ended all
        assert done.status not in (0, 124), done.story
        return
    assert done.status in (1, 2), done.story
    (said,) = [each for each in done.sentences if "of 2 ranks are there" not in each]
    assert "name the network interface that all hosts share" in said, done.story
    assert "Traceback" not in done.err, done.story
    _ended(words, tmp_path)  # over eth0 alone


# What becomes of a job whose host dies, or whose link is cut.

ULFM = ["--with-ft", "ulfm"]
LOOKS_AFTER = [  # mpirun, after other hosts: every second, after so many without a word
    *("--prtemca", "oob_tcp_keepalive_time", "3", "--prtemca", "oob_tcp_keepalive_intvl", "1"),
    *("--prtemca", "oob_tcp_keepalive_probes", "3"),
]


def _does(lab: Path, *action: str) -> None:
    subprocess.run([LAB, action[0], lab, *action[1:]], check=True, timeout=20)


def _tolerant(lab: Path, folder: Path, hosts: str, *words: str) -> list[str]:
    """A job of emulated devices, some seconds long, with ranks on `hosts` as in `h0:2,h1:1`."""
    ranks = sum(int(each.split(":")[1]) for each in hosts.split(","))
    (folder / "even.yaml").write_text(f"name: even\nsource: none\ndevices: [{{name: a, count: {ranks}, speed: 1}}]\n")
    mine = ["--run.dir", "run", "--run.samples", SAMPLES, "--run.checkpoint_every", SAVE_EVERY]
    mine += ["--emulate", "even.yaml", "--emulation.samples_per_second", 400]
    mine += ["--run.timeout_seconds", 30]
    mpirun = ["env", f"HOSTS={hosts}", str(lab / "mpirun"), "-np", str(ranks), *ULFM]
    return [*mpirun, *words, *command(*mine)]


def _until_saved(job: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not complete(folder / "run" / "checkpoints"):
        assert job.poll() is None, finished(job).story
        assert time.monotonic() < deadline, "no checkpoint in time"
        time.sleep(0.02)


def _until_nothing_runs(lab: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while running := subprocess.run([LAB, "pids", lab], capture_output=True, text=True, check=True).stdout.split():
        assert time.monotonic() < deadline, f"still there: {running}"
        time.sleep(0.1)


def _goes_on_to_the_end(folder: Path) -> None:
    done = run("--resume", "run", "--emulation.samples_per_second", 20_000, folder=folder)
    assert done.status == 0, done.story
    summary = summary_of(folder / "run")
    assert (summary["status"], summary["samples_applied"]) == ("finished", SAMPLES)


def test_where_a_host_dies_the_job_ends_and_can_be_resumed(lab: Path, tmp_path: Path) -> None:
    """Open MPI's mpirun ends all of it, though the others could go on, and with status 0."""
    try:
        with started(_tolerant(lab, tmp_path, "h0:2,h1:1", *LOOKS_AFTER), tmp_path) as job:
            _until_saved(job, tmp_path)
            _does(lab, "crash", "h1")
            done = finished(job)
        _until_nothing_runs(lab)
    finally:
        _does(lab, "mend", "h1")
    assert "lost communication with a remote daemon" in done.err, done.story
    assert summary_of(tmp_path / "run")["status"] == "running", "of a job that was killed"
    _goes_on_to_the_end(tmp_path)


def test_a_link_that_is_cut_for_seconds_costs_time_alone(lab: Path, tmp_path: Path) -> None:
    same = ["--sync.delay_bound", "0", "--optimizer.name", "sgd", "--optimizer.momentum", "0.9"]
    with started([*_tolerant(lab, tmp_path, "h0:2,h1:1"), *same], tmp_path) as job:
        _until_saved(job, tmp_path)
        _does(lab, "cut", "h1")
        time.sleep(5)
        _does(lab, "mend", "h1")
        done = finished(job)
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert (summary["samples_applied"], summary["ranks"], summary["failures"]) == (SAMPLES, 3, [])
    alone = run("--run.dir", "alone", "--run.samples", SAMPLES, *same, folder=tmp_path)  # saves at its end
    assert alone.status == 0, alone.story
    theirs, mine = (load_newest(tmp_path / name).model for name in ("run", "alone"))
    assert max(float((theirs[name] - value).abs().max()) for name, value in mine.items()) < 1e-5


def test_of_a_link_that_is_cut_for_ever_at_most_one_side_goes_on(lab: Path, tmp_path: Path) -> None:
    """The side of rank 0 is the smaller one: it ends, and leaves the run folder to those who may go on. Whether these
    do before mpirun ends all is left to the system's clocks; nobody waits for ever."""
    _does(lab, "hasten")
    try:
        with started(_tolerant(lab, tmp_path, "h1:2,h0:3"), tmp_path) as job:
            _until_saved(job, tmp_path)
            _does(lab, "cut", "h1")
            done = finished(job)
        _until_nothing_runs(lab)
    finally:
        _does(lab, "mend", "h1")
    summary = summary_of(tmp_path / "run")
    assert summary["status"] in ("running", "finished"), "that of the smaller side"
    if summary["status"] == "finished":
        assert (summary["samples_applied"], summary["ranks"]) == (SAMPLES, 3)
        assert [(death["rank"], death["host"]) for death in summary["failures"]] == [(0, "h1"), (1, "h1")]
    told = [path.read_text() for path in (tmp_path / "run" / "telemetry").iterdir()]
    assert not any(TOO_FEW in lines for lines in told), "a rest at which the smaller side saves"
    _goes_on_to_the_end(tmp_path)
    if "may live and go on without them" not in done.story:
        pytest.skip("mpirun has ended all before any rank noticed the cut; what is left of the job is as it should be")


def test_the_lab_leaves_nothing_behind(tmp_path: Path) -> None:
    reason = _refused(tmp_path)
    if reason:
        pytest.skip(reason)
    subprocess.run([LAB, "down", tmp_path], check=True, timeout=60)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, env=environment()).stdout
    tag = (tmp_path / "on").read_text().split("/run/netns/")[1].split("-")[0]
    assert tag not in left
