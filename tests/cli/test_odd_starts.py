"""Scripts that are started in odd ways: streams closed, a long TMPDIR, standard input as the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, environment

SECONDS = 100.0
SCRIPT = """
import sys
import torch
import hetsync
from torch.utils.data import DataLoader, TensorDataset

{own}
if __name__ == "__main__":
    model = torch.nn.Linear(3, 1)
    data = {data}
    with hetsync.join(run="run", plane="local") as job:
        model, optimizer, loader = job.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(data, batch_size=4, shuffle=True, num_workers={workers}),
        )
        for _ in job.epochs(1):
            for (inputs,) in loader:
                job.backward(model(inputs).square().mean())
                job.step(optimizer)
    open("ended", "w").write(str(job.session.applied))
"""
PLAIN = SCRIPT.format(own="", data="TensorDataset(torch.ones(16, 3))", workers="{workers}")
OWN = SCRIPT.format(own="class Mine(TensorDataset): pass", data="Mine(torch.ones(16, 3))", workers=1)


def shell(words: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    changes = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **env}
    return subprocess.run(
        words, shell=True, cwd=folder, env=environment(**changes), capture_output=True, text=True, timeout=SECONDS
    )


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_lose_no_run(tmp_path: Path, streams: str) -> None:
    (tmp_path / "script.py").write_text(PLAIN.format(workers=0))
    done = shell(f'"$PYTHON" script.py {streams}', tmp_path)
    assert done.returncode == 0, done
    assert (tmp_path / "ended").read_text() == "16"


@pytest.mark.thorough
def test_workers_of_a_script_from_standard_input_need_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLAIN.format(workers=2))
    done = shell('"$PYTHON" - < script.py', tmp_path)
    assert done.returncode == 0, done
    assert (tmp_path / "ended").read_text() == "16"


def test_what_such_a_script_defines_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN)
    done = shell('"$PYTHON" - < script.py', tmp_path)
    assert done.returncode == 2, done
    assert "a data worker does not find what the script defines, which was read from standard input" in done.stderr


@pytest.mark.thorough
def test_workers_hand_over_tensors_though_tmpdir_is_long(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 150)
    long.mkdir()
    (tmp_path / "script.py").write_text(PLAIN.format(workers=2))
    done = shell('"$PYTHON" script.py', tmp_path, TMPDIR=str(long))
    assert done.returncode == 0, done
    assert (tmp_path / "ended").read_text() == "16"
