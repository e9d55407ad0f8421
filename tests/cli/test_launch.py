"""The scripts that start HetSync, with a stub in the place of Python: what they do to environments; and files to start
from."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetsync.cli import train

ROOT = Path(__file__).resolve().parents[2]
STUB = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n'  # succeeds at whatever it is asked


# In the place of launch/local: the terminal is lost, of which its whole process group hears, and it saves.
HANGS_UP = """#!/bin/bash
trap 'echo told >>"$0.calls"' HUP
sleep 1 # until it is waited for
kill -HUP "$PPID"
sleep 0.5
kill -HUP "$PPID"
sleep 1
echo saved >>"$0.calls"
exit 129
"""


def clone(folder: Path) -> Path:
    """What `launch/environment` needs of the repository."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def environment(folder: Path, stamp: str) -> Path:
    """A virtual environment with something of the user's in it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "of-the-user").touch()
    (folder / "bin" / "python").write_text(STUB)
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".hetsync-installed").write_text(stamp)
    return folder


def prepare(root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHON")}
    words = ["bash", str(root / "launch" / "environment")]
    return subprocess.run(
        words, env={**kept, "MPICC": "", **variables}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("installed_from", ["another clone", "nowhere"])
def test_an_active_environment_keeps_what_is_in_it(tmp_path: Path, installed_from: str) -> None:
    root, active = clone(tmp_path / "clone"), tmp_path / "active"
    stamp = f"mpi wheel\nat {tmp_path / 'other'} {active} python\n" if installed_from == "another clone" else ""
    environment(active, stamp)
    done = prepare(root, VIRTUAL_ENV=str(active))
    assert done.returncode == 0, done.stderr
    assert (active / "of-the-user").exists()
    assert "install" in (active / "bin" / "calls").read_text()
    assert f"at {root} {active} " in (active / ".hetsync-installed").read_text()
    told = f"it had HetSync of {tmp_path / 'other'}, whose place that of {root} takes"
    assert (told in done.stderr) == (installed_from == "another clone")


# Notes the versions that pip is held to, and is Python in all else.
HELD = """#!/bin/bash
if [[ $1 == -m && $2 == pip ]]; then
    while (($#)); do
        if [[ $1 == --constraint ]]; then cat "$2" >>"${{BASH_SOURCE[0]}}.held"; fi
        shift
    done
    exit
fi
exec {python} "$@"
"""


@pytest.mark.parametrize("own", [False, True])
def test_a_torch_that_is_in_the_users_environment_stays(tmp_path: Path, own: bool) -> None:
    """One of its own has the versions that were tried."""
    root = clone(tmp_path / "clone")
    venv = root / ".venv" if own else tmp_path / "active"
    python = environment(venv, f"mpi wheel\nat {root} {venv} python\n") / "bin" / "python"
    python.write_text(HELD.format(python=sys.executable))
    done = prepare(root, **({} if own else {"VIRTUAL_ENV": str(venv)}))
    assert done.returncode == 0, done.stderr
    held = (venv / "bin" / "python.held").read_text().splitlines()
    tried = (root / "launch" / "constraints.txt").read_text().splitlines()
    assert any(line.startswith("torch==") for line in held) == own
    assert held == tried if own else set(held) < set(tried)


@pytest.mark.parametrize(("extras", "asked"), [(None, ".[mpi,digits,report]"), ("", ".[mpi]")])
def test_whoever_starts_a_program_of_its_own_may_say_what_it_needs(
    tmp_path: Path, extras: str | None, asked: str
) -> None:
    root, active = clone(tmp_path / "clone"), environment(tmp_path / "active", "")
    words = ["bash", str(root / "launch" / "local"), "1", "--", "true"]
    env = {name: value for name, value in os.environ.items() if name != "extras"}
    env |= {"MPICC": "", "VIRTUAL_ENV": str(active)} | ({} if extras is None else {"extras": extras})
    subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert f" {asked}\n" in (active / "bin" / "calls").read_text()


def test_the_quick_start_waits_for_a_job_that_saves_as_the_terminal_is_lost(tmp_path: Path) -> None:
    root, active = clone(tmp_path / "clone"), environment(tmp_path / "active", "")
    (root / "launch" / "local").write_text(HANGS_UP)
    env = {**os.environ, "MPICC": "", "VIRTUAL_ENV": str(active)}
    words = [str(root / "launch" / "quickstart")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (root / "launch" / "local.calls").read_text().split() == ["told", "told", "saved"]
    assert "training ended with status 129" in done.stderr


def test_an_environment_of_its_own_that_another_clone_has_installed_into_is_kept(tmp_path: Path) -> None:
    """The other was called while this one's was active."""
    root = clone(tmp_path / "clone")
    own = environment(root / ".venv", f"mpi wheel\nat {tmp_path / 'other'} {root / '.venv'} python\n")
    done = prepare(root)
    assert done.returncode == 0, done.stderr
    assert (own / "of-the-user").exists()
    assert f"at {root} {own} " in (own / ".hetsync-installed").read_text()


def test_an_environment_that_was_copied_along_is_made_anew(tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    own = environment(root / ".venv", f"mpi wheel\nat {tmp_path / 'other'} {tmp_path / 'other' / '.venv'} python\n")
    stub = tmp_path / "python"
    # Makes an environment where it is asked to: python -m venv FOLDER.
    stub.write_text(
        f'#!/bin/sh\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp {tmp_path / "stub"} "$3/bin/python"\nexit 0\n'
    )
    (tmp_path / "stub").write_text(STUB)
    for made in (stub, tmp_path / "stub"):
        made.chmod(0o755)
    done = prepare(root, PYTHON=str(stub))
    assert done.returncode == 0, done.stderr
    assert not (own / "of-the-user").exists()
    assert "install" in (own / "bin" / "calls").read_text()


def build_horovod(path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CXX")}
    words = ["bash", str(ROOT / "launch" / "horovod")]
    return subprocess.run(
        words, env={**kept, "PATH": path, **variables}, capture_output=True, text=True, timeout=60, check=False
    )


def tool(name: str) -> str:
    """A checker of the extra `test`."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def programs(folder: Path, *names: str) -> str:
    """A folder for PATH with these programs, which succeed at anything, and what scripts are made of."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    for name in ("bash", "dirname", "sh"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return str(folder)


@pytest.mark.parametrize(
    ("there", "compiler", "sentence"),
    [
        ((), "c++", "there is no cmake: install it"),
        (("cmake", "make"), "c++", "there is no mpicxx: install it"),
        (("cmake", "make", "mpicxx"), "c++", "there is no C++ compiler 'c++': install one (apt install g++)"),
        (("cmake", "make", "mpicxx", "g++"), "clang++-99", "there is no C++ compiler 'clang++-99'"),
    ],
)
def test_what_horovods_build_lacks_is_named(
    tmp_path: Path, there: tuple[str, ...], compiler: str, sentence: str
) -> None:
    active = environment(tmp_path / "active", "")
    done = build_horovod(programs(tmp_path / "bin", *there), VIRTUAL_ENV=str(active), CXX=compiler)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("horovod: ")
    assert sentence in done.stderr


def test_arguments_of_horovods_build_are_refused() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "horovod"), "0.28.1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "it takes no arguments, and not '0.28.1'" in done.stderr


def test_horovod_is_built_where_hetsync_is(tmp_path: Path) -> None:
    done = build_horovod(os.environ["PATH"], VIRTUAL_ENV=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        f"horovod: {tmp_path} has no HetSync: activate the environment that has it, or run launch/test or"
        " launch/quickstart first.\n"
    )


# Files to start from.


def test_the_hosts_have_as_many_slots_as_their_command_takes() -> None:
    text = (ROOT / "launch" / "hosts").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    slots = [int(slot.removeprefix("slots=")) for _, slot in lines]
    assert len(set(slots)) > 1
    assert f"--hostfile launch/hosts -n {sum(slots)} " in text


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "launch" / "kubernetes" / "mpijob.yaml").read_text(encoding="utf-8"))
    return read


def container(manifest: dict[str, Any], role: str) -> dict[str, Any]:
    (only,) = manifest["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_the_kubernetes_job_has_what_the_operator_reads(manifest: dict[str, Any]) -> None:
    """Its keys of v2beta1, where others are dropped without a word."""
    spec = manifest["spec"]
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert set(spec) <= {"slotsPerWorker", "sshAuthMountPath", "runPolicy", "mpiReplicaSpecs", "mpiImplementation"}
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replicas in spec["mpiReplicaSpecs"].values():
        assert set(replicas) == {"replicas", "restartPolicy", "template"}


def closed(schema: Any) -> Any:
    """Refuses keys that it does not know, which the API server would drop."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    return {"additionalProperties": False, **found} if "properties" in found else found


def test_the_kubernetes_job_keeps_to_the_schema_of_the_operator(manifest: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    path = os.environ.get("HETSYNC_MPIJOB_SCHEMA")
    if path is None:
        pytest.skip("HETSYNC_MPIJOB_SCHEMA does not name the operator's kubeflow.org_mpijobs.yaml")
    (kind,) = filter(None, yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in kind["spec"]["versions"] if v["name"] == "v2beta1"]
    validator = jsonschema.Draft202012Validator(closed(schema))
    assert list(validator.iter_errors(manifest)) == []
    wrong = copy.deepcopy(manifest)
    container(wrong, "Worker")["volumeMount"] = []
    assert [error.message for error in validator.iter_errors(wrong)] != []


def test_the_kubernetes_job_starts_a_rank_in_each_slot(manifest: dict[str, Any]) -> None:
    spec, words = manifest["spec"], container(manifest, "Launcher")["args"]
    workers = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert int(words[words.index("-n") + 1]) == workers * spec["slotsPerWorker"]
    at = words.index("/opt/hetsync/bin/hetsync-train")
    config, *_ = train.parse(words[at + 1 :])
    mounts = [mount["mountPath"] for mount in container(manifest, "Worker")["volumeMounts"]]
    assert any(str(config.run.dir).startswith(f"{mount}/") for mount in mounts)


def test_the_kubernetes_job_fits_the_image(manifest: dict[str, Any]) -> None:
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    launcher, worker = container(manifest, "Launcher"), container(manifest, "Worker")
    assert launcher["image"] == worker["image"]
    assert "openssh-client openssh-server" in image
    users = {each["securityContext"]["runAsUser"] for each in (launcher, worker)}
    assert users == {1000}
    assert "--uid 1000 hetsync" in image
    assert manifest["spec"]["sshAuthMountPath"] == "/home/hetsync/.ssh"
    assert "COPY --from=build /opt/hetsync /opt/hetsync" in image
    port = worker["args"][worker["args"].index("-p") + 1]
    assert any(variable["value"].startswith(f"-p {port} ") for variable in launcher["env"])


# Containers.


@pytest.fixture(scope="module")
def composition() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "launch" / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    return read


def test_the_composition_keeps_to_the_schema_of_compose() -> None:
    check = tool("check-jsonschema")
    words = [check, "--builtin-schema", "vendor.compose-spec", "launch/docker/compose.yaml"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_composition_starts_a_rank_in_each_of_its_unequal_containers(composition: dict[str, Any]) -> None:
    services = composition["services"]
    words = services["launcher"]["entrypoint"]
    hosts = dict(host.split(":") for host in words[words.index("--host") + 1].split(","))
    assert set(hosts) == {name for name, service in services.items() if "cpus" in service}
    assert len({services[name]["cpus"] for name in hosts}) == len(hosts)
    assert int(words[words.index("-n") + 1]) == sum(map(int, hosts.values()))
    program, *arguments = services["launcher"]["command"]
    assert program == "/opt/hetsync/bin/hetsync-train"
    config, *_ = train.parse(arguments)
    mounts = [volume.split(":")[1] for volume in services["fast"]["volumes"]]
    assert any(str(config.run.dir).startswith(f"{mount}/") for mount in mounts)


def test_the_composition_fits_the_image(composition: dict[str, Any]) -> None:
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    services = composition["services"]
    (keys,) = (volume.partition(":")[2] for volume in services["keys"]["volumes"])
    assert f"install -d -o hetsync -m 700 {keys}" in image  # a new volume has the owner of what it covers
    command = services["fast"]["command"]
    port = command[command.index("-p") + 1]
    assert services["launcher"]["environment"]["PRTE_MCA_plm_ssh_args"].startswith(f"-p {port} ")


def test_the_image_is_clean() -> None:
    done = subprocess.run(
        [tool("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "benchmarks/gpu/carry pack FOLDER"),
        (["pack"], "benchmarks/gpu/carry pack FOLDER"),
        (["run", "{folder}/nowhere"], "carry: there is no folder"),
    ],
)
def test_what_carries_the_gpu_kit_says_how_it_is_called(tmp_path: Path, words: list[str], says: str) -> None:
    called = [word.format(folder=tmp_path) for word in words]
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "carry"), *called], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert not list(tmp_path.iterdir())
