from __future__ import annotations

from pathlib import Path

import pytest

from hetsync.cgroups import cpu_quotas

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
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(lines)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    assert [quota.cores for quota in cpu_quotas(proc, cgroups)] == cores


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quotas(tmp_path, tmp_path) == []
