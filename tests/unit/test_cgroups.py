from __future__ import annotations

from pathlib import Path

import pytest

from hetsync.cgroups import cpu_quotas, memory_kills

V2 = {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n", "cpu.max": "400000 100000\n"}
V1 = {
    "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
    "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        ("0::/a/b\n", V2, [1.5, 4.0]),
        ("3:cpu,cpuacct:/job\n2:memory:/job\n", V1, [0.5]),
        ("0::/\n4:cpu,cpuacct:/elsewhere\n", V1, []),  # of a container that does not see its own group
        ("", {}, []),
    ],
)
def test_quotas_of_both_versions(tmp_path: Path, lines: str, files: dict[str, str], cores: list[float]) -> None:
    assert [quota.cores for quota in cpu_quotas(*system(tmp_path, lines, files))] == cores


def system(folder: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(lines)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("lines", "files", "kills"),
    [
        ("0::/a/b\n", {"a/b/memory.events": EVENTS.format(2), "a/memory.events": EVENTS.format(7)}, 2),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.oom_control": CONTROL.format(1)}, 1),
        ("0::/\n4:memory:/job\n", {"memory/job/memory.oom_control": CONTROL.format(3)}, 3),
        # Of a container, which sees its own group as the root.
        ("4:memory:/elsewhere\n", {"memory/memory.oom_control": CONTROL.format(5)}, 5),
        ("4:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),  # Linux 4.12
    ],
)
def test_memorys_kills_of_both_versions(tmp_path: Path, lines: str, files: dict[str, str], kills: int) -> None:
    assert memory_kills(*system(tmp_path, lines, files)) == kills


def test_a_system_without_cgroups_has_no_quota_and_counts_no_kills(tmp_path: Path) -> None:
    assert cpu_quotas(tmp_path, tmp_path) == []
    assert memory_kills(tmp_path, tmp_path) == 0
